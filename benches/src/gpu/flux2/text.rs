//! The text encoder: ids on the host to prompt embeddings on the device.

use std::sync::Arc;

use anyhow::Result;
use candle_core::DType;
use candle_fork::memory;
use flux2::{Qwen3Encoder, text_encoder};
use policy::AttentionPolicy;

use super::{
    super::{Gpu, Options, floors::Floors, peer, relative_error},
    GIB, STD, load_options, row,
};
use crate::{
    flux2::{self as published, OUT_LAYERS, TEXT, TEXT_4B_FLOP, TEXT_4B_JSON},
    record::{Row, Sink},
    synthetic::RandomWeights,
};

/// Timed runs.
const RUNS: usize = 21;
/// Tokens of a prompt of some thirty words with its template.
const REAL: usize = 52;

/// 512 rows of Qwen3-4B.
///
/// # Errors
/// If an op fails or a row cannot be kept.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let config = published::text_encoder()?;
    let peers = peer::flux2(options, &["text", TEXT_4B_JSON, &TEXT.to_string(), &REAL.to_string()]);
    let weights =
        Arc::new(RandomWeights::new("text encoder", &text_encoder::expected(&config, &OUT_LAYERS, "model."), STD));
    let load = |dtype, attention| -> Result<Qwen3Encoder> {
        let mut options = load_options(gpu, dtype);
        options.attention = attention;
        Ok(Qwen3Encoder::load(&config, &OUT_LAYERS, weights.clone(), &options)?)
    };
    let (ids, real) = prompt();
    let want = load(DType::F32, AttentionPolicy::Math)?.forward(&ids, real)?;
    for (name, attention) in
        [("flux2_text_512", AttentionPolicy::Math), ("flux2_text_512_fused", AttentionPolicy::FusedAuto)]
    {
        let encoder = load(DType::BF16, attention)?;
        let error = relative_error(&encoder.forward(&ids, real)?, &want)?;
        memory::reset_peak(&gpu.device)?;
        let ms = gpu.clock(RUNS, || Ok(encoder.forward(&ids, real).map(drop)?))?;
        println!("{name}: peak {:.2} GiB", memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB);
        sink(Row {
            floor: Some(TEXT_4B_FLOP / floors.bf16 / 1e9),
            error: format!("rel_l2 {error:.1e} against f32"),
            ..row(gpu, name, ms, "ms", &peers, "text")
        })?;
    }
    Ok(())
}

/// Ids of a padded prompt, and how many of them are real.
pub(super) fn prompt() -> (Vec<u32>, usize) {
    ((0..TEXT).map(|i| if i < REAL { 977 * i as u32 + 11 } else { 151_643 }).collect(), REAL)
}
