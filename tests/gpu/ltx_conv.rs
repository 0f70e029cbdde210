//! The convolutional VAE of LTX-2 on the GPU against the CPU, and chunks against whole clips.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    cudnn_policy::{Backend, current, take_counters},
    memory,
};
use ltx::{
    LoadOptions,
    conv_vae::{
        ConvDecodeOptions, ConvEncodeOptions, ConvVae,
        config::from_original,
        names::{Layout, expected},
    },
};
use policy::{ConvPolicy, Silent};
use tests::{
    Golden, data,
    gpu::{Failures, cuda, cudnn, noise},
    psnr, rel_l2,
};
use weights::{
    Safetensors, ValueCheck,
    write::{TensorData, to_bytes},
};

/// f32 on the GPU against f32 on the CPU, relative in the Euclidean norm.
const F32: f64 = 1e-4;
/// bf16 on the GPU against f32 on the CPU, in decibels of the range -1..=1: random weights of a few channels.
const BF16: f64 = 30.0;
const CASES: [&str; 3] = ["ltx-conv-20", "ltx-conv-23", "ltx-conv-options"];

/// Memory is counted for the whole process: tests take turns.
static ALONE: Mutex<()> = Mutex::new(());

fn load(golden: &Golden, dtype: DType, device: &Device, conv: ConvPolicy) -> Result<ConvVae> {
    let mut options = LoadOptions::new(device.clone(), dtype);
    options.conv = conv;
    Ok(ConvVae::load(golden.weights()?, Some(&golden.config()?), &options)?)
}

fn decode(vae: &ConvVae, latents: &Tensor, device: &Device, chunk: Option<usize>) -> Result<Tensor> {
    let options = ConvDecodeOptions::default().with_chunk(chunk).with_seed(5);
    on_cpu(&vae.decode(&latents.to_device(device)?, &options)?)
}

fn encode(vae: &ConvVae, frames: &Tensor, device: &Device, chunk: Option<usize>) -> Result<Tensor> {
    let options = ConvEncodeOptions::default().with_chunk(chunk);
    on_cpu(&vae.encode(&frames.to_device(device)?, &options, &Silent)?)
}

fn on_cpu(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?)
}

#[test]
fn the_gpu_agrees_with_the_cpu() -> Result<()> {
    let suite = "gpu_ltx_conv";
    let _turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    for case in CASES {
        let golden = Golden::open(case)?;
        let (latents, frames) = (golden.tensor("in.latents")?, golden.tensor("in.frames")?);
        let cpu = load(&golden, DType::F32, &Device::Cpu, ConvPolicy::Im2col)?;
        let want = decode(&cpu, &latents, &Device::Cpu, None)?;
        let want_latents = encode(&cpu, &frames, &Device::Cpu, None)?;
        for dtype in [DType::F32, DType::BF16] {
            for conv in [ConvPolicy::Im2col, ConvPolicy::CudnnAuto] {
                for chunk in [None, Some(1)] {
                    let what = format!("{case}, {dtype:?}, {conv}, chunks {chunk:?}");
                    let run = || -> Result<_> {
                        let vae = load(&golden, dtype, &device, conv)?;
                        Ok((decode(&vae, &latents, &device, chunk)?, encode(&vae, &frames, &device, chunk)?))
                    };
                    let Some((got, got_latents)) = failures.take(run(), || what.clone()) else { continue };
                    let (error, db) = (rel_l2(&got, &want)?, psnr(&got, &want, 2.0)?);
                    let latent_error = rel_l2(&got_latents, &want_latents)?;
                    println!("{what}: frames {error:.1e}, {db:.1} dB; latents {latent_error:.1e}");
                    let holds = if dtype == DType::F32 { error <= F32 && latent_error <= F32 } else { db >= BF16 };
                    failures.check(holds, || format!("{what}: {error:.2e}, {db:.1} dB, latents {latent_error:.2e}"));
                }
            }
        }
    }
    failures.finish(suite)
}

/// The VAE's own policy holds inside of a call and nowhere else.
#[test]
fn the_policy_is_that_of_the_vae() -> Result<()> {
    let suite = "gpu_ltx_conv, policy";
    let _turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let golden = Golden::open("ltx-conv-23")?;
    for conv in [ConvPolicy::Im2col, ConvPolicy::CudnnAuto] {
        let vae = load(&golden, DType::F32, &device, conv)?;
        take_counters();
        decode(&vae, &golden.tensor("in.latents")?, &device, None)?;
        let counters = take_counters();
        let dispatches = conv == ConvPolicy::CudnnAuto && cudnn(suite, &device)?;
        failures.check((counters.dispatched > 0) == dispatches, || format!("{conv}: {counters:?}"));
        failures.check(current().backend == Backend::Im2col, || format!("{:?} is left behind", current()));
    }
    failures.finish(suite)
}

