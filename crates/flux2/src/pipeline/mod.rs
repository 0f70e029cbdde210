//! From a prompt to a picture.

mod check;
mod denoise;
mod options;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::{Event, Observer, Silent};
use weights::ModelFolder;

use self::{check::Description, options::Run};
pub use self::{
    denoise::{DenoiseInput, DenoiseStep},
    options::{GenerateOptions, Generated, Notice},
};
use crate::{
    error::{Error, Result},
    generation::{GenerationDefaults, ModelKind},
    options::LoadOptions,
    text_encoder::{self, Qwen3Encoder},
    tokenizer::PromptTokenizer,
    transformer::Flux2Transformer,
    vae::{self, Flux2Vae},
};

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
/// `Send + Sync`; inference takes `&self`. The only state is the embeddings of the last two prompts, which are exact.
#[derive(Debug)]
pub struct Flux2Pipeline {
    kind: ModelKind,
    defaults: GenerationDefaults,
    device: Device,
    tokenizer: PromptTokenizer,
    text_encoder: Qwen3Encoder,
    transformer: Flux2Transformer,
    vae: Flux2Vae,
    kept_prompts: Mutex<Vec<(String, PromptEmbeds)>>,
}

impl Flux2Pipeline {
    /// Loads a model folder in the diffusers layout.
    ///
    /// What is cheap is checked first: the pipeline's class, the configs, the widths between the components, the names
    /// and shapes of all tensors. Only then weights are read. On the CPU matrices stay mapped in their stored type.
    ///
    /// # Errors
    /// [`Error::NotThisModel`] and [`Error::UnsupportedModel`] for other folders, [`Error::Config`],
    /// [`Error::EncoderMismatch`], [`Error::VaeMismatch`] for configs that do not fit, [`Error::Tokenizer`],
    /// [`Error::Weights`] for missing, damaged, misshapen or unexpected tensors.
    pub fn load(folder: &ModelFolder, options: &LoadOptions) -> Result<Self> {
        let _span = tracing::info_span!("load", folder = folder.describe()).entered();
        let description = Description::load(folder)?;
        let out_layers = &description.defaults.text_encoder_out_layers;
        let text_encoder = folder.tensors("text_encoder")?;
        let transformer = folder.tensors("transformer")?;
        let vae = folder.tensors("vae")?;
        // A loader checks its plan when it is made; made and dropped here, it reports before anything large is read.
        let prefix = text_encoder::prefix(&*text_encoder);
        let plan = text_encoder::expected(&description.text_encoder, out_layers, prefix);
        let ignored = text_encoder::ignored(&description.text_encoder, out_layers, prefix);
        options.loader(text_encoder.clone(), &plan, ignored)?;
        let plan = Flux2Transformer::expected(&description.transformer);
        options.loader(transformer.clone(), &plan, |_| false)?;
        let plan = Flux2Vae::expected(&description.vae);
        options.loader(vae.clone(), &plan, vae::ignored)?;
        let tokenizer = PromptTokenizer::load(
            folder,
            description.defaults.max_sequence_length,
            description.text_encoder.pad_token_id,
        )?;
        Ok(Self {
            kind: description.kind,
            device: options.device.clone(),
            tokenizer,
            text_encoder: Qwen3Encoder::load(&description.text_encoder, out_layers, text_encoder, options)?,
            transformer: Flux2Transformer::load(&description.transformer, transformer, options)?,
            vae: Flux2Vae::load(&description.vae, vae, options)?,
            defaults: description.defaults,
            kept_prompts: Mutex::default(),
        })
    }

    /// What a run does where its options do not say.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }

