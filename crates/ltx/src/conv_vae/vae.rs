//! The convolutional VAE.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device, DeviceLocation};
use policy::Backends;
use serde_json::Value;
use weights::{Loader, LoaderOptions, TensorSource};

use super::{
    architecture::{Architecture, Network},
    builder::Builder,
    checkpoint::Checkpoint,
    names::{MEAN, STD},
    network::ConvNetwork,
    statistics::Statistics,
};
use crate::{
    error::{Error, Result},
    files::{Component, LtxFiles},
    options::LoadOptions,
};

/// A convolutional VAE: encoder, decoder, or both. Cloning shares the weights; threads may use one VAE at the same time.
#[derive(Debug, Clone)]
pub struct ConvVae(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    architecture: Architecture,
    statistics: Statistics,
    encoder: Option<ConvNetwork>,
    decoder: Option<ConvNetwork>,
    dtype: DType,
    device: Device,
    backends: Backends,
}

impl ConvVae {
    /// Loads the VAE that a path leads to ([`LtxFiles::find`]).
    ///
    /// # Errors
    /// As [`ConvVae::load`]; [`Error::Missing`] if there is none.
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let component = LtxFiles::find(path)?.vae.ok_or(Error::Missing { part: "convolutional vae of ltx" })?;
        Self::load(component.source, component.config.as_ref(), options)
    }

    /// Loads a checkpoint with diffusers' `config`, if it has one ([`Checkpoint::new`]).
    ///
    /// # Errors
    /// As [`Checkpoint::new`] and [`ConvVae::from_checkpoint`].
    pub fn load(source: Arc<dyn TensorSource>, config: Option<&Value>, options: &LoadOptions) -> Result<Self> {
        Self::from_checkpoint(Checkpoint::new(Component { source, config: config.cloned() })?, options)
    }

    /// Takes the weights of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Weights`] if tensors are missing, unexpected, of other shapes or not finite; [`Error::Config`] for
    /// statistics that are no numbers.
    pub fn from_checkpoint(checkpoint: Checkpoint, options: &LoadOptions) -> Result<Self> {
        let dtype = options.activations(&*checkpoint.source)?;
        let device = options.device.clone();
        let plan = checkpoint.expected()?;
        let ignored = |name: &str| checkpoint.ignores(name);
        let checks = LoaderOptions::default().with_values(options.values);
        let mut loader = Loader::with_options(checkpoint.source.clone(), &plan, ignored, dtype, &device, checks)?;
        let Checkpoint { architecture, layout, source } = checkpoint;
        for name in [MEAN, STD] {
            loader.tensor(&layout.name_in_file(name))?;
        }
        let statistics = Statistics::load(&*source, &layout, &device)?;
        let mut network = |part: &str, network: Option<&Network>, filters: usize| {
            let load =
                |n| ConvNetwork::load(&mut Builder::new(&mut loader, &layout), part, n, filters, (dtype, &device));
            network.map(load).transpose()
        };
        let encoder = network("encoder", architecture.encoder.as_ref(), architecture.latent_channels)?;
        let decoder = network("decoder", architecture.decoder.as_ref(), architecture.packed_channels())?;
        loader.finish()?;
        let backends = options.backends();
        Ok(Self(Arc::new(Inner { architecture, statistics, encoder, decoder, dtype, device, backends })))
    }

    /// What the networks look like.
    pub fn architecture(&self) -> &Architecture {
        &self.0.architecture
    }

    /// Mean and standard deviation of the latents.
    pub fn statistics(&self) -> &Statistics {
        &self.0.statistics
    }

    pub(super) fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub(super) fn backends(&self) -> &Backends {
        &self.0.backends
    }

    /// Where and in which type it computes.
    pub(super) fn placement(&self) -> (DeviceLocation, DType) {
        (self.0.device.location(), self.0.dtype)
    }

    pub(super) fn encoder(&self) -> Result<(&ConvNetwork, &Network)> {
        let (network, spec) = (self.0.encoder.as_ref(), self.0.architecture.encoder.as_ref());
        network.zip(spec).ok_or(Error::Missing { part: "encoder" })
    }

    pub(super) fn decoder(&self) -> Result<(&ConvNetwork, &Network)> {
        let (network, spec) = (self.0.decoder.as_ref(), self.0.architecture.decoder.as_ref());
        network.zip(spec).ok_or(Error::Missing { part: "convolutional decoder" })
    }
}
