//! The demonstration model on the GPU against the reference, in every way that a run can be set.
//!
//! The goldens are those of `flux2/pipeline.rs`.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    cudnn_policy::{Backend, current, take_counters},
    stream::replays,
};
use flux2::{
    DenoiseInput, Flux2Pipeline, Flux2Transformer, Flux2Vae, Launches, LoadOptions, Residency, TransformerConfig,
    vae::Bands,
};
use policy::{AttentionPolicy, ConvPolicy, Silent};
use serde_json::{Value, json};
use tests::{
    Golden, demo,
    gpu::{Failures, cuda, cudnn, noise, values},
    psnr, rel_l2, request,
};

const GOLDENS: [&str; 3] = ["flux2-a", "flux2-b", "flux2-c"];
/// Relative L2 error of every stage in f32.
const F32: f64 = 1e-4;
/// A picture in bf16 against the reference in f32, in decibels of the range 0..=1.
const BF16: f64 = 40.0;

/// Names the library that a child is to use.
const CUDNN: &str = "TALLOW_CUDNN";

/// The default first.
const WAYS: [(ConvPolicy, AttentionPolicy); 4] = [
    (ConvPolicy::Im2col, AttentionPolicy::Math),
    (ConvPolicy::Im2col, AttentionPolicy::FusedAuto),
    (ConvPolicy::CudnnAuto, AttentionPolicy::Math),
    (ConvPolicy::CudnnAuto, AttentionPolicy::FusedAuto),
];

fn options(device: &Device, dtype: DType, (conv, attention): (ConvPolicy, AttentionPolicy)) -> LoadOptions {
    let mut options = LoadOptions::new(device.clone(), dtype);
    options.conv = conv;
    options.attention = attention;
    options
}

fn pipeline(device: &Device, dtype: DType, way: (ConvPolicy, AttentionPolicy)) -> Result<Flux2Pipeline> {
    Ok(Flux2Pipeline::load(&demo(), &options(device, dtype, way))?)
}

fn on_cpu(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?)
}

#[test]
fn every_stage_in_f32_is_that_of_the_reference() -> Result<()> {
    let suite = "gpu_flux2 in f32";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    for way in WAYS {
        let pipeline = pipeline(&device, DType::F32, way)?;
        for name in GOLDENS {
            let golden = Golden::open(name)?;
            let mut check = |stage: &str, got: &Tensor, want: &Tensor| -> Result<()> {
                let error = rel_l2(&on_cpu(got)?, want)?;
                println!("{way:?} {name}, {stage}: {error:.1e}");
                failures.check(error <= F32, || format!("{way:?} {name}, {stage}: {error:.2e}"));
                Ok(())
            };
            let prompt = pipeline.encode_prompt(golden.metadata("prompt")?)?;
            let embeds = golden.tensor("prompt_embeds")?;
            check("prompt", &prompt.embeds, &embeds)?;
            // From the golden's own, so that a fault of one stage does not show in the next.
            let (embeds, noise) = (embeds.to_device(&device)?, golden.tensor("noise")?);
            let input = DenoiseInput {
                prompt_embeds: &embeds,
                negative_prompt_embeds: None,
                latents: &noise,
                num_inference_steps: golden.number("steps")?,
                guidance_scale: 1.0,
            };
            let mut steps = Vec::new();
            let latents = pipeline.denoise(&input, &Silent, &mut |step| steps.push(step.latents.clone()))?;
            ensure!(steps.len() == input.num_inference_steps, "{name}: {} steps", steps.len());
            for (index, latents) in steps.iter().enumerate() {
                check(&format!("step {index}"), latents, &golden.tensor(&format!("latents_step_{index}"))?)?;
            }
            check("picture", &pipeline.decode(&latents, &Silent)?, &golden.tensor("image")?.squeeze(0)?)?;
        }
    }
    failures.finish(suite)
}

