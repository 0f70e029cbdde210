//! What computes a run, and what is recorded of it.

use anyhow::Context;
use candle_core::{DType, Device};
use candle_fork::cudnn_policy::take_counters;
use policy::{AttentionPolicy, ConvPolicy, ExecutionIdentity, ModelFamily};

use crate::{cli::RunArgs, failure::Failure};

/// Key of the identity in metadata.
pub(crate) const KEY: &str = "execution";

/// The backends of a run of `family`: its own, or those that the environment asks for.
///
/// # Errors
/// Usage, for a value that is not known.
pub(crate) fn backends(family: ModelFamily) -> Result<(ConvPolicy, AttentionPolicy), Failure> {
    let overrides = policy::overrides_from(std::env::vars_os()).map_err(|error| Failure::Usage(error.into()))?;
    Ok((overrides.conv_for(family), overrides.attention_for(family)))
}

/// Watches what runs on this thread from its making on.
#[derive(Debug)]
pub(crate) struct Watch {
    device: Device,
    dtype: DType,
    weights: String,
    quant: Option<String>,
}

impl Watch {
    /// For a model on `device` with results of `dtype`; `weights` is a hash of its weights.
    pub(crate) fn new(device: &Device, dtype: DType, weights: String) -> Self {
        take_counters();
        Self { device: device.clone(), dtype, weights, quant: None }
    }

    /// The same with the use of quantised weights that was asked for, if any.
    pub(crate) fn with_quant(self, quant: Option<String>) -> Self {
        Self { quant, ..self }
    }

    /// What has run since the last call; told with `--verbose`.
    ///
    /// # Errors
    /// As [`json`].
    pub(crate) fn identity(&self, run: &RunArgs) -> anyhow::Result<ExecutionIdentity> {
        let identity = ExecutionIdentity::executed(&take_counters(), &self.device, self.dtype);
        let identity = identity.with_weights(&self.weights).with_quant(self.quant.clone());
        if run.verbose > 0 {
            run.say(&format!("execution: {}", json(&identity)?));
        }
        Ok(identity)
    }
}

/// The identity as it stands in metadata.
///
/// # Errors
/// If the JSON cannot be made.
pub(crate) fn json(identity: &ExecutionIdentity) -> anyhow::Result<String> {
    serde_json::to_string(identity).context("cannot describe the run")
}
