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
mod recorded;
mod rope;
mod single_block;
mod stacks;
#[cfg(test)]
mod test_support;
#[cfg(test)]
pub(crate) use test_support::{config as small_config, published_names};
#[cfg(test)]
mod tests;

use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

use candle_core::{DType, Device, Tensor};
use candle_fork::{LinearWeight, What, linear};
use policy::{Backends, Event, Observer};
use weights::{Expected, TensorSource};

pub use self::{
    double_block::DoubleBlock,
    embed::{StepModulations, sinusoid},
    modulation::{DoubleModulation, Modulation},
    names::Widths,
    rope::{Position, RopeTable, positions, reference_positions},
    single_block::SingleBlock,
    stacks::StreamedBlocks,
};
use self::{embed::TimeEmbedding, recorded::Recorder, stacks::Stacks};
use crate::{
    config::TransformerConfig,
    error::{Error, Result},
    layouts,
    options::LoadOptions,
    streaming::HostBlocks,
};

/// The diffusion transformer of FLUX.2.
#[derive(Debug)]
pub struct Flux2Transformer {
    config: TransformerConfig,
    widths: Widths,
    time: TimeEmbedding,
    image_in: LinearWeight,
    text_in: LinearWeight,
    stacks: Stacks,
    image_out: LinearWeight,
    dtype: DType,
    device: Device,
    backends: Backends,
    /// `None` if steps are not to be recorded.
    recorder: Option<Mutex<Recorder>>,
}

/// What stays the same over the steps of a run: the embedded text and the positions of all tokens.
#[derive(Debug, Clone)]
pub struct Prepared {
    text: Tensor,
    rope: RopeTable,
    /// Rows and columns of the picture, then of the references.
    grids: Vec<(usize, usize)>,
    image_tokens: usize,
    reference_tokens: usize,
}

impl Prepared {
    /// Tokens of the picture among all tokens.
    fn image(&self) -> Range<usize> {
        let text_tokens = self.text.dims()[1];
        text_tokens..text_tokens + self.image_tokens
    }
}

impl Flux2Transformer {
    /// Name and shape of every tensor that a checkpoint of `config` holds, in the diffusers layout.
    pub fn expected(config: &TransformerConfig) -> Vec<Expected> {
        names::expected(config)
    }

    /// Checks the configuration and the plan, then takes the weights. Matrices stay in their stored form and, on the CPU,
    /// where they lie. Names of other layouts are understood ([`crate::layouts::transformer`]).
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration describes no such model; [`Error::Weights`] if a tensor is missing, has
    /// another shape, is unknown or holds non-finite values.
    pub fn load(config: &TransformerConfig, source: Arc<dyn TensorSource>, options: &LoadOptions) -> Result<Self> {
        Self::load_streamed(config, source, options, StreamedBlocks::default())
    }

