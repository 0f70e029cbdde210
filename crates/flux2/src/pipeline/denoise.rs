//! The loop that turns noise into latents.

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::{Event, Observer};
use sampling::FlowMatchEuler;

use crate::{
    error::{Error, Result},
    generation::ModelKind,
    sizes::{check_guidance, check_steps},
    transformer::{Flux2Transformer, Prepared},
};

/// What the denoising loop starts from.
#[derive(Clone, Copy, Debug)]
pub struct DenoiseInput<'a> {
    /// Prompt embeddings `[1, L, joint_attention_dim]`.
    pub prompt_embeds: &'a Tensor,
    /// Embeddings of the empty (or a negative) prompt; needed where classifier-free guidance takes effect.
    pub negative_prompt_embeds: Option<&'a Tensor>,
    /// Noise `[1, in_channels, h, w]`, where h and w are the picture's height and width over the packed factor.
    pub latents: &'a Tensor,
    /// Number of steps.
    pub num_inference_steps: usize,
    /// Guidance scale; ignored by a distilled model.
    pub guidance_scale: f64,
}

/// A step that was made.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DenoiseStep<'a> {
    /// Index of the step, from 0.
    pub index: usize,
    /// Steps of the run.
    pub num_inference_steps: usize,
    /// Noise level before the step, in \[0, 1\].
    pub sigma: f32,
    /// Latents after the step as tokens `[1, h * w, in_channels]`, row by row, f32 on the host.
    pub latents: &'a Tensor,
}

/// Runs the schedule; see [`super::Flux2Pipeline::denoise`].
pub(super) fn denoise(
    transformer: &Flux2Transformer,
    kind: ModelKind,
    device: &Device,
    input: &DenoiseInput<'_>,
    observer: &dyn Observer,
    on_step: &mut dyn FnMut(DenoiseStep<'_>),
) -> Result<Tensor> {
    let total = input.num_inference_steps;
    check_steps(total)?;
    check_guidance(input.guidance_scale)?;
    let (channels, h, w) = grid(transformer, input.latents)?;
    let guided = kind == ModelKind::Base && !transformer.config().guidance_embeds && input.guidance_scale > 1.0;
    let negative = match (guided, input.negative_prompt_embeds) {
        (false, _) => None,
        (true, Some(embeds)) => Some(transformer.prepare(embeds, (h, w))?),
        (true, None) => return Err(Error::NoNegativePrompt { guidance_scale: input.guidance_scale }),
    };
    let positive = transformer.prepare(input.prompt_embeds, (h, w))?;
    let embedded = transformer.config().guidance_embeds.then_some(input.guidance_scale as f32);

    observer.notify(Event::Stage { name: "denoise" })?;
    let sampler = FlowMatchEuler::new(h * w, total)?;
    let mut latents = tokens(input.latents)?;
    for (index, &sigma) in sampler.timesteps().iter().enumerate() {
        let _span = tracing::debug_span!("denoise", step = index, sigma).entered();
        // Layers report to their own count; the run's progress is in steps, so a layer only repeats the step's event.
        let poll = |_: &Event<'_>| observer.on_event(&Event::Progress { done: index, total });
        let x = Tensor::from_slice(&latents, (1, h * w, channels), device).what("latents")?;
        let velocity = |prepared: &Prepared| -> Result<Vec<f32>> {
            host(&transformer.forward(&x, sigma, embedded, prepared, &poll)?)
        };
        let mut v = velocity(&positive)?;
        if let Some(negative) = &negative {
            let scale = input.guidance_scale as f32;
            for (v, u) in v.iter_mut().zip(velocity(negative)?) {
                *v = u + scale * (*v - u);
            }
        }
        sampler.step(index, &mut latents, &v)?;
        if !latents.iter().all(|x| x.is_finite()) {
            return Err(Error::NonFiniteLatents { step: index + 1, num_inference_steps: total });
        }
        let after = Tensor::from_slice(&latents, (1, h * w, channels), &Device::Cpu).what("latents")?;
        on_step(DenoiseStep { index, num_inference_steps: total, sigma, latents: &after });
        observer.notify(Event::Progress { done: index + 1, total })?;
    }
    Ok(Tensor::from_vec(latents, (1, h, w, channels), &Device::Cpu)
        .and_then(|x| x.permute((0, 3, 1, 2))?.contiguous())
        .what("tokens to latents")?)
}

/// Channels, height and width of the noise.
fn grid(transformer: &Flux2Transformer, latents: &Tensor) -> Result<(usize, usize, usize)> {
    let in_channels = transformer.config().in_channels;
    match *latents.dims() {
        [1, channels, h, w] if channels == in_channels && h > 0 && w > 0 => Ok((channels, h, w)),
        ref got => {
            Err(Error::Shape { what: "latents", got: got.to_vec(), expected: format!("[1, {in_channels}, h, w]") })
        }
    }
}

/// `[1, C, h, w]` to host tokens, `h * w` rows of C.
fn tokens(latents: &Tensor) -> Result<Vec<f32>> {
    host(&latents.permute((0, 2, 3, 1)).what("latents to tokens")?)
}

/// The elements in f32, row-major.
fn host(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1()).what("copy to the host")?)
}
