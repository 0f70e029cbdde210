//! From a prompt to a picture.

mod check;
mod component;
mod components;
mod denoise;
mod options;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use candle_fork::{
    What,
    frames::{Downloads, HostFrames},
    memory::give_back,
};
use policy::{Backends, Event, Observer, Silent};
use weights::{ModelFolder, TensorSource};

use self::{check::Description, component::Component, options::Run};
pub use self::{
    components::Components,
    denoise::{DenoiseInput, DenoiseStep},
    options::{GenerateOptions, Generated, GeneratedRgb8, Notice},
};
use crate::{
    error::{Error, Result},
    generation::{GenerationDefaults, ModelKind},
    layouts,
    memory::{MemoryPlan, Shapes},
    options::{LoadOptions, Residency},
    streaming::HostBlocks,
    text_encoder::{self, Qwen3Encoder},
    tokenizer::PromptTokenizer,
    transformer::Flux2Transformer,
    vae::{self, Bands, Flux2Vae},
};

/// Where the tensors of a component come from: `text_encoder`, `transformer` or `vae`.
pub type TensorSources = Arc<dyn Fn(&str) -> weights::Result<Arc<dyn TensorSource>> + Send + Sync>;

/// Prompts whose embeddings are kept: the last one and the empty one of guidance.
const KEPT_PROMPTS: usize = 2;

/// Embeddings of one prompt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PromptEmbeds {
    /// `[1, L, joint_attention_dim]`, in the dtype and on the device of the pipeline.
    pub embeds: Tensor,
    /// Number of real tokens among the L.
    pub n_real: usize,
    /// Tokens that were cut off because the text was too long.
    pub dropped: usize,
}

/// FLUX.2 klein: tokenizer, text encoder, transformer, VAE.
///
/// `Send + Sync`; inference takes `&self`. The only state is the embeddings of the last two prompts, which are exact, and
/// which components are loaded at the moment.
pub struct Flux2Pipeline {
    description: Description,
    options: LoadOptions,
    /// Whether components never make room for one another.
    all_stay: bool,
    sources: TensorSources,
    backends: Backends,
    tokenizer: PromptTokenizer,
    text_encoder: Component<Qwen3Encoder>,
    transformer: Component<Flux2Transformer>,
    vae: Component<Flux2Vae>,
    /// Streamed blocks of components that make room for one another.
    text_blocks: HostBlocks,
    transformer_blocks: HostBlocks,
    /// Memory in which pictures arrive.
    downloads: Mutex<Downloads>,
    kept_prompts: Mutex<Vec<(String, PromptEmbeds)>>,
}

impl std::fmt::Debug for Flux2Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flux2Pipeline")
            .field("description", &self.description)
            .field("options", &self.options)
            .field("text_encoder", &self.text_encoder)
            .field("transformer", &self.transformer)
            .field("vae", &self.vae)
            .finish_non_exhaustive()
    }
}

impl Flux2Pipeline {
    /// Loads a model folder in the diffusers layout.
    ///
    /// What is cheap is checked first: the pipeline's class, the configs, the widths between the components, the names
    /// and shapes of all tensors. Only then weights are read. On the CPU matrices stay mapped in their stored type. On a
    /// device of its own a component is loaded when it is first needed, unless all of them stay ([`Residency::Stay`]
    /// without a limit of memory).
    ///
    /// # Errors
    /// [`Error::NotThisModel`] and [`Error::UnsupportedModel`] for other folders, [`Error::Config`],
    /// [`Error::EncoderMismatch`], [`Error::VaeMismatch`] for configs that do not fit, [`Error::Tokenizer`],
    /// [`Error::Weights`] for missing, damaged, misshapen or unexpected tensors.
    pub fn load(folder: &ModelFolder, options: &LoadOptions) -> Result<Self> {
        Self::load_with(folder, Components::default(), options)
    }

    /// Like [`Self::load`], with the weights of some components from elsewhere. The folder need not hold those.
    ///
    /// # Errors
    /// As [`Self::load`]; [`Error::Architecture`] for a GGUF file of another language model.
    pub fn load_with(folder: &ModelFolder, components: Components, options: &LoadOptions) -> Result<Self> {
        Self::load_from(folder, components.sources(folder), options)
    }