/// Pictures in bf16, and proof by the counters of which path made them.
#[test]
fn a_picture_in_bf16_is_that_of_f32() -> Result<()> {
    let suite = "gpu_flux2 in bf16";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let has_cudnn = cudnn(suite, &device)?;
    let mut failures = Failures::default();
    for way in WAYS {
        let pipeline = pipeline(&device, DType::BF16, way)?;
        for name in GOLDENS {
            let golden = Golden::open(name)?;
            take_counters();
            let picture = on_cpu(&pipeline.generate(&request(&golden)?, &Silent)?.image)?;
            let counted = take_counters();
            let quality = psnr(&picture, &golden.tensor("image")?.squeeze(0)?, 1.0)?;
            println!("{way:?} {name}: {quality:.1} dB, {counted:?}");
            failures.check(quality >= BF16, || format!("{way:?} {name}: {quality:.1} dB"));
            let at = |what: &str| format!("{way:?} {name}: {what}: {counted:?}");
            let attention = &counted.attention;
            if way.1 == AttentionPolicy::Math {
                failures.check(attention.attempts == 0, || at("the math path tried cudnn"));
                failures.check(attention.fused + attention.products > 0, || at("no attention was counted"));
            } else {
                failures.check((attention.dispatched > 0) == has_cudnn, || at("attention was not fused"));
            }
            if way.0 == ConvPolicy::Im2col {
                failures.check(counted.attempts == 0, || at("im2col tried cudnn"));
            } else {
                // Small pictures may be below the size at which cuDNN pays; what it was given it must have done.
                let done = counted.dispatched + counted.fallback_total() == counted.attempts;
                failures.check(done, || at("convolutions were lost"));
                failures.check(!has_cudnn || counted.fallback_total() == 0, || at("convolutions fell back"));
            }
            failures.check(current().backend == Backend::Im2col, || at("a policy is left behind"));
        }
    }
    failures.finish(suite)
}

/// The bytes are the picture, rounded.
#[test]
fn bytes_are_the_picture() -> Result<()> {
    let Some(device) = cuda("gpu_flux2, bytes")? else { return Ok(()) };
    let pipeline = pipeline(&device, DType::F32, WAYS[0])?;
    let request = request(&Golden::open("flux2-c")?)?;
    let image = pipeline.generate(&request, &Silent)?.image.permute((1, 2, 0))?;
    let rgb8 = pipeline.generate_rgb8(&request, &Silent)?;
    ensure!(image.dims() == [rgb8.height, rgb8.width, 3], "{:?} and {}x{}", image.dims(), rgb8.height, rgb8.width);
    let want: Vec<f32> = image.flatten_all()?.to_vec1()?;
    ensure!(want.len() == rgb8.pixels.len(), "{} values, {} bytes", want.len(), rgb8.pixels.len());
    for (i, (&got, want)) in rgb8.pixels.iter().zip(want).enumerate() {
        // Half a step, and the rounding of the two ways there.
        ensure!((f32::from(got) - 255.0 * want).abs() <= 0.501, "byte {i} is {got}, the picture has {}", 255.0 * want);
    }
    Ok(())
}

/// Bytes of the default way in bf16.
fn default_bytes(device: &Device) -> Result<Vec<u8>> {
    let request = request(&Golden::open("flux2-a")?)?;
    Ok(pipeline(device, DType::BF16, WAYS[0])?.generate_rgb8(&request, &Silent)?.pixels)
}

