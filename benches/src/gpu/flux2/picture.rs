//! From a prompt to the bytes of a PNG file: klein 4B, four steps, 1024x1024.

use std::{sync::Arc, time::Instant};

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{cudnn_policy::take_counters, memory};
use flux2::{
    Flux2Pipeline, Flux2Transformer, Flux2Vae, GenerateOptions, LoadOptions, Residency, TensorSources, text_encoder,
};
use media::{ImageFormat, Rgb8};
use policy::{AttentionPolicy, ConvPolicy, Silent};
use weights::TensorSource;

use super::{
    super::{Gpu, Options, floors::Floors, peer},
    GIB, STD, load_options, row,
};
use crate::{
    flux2::{self as published, DECODE_1024_FLOP, Klein, OUT_LAYERS, TEXT, TEXT_4B_FLOP, Tokens, step_flop},
    record::{Row, Sink},
    synthetic::RandomWeights,
};

const SIDE: usize = 1024;
const STEPS: usize = 4;
/// Timed runs, each of another prompt: the pipeline keeps what it made of the last ones.
const RUNS: usize = 7;
/// Memory of a small card and of a middling one, in bytes.
const CARDS: [u64; 2] = [8_000_000_000, 13_000_000_000];

/// How a picture is made.
struct Way {
    /// Name of the time, and of the peak.
    names: [&'static str; 2],
    attention: AttentionPolicy,
    conv: ConvPolicy,
    residency: Residency,
    max_vram: Option<u64>,
}

/// Time and peak of each way.
///
/// # Errors
/// If an op fails or a row cannot be kept.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let size = format!("{SIDE}x{SIDE}");
    let peers = peer::flux2(
        options,
        &[
            "picture",
            Klein::FourB.transformer_json(),
            published::VAE_JSON,
            published::TEXT_4B_JSON,
            &size,
            &STEPS.to_string(),
        ],
    );
    let tokens = Tokens { text: TEXT, image: (SIDE / 16).pow(2), references: 0 };
    let flop = STEPS as f64 * step_flop(&Klein::FourB.transformer()?, tokens) + TEXT_4B_FLOP + DECODE_1024_FLOP;
    let source = sources()?;
    let exact = {
        let pipeline = load(&source, load_options(gpu, DType::F32))?;
        picture(&pipeline, 0)?.pixels
    };
    for way in ways() {
        let mut options = load_options(gpu, DType::BF16);
        options.attention = way.attention;
        options.conv = way.conv;
        options.text_encoder = way.residency;
        options.max_vram = way.max_vram;
        memory::reset_peak(&gpu.device)?;
        let pipeline = load(&source, options)?;
        take_counters();
        let error = format!("psnr {:.1} dB against f32", psnr(&picture(&pipeline, 0)?.pixels, &exact));
        println!("{}: {:?}", way.names[0], take_counters());
        if way.max_vram.is_some() {
            println!("{}: {}", way.names[0], pipeline.memory_plan(SIDE, SIDE)?);
        }
        let mut seed = 0;
        let ms = gpu.clock(RUNS, || {
            seed += 1;
            png(picture(&pipeline, seed)?).map(drop)
        })?;
        let peak = memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB;
        println!("{}: {ms:.1} ms, peak {peak:.2} GiB", way.names[0]);
        if way.residency == Residency::Stay {
            parts(&pipeline)?;
        }
        sink(Row {
            floor: Some(flop / floors.bf16 / 1e9),
            error,
            ..row(gpu, way.names[0], ms, "ms", &peers, "picture")
        })?;
        sink(row(gpu, way.names[1], peak, "GiB", &peers, "peak_gib"))?;
    }
    Ok(())
}

