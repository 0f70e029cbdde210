//! From a checkpoint to a VAE.

use std::{path::Path, sync::Arc};

use candle_core::DType;
use weights::{Loader, LoaderOptions, StoredDType, TensorSource};

use crate::{
    architecture::Architecture,
    checkpoint::{self, Checkpoint},
    config::VaeConfig,
    error::{Error, Result},
    latents::Statistics,
    layers::Builder,
    memory::Precision,
    network::{Decoder, Encoder},
    options::LoadOptions,
    plan::expected,
    vae::{Inner, WanVae},
    variant::Variant,
};

impl WanVae {
    /// Loads a checkpoint of any layout. The tensors decide what the network is; of a configuration only the statistics of
    /// the latents count, which are in no tensor ([`Checkpoint::new`]).
    ///
    /// # Errors
    /// [`Error::NotAVae`]; [`Error::Weights`] if tensors are missing, have other shapes or hold non-finite values;
    /// [`Error::Zeroed`]; [`Error::Statistics`] for the configuration of another VAE.
    pub fn load(source: Arc<dyn TensorSource>, config: Option<&VaeConfig>, options: &LoadOptions) -> Result<Self> {
        let checkpoint = Checkpoint::new(source, config)?;
        checkpoint.check_values()?;
        Self::from_architecture(checkpoint.architecture, checkpoint.statistics, checkpoint.source, options)
    }

    /// Loads a file of any layout, or a folder, with the configuration beside it ([`checkpoint::open`]).
    ///
    /// # Errors
    /// As [`WanVae::load`].
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let (source, config) = checkpoint::open(path)?;
        Self::load(source, config.as_ref(), options)
    }

    /// Which published VAE this is.
    pub fn variant(&self) -> Variant {
        Variant::of(self.architecture())
    }

    /// Loads a network that is known, from tensors under their diffusers names ([`expected`]).
    ///
    /// # Errors
    /// As [`WanVae::load`]; [`Error::Statistics`] if the statistics are not those of as many channels.
    pub fn from_architecture(
        architecture: Architecture,
        statistics: Option<Statistics>,
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
    ) -> Result<Self> {
        architecture.validate()?;
        if let Some(statistics) = &statistics
            && statistics.mean().len() != architecture.z_dim
        {
            let got = format!("{} values", statistics.mean().len());
            return Err(Error::Statistics { field: "latents_mean", got, expected: architecture.z_dim.to_string() });
        }
        let plan = expected(&architecture);
        let dtype = options.dtype.unwrap_or_else(|| stored_float(&*source));
        let checks = LoaderOptions::default().with_values(options.values);
        let mut loader = Loader::with_options(source, &plan, |_| false, dtype, &options.device, checks)?;
        let encoder = match &architecture.encoder {
            Some(network) => Some(Encoder::load(&mut Builder::new(&mut loader), &architecture, network)?),
            None => None,
        };
        let decoder = match &architecture.decoder {
            Some(network) => Some(Decoder::load(&mut Builder::new(&mut loader), &architecture, network)?),
            None => None,
        };
        loader.finish()?;
        let device = options.device.clone();
        let precision = Precision::new(device.location(), dtype);
        let backends = options.backends();
        let inner = Inner { architecture, statistics, encoder, decoder, device, precision, backends };
        Ok(Self(Arc::new(inner)))
    }
}

/// The narrowest element type that holds every weight as it is stored.
pub(crate) fn stored_float(source: &dyn TensorSource) -> DType {
    let bytes = |stored: StoredDType| -> usize {
        source.tensors().iter().filter(|t| t.dtype == stored).map(|t| t.bytes.len()).sum()
    };
    let (f16, bf16) = (bytes(StoredDType::F16), bytes(StoredDType::BF16));
    let wide = bytes(StoredDType::F32) + bytes(StoredDType::F64);
    match (wide, f16, bf16) {
        (0, 0, 1..) => DType::BF16,
        (0, 1.., 0) => DType::F16,
        _ => DType::F32,
    }
}