fn hash(bytes: &[u8]) -> String {
    let step = |state: u64, &byte: &u8| (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Not a test: a process of its own, whose warnings go to stdout. Prints one line of JSON: the default picture, and the
/// same asked of cuDNN's attention.
#[test]
#[ignore = "run by the other tests"]
fn child() -> Result<()> {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    let device = cuda("the child of gpu_flux2")?.context("no device")?;
    let default = default_bytes(&device)?;
    let pipeline = pipeline(&device, DType::BF16, WAYS[1])?;
    let mut asked = Vec::new();
    take_counters();
    for name in ["flux2-a", "flux2-b"] {
        asked.push(pipeline.generate_rgb8(&request(&Golden::open(name)?)?, &Silent)?.pixels);
    }
    let counted = take_counters().attention;
    let fallbacks: BTreeMap<String, u64> =
        counted.fallbacks.iter().map(|(reason, count)| (format!("{reason:?}"), *count)).collect();
    println!(
        "CHILD {}",
        json!({
            "default": hash(&default), "same": asked.first() == Some(&default), "attempts": counted.attempts,
            "dispatched": counted.dispatched, "fallbacks": fallbacks,
        })
    );
    Ok(())
}

/// What a child says, and its warnings, when its cuDNN is at `cudnn` (or where ours is).
fn ask_a_process(cudnn: Option<&Path>) -> Result<(Value, Vec<String>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["child", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    if let Some(cudnn) = cudnn {
        command.env(CUDNN, cudnn);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{}\n{text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    let said = text.lines().find_map(|line| line.split_once("CHILD ")).context("the child said nothing")?.1;
    let warnings = text.lines().filter(|line| line.contains(" WARN ")).map(str::to_owned).collect();
    Ok((serde_json::from_str(said)?, warnings))
}

#[test]
fn the_default_gives_the_same_bytes_always() -> Result<()> {
    let Some(device) = cuda("gpu_flux2, bytes of the default")? else { return Ok(()) };
    let here = default_bytes(&device)?;
    ensure!(default_bytes(&device)? == here, "two pipelines in one process differ");
    let pipeline = pipeline(&device, DType::BF16, WAYS[0])?;
    for name in ["flux2-b", "flux2-a", "flux2-c", "flux2-a"] {
        let bytes = pipeline.generate_rgb8(&request(&Golden::open(name)?)?, &Silent)?.pixels;
        ensure!(name != "flux2-a" || bytes == here, "other bytes after other pictures");
    }
    let folder = tempfile::tempdir()?;
    for cudnn in [None, Some(folder.path().join("libcudnn.so.9"))] {
        let (said, _) = ask_a_process(cudnn.as_deref())?;
        ensure!(said["default"] == hash(&here), "{} here, in another process with {cudnn:?}: {said}", hash(&here));
    }
    Ok(())
}

/// Without cuDNN a run that asks for it gives the default's bytes, counts why, and warns once.
#[test]
fn without_cudnn_the_math_path_serves_after_one_warning() -> Result<()> {
    if cuda("gpu_flux2 without cuDNN")?.is_none() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let (said, warnings) = ask_a_process(Some(&folder.path().join("libcudnn.so.9")))?;
    ensure!(said["same"] == true && said["dispatched"] == 0, "{said}");
    let attempts = said["attempts"].as_u64().unwrap_or(0);
    ensure!(attempts > 1 && said["fallbacks"] == json!({ "Unavailable": attempts }), "{said}");
    ensure!(warnings.len() == 1, "{} warnings:\n{}", warnings.len(), warnings.join("\n"));
    println!("{}", warnings[0]);
    Ok(())
}

/// Heads of 20 channels, which cuDNN does not take: the math path's bytes.
#[test]
fn heads_of_an_odd_width_fall_back() -> Result<()> {
    let suite = "gpu_flux2, odd heads";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn(suite, &device)? {
        return Ok(());
    }
    let golden = Golden::open("flux2-transformer")?;
    let config: TransformerConfig = serde_json::from_value(golden.config()?)?;
    let grid = golden.integers("in.grid")?;
    let sigma = golden.tensor("in.timestep")?.to_vec1::<f32>()?[0];
    let run = |dtype, way| -> Result<Tensor> {
        let model = Flux2Transformer::load(&config, golden.weights()?, &options(&device, dtype, way))?;
        let input = |name: &str| -> Result<Tensor> { Ok(golden.tensor(name)?.to_device(&device)?) };
        let prepared = model.prepare(&input("in.encoder_hidden_states")?, (grid[0] as usize, grid[1] as usize))?;
        on_cpu(&model.forward(&input("in.hidden_states")?, sigma, None, &prepared, &Silent)?)
    };
    let error = rel_l2(&run(DType::F32, WAYS[0])?, &golden.tensor("out.velocity")?)?;
    println!("f32: {error:.1e}");
    ensure!(error <= F32, "f32 is off by {error:.2e}");
    let default = run(DType::BF16, WAYS[0])?;
    take_counters();
    let asked = run(DType::BF16, WAYS[1])?;
    let counted = take_counters().attention;
    ensure!(values(&asked)? == values(&default)?, "other bytes than the math path's");
    ensure!(counted.attempts > 0 && counted.fallback_total() == counted.attempts, "{counted:?}");
    Ok(())
}

/// The VAE gives an item of a batch the bytes of the item alone.
#[test]
fn items_of_a_batch_decode_alone() -> Result<()> {
    let suite = "gpu_flux2, batch of the VAE";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let folder = demo();
    let config = folder.json("vae/config.json")?;
    let mut failures = Failures::default();
    for dtype in [DType::F32, DType::BF16] {
        let vae = Flux2Vae::load(&config, folder.tensors("vae")?, &options(&device, dtype, WAYS[0]))?;
        let latents = noise(1, 1.0, &[3, 128, 7, 5], DType::F32)?.to_device(&device)?;
        let together = vae.decode(&latents, &Silent)?;
        for item in 0..3 {
            let alone = vae.decode(&latents.narrow(0, item, 1)?.contiguous()?, &Silent)?;
            let same = values(&alone)? == values(&together.narrow(0, item, 1)?)?;
            failures.check(same, || format!("{dtype:?}: other bytes as item {item}"));
        }
    }
    failures.finish(suite)
}

/// Bands of the VAE give the bytes of the whole on our own kernels, and the picture on cuDNN's and in f32.
#[test]
fn bands_give_the_same_bytes() -> Result<()> {
    let suite = "gpu_flux2, bands of the VAE";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let folder = demo();
    let config = folder.json("vae/config.json")?;
    let mut failures = Failures::default();
    for (dtype, way, same) in
        [(DType::BF16, WAYS[0], true), (DType::BF16, WAYS[2], false), (DType::F32, WAYS[0], false)]
    {
        let vae = Flux2Vae::load(&config, folder.tensors("vae")?, &options(&device, dtype, way))?;
        for [h, w] in [[7, 5], [16, 12], [3, 40]] {
            let latents = noise(1, 1.0, &[1, 128, h, w], DType::F32)?.to_device(&device)?;
            let whole = vae.decode(&latents, &Silent)?;
            for bytes in [0, 100_000, 1 << 30] {
                let at = || format!("{dtype:?} {way:?} {h} x {w}, bands of {bytes} bytes");
                let banded = vae.decode_in(Bands::OfBytes(bytes), &latents, &Silent);
                let Some(banded) = failures.take(banded, at) else { continue };
                let error = rel_l2(&on_cpu(&banded)?, &on_cpu(&whole)?)?;
                let bound = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
                failures.check(error <= if same { 0.0 } else { bound }, || format!("{}: {error:.1e}", at()));
            }
        }
    }
    failures.finish(suite)
}

/// Steps that are recorded and replayed give the bytes of steps op by op, also when the size of the picture changes.
#[test]
fn recorded_steps_give_the_same_bytes() -> Result<()> {
    let suite = "gpu_flux2, recorded steps";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    for dtype in [DType::F32, DType::BF16] {
        let eager = pipeline(&device, dtype, WAYS[0])?;
        let mut options = options(&device, dtype, WAYS[0]).with_text_encoder(Residency::Stay);
        options.launches = Launches::Recorded;
        let recorded = Flux2Pipeline::load(&demo(), &options)?;
        for name in ["flux2-a", "flux2-c", "flux2-b", "flux2-a"] {
            let request = request(&Golden::open(name)?)?;
            let want = eager.generate_rgb8(&request, &Silent)?.pixels;
            let before = replays();
            let picture = failures.take(recorded.generate_rgb8(&request, &Silent), || format!("{dtype:?} {name}"));
            let Some(picture) = picture else { continue };
            let count = replays() - before;
            println!("{dtype:?} {name}: {count} replays");
            failures.check(picture.pixels == want, || format!("{dtype:?} {name}: other bytes"));
            failures.check(count > 0, || format!("{dtype:?} {name}: nothing was replayed"));
        }
    }
    failures.finish(suite)
}

/// Blocks that are streamed from the host give the bytes of blocks that stay.
#[test]
fn a_small_card_gives_the_same_bytes() -> Result<()> {
    let suite = "gpu_flux2, limits of memory";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let want = default_bytes(&device)?;
    let request = request(&Golden::open("flux2-a")?)?;
    let mut made = 0;
    // Scratch memory and the driver are most of what so small a model needs.
    for limit in [1024, 980, 950, 930, 915, 910, 900, 800, 710, 64, 1].map(|mib| mib << 20) {
        let options = options(&device, DType::BF16, WAYS[0]).with_max_vram(Some(limit));
        let run = Flux2Pipeline::load(&demo(), &options).and_then(|p| p.generate_rgb8(&request, &Silent));
        match run {
            Ok(picture) => {
                made += 1;
                println!("{limit} bytes: a picture");
                ensure!(picture.pixels == want, "other bytes within {limit} bytes");
            }
            Err(error) => {
                let text = error.to_string();
                println!("{limit} bytes: {text}");
                ensure!(!text.contains('\n'), "more than one line: {text}");
            }
        }
    }
    ensure!(made >= 2, "{made} pictures");
    Ok(())
}
