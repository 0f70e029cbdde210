//! The loop that turns noise into latents.

use std::collections::VecDeque;

use candle_core::{DType, Device, Tensor};
use candle_fork::{What, stream::Fence};
use policy::{Event, Observer};
use sampling::FlowMatchEuler;

use crate::{
    config::TransformerConfig,
    error::{Error, Result},
    generation::ModelKind,
    sizes::{check_guidance, check_steps},
    transformer::{Flux2Transformer, Prepared},
    vae::{from_tokens, to_tokens},
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
    /// Latents after the step as tokens `[1, h * w, in_channels]`, row by row, f32 on the device of the pipeline. To read
    /// them waits for the step.
    pub latents: &'a Tensor,
}

/// A run whose input was checked.
pub(super) struct Schedule {
    sampler: FlowMatchEuler,
    guided: bool,
    /// Guidance scale that the transformer takes as an input.
    embedded: Option<f32>,
    grid: (usize, usize),
}

impl Schedule {
    /// Checks what can be checked without the transformer's weights.
    pub(super) fn new(config: &TransformerConfig, kind: ModelKind, input: &DenoiseInput<'_>) -> Result<Self> {
        check_steps(input.num_inference_steps)?;
        check_guidance(input.guidance_scale)?;
        let channels = config.in_channels;
        let (h, w) = match *input.latents.dims() {
            [1, c, h, w] if c == channels && h > 0 && w > 0 => (h, w),
            ref got => {
                let expected = format!("[1, {channels}, h, w]");
                return Err(Error::Shape { what: "latents", got: got.to_vec(), expected });
            }
        };
        let guided = kind == ModelKind::Base && !config.guidance_embeds && input.guidance_scale > 1.0;
        if guided && input.negative_prompt_embeds.is_none() {
            return Err(Error::NoNegativePrompt { guidance_scale: input.guidance_scale });
        }
        let sampler = FlowMatchEuler::new(h.saturating_mul(w), input.num_inference_steps)?;
        let embedded = config.guidance_embeds.then_some(input.guidance_scale as f32);
        Ok(Self { sampler, guided, embedded, grid: (h, w) })
    }

    /// Rows and columns of the latents.
    pub(super) fn grid(&self) -> (usize, usize) {
        self.grid
    }

    /// Runs it; see [`super::Flux2Pipeline::denoise`].
    pub(super) fn run(
        &self,
        transformer: &Flux2Transformer,
        device: &Device,
        input: &DenoiseInput<'_>,
        observer: &dyn Observer,
        on_step: &mut dyn FnMut(DenoiseStep<'_>),
    ) -> Result<Tensor> {
        let total = input.num_inference_steps;
        let prepare = |embeds: &Tensor| transformer.prepare(&on(device, embeds, "prompt_embeds")?, self.grid);
        let negative = match (self.guided, input.negative_prompt_embeds) {
            (true, Some(embeds)) => Some(prepare(embeds)?),
            _ => None,
        };
        let positive = prepare(input.prompt_embeds)?;
        let modulations = transformer.modulations(self.sampler.timesteps(), self.embedded, 1)?;

        observer.notify(Event::Stage { name: "denoise" })?;
        let latents = on(device, input.latents, "latents")?.to_dtype(DType::F32).what("latents")?;
        let mut latents = to_tokens(&latents)?;
        let mut progress = Progress::new(device, total, observer);
        for (index, (modulation, sigmas)) in modulations.iter().zip(self.sampler.sigmas().windows(2)).enumerate() {
            let _span = tracing::debug_span!("denoise", step = index, sigma = sigmas[0]).entered();
            // Layers report to their own count; the run's progress is in steps, so a layer only repeats the last event.
            let poll = |_: &Event<'_>| observer.on_event(&Event::Progress { done: progress.told, total });
            let velocity = |prepared: &Prepared| transformer.step(&latents, modulation, prepared, &poll);
            let mut v = velocity(&positive)?;
            if let Some(negative) = &negative {
                v = guide(&velocity(negative)?, &v, input.guidance_scale as f32).what("guidance")?;
            }
            let step = f64::from(sigmas[1] - sigmas[0]);
            latents = (v * step).and_then(|step| &latents + step).what("euler step")?;
            progress.step(&latents)?;
            on_step(DenoiseStep { index, num_inference_steps: total, sigma: sigmas[0], latents: &latents });
        }
        progress.finish()?;
        from_tokens(&latents, self.grid)
    }
}

/// `u + scale * (c - u)`.
fn guide(u: &Tensor, c: &Tensor, scale: f32) -> candle_core::Result<Tensor> {
    u + ((c - u)? * f64::from(scale))?
}

fn on(device: &Device, x: &Tensor, what: &'static str) -> Result<Tensor> {
    Ok(x.to_device(device).what(what)?)
}

/// Tells the observer of steps that are done, and looks for values that are not finite, without making a device wait.
struct Progress<'a> {
    device: &'a Device,
    total: usize,
    observer: &'a dyn Observer,
    /// Steps that were told as done.
    told: usize,
    /// Ends of the steps behind them.
    ends: VecDeque<Fence>,
    /// For each step that was not looked at: zero if its latents are finite.
    zeros: Vec<Tensor>,
}

impl<'a> Progress<'a> {
    fn new(device: &'a Device, total: usize, observer: &'a dyn Observer) -> Self {
        Self { device, total, observer, told: 0, ends: VecDeque::new(), zeros: Vec::new() }
    }

    /// The next step has been enqueued; on the CPU it is done.
    fn step(&mut self, latents: &Tensor) -> Result<()> {
        // NaN and infinities survive the sum of x * 0, which is exact for everything else.
        let zero = latents.affine(0.0, 0.0).and_then(|x| x.sum_all()).what("search for non-finite latents")?;
        self.zeros.push(zero);
        self.ends.push_back(Fence::new(self.device)?);
        if self.device.is_cpu() {
            self.look()?;
            self.tell(0)
        } else {
            self.tell(1)
        }
    }

    fn finish(mut self) -> Result<()> {
        self.look()?;
        self.tell(0)
    }

    /// Waits until no more than `ahead` steps are in flight.
    fn tell(&mut self, ahead: usize) -> Result<()> {
        while self.ends.len() > ahead {
            let Some(end) = self.ends.pop_front() else { break };
            end.wait()?;
            self.told += 1;
            self.observer.notify(Event::Progress { done: self.told, total: self.total })?;
        }
        Ok(())
    }

    /// Waits for all steps.
    ///
    /// Values that are not finite stay so in later steps, but the first step that has them is the one to name.
    fn look(&mut self) -> Result<()> {
        if self.zeros.is_empty() {
            return Ok(());
        }
        let first = self.told + self.ends.len() - self.zeros.len();
        let sums = Tensor::stack(&self.zeros, 0).and_then(|zeros| zeros.to_vec1::<f32>());
        self.zeros.clear();
        match sums.what("search for non-finite latents")?.iter().position(|&sum| sum != 0.0) {
            None => Ok(()),
            Some(index) => Err(Error::NonFiniteLatents { step: first + index + 1, num_inference_steps: self.total }),
        }
    }
}
