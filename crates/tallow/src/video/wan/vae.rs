//! The VAE of a run, checked before its weights are read.

use std::sync::Arc;

use anyhow::ensure;
use candle_core::DType;
use policy::ModelFamily;
use wan_vae::{Architecture, Checkpoint, Error, LoadOptions, Precision, Variant, WanVae, checkpoint};

use super::{
    super::{Limit, weights_hash},
    failed,
};
use crate::{
    cli::{VaeArgs, WeightType},
    demo, device,
    execution::{self, Watch},
    failure::Failure,
    machine,
};

/// A VAE whose tensors are all there.
pub(in crate::video) struct Vae<'a> {
    args: &'a VaeArgs,
    checkpoint: Checkpoint,
    options: LoadOptions,
}

impl<'a> Vae<'a> {
    /// Opens the device and the VAE that were asked for.
    ///
    /// # Errors
    /// A device that this build or machine does not have; a file that is no VAE.
    pub(in crate::video) fn open(args: &'a VaeArgs) -> Result<Self, Failure> {
        let dtype = args.dtype.map(WeightType::dtype);
        let (conv, attention) = execution::backends(ModelFamily::WanVae)?;
        let mut options = LoadOptions::default().with_device(device::open(args.device)?).with_dtype(dtype);
        (options.conv, options.attention) = (conv, attention);
        options.plan_cache = machine::cache_folder("cudnn").map(Arc::from);
        let opened = match &args.vae {
            Some(path) => checkpoint::open(path),
            None => checkpoint::open_folder(&demo::vae()),
        };
        let checkpoint = opened.and_then(|(source, config)| Checkpoint::new(source, config.as_ref()));
        Ok(Self { args, checkpoint: checkpoint.map_err(failed)?, options })
    }

    pub(in crate::video) fn architecture(&self) -> &Architecture {
        &self.checkpoint.architecture
    }

    pub(in crate::video) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// For metadata.
    pub(in crate::video) fn name(&self) -> String {
        if self.is_built_in() { demo::VAE_NAME.to_owned() } else { self.checkpoint.variant.to_string() }
    }

    /// For messages.
    pub(in crate::video) fn title(&self) -> String {
        let built_in = if self.is_built_in() { "built-in " } else { "" };
        format!("{built_in}{}, weights {}", self.name(), self.dtype().as_str())
    }

    fn is_built_in(&self) -> bool {
        self.args.vae.is_none()
    }

    /// Whether it is one of the Wan 2.2 family.
    pub(in crate::video) fn is_wan22(&self) -> bool {
        matches!(self.checkpoint.variant, Variant::Wan22 | Variant::Wan22Pruned)
    }

    fn dtype(&self) -> DType {
        self.options.dtype.unwrap_or_else(|| self.checkpoint.dtype())
    }

    /// Element types, and where it computes.
    pub(in crate::video) fn precision(&self) -> Precision {
        Precision::new(self.options.device.location(), self.dtype())
    }

    fn limit(&self) -> Limit {
        Limit::of(self.args, &self.options.device)
    }

    /// Most bytes that the run may take.
    pub(in crate::video) fn max_bytes(&self) -> Option<u64> {
        self.limit().bytes
    }

    /// Says where a limit that was too small comes from.
    pub(in crate::video) fn explain(&self, error: Error) -> anyhow::Error {
        match error {
            Error::Memory { .. } => self.limit().explain(error.into()),
            other => failed(other),
        }
    }

    /// Holds the colour channels to three.
    ///
    /// # Errors
    /// For VAEs of pictures with transparency.
    pub(in crate::video) fn check_colours(&self, channels: usize) -> anyhow::Result<()> {
        ensure!(
            channels == 3,
            "{}: a {} has frames of {channels} channels, expected 3: red, green and blue",
            self.checkpoint.source.describe(),
            self.checkpoint.variant
        );
        Ok(())
    }

    /// Looks at those values that are known to be damaged in some copies.
    ///
    /// # Errors
    /// If they are.
    pub(in crate::video) fn check_values(&self) -> anyhow::Result<()> {
        self.checkpoint.check_values().map_err(failed)
    }

    /// Reads the weights, and begins to watch what computes.
    ///
    /// # Errors
    /// If they are damaged.
    pub(in crate::video) fn load(self) -> anyhow::Result<(WanVae, Watch)> {
        let hash = weights_hash(&*self.checkpoint.source, self.checkpoint.dtype(), self.dtype())?;
        let Self { checkpoint, options, .. } = self;
        let Checkpoint { architecture, statistics, source, .. } = checkpoint;
        let vae = WanVae::from_architecture(architecture, statistics, source, &options).map_err(failed)?;
        let watch = Watch::new(&options.device, vae.precision().activations, hash);
        Ok((vae, watch))
    }
}
