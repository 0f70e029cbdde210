//! The diffusion decoder of LTX-2.5: a transformer that makes pixels from noise, given a volume made from latents.
//!
//! Deterministic stages turn latents into a context at a token per patch of pixels; the last stage denoises patches of
//! pixels, with the context added before each block. All attention is to a window of neighbours
//! ([`candle_fork::neighborhood_attention()`]). The reference is huggingface/diffusers, `ltx2_diffusion_decoder.py`.
//!
//! Published weights take one step and predict the pixels, so that a decode is one pass over the last stage.

mod block;
pub mod config;
mod decode;
#[cfg(test)]
mod goldens;
mod memory;
mod names;
pub mod options;
mod parts;
mod passes;
mod rgb8;
mod rope;
mod short_clips;
mod shuffle;
mod slabs;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tiles;
mod timestep;

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::Backends;
use weights::{Expected, Loader, LoaderOptions, TensorSource};

use self::{
    block::{DiffusionBlock, NaBlock},
    names::Spelling,
    parts::{Linear, Parts},
    shuffle::Upsample,
    timestep::Timestep,
};
pub use self::{
    config::{DiffusionDecoderConfig, OutputType},
    memory::DecodeMemory,
    options::{BlendedTiles, DecodeOptions, LatentScale, Noise, Tiling},
    short_clips::ShortClips,
};
use crate::{
    error::{Error, Result},
    files::LtxFiles,
    options::LoadOptions,
};

/// Blocks on one grid, and the upsample behind them.
#[derive(Debug)]
struct Stage {
    blocks: Vec<NaBlock>,
    upsample: Upsample,
}

/// The diffusion decoder.
#[derive(Debug)]
pub struct DiffusionDecoder {
    config: DiffusionDecoderConfig,
    /// Mean and standard deviation of the latents' channels, `[1, C, 1, 1, 1]` f32.
    statistics: [Tensor; 2],
    latents_in: Linear,
    stages: Vec<Stage>,
    timestep: Timestep,
    pixels_in: Linear,
    blocks: Vec<DiffusionBlock>,
    norm_out: Tensor,
    pixels_out: Linear,
    dtype: DType,
    device: Device,
    backends: Backends,
    /// About: in the dtype of the activations.
    weight_bytes: u64,
}

/// Bytes of tensors in a dtype.
fn weight_bytes(plan: &[Expected], dtype: DType) -> u64 {
    let elements = plan.iter().map(|tensor| tensor.shape.iter().map(|&n| n as u64).product::<u64>());
    elements.sum::<u64>() * dtype.size_in_bytes() as u64
}

impl DiffusionDecoder {
    /// Name and shape of every tensor that `source` has to hold, in the spelling that it uses: that of diffusers, or that
    /// of the published file, whose encoder and other parts are not looked at.
    pub fn expected(config: &DiffusionDecoderConfig, source: &dyn TensorSource) -> Vec<Expected> {
        names::expected(config, Spelling::of(source))
    }

    /// Whether a tensor of `source` belongs to something else than the decoder: to the encoder or other parts of the same
    /// file, to training, or to nothing that any implementation reads.
    pub fn ignores(source: &dyn TensorSource, name: &str) -> bool {
        Spelling::of(source).ignores(name)
    }

    /// Loads the diffusion decoder that a path leads to ([`LtxFiles::find`]).
    ///
    /// # Errors
    /// [`Error::Missing`] if there is none; those of [`DiffusionDecoderConfig::of`] and [`DiffusionDecoder::load`].
    pub fn open(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let component = LtxFiles::find(path)?.diffusion_decoder.ok_or(Error::Missing { part: "diffusion decoder" })?;
        let config = DiffusionDecoderConfig::of(&*component.source, component.config.as_ref())?;
        Self::load(&config, component.source, options)
    }

    /// Compares the configuration with itself and the tensors of `source` with what it calls for, without reading any.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration describes no such network; [`Error::Weights`] if tensors are missing,
    /// unexpected or of other shapes.
    pub fn check(config: &DiffusionDecoderConfig, source: Arc<dyn TensorSource>) -> Result<()> {
        config.validate()?;
        let spelling = Spelling::of(&*source);
        let plan = names::expected(config, spelling);
        let ignores = |name: &str| spelling.ignores(name);
        Loader::with_options(source, &plan, ignores, DType::F32, &Device::Cpu, LoaderOptions::default())?;
        Ok(())
    }

    /// Checks the configuration and the plan, then takes the weights. Matrices stay in their stored form and, on the CPU,
    /// where they lie.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration describes no such network; [`Error::Weights`] if a tensor is missing, has
    /// another shape, is unknown or holds non-finite values.
    pub fn load(config: &DiffusionDecoderConfig, source: Arc<dyn TensorSource>, options: &LoadOptions) -> Result<Self> {
        config.validate()?;
        let dtype = options.activations(&*source)?;
        let spelling = Spelling::of(&*source);
        let plan = names::expected(config, spelling);
        let checks = LoaderOptions::default().with_values(options.values);
        let ignores = |name: &str| spelling.ignores(name);
        let mut loader = Loader::with_options(source, &plan, ignores, dtype, &options.device, checks)?;
        let mut parts = Parts { loader: &mut loader, spelling, dtype, device: options.device.clone() };
        let mut decoder = Self::take(config, &mut parts, dtype, options)?;
        decoder.weight_bytes = weight_bytes(&plan, dtype);
        loader.finish()?;
        Ok(decoder)
    }

    fn take(
        config: &DiffusionDecoderConfig,
        parts: &mut Parts<'_>,
        dtype: DType,
        options: &LoadOptions,
    ) -> Result<Self> {
        let mut stages = Vec::new();
        for stage in 0..config.deterministic() {
            let (channels, window) = (config.stage_channels[stage], config.stage_kernels[stage]);
            let block = |block: usize| {
                let prefix = format!("decoder.det_stages.{stage}.{block}");
                NaBlock::load(parts, &prefix, config, channels, window)
            };
            let blocks = (0..config.stage_depths[stage]).map(block).collect::<Result<_>>()?;
            let stride = config.upsample_strides[stage];
            let proj = parts.upsample(&format!("decoder.upsamples.{stage}.proj"), stride.iter().product())?;
            stages.push(Stage { blocks, upsample: Upsample { proj, stride } });
        }
        let last = config.deterministic();
        let block = |block: usize| {
            DiffusionBlock::load(parts, &format!("decoder.diff_blocks.{block}"), config, config.stage_channels[last])
        };
        let blocks = (0..config.stage_depths[last]).map(block).collect::<Result<_>>()?;
        let mut statistic = |name: &str| -> Result<Tensor> {
            let values = parts.wide(name)?;
            Ok(values.reshape((1, config.in_channels, 1, 1, 1)).what("statistics of the latents")?)
        };
        Ok(Self {
            statistics: [statistic("latents_mean")?, statistic("latents_std")?],
            latents_in: parts.linear("decoder.conv_in")?,
            stages,
            timestep: Timestep::load(parts, config.timestep_scale_multiplier)?,
            pixels_in: parts.pixels_in("decoder.conv_in_x_t", config.patch_size)?,
            blocks,
            norm_out: parts.tensor("decoder.norm_out.weight")?,
            pixels_out: parts.pixels_out("decoder.conv_out", config.patch_size)?,
            config: config.clone(),
            dtype,
            device: options.device.clone(),
            backends: options.backends(),
            weight_bytes: 0,
        })
    }

    /// The configuration that the decoder was loaded with.
    pub fn config(&self) -> &DiffusionDecoderConfig {
        &self.config
    }
}