    /// [`Self::load`] with some of the blocks left on the host, from where each is copied to the device while others work.
    /// Results are the same.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_streamed(
        config: &TransformerConfig,
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
        streamed: StreamedBlocks,
    ) -> Result<Self> {
        Self::load_again(config, source, options, streamed, &HostBlocks::default())
    }

    /// [`Self::load_streamed`] with host blocks of an earlier loading.
    pub(crate) fn load_again(
        config: &TransformerConfig,
        source: Arc<dyn TensorSource>,
        options: &LoadOptions,
        streamed: StreamedBlocks,
        kept: &HostBlocks,
    ) -> Result<Self> {
        config.validate()?;
        let widths = Widths::new(config);
        let source = layouts::transformer(source, config)?;
        let mut loader = options.loader(source.clone(), &Self::expected(config), |_| false)?;
        let model = Self {
            time: TimeEmbedding::load(&mut loader, config.guidance_embeds)?,
            image_in: loader.linear("x_embedder.weight")?,
            text_in: loader.linear("context_embedder.weight")?,
            stacks: Stacks::load(&mut loader, source, config, options, streamed, kept)?,
            image_out: loader.linear("proj_out.weight")?,
            config: config.clone(),
            widths,
            dtype: options.dtype,
            device: options.device.clone(),
            backends: options.backends(),
            recorder: Recorder::new(options, streamed),
        };
        if streamed == StreamedBlocks::default() {
            loader.finish()?;
        }
        Ok(model)
    }

    /// The configuration that the model was loaded with.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// How many blocks were left on the host.
    pub fn streamed(&self) -> StreamedBlocks {
        self.stacks.streamed()
    }

    /// The part of a run that no step changes, for `prompt_embeds` `[B, L, joint_attention_dim]` and latents of `grid`
    /// (rows, columns) tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if the embeddings have another rank or width, or a grid is empty.
    pub fn prepare(&self, prompt_embeds: &Tensor, grid: (usize, usize)) -> Result<Prepared> {
        self.prepare_with_references(prompt_embeds, grid, &[])
    }

    /// [`Self::prepare`] for latents whose tokens are followed by those of reference pictures, each a grid of its own.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub fn prepare_with_references(
        &self,
        prompt_embeds: &Tensor,
        grid: (usize, usize),
        references: &[(usize, usize)],
    ) -> Result<Prepared> {
        let _policy = self.backends.enter();
        let channels = self.config.joint_attention_dim;
        let tokens = match *prompt_embeds.dims() {
            [batch, tokens, c] if batch > 0 && c == channels => tokens,
            _ => return Err(shape("prompt_embeds", prompt_embeds.dims(), format!("[B, L, {channels}]"))),
        };
        let count = |(rows, columns): (usize, usize)| match rows.checked_mul(columns) {
            Some(count) if count > 0 && count <= MAX_TOKENS => Ok(count),
            _ => Err(shape("latents grid", &[rows, columns], format!("1 to {MAX_TOKENS} tokens"))),
        };
        let image_tokens = count(grid)?;
        let reference_tokens = references.iter().try_fold(0, |sum, &grid| Ok::<_, Error>(sum + count(grid)?))?;
        let all = tokens.saturating_add(image_tokens).saturating_add(reference_tokens);
        if tokens > MAX_TOKENS || all > 2 * MAX_TOKENS {
            return Err(shape(
                "latents grid",
                &[grid.0, grid.1],
                format!("{MAX_TOKENS} tokens of text and of pictures"),
            ));
        }
        let embeds = prompt_embeds.to_dtype(self.dtype).what("prompt_embeds")?;
        let TransformerConfig { axes_dims_rope, rope_theta, .. } = &self.config;
        let mut positions = positions(tokens, grid);
        positions.extend(reference_positions(references));
        Ok(Prepared {
            text: linear(&embeds, &self.text_in, None)?,
            rope: RopeTable::new(axes_dims_rope, *rope_theta, &positions, &self.device)?,
            grids: [&[grid], references].concat(),
            image_tokens,
            reference_tokens,
        })
    }

    /// What the embedding of the time gives to all blocks, for each of `sigmas` in 0..=1 and each of `batch` items alike:
    /// made once, before the steps.
    ///
    /// # Errors
    /// [`Error::GuidanceInput`] if a guidance is given to a model that takes none or the other way round; [`Error::Op`].
    pub fn modulations(&self, sigmas: &[f32], guidance: Option<f32>, batch: usize) -> Result<Vec<StepModulations>> {
        if guidance.is_some() != self.config.guidance_embeds {
            return Err(Error::GuidanceInput { given: guidance.is_some() });
        }
        let _policy = self.backends.enter();
        self.time.forward(sigmas, guidance, batch, &self.device)
    }

    /// The velocity `[B, N, out_channels]` f32 of `latents` `[B, N, in_channels]` (tokens row by row) at `sigma` in 0..=1:
    /// [`Self::modulations`] of one sigma and [`Self::step`].
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
        let batch = self.check(latents, prepared)?;
        let modulations = self.modulations(&[sigma], guidance, batch)?;
        match modulations.first() {
            Some(modulations) => self.step(latents, modulations, prepared, observer),
            None => unreachable!("one sigma has one modulation"),
        }
    }

    /// The velocity `[B, N, out_channels]` f32 of `latents` `[B, N + R, in_channels]`: N tokens of the picture, then R of
    /// the references that `prepared` is for. Nothing in it waits for a device. See [`Self::forward`].
    ///
    /// # Errors
    /// [`Error::Shape`] if the latents do not fit the model or `prepared`; [`Error::Cancelled`] if the observer stops the
    /// run; [`Error::Op`].
    pub fn step(
        &self,
        latents: &Tensor,
        modulations: &StepModulations,
        prepared: &Prepared,
        observer: &dyn Observer,
    ) -> Result<Tensor> {
        self.check(latents, prepared)?;
        let _policy = self.backends.enter();
        match &self.recorder {
            Some(recorder) => recorded::step(self, recorder, latents, modulations, prepared, observer),
            None => self.eager(latents, modulations, prepared, observer),
        }
    }

    /// The step op by op.
    fn eager(
        &self,
        latents: &Tensor,
        modulations: &StepModulations,
        prepared: &Prepared,
        observer: &dyn Observer,
    ) -> Result<Tensor> {
        let total = self.stacks.len();
        let mut done = 0;
        let mut block_done = || {
            done += 1;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        let latents = latents.to_dtype(self.dtype).what("latents")?;
        let image = linear(&latents, &self.image_in, None)?;
        let image = self.stacks.forward(image, modulations, prepared, &mut block_done)?;
        let (shift, scale) = (&modulations.output_shift, &modulations.output_scale);
        let normed = candle_fork::layer_norm_modulate(&image, shift, scale, self.widths.eps)?;
        Ok(linear(&normed, &self.image_out, None)?.to_dtype(DType::F32).what("velocity")?)
    }

    /// The batch of latents that fit.
    fn check(&self, latents: &Tensor, prepared: &Prepared) -> Result<usize> {
        let batch = prepared.text.dims()[0];
        let tokens = prepared.image_tokens + prepared.reference_tokens;
        let expected = [batch, tokens, self.config.in_channels];
        if latents.dims() == expected {
            Ok(batch)
        } else {
            Err(shape("latents", latents.dims(), format!("{expected:?}")))
        }
    }
}

/// Bound on a sequence: positions fit u32 and tables stay small.
const MAX_TOKENS: usize = 1 << 20;

fn shape(what: &'static str, got: &[usize], expected: String) -> Error {
    Error::Shape { what, got: got.to_vec(), expected }
}
