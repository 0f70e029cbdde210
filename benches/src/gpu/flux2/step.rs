//! One step of the transformer, latents to velocity, everything on the device.
//!
//! Figures are measured as the peer measures its own: a rest (there the compiler's), two runs that do not count, then the median
//! of runs that are each waited for, by the clock. What the card sustains without a rest, when its power is the limit, is
//! printed beside.

use std::{sync::Arc, thread::sleep, time::Duration};

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_fork::{cudnn_policy::take_counters, memory, stream::replays};
use flux2::{
    Flux2Transformer, Launches, TransformerConfig,
    transformer::{Prepared, StepModulations},
};
use policy::{AttentionPolicy, Silent};

use super::{
    super::{Gpu, Options, floors::Floors, peer, relative_error},
    GIB, STD, load_options, row,
};
use crate::{
    flux2::{Klein, TEXT, Tokens, step_flop},
    record::{Row, Sink},
    synthetic::RandomWeights,
};

/// Timed runs of a figure.
const RUNS: usize = 15;
/// Before them.
const REST: Duration = Duration::from_secs(2);
/// Timed runs of what the card sustains, after three that are not.
const SUSTAINED: usize = 41;
/// Noise levels of four steps at 1024x1024.
const SIGMAS: [f32; 4] = [1.0, 0.967_384, 0.908_144, 0.767_2];

/// A size of the record.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Name of the figure on the default path, and on cuDNN's attention.
    names: [&'static str; 2],
    /// As the peer calls it.
    peer: &'static str,
    /// Rows and columns of the picture's tokens.
    grid: (usize, usize),
    /// The same of each reference picture.
    references: &'static [(usize, usize)],
}

