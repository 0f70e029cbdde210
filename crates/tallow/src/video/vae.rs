//! The VAE of a run, checked before its weights are read.

use std::sync::Arc;

use anyhow::{anyhow, ensure};
use candle_core::{DType, Device};
use policy::ModelFamily;
use wan_vae::{Architecture, Checkpoint, Error, LoadOptions, Precision, Variant, WanVae, checkpoint};
use weights::sample_hash;

use super::failed;
use crate::{
    cli::{VaeArgs, WeightType},
    demo, device,
    execution::{self, Watch},
    failure::Failure,
    machine,
};

/// A VAE whose tensors are all there.
pub(crate) struct Vae<'a> {
    args: &'a VaeArgs,
    checkpoint: Checkpoint,
    options: LoadOptions,
}

impl<'a> Vae<'a> {
    /// Opens the device and the VAE that were asked for.
    ///
    /// # Errors
    /// A device that this build or machine does not have; a file that is no VAE.
    pub(crate) fn open(args: &'a VaeArgs) -> Result<Self, Failure> {
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

    pub(crate) fn architecture(&self) -> &Architecture {
        &self.checkpoint.architecture
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// For metadata.
    pub(crate) fn name(&self) -> String {
        if self.is_built_in() { demo::VAE_NAME.to_owned() } else { self.checkpoint.variant.to_string() }
    }

    /// For messages.
    pub(crate) fn title(&self) -> String {
        let built_in = if self.is_built_in() { "built-in " } else { "" };
        format!("{built_in}{}, weights {}", self.name(), self.dtype().as_str())
    }

    fn is_built_in(&self) -> bool {
        self.args.vae.is_none()
    }

    /// Whether it is one of the Wan 2.2 family.
    pub(crate) fn is_wan22(&self) -> bool {
        matches!(self.checkpoint.variant, Variant::Wan22 | Variant::Wan22Pruned)
    }

    fn dtype(&self) -> DType {
        self.options.dtype.unwrap_or_else(|| self.checkpoint.dtype())
    }

    /// Element types, and where it computes.
    pub(crate) fn precision(&self) -> Precision {
        Precision::new(self.options.device.location(), self.dtype())
    }

    /// Most bytes that the run may take: those that were asked for, else those that are available, if that is known.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        let available = || match &self.options.device {
            Device::Cpu => machine::memory().1,
            // If the driver does not say, the run will.
            device => candle_fork::memory::available(device).ok().flatten(),
        };
        self.args.max_memory.or_else(available)
    }

    /// Says where a limit that was too small comes from.
    pub(crate) fn explain(&self, error: Error) -> anyhow::Error {
        match error {
            Error::Memory { .. } if self.args.max_memory.is_none() => {
                anyhow!("{error}, which is what is available now; --max-memory overrides it")
            }
            other => failed(other),
        }
    }

    /// Holds the colour channels to three.
    ///
    /// # Errors
    /// For VAEs of pictures with transparency.
    pub(crate) fn check_colours(&self, channels: usize) -> anyhow::Result<()> {
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
    pub(crate) fn check_values(&self) -> anyhow::Result<()> {
        self.checkpoint.check_values().map_err(failed)
    }

    /// Reads the weights, and begins to watch what computes.
    ///
    /// # Errors
    /// If they are damaged.
    pub(crate) fn load(self) -> anyhow::Result<(WanVae, Watch)> {
        let mut hash = sample_hash(&[("vae", &self.checkpoint.source)])?;
        if self.dtype() != DType::F32 && self.dtype() != self.checkpoint.dtype() {
            // Weights that were rounded are other weights.
            hash = format!("{hash} as {}", self.dtype().as_str());
        }
        let Self { checkpoint, options, .. } = self;
        let Checkpoint { architecture, statistics, source, .. } = checkpoint;
        let vae = WanVae::from_architecture(architecture, statistics, source, &options).map_err(failed)?;
        let watch = Watch::new(&options.device, vae.precision().activations, hash);
        Ok((vae, watch))
    }
}
