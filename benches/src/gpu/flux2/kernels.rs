//! Runs for `benches/profile/kernels.c`, which lists the kernels of what comes after a pause. Backends are those of the
//! variables `MOLD_CONV` and `MOLD_ATTENTION`, as for the command. Clocks of the host beside it tell whether it keeps up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use candle_core::DType;
use flux2::{Flux2Transformer, Flux2Vae, LoadOptions, Qwen3Encoder, text_encoder};
use policy::{ModelFamily, Silent, overrides_from};

use super::{super::Gpu, STD, load_options};
use crate::{
    flux2::{self as published, Klein, OUT_LAYERS, TEXT},
    synthetic::RandomWeights,
};

/// Runs after the pause, unless `KERNEL_RUNS` says otherwise; the list divides by the same variable.
const RUNS: u32 = 5;
/// Side of a step's picture in pixels, unless `KERNEL_SIDE` says otherwise.
const SIDE: usize = 1024;
/// Longer than the pause that the list looks for.
const PAUSE: Duration = Duration::from_millis(300);

/// One step of klein 4B, for a square picture.
///
/// # Errors
/// If an op fails.
pub fn step(gpu: &Gpu) -> Result<()> {
    let config = Klein::FourB.transformer()?;
    let weights = Arc::new(RandomWeights::new("klein 4B", &Flux2Transformer::expected(&config), STD));
    let transformer = Flux2Transformer::load(&config, weights, &options(gpu)?)?;
    let text = gpu.noise(1.0, &[1, TEXT, config.joint_attention_dim], DType::F32)?;
    let tokens = variable("KERNEL_SIDE", SIDE) / 16;
    let latents = gpu.noise(1.0, &[1, tokens * tokens, config.in_channels], DType::F32)?;
    let prepared = transformer.prepare(&text, (tokens, tokens))?;
    let modulations = transformer.modulations(&[0.9], None, 1)?;
    after_a_pause(gpu, || Ok(transformer.step(&latents, &modulations[0], &prepared, &Silent).map(drop)?))
}

/// One VAE decode to bytes of 1024x1024.
///
/// # Errors
/// If an op fails.
pub fn decode(gpu: &Gpu) -> Result<()> {
    let config = published::vae()?;
    let weights = Arc::new(RandomWeights::new("vae", &Flux2Vae::expected(&config), STD));
    let vae = Flux2Vae::load(&config, weights, &options(gpu)?)?;
    let latents = gpu.noise(1.0, &[1, config.packed_channels(), 64, 64], DType::F32)?;
    after_a_pause(gpu, || Ok(vae.decode_rgb8(&latents, &Silent).map(drop)?))
}

/// One prompt of klein 4B's text encoder.
///
/// # Errors
/// If an op fails.
pub fn text(gpu: &Gpu) -> Result<()> {
    let config = published::text_encoder()?;
    let plan = text_encoder::expected(&config, &OUT_LAYERS, "model.");
    let weights = Arc::new(RandomWeights::new("text encoder", &plan, STD));
    let encoder = Qwen3Encoder::load(&config, &OUT_LAYERS, weights, &options(gpu)?)?;
    let (ids, real) = super::text::prompt();
    after_a_pause(gpu, || Ok(encoder.forward(&ids, real).map(drop)?))
}

fn options(gpu: &Gpu) -> Result<LoadOptions> {
    let overrides = overrides_from(std::env::vars_os())?;
    let mut options = load_options(gpu, DType::BF16);
    options.conv = overrides.conv_for(ModelFamily::Flux2);
    options.attention = overrides.attention_for(ModelFamily::Flux2);
    println!("convolutions on {}, attention on {}", options.conv, options.attention);
    Ok(options)
}

fn variable<N: std::str::FromStr>(name: &str, default: N) -> N {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Runs what the list counts, [`RUNS`] times, after warming up and a pause.
///
/// # Errors
/// The first error of `run`.
pub(in crate::gpu) fn after_a_pause(gpu: &Gpu, mut run: impl FnMut() -> Result<()>) -> Result<()> {
    let runs = variable("KERNEL_RUNS", RUNS);
    for _ in 0..3 {
        run()?;
    }
    gpu.device.synchronize()?;
    std::thread::sleep(PAUSE);
    let start = Instant::now();
    let ms = || start.elapsed().as_secs_f64() * 1e3 / f64::from(runs);
    for _ in 0..runs {
        run()?;
    }
    let host = ms();
    gpu.device.synchronize()?;
    println!("{host:.3} ms of the host, {:.3} ms until the device was done, for each of {runs} runs", ms());
    Ok(())
}