    /// [`Self::load`] with tensors from elsewhere than the folder. `sources` is asked again when a component that was
    /// dropped is needed again.
    ///
    /// # Errors
    /// As [`Self::load_with`].
    pub fn load_from(folder: &ModelFolder, sources: TensorSources, options: &LoadOptions) -> Result<Self> {
        let _span = tracing::info_span!("load", folder = folder.describe()).entered();
        let description = Description::load(folder)?;
        let out_layers = &description.defaults.text_encoder_out_layers;
        let text_encoder = layouts::text_encoder(sources("text_encoder")?)?;
        let transformer = layouts::transformer(sources("transformer")?, &description.transformer)?;
        let vae = layouts::vae(sources("vae")?)?;
        // A loader checks its plan when it is made; made and dropped here, it reports before anything large is read.
        let prefix = text_encoder::prefix(&*text_encoder);
        let plan = text_encoder::expected(&description.text_encoder, out_layers, prefix);
        let ignored = text_encoder::ignored(&description.text_encoder, out_layers, prefix);
        options.loader(text_encoder, &plan, ignored)?;
        let plan = Flux2Transformer::expected(&description.transformer);
        options.loader(transformer, &plan, |_| false)?;
        let plan = Flux2Vae::expected(&description.vae);
        options.loader(vae, &plan, vae::ignored)?;
        let tokenizer = PromptTokenizer::load(
            folder,
            description.defaults.max_sequence_length,
            description.text_encoder.pad_token_id,
        )?;
        let pipeline = Self {
            description,
            options: options.clone(),
            all_stay: all_stay(options),
            sources,
            backends: options.backends(),
            tokenizer,
            text_encoder: Component::default(),
            transformer: Component::default(),
            vae: Component::default(),
            text_blocks: HostBlocks::default(),
            transformer_blocks: HostBlocks::default(),
            downloads: Mutex::default(),
            kept_prompts: Mutex::default(),
        };
        if pipeline.all_stay {
            pipeline.text_encoder()?;
            pipeline.transformer()?;
            pipeline.vae()?;
        }
        Ok(pipeline)
    }

    /// How a picture of this size is made within the limit of memory. On the CPU it says nothing of use: weights are
    /// mapped there.
    ///
    /// # Errors
    /// [`Error::Memory`] if the limit is too small.
    pub fn memory_plan(&self, height: usize, width: usize) -> Result<MemoryPlan> {
        let Description { defaults, text_encoder, transformer, vae, .. } = &self.description;
        let shapes = Shapes {
            text_encoder,
            out_layers: &defaults.text_encoder_out_layers,
            transformer,
            vae,
            dtype: self.options.dtype,
            text_tokens: defaults.max_sequence_length,
            height,
            width,
        };
        MemoryPlan::new(&shapes, self.options.text_encoder, self.options.max_vram)
    }

    /// The plan of a run; `None` where everything stays.
    fn staging(&self, height: usize, width: usize) -> Result<Option<MemoryPlan>> {
        if self.all_stay { Ok(None) } else { self.memory_plan(height, width).map(Some) }
    }

    /// The plan for a picture of the default size, where none is known.
    fn any_size(&self) -> Result<Option<MemoryPlan>> {
        self.staging(self.description.defaults.height, self.description.defaults.width)
    }

    /// Gives the memory of a component back, if one was released.
    fn make_room(&self, released: bool) -> Result<()> {
        if released { Ok(give_back(&self.options.device)?) } else { Ok(()) }
    }

    fn load_text_encoder(&self, plan: Option<&MemoryPlan>) -> Result<Arc<Qwen3Encoder>> {
        let streamed = plan.map_or(0, |plan| plan.streamed_layers);
        if plan.is_some_and(|plan| !plan.keeps_text_encoder) && !self.text_encoder.is_loaded() {
            self.make_room(self.transformer.release())?;
        }
        let Description { text_encoder: config, defaults, .. } = &self.description;
        self.text_encoder.get(
            |loaded| loaded.streamed() >= streamed,
            || {
                let source = (self.sources)("text_encoder")?;
                let out_layers = &defaults.text_encoder_out_layers;
                let kept = &self.text_blocks;
                let loaded = Qwen3Encoder::load_again(config, out_layers, source, &self.options, streamed, kept);
                kept.prune();
                loaded
            },
        )
    }