    /// Whether the model is distilled.
    pub fn kind(&self) -> ModelKind {
        self.kind
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &PromptTokenizer {
        &self.tokenizer
    }

    /// The text encoder.
    pub fn text_encoder(&self) -> &Qwen3Encoder {
        &self.text_encoder
    }

    /// The transformer.
    pub fn transformer(&self) -> &Flux2Transformer {
        &self.transformer
    }

    /// The VAE.
    pub fn vae(&self) -> &Flux2Vae {
        &self.vae
    }

    /// Checks options without doing any work; [`Self::generate`] does the same first.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Steps`], [`Error::Guidance`].
    pub fn check(&self, options: &GenerateOptions) -> Result<()> {
        self.run(options).map(|_| ())
    }

    fn run(&self, options: &GenerateOptions) -> Result<Run> {
        Run::new(options, &self.defaults, self.kind, self.vae.config().packed_factor())
    }

    /// Embeddings of a prompt: tokenised with the chat template, cut and padded to the model's text length, encoded.
    /// The last two prompts are kept, so a batch encodes its prompt once.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], [`Error::TokenOutOfRange`], [`Error::NonFinite`], [`Error::Op`].
    pub fn encode_prompt(&self, prompt: &str) -> Result<PromptEmbeds> {
        self.encode_observed(prompt, &Silent)
    }

    fn encode_observed(&self, prompt: &str, observer: &dyn Observer) -> Result<PromptEmbeds> {
        // A panic while the lock is held cannot leave the list half-made, so a poisoned lock is still good.
        let kept = || self.kept_prompts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, embeds)) = kept().iter().find(|(text, _)| text == prompt) {
            return Ok(embeds.clone());
        }
        let tokens = self.tokenizer.encode(prompt)?;
        let embeds = self.text_encoder.forward_observed(&tokens.ids, tokens.n_real, observer)?;
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
    /// **Numerics**: latents and steps in f32 on the host.
    ///
    /// The observer hears the stage `denoise` and its progress in steps. While a step runs, the event of the step before
    /// it is repeated between layers, so that a run can be stopped there.
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
        denoise::denoise(&self.transformer, self.kind, &self.device, input, observer, on_step)
    }

    /// Decodes latents `[1, in_channels, h, w]`, as [`Self::denoise`] gives them, to a picture `[3, height, width]`, f32 in
    /// \[0, 1\] on the host. The observer hears the stage `vae decode`.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if the picture holds NaN or infinity, [`Error::Cancelled`], [`Error::Op`].
    pub fn decode(&self, latents: &Tensor, observer: &dyn Observer) -> Result<Tensor> {
        observer.notify(Event::Stage { name: "vae decode" })?;
        let latents = latents.to_device(&self.device).what("latents")?;
        let decoded = self.vae.decode(&latents, observer)?;
        if !is_finite(&decoded)? {
            return Err(Error::NonFinite { what: "the decoded picture" });
        }
        Ok(decoded
            .squeeze(0)
            .and_then(|x| x.to_dtype(DType::F32)?.affine(0.5, 0.5)?.clamp(0f32, 1f32)?.to_device(&Device::Cpu))
            .what("picture")?)
    }

    /// Makes one picture. Stages for the observer: `text encoder`, `denoise`, `vae decode`.
    ///
    /// # Errors
    /// Options are checked before any work: [`Error::Size`], [`Error::Steps`], [`Error::Guidance`]. Then as
    /// [`Self::encode_prompt`], [`Self::denoise`] and [`Self::decode`].
    pub fn generate(&self, options: &GenerateOptions, observer: &dyn Observer) -> Result<Generated> {
        let run = self.run(options)?;
        let Run { height, width, num_inference_steps, guidance_scale, mut notices } = run;
        let _span = tracing::info_span!("generate", height, width, num_inference_steps, seed = options.seed).entered();
        observer.notify(Event::Stage { name: "text encoder" })?;
        let prompt = self.encode_observed(&options.prompt, observer)?;
        if prompt.dropped > 0 {
            notices.push(Notice::PromptTruncated { dropped: prompt.dropped });
        }
        let guided = guidance_scale > 1.0 && !self.transformer.config().guidance_embeds;
        let negative = if guided { Some(self.encode_observed("", observer)?) } else { None };

        let factor = self.vae.config().packed_factor();
        let (channels, h, w) = (self.transformer.config().in_channels, height / factor, width / factor);
        let noise = options.noise.normal(options.seed, channels * h * w);
        let noise = Tensor::from_vec(noise, (1, channels, h, w), &Device::Cpu).what("noise")?;
        let input = DenoiseInput {
            prompt_embeds: &prompt.embeds,
            negative_prompt_embeds: negative.as_ref().map(|negative| &negative.embeds),
            latents: &noise,
            num_inference_steps,
            guidance_scale,
        };
        let latents = self.denoise(&input, observer, &mut |_| ())?;
        let image = self.decode(&latents, observer)?;
        Ok(Generated { image, height, width, num_inference_steps, guidance_scale, seed: options.seed, notices })
    }
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