const fn case(
    names: [&'static str; 2],
    peer: &'static str,
    side: usize,
    references: &'static [(usize, usize)],
) -> Case {
    Case { names, peer, grid: (side / 16, side / 16), references }
}

const FOUR_B: [Case; 2] = [
    case(["flux2_klein4b_step_1024", "flux2_klein4b_step_1024_fused"], "1024x1024", 1024, &[]),
    case(["flux2_klein4b_step_512", "flux2_klein4b_step_512_fused"], "512x512", 512, &[]),
];

const NINE_B: [Case; 2] = [
    case(["flux2_klein9b_step_1024", "flux2_klein9b_step_1024_fused"], "1024x1024", 1024, &[]),
    case(
        ["flux2_klein9b_step_1024_ref", "flux2_klein9b_step_1024_ref_fused"],
        "1024x1024+1024x1024",
        1024,
        &[(64, 64)],
    ),
];

/// Steps of a model, on both paths of attention. What recording a step brings is printed.
///
/// # Errors
/// If an op fails or a row cannot be kept.
pub fn rows(model: Klein, gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let config = model.transformer()?;
    let cases = if model == Klein::FourB { FOUR_B } else { NINE_B };
    let sizes = cases.map(|case| case.peer);
    let peers = peer::flux2(options, &[&["step", model.transformer_json()][..], &sizes].concat());
    let weights = Arc::new(RandomWeights::new(format!("{model:?}"), &Flux2Transformer::expected(&config), STD));
    let inputs = cases.iter().map(|case| Inputs::new(gpu, &config, case)).collect::<Result<Vec<_>>>()?;

    // In f32 first: its memory is needed again.
    let exact = load(gpu, &config, &weights, DType::F32, AttentionPolicy::Math, Launches::Eager)?;
    let wanted = inputs.iter().map(|inputs| Ready::new(&exact, inputs)?.step(&exact, 1)).collect::<Result<Vec<_>>>()?;
    drop(exact);
    for (path, attention) in [AttentionPolicy::Math, AttentionPolicy::FusedAuto].into_iter().enumerate() {
        let transformer = load(gpu, &config, &weights, DType::BF16, attention, Launches::Eager)?;
        for ((case, inputs), want) in cases.iter().zip(&inputs).zip(&wanted) {
            let name = case.names[path];
            let ready = Ready::new(&transformer, inputs)?;
            take_counters();
            let error = relative_error(&ready.step(&transformer, 1)?, want)?;
            println!("{name}: {:?}", take_counters());
            memory::reset_peak(&gpu.device)?;
            sleep(REST);
            ready.step(&transformer, 0)?;
            let ms = gpu.clock(RUNS, || ready.step(&transformer, 0).map(drop))?;
            let peak = memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB;
            let flop = step_flop(&config, case.tokens());
            println!("{name}: {ms:.2} ms, {:.0} TFLOP/s, peak {peak:.2} GiB", flop / ms / 1e9);
            sink(Row {
                floor: Some(flop / floors.bf16 / 1e9),
                error: format!("rel_l2 {error:.1e} against f32"),
                ..row(gpu, name, ms, "ms", &peers, case.peer)
            })?;
        }
        for (case, inputs) in cases.iter().zip(&inputs) {
            let ready = Ready::new(&transformer, inputs)?;
            let ms = gpu.time(3, SUSTAINED, |i| ready.step(&transformer, i).map(drop))?;
            println!("{}: sustained {ms:.2} ms by events", case.names[path]);
        }
        drop(transformer);
        let recorded = load(gpu, &config, &weights, DType::BF16, attention, Launches::Recorded)?;
        for (case, inputs) in cases.iter().zip(&inputs) {
            let ready = Ready::new(&recorded, inputs)?;
            let before = replays();
            let ms = gpu.time(3, SUSTAINED, |i| ready.step(&recorded, i).map(drop))?;
            let count = replays() - before;
            println!("{}: recorded and sustained {ms:.2} ms by events, {count} replays", case.names[path]);
        }
    }
    Ok(())
}

/// A transformer with these weights.
pub(super) fn load(
    gpu: &Gpu,
    config: &TransformerConfig,
    weights: &Arc<RandomWeights>,
    dtype: DType,
    attention: AttentionPolicy,
    launches: Launches,
) -> Result<Flux2Transformer> {
    let mut options = load_options(gpu, dtype);
    options.attention = attention;
    options.launches = launches;
    Ok(Flux2Transformer::load(config, weights.clone(), &options)?)
}

impl Case {
    fn tokens(&self) -> Tokens {
        let count = |(rows, columns): (usize, usize)| rows * columns;
        let references = self.references.iter().copied().map(count).sum();
        Tokens { text: TEXT, image: count(self.grid), references }
    }
}

/// What a step is given, in f32.
struct Inputs {
    case: Case,
    text: Tensor,
    latents: Tensor,
}

impl Inputs {
    fn new(gpu: &Gpu, config: &TransformerConfig, case: &Case) -> Result<Self> {
        let tokens = case.tokens();
        Ok(Self {
            case: *case,
            text: gpu.noise(1.0, &[1, TEXT, config.joint_attention_dim], DType::F32)?,
            latents: gpu.noise(1.0, &[1, tokens.image + tokens.references, config.in_channels], DType::F32)?,
        })
    }
}

/// What does not change from step to step.
struct Ready<'a> {
    inputs: &'a Inputs,
    prepared: Prepared,
    modulations: Vec<StepModulations>,
}

impl<'a> Ready<'a> {
    fn new(transformer: &Flux2Transformer, inputs: &'a Inputs) -> Result<Self> {
        let Case { grid, references, .. } = inputs.case;
        Ok(Self {
            inputs,
            prepared: transformer.prepare_with_references(&inputs.text, grid, references)?,
            modulations: transformer.modulations(&SIGMAS, None, 1)?,
        })
    }

    /// The velocity at one of the noise levels.
    fn step(&self, transformer: &Flux2Transformer, index: usize) -> Result<Tensor> {
        let modulations = self.modulations.get(index % SIGMAS.len()).context("a modulation for each level")?;
        Ok(transformer.step(&self.inputs.latents, modulations, &self.prepared, &Silent)?)
    }
}