    fn load_transformer(&self, plan: Option<&MemoryPlan>) -> Result<Arc<Flux2Transformer>> {
        let streamed = plan.map(|plan| plan.streamed_blocks).unwrap_or_default();
        if plan.is_some_and(|plan| !plan.keeps_text_encoder) {
            self.make_room(self.text_encoder.release())?;
        }
        let serves = |loaded: &Flux2Transformer| {
            let has = loaded.streamed();
            has.single >= streamed.single && has.double >= streamed.double
        };
        let config = &self.description.transformer;
        let load = || {
            let (source, kept) = ((self.sources)("transformer")?, &self.transformer_blocks);
            let loaded = Flux2Transformer::load_again(config, source, &self.options, streamed, kept);
            kept.prune();
            loaded
        };
        self.transformer.get(serves, load)
    }

    fn load_vae(&self, plan: Option<&MemoryPlan>) -> Result<Arc<Flux2Vae>> {
        if plan.is_some_and(|plan| !plan.keeps_transformer) {
            self.make_room(self.transformer.release())?;
        }
        let config = &self.description.vae;
        self.vae.get(|_| true, || Flux2Vae::load(config, (self.sources)("vae")?, &self.options))
    }

    /// What a run does where its options do not say.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.description.defaults
    }

    /// Whether the model is distilled.
    pub fn kind(&self) -> ModelKind {
        self.description.kind
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &PromptTokenizer {
        &self.tokenizer
    }

    /// The text encoder, which is loaded if it is not there.
    ///
    /// # Errors
    /// [`Error::Weights`] if its tensors are damaged; [`Error::Memory`], [`Error::OutOfMemory`].
    pub fn text_encoder(&self) -> Result<Arc<Qwen3Encoder>> {
        self.load_text_encoder(self.any_size()?.as_ref())
    }

    /// The transformer, which is loaded if it is not there.
    ///
    /// # Errors
    /// As [`Self::text_encoder`].
    pub fn transformer(&self) -> Result<Arc<Flux2Transformer>> {
        self.load_transformer(self.any_size()?.as_ref())
    }

    /// The VAE, which is loaded if it is not there.
    ///
    /// # Errors
    /// As [`Self::text_encoder`].
    pub fn vae(&self) -> Result<Arc<Flux2Vae>> {
        self.load_vae(self.any_size()?.as_ref())
    }

    /// Checks options without doing any work; [`Self::generate`] does the same first.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Steps`], [`Error::Guidance`], [`Error::Memory`].
    pub fn check(&self, options: &GenerateOptions) -> Result<()> {
        let Run { height, width, .. } = self.run(options)?;
        self.staging(height, width).map(|_| ())
    }

    fn run(&self, options: &GenerateOptions) -> Result<Run> {
        let Description { defaults, kind, vae, .. } = &self.description;
        Run::new(options, defaults, *kind, vae.packed_factor())
    }

    /// Embeddings of a prompt: tokenised with the chat template, cut and padded to the model's text length, encoded.
    /// The last two prompts are kept, so a batch encodes its prompt once.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], [`Error::TokenOutOfRange`], [`Error::NonFinite`], [`Error::Op`].
    pub fn encode_prompt(&self, prompt: &str) -> Result<PromptEmbeds> {
        self.encode_observed(prompt, self.any_size()?.as_ref(), &Silent)
    }

    fn encode_observed(
        &self,
        prompt: &str,
        plan: Option<&MemoryPlan>,
        observer: &dyn Observer,
    ) -> Result<PromptEmbeds> {
        let _policy = self.backends.enter();
        // A panic while the lock is held cannot leave the list half-made, so a poisoned lock is still good.
        let kept = || self.kept_prompts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, embeds)) = kept().iter().find(|(text, _)| text == prompt) {
            return Ok(embeds.clone());
        }
        let tokens = self.tokenizer.encode(prompt)?;
        let embeds = self.load_text_encoder(plan)?.forward_observed(&tokens.ids, tokens.n_real, observer)?;
        if !is_finite(&embeds)? {
            return Err(Error::NonFinite { what: "the prompt embeddings" });
        }
        let embeds = PromptEmbeds { embeds, n_real: tokens.n_real, dropped: tokens.dropped };
        let mut kept = kept();
        if kept.len() >= KEPT_PROMPTS {
            kept.remove(0);
        }
        kept.push((prompt.to_owned(), embeds.clone()));
        Ok(embeds)
    }

    /// Turns noise into latents.
    ///
    /// **Shapes**: noise and result `[1, in_channels, h, w]`; `on_step` sees the latents after each step as tokens.
    ///
    /// **Formula**: `x += (sigma[i + 1] - sigma[i]) * v(x, sigma[i])` with the schedule of
    /// [`sampling::FlowMatchEuler`]; under classifier-free guidance (a base model, scale above 1)
    /// `v = u + scale * (c - u)`, with u from `negative_prompt_embeds` (huggingface/diffusers:
    /// `pipelines/flux2/pipeline_flux2_klein.py`).
    ///
    /// **Numerics**: latents and steps in f32, on the device of the pipeline, product and sum each rounded.
    ///
    /// The observer hears the stage `denoise` and its progress in steps. While a step runs, the event of the step before
    /// it is repeated between layers, so that a run can be stopped there. On a device of its own nothing in a step waits
    /// for the device; the host is at most two steps ahead, and progress is told when a step is done.
    ///
    /// # Errors
    /// [`Error::Steps`], [`Error::Guidance`], [`Error::Shape`], [`Error::NoNegativePrompt`], [`Error::NonFiniteLatents`],
    /// [`Error::Cancelled`], [`Error::Op`].
    pub fn denoise(
        &self,
        input: &DenoiseInput<'_>,
        observer: &dyn Observer,
        on_step: &mut dyn FnMut(DenoiseStep<'_>),
    ) -> Result<Tensor> {
        let _policy = self.backends.enter();
        let Description { transformer: config, kind, vae, .. } = &self.description;
        let schedule = denoise::Schedule::new(config, *kind, input)?;
        let (height, width) = schedule.grid();
        let factor = vae.packed_factor();
        let plan = self.staging(height.saturating_mul(factor), width.saturating_mul(factor))?;
        let transformer = self.load_transformer(plan.as_ref())?;
        schedule.run(&transformer, &self.options.device, input, observer, on_step)
    }

    /// Decodes latents `[1, in_channels, h, w]`, as [`Self::denoise`] gives them, to a picture `[3, height, width]`, f32 in
    /// \[0, 1\] on the host. The observer hears the stage `vae decode`.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if the picture holds NaN or infinity, [`Error::Cancelled`], [`Error::Op`].
    pub fn decode(&self, latents: &Tensor, observer: &dyn Observer) -> Result<Tensor> {
        let _policy = self.backends.enter();
        observer.notify(Event::Stage { name: "vae decode" })?;
        let (vae, bands) = self.decoder(latents)?;
        let decoded = vae.decode_in(bands, latents, observer)?;
        if !is_finite(&decoded)? {
            return Err(Error::NonFinite { what: "the decoded picture" });
        }
        Ok(decoded
            .squeeze(0)
            .and_then(|x| x.to_dtype(DType::F32)?.affine(0.5, 0.5)?.clamp(0f32, 1f32)?.to_device(&Device::Cpu))
            .what("picture")?)
    }

    /// [`Self::decode`] to bytes `[height, width, 3]`, rounded on the device: the bytes that the picture would become.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_rgb8(&self, latents: &Tensor, observer: &dyn Observer) -> Result<Vec<u8>> {
        let _policy = self.backends.enter();
        observer.notify(Event::Stage { name: "vae decode" })?;
        let (vae, bands) = self.decoder(latents)?;
        let decoded = vae.decode_rgb8_in(bands, latents, observer)?;
        // A panic while the lock is held leaves at worst memory that is made anew, so a poisoned lock is still good.
        let mut downloads = self.downloads.lock().unwrap_or_else(PoisonError::into_inner);
        let HostFrames { pixels, all_finite, .. } = downloads.fetch(decoded)?;
        if all_finite { Ok(pixels) } else { Err(Error::NonFinite { what: "the decoded picture" }) }
    }

    /// The VAE for latents of this size, and how it decodes them.
    fn decoder(&self, latents: &Tensor) -> Result<(Arc<Flux2Vae>, Bands)> {
        let factor = self.description.vae.packed_factor();
        let side = |axis: usize| latents.dims().get(axis).copied().unwrap_or(0).saturating_mul(factor);
        let plan = self.staging(side(2), side(3))?;
        let in_bands = plan.as_ref().is_some_and(|plan| plan.vae_in_bands);
        let bands = if in_bands { Bands::OfBytes(Bands::BYTES) } else { Bands::Whole };
        Ok((self.load_vae(plan.as_ref())?, bands))
    }

    /// Makes one picture. Stages for the observer: `text encoder`, `denoise`, `vae decode`.
    ///
    /// # Errors
    /// Options are checked before any work: [`Error::Size`], [`Error::Steps`], [`Error::Guidance`], [`Error::Memory`]. Then
    /// as [`Self::encode_prompt`], [`Self::denoise`] and [`Self::decode`].
    pub fn generate(&self, options: &GenerateOptions, observer: &dyn Observer) -> Result<Generated> {
        let _policy = self.backends.enter();
        let (run, latents) = self.latents(options, observer)?;
        let image = self.decode(&latents, observer)?;
        let Run { height, width, num_inference_steps, guidance_scale, notices } = run;
        Ok(Generated { image, height, width, num_inference_steps, guidance_scale, seed: options.seed, notices })
    }

    /// [`Self::generate`] with the picture as bytes, see [`Self::decode_rgb8`].
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub fn generate_rgb8(&self, options: &GenerateOptions, observer: &dyn Observer) -> Result<GeneratedRgb8> {
        let _policy = self.backends.enter();
        let (run, latents) = self.latents(options, observer)?;
        let pixels = self.decode_rgb8(&latents, observer)?;
        let Run { height, width, num_inference_steps, guidance_scale, notices } = run;
        Ok(GeneratedRgb8 { pixels, height, width, num_inference_steps, guidance_scale, seed: options.seed, notices })
    }

    /// From options to latents.
    fn latents(&self, options: &GenerateOptions, observer: &dyn Observer) -> Result<(Run, Tensor)> {
        let mut run = self.run(options)?;
        let Run { height, width, num_inference_steps, guidance_scale, .. } = run;
        let plan = self.staging(height, width)?;
        let _span = tracing::info_span!("generate", height, width, num_inference_steps, seed = options.seed).entered();
        let Description { transformer: config, vae, .. } = &self.description;
        let factor = vae.packed_factor();
        let (channels, h, w) = (config.in_channels, height / factor, width / factor);
        observer.notify(Event::Stage { name: "text encoder" })?;
        // The noise is the host's, which has nothing else to do while a device encodes the prompt.
        let (noise, prompt) = std::thread::scope(|scope| {
            let noise = scope.spawn(|| options.noise.normal(options.seed, channels * h * w));
            let prompt = self.encode_observed(&options.prompt, plan.as_ref(), observer);
            (noise.join(), prompt)
        });
        let prompt = prompt?;
        if prompt.dropped > 0 {
            run.notices.push(Notice::PromptTruncated { dropped: prompt.dropped });
        }
        let guided = guidance_scale > 1.0 && !config.guidance_embeds;
        let negative = if guided { Some(self.encode_observed("", plan.as_ref(), observer)?) } else { None };

        let noise = noise.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let noise = Tensor::from_vec(noise, (1, channels, h, w), &Device::Cpu).what("noise")?;
        let input = DenoiseInput {
            prompt_embeds: &prompt.embeds,
            negative_prompt_embeds: negative.as_ref().map(|negative| &negative.embeds),
            latents: &noise,
            num_inference_steps,
            guidance_scale,
        };
        let latents = self.denoise(&input, observer, &mut |_| ())?;
        Ok((run, latents))
    }
}

/// Whether components never make room for one another: on the CPU their weights are mapped.
fn all_stay(options: &LoadOptions) -> bool {
    options.device.is_cpu() || (options.text_encoder == Residency::Stay && options.max_vram.is_none())
}

/// Whether every element is finite.
fn is_finite(x: &Tensor) -> Result<bool> {
    // NaN and infinities survive the sum of x * 0, which is exact for everything else.
    let sum = x
        .to_dtype(DType::F32)
        .and_then(|x| x.affine(0.0, 0.0)?.sum_all()?.to_scalar::<f32>())
        .what("search for non-finite values")?;
    Ok(sum == 0.0)
}
