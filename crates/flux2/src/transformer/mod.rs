//! The transformer: from latents, text embeddings and a sigma to the velocity of the flow.
//!
//! Sequence order is text, then image. Double blocks keep the two streams apart except in attention; single blocks work on
//! the joined sequence. Shift, scale and gate of all blocks of a kind come from one linear map of the time embedding, so
//! they are computed once per step. The reference is huggingface/diffusers, `transformer_flux2.py`.
//!
//! Blocks can be loaded and run alone: names below a block's prefix are those of the diffusers `state_dict`.

mod attention;
mod double_block;
mod embed;
mod modulation;
pub mod names;
mod rope;
mod single_block;
#[cfg(test)]
mod test_support;
#[cfg(test)]
pub(crate) use test_support::published_names;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_fork::{LinearWeight, What, linear};
use policy::{Event, Observer};
use weights::{Expected, TensorSource};

use self::embed::TimeEmbedding;
pub use self::{
    double_block::DoubleBlock,
    embed::sinusoid,
    modulation::{DoubleModulation, Modulation},
    names::Widths,
    rope::{Position, RopeTable, positions},
    single_block::SingleBlock,
};
use crate::{
    config::TransformerConfig,
    error::{Error, Result},
    options::LoadOptions,
};

/// The diffusion transformer of FLUX.2.
#[derive(Debug)]
pub struct Flux2Transformer {
    config: TransformerConfig,
    widths: Widths,
    time: TimeEmbedding,
    image_in: LinearWeight,
    text_in: LinearWeight,
    double_blocks: Vec<DoubleBlock>,
    single_blocks: Vec<SingleBlock>,
    image_out: LinearWeight,
    dtype: DType,
    device: Device,
}

/// What stays the same over the steps of a run: the embedded text and the positions of all tokens.
#[derive(Debug, Clone)]
pub struct Prepared {
    text: Tensor,
    rope: RopeTable,
    image_tokens: usize,
}

impl Flux2Transformer {
    /// Name and shape of every tensor that a checkpoint of `config` holds, in the diffusers layout.
    pub fn expected(config: &TransformerConfig) -> Vec<Expected> {
        names::expected(config)
    }

    /// Checks the configuration and the plan, then takes the weights. Matrices stay in their stored dtype and, on the CPU,
    /// where they lie.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration describes no such model; [`Error::Weights`] if a tensor is missing, has
    /// another shape, is unknown or holds non-finite values.
    pub fn load(config: &TransformerConfig, source: Arc<dyn TensorSource>, options: &LoadOptions) -> Result<Self> {
        config.validate()?;
        let widths = Widths::new(config);
        let mut loader = options.loader(source, &Self::expected(config), |_| false)?;
        let model = Self {
            time: TimeEmbedding::load(&mut loader, config.guidance_embeds)?,
            image_in: loader.linear("x_embedder.weight")?,
            text_in: loader.linear("context_embedder.weight")?,
            double_blocks: (0..config.num_layers)
                .map(|index| DoubleBlock::load(&mut loader, &widths, &names::double_block(index)))
                .collect::<Result<_>>()?,
            single_blocks: (0..config.num_single_layers)
                .map(|index| SingleBlock::load(&mut loader, &widths, &names::single_block(index)))
                .collect::<Result<_>>()?,
            image_out: loader.linear("proj_out.weight")?,
            config: config.clone(),
            widths,
            dtype: options.dtype,
            device: options.device.clone(),
        };
        loader.finish()?;
        Ok(model)
    }

    /// The configuration that the model was loaded with.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The part of a run that no step changes, for `prompt_embeds` `[B, L, joint_attention_dim]` and latents of `grid`
    /// (rows, columns) tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if the embeddings have another rank or width, or a grid is empty.
    pub fn prepare(&self, prompt_embeds: &Tensor, grid: (usize, usize)) -> Result<Prepared> {
        let channels = self.config.joint_attention_dim;
        let tokens = match *prompt_embeds.dims() {
            [batch, tokens, c] if batch > 0 && c == channels => tokens,
            _ => return Err(shape("prompt_embeds", prompt_embeds.dims(), format!("[B, L, {channels}]"))),
        };
        let image_tokens = match grid.0.checked_mul(grid.1) {
            Some(count) if count > 0 && count <= MAX_TOKENS && tokens <= MAX_TOKENS => count,
            _ => return Err(shape("latents grid", &[grid.0, grid.1], format!("1 to {MAX_TOKENS} tokens"))),
        };
        let embeds = prompt_embeds.to_dtype(self.dtype).what("prompt_embeds")?;
        let TransformerConfig { axes_dims_rope, rope_theta, .. } = &self.config;
        Ok(Prepared {
            text: linear(&embeds, &self.text_in, None)?,
            rope: RopeTable::new(axes_dims_rope, *rope_theta, &positions(tokens, grid), &self.device)?,
            image_tokens,
        })
    }

    /// The velocity `[B, N, out_channels]` f32 of `latents` `[B, N, in_channels]` (tokens row by row) at `sigma` in 0..=1.
    ///
    /// `guidance` is an input of models with `guidance_embeds` and of no others. The observer receives
    /// [`Event::Progress`] in units of the blocks of this one call, and can stop it between two blocks.
    ///
    /// # Errors
    /// [`Error::Shape`] if the latents do not fit the model or `prepared`; [`Error::GuidanceInput`] if a guidance is given
    /// to a model that takes none or the other way round; [`Error::Cancelled`] if the observer stops the run.
    pub fn forward(
        &self,
        latents: &Tensor,
        sigma: f32,
        guidance: Option<f32>,
        prepared: &Prepared,
        observer: &dyn Observer,
    ) -> Result<Tensor> {
        let batch = prepared.text.dims()[0];
        let expected = [batch, prepared.image_tokens, self.config.in_channels];
        if latents.dims() != expected {
            return Err(shape("latents", latents.dims(), format!("{expected:?}")));
        }
        if guidance.is_some() != self.config.guidance_embeds {
            return Err(Error::GuidanceInput { given: guidance.is_some() });
        }
        let blocks = self.double_blocks.len() + self.single_blocks.len();
        let mut done = 0;
        let mut block_done = || {
            done += 1;
            observer.notify(Event::Progress { done, total: blocks })
        };

        let modulations = self.time.forward(sigma, guidance, batch, &self.device)?;
        let latents = latents.to_dtype(self.dtype).what("latents")?;
        let mut image = linear(&latents, &self.image_in, None)?;
        let mut text = prepared.text.clone();
        for block in &self.double_blocks {
            (image, text) = block.forward(&image, &text, &modulations.double, &prepared.rope)?;
            block_done()?;
        }
        if let Some((last, others)) = self.single_blocks.split_last() {
            let mut x = Tensor::cat(&[text, image], 1).what("text and image streams")?;
            for block in others {
                x = block.forward(&x, &modulations.single, &prepared.rope)?;
                block_done()?;
            }
            image = last.forward_last(&x, prepared.image_tokens, &modulations.single, &prepared.rope)?;
            block_done()?;
        }
        let (shift, scale) = (&modulations.output_shift, &modulations.output_scale);
        let normed = candle_fork::layer_norm_modulate(&image, shift, scale, self.widths.eps)?;
        Ok(linear(&normed, &self.image_out, None)?.to_dtype(DType::F32).what("velocity")?)
    }
}

/// Bound on a sequence: positions fit u32 and tables stay small.
const MAX_TOKENS: usize = 1 << 20;

fn shape(what: &'static str, got: &[usize], expected: String) -> Error {
    Error::Shape { what, got: got.to_vec(), expected }
}
