//! Steps that are recorded once and replayed.
//!
//! ```text
//! first step of a shape     op by op: kernels are loaded, plans are made
//! second                    recorded over buffers of its own, then replayed
//! others                    inputs into the buffers, replay, velocity out of them
//! ```
//!
//! A step that cannot be recorded goes on op by op, for good.

use std::sync::Mutex;

use candle_core::{DType, Tensor};
use candle_fork::{What, stream::Replay};
use policy::{Event, Observer, Silent};

use super::{Flux2Transformer, Prepared, StepModulations, StreamedBlocks};
use crate::{
    error::Result,
    options::{Launches, LoadOptions},
};

/// What a recording depends on, apart from what it copies: batch and tokens of the text, grids of the pictures.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    text: Vec<usize>,
    grids: Vec<(usize, usize)>,
}

impl Shape {
    fn of(prepared: &Prepared) -> Self {
        Self { text: prepared.text.dims().to_vec(), grids: prepared.grids.clone() }
    }
}

/// The recording of the last shape.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Empty,
    /// A step of this shape has run.
    Rehearsed(Shape),
    Recorded(Shape, Box<Recording>),
    /// Nothing can be recorded.
    Refused,
}

impl Recorder {
    /// `None` if the options do not ask for recordings, or where there are none.
    pub(super) fn new(options: &LoadOptions, streamed: StreamedBlocks) -> Option<Mutex<Self>> {
        let possible = options.device.is_cuda() && streamed == StreamedBlocks::default();
        (options.launches == Launches::Recorded && possible).then(Mutex::default)
    }
}

/// A recorded step and the tensors that it reads and writes.
#[derive(Debug)]
struct Recording {
    replay: Replay,
    latents: Tensor,
    modulations: Tensor,
    prepared: Prepared,
    velocity: Tensor,
}

impl Recording {
    fn new(model: &Flux2Transformer, latents: &Tensor, modulations: &Tensor, prepared: &Prepared) -> Result<Self> {
        let batch = latents.dims()[0];
        let buffer = |like: &Tensor| like.zeros_like().what("buffer of a recorded step");
        let (own_latents, own_modulations) = (buffer(latents)?, buffer(modulations)?);
        let own_prepared = Prepared { text: buffer(&prepared.text)?, ..prepared.clone() };
        let out_channels = model.config.out_channels.unwrap_or(model.config.in_channels);
        let dims = (batch, prepared.image_tokens, out_channels);
        let velocity = Tensor::zeros(dims, DType::F32, &model.device).what("buffer of a recorded step")?;
        let parts = StepModulations::over(&own_modulations, batch)?;
        let replay = Replay::record(&model.device, || {
            let step = || -> Result<()> {
                let result = model.eager(&own_latents, &parts, &own_prepared, &Silent)?;
                Ok(velocity.slice_set(&result, 0, 0).what("velocity of a recorded step")?)
            };
            step().map_err(|error| candle_fork::Error::Unsupported { op: "recorded step", what: error.to_string() })
        })?;
        Ok(Self { replay, latents: own_latents, modulations: own_modulations, prepared: own_prepared, velocity })
    }

    fn run(&mut self, latents: &Tensor, modulations: &Tensor, prepared: &Prepared) -> Result<Tensor> {
        let inputs =
            [(&self.latents, latents), (&self.modulations, modulations), (&self.prepared.text, &prepared.text)];
        for (buffer, input) in inputs {
            buffer.slice_set(input, 0, 0).what("input of a recorded step")?;
        }
        self.replay.run()?;
        Ok(self.velocity.copy().what("velocity of a recorded step")?)
    }
}

/// [`Flux2Transformer::step`] through a recording, where there is one or can be one.
pub(super) fn step(
    model: &Flux2Transformer,
    recorder: &Mutex<Recorder>,
    latents: &Tensor,
    modulations: &StepModulations,
    prepared: &Prepared,
    observer: &dyn Observer,
) -> Result<Tensor> {
    let eager = || model.eager(latents, modulations, prepared, observer);
    // Another thread is at work with the recording; a poisoned one may be half-used.
    let Ok(mut recorder) = recorder.try_lock() else { return eager() };
    let shape = Shape::of(prepared);
    let latents = latents.to_dtype(DType::F32).and_then(|x| x.contiguous()).what("latents")?;
    match &mut recorder.state {
        State::Refused => return eager(),
        State::Recorded(recorded, _) if *recorded == shape => {}
        State::Rehearsed(rehearsed) if *rehearsed == shape => {
            match Recording::new(model, &latents, &modulations.flat()?, prepared) {
                Ok(recording) => recorder.state = State::Recorded(shape, Box::new(recording)),
                Err(error) => {
                    tracing::warn!(%error, "a step cannot be recorded and runs op by op");
                    recorder.state = State::Refused;
                    return eager();
                }
            }
        }
        state => {
            // Frees what was recorded for another shape before this one takes its memory.
            *state = State::Empty;
            let velocity = eager()?;
            *state = State::Rehearsed(shape);
            return Ok(velocity);
        }
    }
    let State::Recorded(_, recording) = &mut recorder.state else { return eager() };
    let total = model.stacks.len();
    observer.notify(Event::Progress { done: total, total })?;
    recording.run(&latents, &modulations.flat()?, prepared)
}
