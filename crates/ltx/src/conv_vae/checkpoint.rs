//! From a file to a network: which layout, which configuration.

use std::sync::Arc;

use candle_core::{DType, Device};
use serde_json::Value;
use weights::{Expected, Loader, LoaderOptions, TensorSource};

use super::{
    architecture::{Architecture, Network},
    config::{from_diffusers, from_original},
    memory::{self, ClipMemory, Part},
    names::{Layout, MEAN, expected, is_ignored},
};
use crate::{
    error::{Error, Result},
    files::{Component, embedded, no_config, prefix_of},
    options::LoadOptions,
};

/// A checkpoint, and what it holds according to its configuration; no tensor is read for that.
pub struct Checkpoint {
    /// The networks that the checkpoint has tensors of.
    pub architecture: Architecture,
    /// How it names its tensors.
    pub layout: Layout,
    /// Its tensors.
    pub source: Arc<dyn TensorSource>,
}

impl Checkpoint {
    /// Recognises what a component holds. A published file, of the VAE or of a whole model, says in its metadata what the
    /// networks are; tensors under diffusers' names need their `config.json`. A network without tensors is left out, and so
    /// is a diffusion decoder.
    ///
    /// # Errors
    /// [`Error::NoConfig`], [`Error::Config`]; [`Error::Missing`] if there is nothing of this family.
    pub fn new(Component { source, config }: Component) -> Result<Self> {
        let holds = |name: &str| source.info(name).is_some();
        let (layout, mut architecture) = if holds("latents_mean") {
            let architecture = from_diffusers(&config.ok_or_else(|| no_config(&*source))?)?;
            let blocks = architecture.encoder.as_ref().map_or(0, |encoder| encoder.blocks.len());
            (Layout::Diffusers { encoder_end: blocks.saturating_sub(1) }, architecture)
        } else {
            let prefix = prefix_of(&*source, MEAN);
            let prefix = prefix.ok_or(Error::Missing { part: "statistics of the latents of an ltx vae" })?;
            let config = embedded(&*source)?.or(config).ok_or_else(|| no_config(&*source))?;
            (Layout::Original { prefix }, from_original(section(&config))?)
        };
        let has = |part: &str| holds(&layout.name_in_file(&format!("{part}.conv_in.conv.weight")));
        architecture.encoder = architecture.encoder.filter(|_| has("encoder"));
        architecture.decoder = architecture.decoder.filter(|_| has("decoder"));
        if architecture.encoder.is_none() && architecture.decoder.is_none() {
            return Err(Error::Missing { part: "encoder and no decoder of a convolutional vae" });
        }
        Ok(Self { architecture, layout, source })
    }

    /// Name in the file and shape of every tensor that the networks need.
    ///
    /// # Errors
    /// As [`expected`].
    pub fn expected(&self) -> Result<Vec<Expected>> {
        let mut plan = expected(&self.architecture)?;
        for tensor in &mut plan {
            tensor.name = self.layout.name_in_file(&tensor.name);
        }
        Ok(plan)
    }

    /// Compares the tensors with what the networks need, without reading any.
    ///
    /// # Errors
    /// [`Error::Weights`] if tensors are missing, unexpected or of other shapes.
    pub fn check(&self) -> Result<()> {
        let options = LoaderOptions::default();
        let ignored = |name: &str| self.ignores(name);
        Loader::with_options(self.source.clone(), &self.expected()?, ignored, DType::F32, &Device::Cpu, options)?;
        Ok(())
    }

    /// Memory of a decode of latents whose batch, frames, rows and columns are `extents`, cut as
    /// [`ConvVae::decode_clip`](super::ConvVae::decode_clip) will cut them to keep within `max_bytes`.
    ///
    /// # Errors
    /// [`Error::Memory`] if nothing does; as [`LoadOptions::activations`].
    pub fn decode_memory(
        &self,
        options: &LoadOptions,
        extents: [usize; 4],
        max_bytes: Option<u64>,
    ) -> Result<ClipMemory> {
        let place = (options.device.location(), options.activations(&*self.source)?);
        let memory = |chunk| memory::clip(&self.architecture, Part::Decoder, place, extents, Some(chunk));
        Ok(memory(memory::chunk("decoding", extents[1], 1, None, max_bytes, memory)?))
    }

    /// Memory of an encode of a clip whose batch, frames, rows and columns are `extents`, cut as
    /// [`ConvVae::encode`](super::ConvVae::encode) will cut it to keep within `max_bytes`.
    ///
    /// # Errors
    /// As [`Checkpoint::decode_memory`].
    pub fn encode_memory(
        &self,
        options: &LoadOptions,
        [batch, frames, height, width]: [usize; 4],
        max_bytes: Option<u64>,
    ) -> Result<ClipMemory> {
        let place = (options.device.location(), options.activations(&*self.source)?);
        let side = self.architecture.patch_size.max(1);
        let extents = [batch, frames, height / side, width / side];
        let memory = |chunk| memory::clip(&self.architecture, Part::Encoder, place, extents, Some(chunk));
        let [group, ..] = self.architecture.encoder.as_ref().map_or([1; 3], Network::factors);
        Ok(memory(memory::chunk("encoding", frames, group, None, max_bytes, memory)?))
    }

    /// Whether a tensor of the file belongs to something else than the networks: to other parts of a whole model, to a
    /// diffusion decoder, or to statistics that nothing reads.
    pub fn ignores(&self, name: &str) -> bool {
        match &self.layout {
            Layout::Original { prefix } => {
                name.strip_prefix(prefix).is_none_or(|name| is_ignored(name, &self.architecture))
            }
            Layout::Diffusers { .. } => is_ignored(name, &self.architecture),
        }
    }
}

/// The section of the VAE in the configuration of a published file, or that section alone.
fn section(config: &Value) -> &Value {
    config.get("vae").unwrap_or(config)
}
