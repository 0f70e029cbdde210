//! The VAEs of LTX-2, 2.3 and 2.5.

pub(super) mod decode;
pub(super) mod encode;
mod network;

use std::{path::Path, sync::Arc};

use anyhow::{anyhow, ensure};
use candle_core::DType;
use ltx::{Error, LoadOptions, LtxFiles, options::stored_dtype};
use policy::ModelFamily;
use weights::TensorSource;

use super::{Limit, weights_hash};
use crate::{
    cli::{VaeArgs, WeightType},
    device,
    execution::{self, Watch},
    failure::Failure,
    machine,
};

/// The networks that a path leads to, if they are those of this family.
///
/// # Errors
/// If there is nothing that can be read.
pub(super) fn find(path: Option<&Path>) -> anyhow::Result<Option<LtxFiles>> {
    let files = path.map(LtxFiles::find).transpose().map_err(failed)?;
    Ok(files.filter(|files| !files.is_empty()))
}

/// What the library reports, or what a caller's own part of the work did, without a frame around it; in words of the command
/// where these say more.
fn failed(error: Error) -> anyhow::Error {
    match error {
        Error::Caller { source, .. } => anyhow::Error::from_boxed(source),
        Error::NoConfig { file } => anyhow!(
            "{file} carries no `config` in its metadata: get the file as it was published, or put its config.json beside it"
        ),
        other => other.into(),
    }
}

/// An error of the caller's part of the work, on its way through the library.
fn caller(what: &'static str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Caller { what, source: error.into() }
}

/// What a run keeps to.
#[derive(Debug, Clone, Copy)]
struct Terms {
    limit: Limit,
    /// Type of the activations.
    dtype: DType,
}

impl Terms {
    /// What the library reports, with what the terms have to do with it.
    fn failed(self, error: Error) -> anyhow::Error {
        match error {
            Error::Memory { .. } => self.limit.explain(error.into()),
            Error::NonFinite { .. } if self.dtype == DType::F16 => {
                anyhow!("{error}, or they leave the range of f16: try --dtype bf16")
            }
            other => failed(other),
        }
    }
}

/// Where a network runs.
struct Place<'a> {
    args: &'a VaeArgs,
    options: LoadOptions,
}

impl<'a> Place<'a> {
    /// Opens the device that was asked for.
    ///
    /// # Errors
    /// If this build or machine does not have it; usage, for a backend that is not known.
    fn open(args: &'a VaeArgs) -> Result<Self, Failure> {
        let (conv, attention) = execution::backends(ModelFamily::Ltx)?;
        let dtype = args.dtype.map(WeightType::dtype);
        let options = LoadOptions::default().with_device(device::open(args.device)?).with_dtype(dtype);
        let mut options = options.with_backends(conv, attention);
        options.plan_cache = machine::cache_folder("cudnn").map(Arc::from);
        Ok(Self { args, options })
    }

    /// The terms of a run of a network of `source`.
    ///
    /// # Errors
    /// If it cannot compute in the type that was asked for.
    fn terms(&self, source: &dyn TensorSource) -> anyhow::Result<Terms> {
        let limit = Limit::of(self.args, &self.options.device);
        Ok(Terms { limit, dtype: self.options.activations(source).map_err(failed)? })
    }

    /// Watches what runs from now on, for a network of `source` that computes in `dtype`.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn watch(&self, source: &dyn TensorSource, dtype: DType) -> anyhow::Result<Watch> {
        let hash = weights_hash(source, stored_dtype(source), dtype)?;
        Ok(Watch::new(&self.options.device, dtype, hash))
    }
}

/// What a network is called: with the version of its file, if that says it.
fn name(source: &dyn TensorSource, network: &str) -> String {
    match source.metadata().get("model_version") {
        Some(version) => format!("LTX-{} {network}", version.trim_end_matches(".0")),
        None => format!("LTX {network}"),
    }
}

/// Holds the colour channels to three.
fn check_colours(channels: usize) -> anyhow::Result<()> {
    ensure!(channels == 3, "this vae has frames of {channels} channels, expected 3: red, green and blue");
    Ok(())
}
