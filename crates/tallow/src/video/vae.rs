//! The VAE of a run, checked before its weights are read.

use std::sync::Arc;

use anyhow::{anyhow, ensure};
use candle_core::{DType, Device};
use policy::ModelFamily;
use wan_vae::{Architecture, Checkpoint, Error, LoadOptions, Variant, WanVae, checkpoint};

use super::failed;
use crate::{
    cli::{DeviceName, VaeArgs, WeightType},
    demo,
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
        let dtype = args.dtype.map(|name| match name {
            WeightType::F32 => DType::F32,
            WeightType::Bf16 => DType::BF16,
            WeightType::F16 => DType::F16,
        });
        let overrides = policy::overrides_from(std::env::vars_os()).map_err(|error| Failure::Usage(error.into()))?;
        let mut options = LoadOptions::default().with_device(device(args.device)?).with_dtype(dtype);
        options.conv = overrides.conv_for(ModelFamily::WanVae);
        options.attention = overrides.attention_for(ModelFamily::WanVae);
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

    /// Bytes of a weight in memory.
    pub(crate) fn weight_size(&self) -> u64 {
        self.dtype().size_in_bytes() as u64
    }

    /// Most bytes that the run may take: those that were asked for, else those that are available, if that is known.
    pub(crate) fn max_bytes(&self) -> Option<u64> {
        // What a device of its own has available is not known here.
        let available = || self.options.device.is_cpu().then(|| machine::memory().1).flatten();
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

    /// Reads the weights.
    ///
    /// # Errors
    /// If they are damaged.
    pub(crate) fn load(self) -> anyhow::Result<WanVae> {
        let Self { checkpoint, options, .. } = self;
        let Checkpoint { architecture, statistics, source, .. } = checkpoint;
        WanVae::from_architecture(architecture, statistics, source, &options).map_err(failed)
    }
}

fn device(name: DeviceName) -> Result<Device, Failure> {
    match name {
        DeviceName::Cpu => Ok(Device::Cpu),
        DeviceName::Cuda(number) => cuda(number),
    }
}

#[cfg(feature = "cuda")]
fn cuda(number: usize) -> Result<Device, Failure> {
    use anyhow::Context;
    let what = || format!("cannot use CUDA device {number}");
    let device = Device::new_cuda_with_stream(number).with_context(what)?;
    // Nobody else in this process wants it back.
    candle_fork::memory::keep_freed(&device, u64::MAX).with_context(what)?;
    Ok(device)
}

#[cfg(not(feature = "cuda"))]
fn cuda(number: usize) -> Result<Device, Failure> {
    Err(Failure::Usage(anyhow!("--device cuda:{number}: this build is without CUDA (feature `cuda`), expected cpu")))
}