/// In half precision the norms write what surrounds their convolutions, and channels move as whole vectors. Bytes on the host
/// are those of the frames; what is in force is the same for all of them.
#[test]
#[cfg(feature = "cuda")]
fn halves_take_the_fused_paths_and_become_bytes() -> Result<()> {
    use candle_fork::{
        cuda::paths::{Path, taken},
        frames::{PatchOrder, frames_to_rgb8},
    };
    let suite = "gpu_ltx_conv, fused paths";
    let _turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    for case in ["ltx-conv-20", "ltx-conv-23"] {
        let golden = Golden::open(case)?;
        let vae = load(&golden, DType::BF16, &device, ConvPolicy::Im2col)?;
        let latents = golden.tensor("in.latents")?.narrow(0, 0, 1)?.to_device(&device)?;
        for chunk in [None, Some(1), Some(2)] {
            let options = ConvDecodeOptions::default().with_chunk(chunk);
            let before = [taken(Path::Surround), taken(Path::DepthToSpace)];
            let frames = vae.decode(&latents, &options)?;
            let took = [taken(Path::Surround) - before[0], taken(Path::DepthToSpace) - before[1]];
            println!("{case}, chunks {chunk:?}: {took:?} of the fused ops");
            failures.check(took.iter().all(|&n| n > 0), || format!("{case}, chunks {chunk:?}: {took:?}"));
            let want: Vec<u8> = frames_to_rgb8(&frames, 1, PatchOrder::RowMajor)?.pixels().flatten_all()?.to_vec1()?;
            let mut got = Vec::new();
            vae.decode_rgb8(&latents, &options, &Silent, &mut |frames| {
                got.extend(frames.pixels);
                Ok(())
            })?;
            let differing = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            failures.check(got.len() == want.len() && differing == 0, || {
                format!("{case}, chunks {chunk:?}: {differing} of {} bytes differ, {} expected", got.len(), want.len())
            });
        }
    }
    failures.finish(suite)
}

/// The published network with random weights: what its decode and its encode take is what was estimated, whatever the chunk.
#[test]
fn memory_is_as_estimated() -> Result<()> {
    let suite = "gpu_ltx_conv, memory";
    let _turn = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let vae = published("ltx20-conv-vae", &device)?;
    let latents = noise(7, 1.0, &[1, 128, 16, 16, 24], DType::F32)?.to_device(&device)?;
    let frames = noise(8, 0.5, &[1, 3, 65, 512, 768], DType::F32)?.to_device(&device)?;
    let mut check = |what: String, estimate: u64, run: &dyn Fn() -> Result<()>| -> Result<()> {
        run()?;
        device.synchronize()?;
        memory::reset_peak(&device)?;
        let held = memory::peak(&device)?.unwrap_or(0);
        run()?;
        device.synchronize()?;
        let peak = memory::peak(&device)?.unwrap_or(0);
        let [estimated, measured, held] = [estimate, peak, held].map(|bytes| bytes as f64 / f64::from(1 << 30));
        println!("{what}: estimated {estimated:.2} GiB, measured {measured:.2}, held before {held:.2}");
        // Latents and frames of this test lie there as well.
        failures
            .check(measured < 1.1 * estimated + 0.6, || format!("{what}: {estimated:.2} GiB, measured {measured:.2}"));
        failures.check(measured > 0.6 * estimated, || format!("{what}: {estimated:.2} GiB, only {measured:.2}"));
        Ok(())
    };
    for chunk in [16, 4, 1] {
        let options = ConvDecodeOptions::default().with_chunk(Some(chunk));
        let estimate = vae.decode_memory([1, 16, 16, 24], Some(chunk)).total();
        check(format!("decode, {chunk} latents at a time"), estimate, &|| {
            Ok(vae.decode_clip(&latents, &options, &Silent, &mut |_| Ok(()))?)
        })?;
    }
    for chunk in [72, 8] {
        let options = ConvEncodeOptions::default().with_chunk(Some(chunk));
        let estimate = vae.encode_memory([1, 65, 512, 768], Some(chunk)).total();
        check(format!("encode, {chunk} frames at a time"), estimate, &|| {
            Ok(vae.encode(&frames, &options, &Silent).map(drop)?)
        })?;
    }
    // A limit leads to a smaller chunk and the same frames.
    let few = latents.narrow(2, 0, 5)?;
    let whole = vae.decode(&few, &ConvDecodeOptions::default())?;
    let limit = vae.decode_memory([1, 5, 16, 24], Some(2)).total();
    let limited = vae.decode(&few, &ConvDecodeOptions::default().with_max_bytes(Some(limit)))?;
    let error = rel_l2(&on_cpu(&limited)?, &on_cpu(&whole)?)?;
    println!("within {limit} bytes: {error:.1e} from the whole");
    failures.check(error < 2e-2, || format!("within {limit} bytes: {error:.2e} from the whole"));
    let refused = vae.decode(&few, &ConvDecodeOptions::default().with_max_bytes(Some(1 << 30)));
    failures.check(matches!(refused, Err(ltx::Error::Memory { .. })), || "1 GiB was enough".to_owned());
    failures.finish(suite)
}

/// Kernels of unit gain in bf16; every tensor is a part of the same noise.
fn published(name: &str, device: &Device) -> Result<ConvVae> {
    let config = std::fs::read_to_string(data(&format!("models/configs/{name}.json")))?;
    let architecture = from_original(&serde_json::from_str(&config)?)?;
    let layout = Layout::Original { prefix: "" };
    let pool: Vec<f32> = noise(3, 1.0, &[(1 << 20) + 7], DType::F32)?.to_vec1()?;
    let tensors = expected(&architecture)?.into_iter().map(|tensor| {
        let count: usize = tensor.shape.iter().product();
        let fan_in = (count / tensor.shape.first().copied().unwrap_or(1).max(1)) as f32;
        let values: Vec<f32> = match tensor.name.as_str() {
            name if name.ends_with("std-of-means") => vec![1.0; count],
            name if name.ends_with("weight") => pool.iter().cycle().take(count).map(|v| v / fan_in.sqrt()).collect(),
            _ => vec![0.0; count],
        };
        TensorData::bf16(layout.name_in_file(&tensor.name), &tensor.shape, &values)
    });
    let metadata = [("config".to_owned(), format!("{{\"vae\": {config}}}"))].into_iter().collect();
    let bytes = to_bytes(&tensors.collect::<Vec<_>>(), &metadata)?;
    let source = Arc::new(Safetensors::from_bytes(Arc::new(bytes), name)?);
    let options = LoadOptions::default().with_device(device.clone()).with_values(ValueCheck::Off);
    Ok(ConvVae::load(source, None, &options)?)
}
