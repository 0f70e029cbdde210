//! Runs for `benches/profile/kernels.c`, which lists the kernels of what comes after a pause. Backends are those of the
//! variables `MOLD_CONV` and `MOLD_ATTENTION`, as for the command.

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use candle_core::DType;
use flux2::{Flux2Transformer, Flux2Vae, LoadOptions};
use policy::{ModelFamily, Silent, overrides_from};

use super::{super::Gpu, STD, load_options};
use crate::{
    flux2::{self as published, Klein, TEXT},
    synthetic::RandomWeights,
};

/// Runs after the pause, unless `KERNEL_RUNS` says otherwise; the list divides by the same variable.
const RUNS: usize = 5;
/// Longer than the pause that the list looks for.
const PAUSE: Duration = Duration::from_millis(300);

/// One step of klein 4B at 1024x1024.
///
/// # Errors
/// If an op fails.
pub fn step(gpu: &Gpu) -> Result<()> {
    let config = Klein::FourB.transformer()?;
    let weights = Arc::new(RandomWeights::new("klein 4B", &Flux2Transformer::expected(&config), STD));
    let transformer = Flux2Transformer::load(&config, weights, &options(gpu)?)?;
    let text = gpu.noise(1.0, &[1, TEXT, config.joint_attention_dim], DType::F32)?;
    let latents = gpu.noise(1.0, &[1, 4096, config.in_channels], DType::F32)?;
    let prepared = transformer.prepare(&text, (64, 64))?;
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

fn options(gpu: &Gpu) -> Result<LoadOptions> {
    let overrides = overrides_from(std::env::vars_os())?;
    let mut options = load_options(gpu, DType::BF16);
    options.conv = overrides.conv_for(ModelFamily::Flux2);
    options.attention = overrides.attention_for(ModelFamily::Flux2);
    println!("convolutions on {}, attention on {}", options.conv, options.attention);
    Ok(options)
}

fn after_a_pause(gpu: &Gpu, mut run: impl FnMut() -> Result<()>) -> Result<()> {
    let runs = std::env::var("KERNEL_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(RUNS);
    for _ in 0..3 {
        run()?;
    }
    gpu.device.synchronize()?;
    std::thread::sleep(PAUSE);
    for _ in 0..runs {
        run()?;
    }
    Ok(gpu.device.synchronize()?)
}