/// Everything loaded, on the default path and on cuDNN's; each component for as long as it is needed; within a card.
fn ways() -> [Way; 5] {
    let way = |names, attention, conv, residency, max_vram| Way { names, attention, conv, residency, max_vram };
    let (math, im2col) = (AttentionPolicy::Math, ConvPolicy::Im2col);
    let (fused, cudnn) = (AttentionPolicy::FusedAuto, ConvPolicy::CudnnAuto);
    [
        way(["flux2_klein4b_e2e_1024_4steps", "flux2_klein4b_e2e_loaded_peak"], math, im2col, Residency::Stay, None),
        way(
            ["flux2_klein4b_e2e_1024_4steps_cudnn", "flux2_klein4b_e2e_loaded_peak_cudnn"],
            fused,
            cudnn,
            Residency::Stay,
            None,
        ),
        way(["flux2_klein4b_e2e_released", "flux2_klein4b_e2e_peak"], math, im2col, Residency::Release, None),
        way(["flux2_klein4b_e2e_8gb", "flux2_klein4b_e2e_8gb_peak"], math, im2col, Residency::Release, Some(CARDS[0])),
        way(["flux2_klein4b_e2e_13gb", "flux2_klein4b_e2e_13gb_peak"], math, im2col, Residency::Stay, Some(CARDS[1])),
    ]
}

/// Weights of the three components.
fn sources() -> Result<TensorSources> {
    let text = text_encoder::expected(&published::text_encoder()?, &OUT_LAYERS, "model.");
    let transformer = Flux2Transformer::expected(&Klein::FourB.transformer()?);
    let vae = Flux2Vae::expected(&published::vae()?);
    let [text, transformer, vae] = [("text encoder", text), ("transformer", transformer), ("vae", vae)]
        .map(|(name, plan)| Arc::new(RandomWeights::new(name, &plan, STD)));
    Ok(Arc::new(move |component: &str| -> weights::Result<Arc<dyn TensorSource>> {
        Ok(match component {
            "text_encoder" => text.clone(),
            "transformer" => transformer.clone(),
            _ => vae.clone(),
        })
    }))
}

fn load(sources: &TensorSources, options: LoadOptions) -> Result<Flux2Pipeline> {
    Ok(Flux2Pipeline::load_from(&published::klein_4b(), sources.clone(), &options)?)
}

/// A picture of a prompt of some thirty words; each seed has its own prompt.
fn picture(pipeline: &Flux2Pipeline, seed: u64) -> Result<flux2::GeneratedRgb8> {
    let words = "a large red circle to the left of a small blue star above a green heart on a white background with ";
    let options = GenerateOptions {
        prompt: format!("{words} {seed} yellow rings and a pink triangle below"),
        height: Some(SIDE),
        width: Some(SIDE),
        num_inference_steps: Some(STEPS),
        seed,
        ..GenerateOptions::default()
    };
    Ok(pipeline.generate_rgb8(&options, &Silent)?)
}

fn png(picture: flux2::GeneratedRgb8) -> Result<Vec<u8>> {
    let picture = Rgb8::new(picture.pixels, picture.width, picture.height)?;
    Ok(media::encode(&picture, ImageFormat::Png, &[])?)
}

/// Prints how long each part takes alone.
fn parts(pipeline: &Flux2Pipeline) -> Result<()> {
    let mut at = Instant::now();
    let mut said = |part: &str| {
        println!("  {part:<14} {:>8.2} ms", at.elapsed().as_secs_f64() * 1e3);
        at = Instant::now();
    };
    let picture = picture(pipeline, 1000)?;
    said("all but PNG");
    let bytes = png(picture)?;
    said("PNG");
    println!("  {} bytes", bytes.len());
    let prompt = pipeline.encode_prompt("a picture of a ring that nobody asked for yet")?;
    said("text encoder");
    let factor = SIDE / 16;
    let channels = Klein::FourB.transformer()?.in_channels;
    let noise = sampling::NoiseGenerator::Philox.normal(1, channels * factor * factor);
    let noise = Tensor::from_vec(noise, (1, channels, factor, factor), &candle_core::Device::Cpu)?;
    said("noise");
    let input = flux2::DenoiseInput {
        prompt_embeds: &prompt.embeds,
        negative_prompt_embeds: None,
        latents: &noise,
        num_inference_steps: STEPS,
        guidance_scale: 1.0,
    };
    let latents = pipeline.denoise(&input, &Silent, &mut |_| ())?;
    said("denoise");
    pipeline.decode_rgb8(&latents, &Silent)?;
    said("vae and bytes");
    Ok(())
}

/// Of bytes, in decibels.
fn psnr(got: &[u8], want: &[u8]) -> f64 {
    let square: f64 = got.iter().zip(want).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    10.0 * (255f64.powi(2) * want.len() as f64 / square).log10()
}
