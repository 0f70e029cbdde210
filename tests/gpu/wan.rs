//! The demonstration VAE on the GPU against the CPU, and streams against whole clips.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    cudnn_policy::{Backend, current, take_counters},
    frames::PatchOrder,
};
use policy::{ConvPolicy, Silent};
use tests::{
    Golden, data,
    gpu::{cuda, cudnn, noise, seed},
    psnr, rel_l2,
};
use wan_vae::{DecodeOptions, DecoderState, EncoderState, LoadOptions, RawLatents, VaeConfig, WanVae};
use weights::Safetensors;

/// f32 on the GPU against f32 on the CPU, relative in the Euclidean norm.
const F32: f64 = 1e-4;
/// bf16 on the GPU against f32 on the CPU, in decibels of the range -1..=1.
const BF16: f64 = 45.0;
/// A stream against a whole clip: other sizes may take other algorithms.
const STREAM_F32: f64 = 1e-5;
const STREAM_BF16: f64 = 50.0;

fn demo(dtype: DType, device: &Device) -> Result<WanVae> {
    load(LoadOptions::default().with_device(device.clone()).with_dtype(Some(dtype)))
}

fn load(options: LoadOptions) -> Result<WanVae> {
    let config: VaeConfig = serde_json::from_slice(&std::fs::read(data("models/wan-vae-demo/config.json"))?)?;
    let weights = Safetensors::open(data("models/wan-vae-demo/diffusion_pytorch_model.safetensors"))?;
    Ok(WanVae::load(Arc::new(weights), Some(&config), &options)?)
}

/// Latents of a clip that the model knows.
fn golden(name: &str) -> Result<RawLatents> {
    Ok(RawLatents::new(Golden::open(name)?.tensor("latent_mean")?)?)
}

/// A clip of noise: 5 latent frames of odd extents.
fn latents(seed: u64) -> Result<RawLatents> {
    Ok(RawLatents::new(noise(seed, 1.0, &[16, 5, 7, 9], DType::F32)?)?)
}

/// A clip in pieces of these lengths, on the CPU.
fn decode(vae: &WanVae, latents: &RawLatents, plan: &[usize]) -> Result<Tensor> {
    let mut state = DecoderState::new(vae);
    let mut first = 0;
    let mut parts = Vec::new();
    for &count in plan {
        parts.push(on_cpu(&vae.decode(&mut state, &latents.frames(first, count)?)?)?);
        first += count;
    }
    Ok(Tensor::cat(&parts, 1)?)
}

fn clip(vae: &WanVae, latents: &RawLatents) -> Result<Tensor> {
    let mut parts = Vec::new();
    vae.decode_clip(latents, &DecodeOptions::default(), &Silent, &mut |frames| {
        parts.push(frames);
        Ok(())
    })?;
    let parts = parts.iter().map(on_cpu).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&parts, 1)?)
}

fn on_cpu(frames: &Tensor) -> Result<Tensor> {
    Ok(frames.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?)
}

#[test]
fn f32_decodes_and_encodes_like_the_cpu() -> Result<()> {
    let suite = "gpu_wan in f32";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let z = latents(seed(suite))?;
    let (gpu, cpu) = (demo(DType::F32, &device)?, demo(DType::F32, &Device::Cpu)?);
    let want = decode(&cpu, &z, &[5])?;
    let error = rel_l2(&decode(&gpu, &z, &[5])?, &want)?;
    println!("decode: {error:.1e}");
    ensure!(error <= F32, "decode is off by {error:.2e}");
    let encode = |vae: &WanVae| -> Result<Tensor> {
        let latents = vae.encode(&mut EncoderState::new(vae), &want)?.context("no latents")?;
        on_cpu(latents.tensor())
    };
    let error = rel_l2(&encode(&gpu)?, &encode(&cpu)?)?;
    println!("encode: {error:.1e}");
    ensure!(error <= F32, "encode is off by {error:.2e}");
    Ok(())
}

#[test]
fn bf16_decodes_like_the_cpu_in_f32() -> Result<()> {
    let Some(device) = cuda("gpu_wan in bf16")? else { return Ok(()) };
    let (gpu, cpu) = (demo(DType::BF16, &device)?, demo(DType::F32, &Device::Cpu)?);
    for name in ["wan-a", "wan-b", "wan-c"] {
        let z = golden(name)?;
        let plan = [z.extents().1];
        let error = psnr(&decode(&gpu, &z, &plan)?, &decode(&cpu, &z, &plan)?, 2.0)?;
        println!("{name}: {error:.1} dB");
        ensure!(error >= BF16, "{name} has {error:.1} dB");
    }
    Ok(())
}

#[test]
fn a_stream_is_the_clip() -> Result<()> {
    let suite = "gpu_wan, streams";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let z = latents(seed(suite))?;
    for dtype in [DType::F32, DType::BF16] {
        let vae = demo(dtype, &device)?;
        let whole = clip(&vae, &z)?;
        for plan in [&[1, 1, 1, 1, 1][..], &[5], &[2, 3], &[1, 4]] {
            let stream = decode(&vae, &z, plan)?;
            if dtype == DType::F32 {
                let error = rel_l2(&stream, &whole)?;
                ensure!(error <= STREAM_F32, "{plan:?} is off by {error:.2e}");
            } else {
                let error = psnr(&stream, &whole, 2.0)?;
                ensure!(error >= STREAM_BF16, "{plan:?} has {error:.1} dB");
            }
        }
    }
    Ok(())
}

/// The bytes are those of the frames.
#[test]
fn bytes_are_the_frames() -> Result<()> {
    let Some(device) = cuda("gpu_wan, bytes")? else { return Ok(()) };
    let vae = demo(DType::BF16, &device)?;
    let z = golden("wan-c")?;
    let frames = clip(&vae, &z)?;
    let mut bytes = Vec::new();
    vae.decode_clip_rgb8(&z, &DecodeOptions::default(), &Silent, &mut |frames| {
        bytes.extend_from_slice(&frames.pixels);
        Ok(())
    })?;
    let want = candle_fork::frames::frames_to_rgb8(&frames.unsqueeze(0)?, 1, PatchOrder::RowMajor)?;
    ensure!(bytes == want.pixels().flatten_all()?.to_vec1::<u8>()?, "other bytes");
    Ok(())
}

/// The VAE's own policy holds inside of a call and nowhere else: convolutions run on cuDNN if it says so, all of them.
#[test]
fn the_policy_is_that_of_the_vae() -> Result<()> {
    let suite = "gpu_wan, policy";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let z = latents(1)?;
    let want = decode(&demo(DType::F32, &Device::Cpu)?, &z, &[5])?;
    for conv in [ConvPolicy::Im2col, ConvPolicy::CudnnAuto] {
        let mut options = LoadOptions::default().with_device(device.clone()).with_dtype(Some(DType::F32));
        options.conv = conv;
        let vae = load(options)?;
        take_counters();
        let error = rel_l2(&decode(&vae, &z, &[5])?, &want)?;
        let counters = take_counters();
        println!("{conv}: {error:.1e}, {counters:?}");
        ensure!(error <= F32, "{conv} is off by {error:.2e}");
        ensure!(current().backend == Backend::Im2col, "{:?} is left behind", current());
        let dispatches = conv == ConvPolicy::CudnnAuto && cudnn(suite, &device)?;
        ensure!((counters.dispatched > 0) == dispatches, "{conv}: {counters:?}");
        ensure!(!dispatches || counters.fallback_total() == 0, "{conv}: {counters:?}");
    }
    Ok(())
}
