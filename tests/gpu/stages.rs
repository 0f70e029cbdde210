//! Weights that come and go, and steps that are recorded: the same bits as when everything stays and runs op by op.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    HostTensor, memory,
    stream::{HostBlock, Staging, Uploads, replays},
};
use flux2::{
    Flux2Pipeline, Flux2Transformer, GenerateOptions, Launches, LoadOptions, Residency, TransformerConfig,
    transformer::StreamedBlocks,
};
use policy::Silent;
use tests::{
    demo,
    gpu::{Choices, cuda, noise, poison, seed, values},
};

/// Rows and columns of the latents.
const GRID: (usize, usize) = (8, 6);
const TEXT: usize = 64;

fn request() -> GenerateOptions {
    GenerateOptions { prompt: "a red circle".to_owned(), seed: 3, ..GenerateOptions::default() }
}

/// The transformer of the demonstration model.
fn transformer(options: &LoadOptions, streamed: StreamedBlocks) -> Result<Flux2Transformer> {
    let folder = demo();
    let config: TransformerConfig = folder.json("transformer/config.json")?;
    Ok(Flux2Transformer::load_streamed(&config, folder.tensors("transformer")?, options, streamed)?)
}

/// Velocities of the same latents at a few sigmas, for two prompts in turn.
fn velocities(model: &Flux2Transformer, device: &Device) -> Result<Vec<Vec<f64>>> {
    let (config, mut all) = (model.config(), Vec::new());
    let latents = noise(1, 1.0, &[1, GRID.0 * GRID.1, config.in_channels], DType::F32)?.to_device(device)?;
    for seed in [2, 3] {
        let embeds = noise(seed, 1.0, &[1, TEXT, config.joint_attention_dim], DType::F32)?.to_device(device)?;
        let prepared = model.prepare(&embeds, GRID)?;
        for modulations in model.modulations(&[1.0, 0.8, 0.3], None, 1)? {
            all.push(values(&model.step(&latents, &modulations, &prepared, &Silent)?)?);
        }
    }
    Ok(all)
}

#[test]
fn a_recorded_step_gives_the_bits_of_the_step() -> Result<()> {
    let Some(device) = cuda("gpu_stages, recorded steps")? else { return Ok(()) };
    for dtype in [DType::F32, DType::BF16] {
        let mut options = LoadOptions::new(device.clone(), dtype);
        let want = velocities(&transformer(&options, StreamedBlocks::default())?, &device)?;
        options.launches = Launches::Recorded;
        let model = transformer(&options, StreamedBlocks::default())?;
        let before = replays();
        for pass in 0..3 {
            ensure!(velocities(&model, &device)? == want, "{dtype:?}, pass {pass}: other bits");
        }
        // All but the first step of all.
        let replayed = replays() - before;
        println!("{dtype:?}: {replayed} of 18 steps were replayed");
        ensure!(replayed == 17, "{dtype:?}: {replayed} of 18 steps were replayed");
    }
    Ok(())
}

/// Tensors about the sizes of the blocks in page-locked memory, at odd addresses, one after another without a pause; the
/// memory that they get held something else before.
#[test]
fn host_tensors_arrive_as_they_are() -> Result<()> {
    const BLOCK: usize = 32 << 20;
    let Some(device) = cuda("gpu_stages, host tensors")? else { return Ok(()) };
    let mut choices = Choices::new(seed("host tensors"));
    let bytes: Vec<u8> = (0..(5 * BLOCK).div_ceil(8)).flat_map(|_| choices.bits().to_le_bytes()).collect();
    let bytes = Arc::new(bytes);
    let mut staging = Staging::new(&device);
    let mut sent = Vec::new();
    let mut large = 0;
    for round in 0..2 {
        for len in [4, (4 << 20) - 4, 4 << 20, BLOCK - 4, BLOCK, BLOCK + 4, 2 * BLOCK, 4 * BLOCK + 12_340] {
            for dtype in [DType::U8, DType::F32] {
                let start = choices.below(5 * BLOCK - len);
                let elements = len / dtype.size_in_bytes();
                let host = HostTensor::new(bytes.clone(), start..start + len, dtype, elements)?;
                poison(&device, len)?;
                sent.push((start, len, staging.upload(&host, dtype)?));
                large += if len >= 4 << 20 { len as u64 } else { 0 };
            }
        }
        ensure!(staging.staged() == large, "{} of {large} bytes went through page-locked memory", staging.staged());
        // The blocks are free for others long before the tensors are looked at.
        for (start, len, tensor) in sent.drain(..) {
            let got = match tensor.dtype() {
                DType::U8 => tensor.to_vec1::<u8>()?,
                _ => tensor.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect(),
            };
            ensure!(
                got == bytes[start..start + len],
                "round {round}: other bytes, {:?} of {len} bytes",
                tensor.dtype()
            );
        }
    }
    println!("{large} bytes through page-locked memory");
    Ok(())
}

#[test]
fn streamed_blocks_give_the_bits_of_resident_ones() -> Result<()> {
    let Some(device) = cuda("gpu_stages, streamed blocks")? else { return Ok(()) };
    for dtype in [DType::F32, DType::BF16] {
        let options = LoadOptions::new(device.clone(), dtype);
        let want = velocities(&transformer(&options, StreamedBlocks::default())?, &device)?;
        for (double, single) in [(0, 1), (0, 5), (1, 2), (2, 6)] {
            let model = transformer(&options, StreamedBlocks { double, single })?;
            for pass in 0..3 {
                let same = velocities(&model, &device)? == want;
                ensure!(same, "{dtype:?}, {double} and {single} streamed, pass {pass}: other bits");
            }
        }
    }
    Ok(())
}

/// Blocks that are much larger than the work beside them, so that an upload that does not wait would be seen.
#[test]
fn uploads_keep_their_order_with_the_work() -> Result<()> {
    let Some(device) = cuda("gpu_stages, uploads")? else { return Ok(()) };
    const LEN: usize = 8 << 20;
    let block =
        |value: f32| -> Result<HostBlock> { Ok(HostBlock::new(&Tensor::full(value, LEN, &Device::Cpu)?, &device)?) };
    let blocks = [block(1.0)?, block(2.0)?, block(3.0)?];
    let slots = [Tensor::zeros(LEN, DType::F32, &device)?, Tensor::zeros(LEN, DType::F32, &device)?];
    let uploads = Uploads::new(&device)?;
    let mut pending = std::collections::VecDeque::new();
    for first in 0..2 {
        pending.push_back(uploads.start(&blocks[first], &slots[first])?);
    }
    let mut sums = Vec::new();
    for visit in 0..60 {
        pending.pop_front().context("an upload")?.wait()?;
        let slot = &slots[visit % 2];
        // A sum over the whole slot, many times over.
        let mut sum = Tensor::zeros((), DType::F32, &device)?;
        for _ in 0..4 {
            sum = (sum + slot.sum_all()?)?;
        }
        sums.push(sum);
        pending.push_back(uploads.start(&blocks[(visit + 2) % 3], slot)?);
    }
    for (visit, sum) in sums.iter().enumerate() {
        let want = (4 * LEN) as f32 * (visit % 3 + 1) as f32;
        let got = sum.to_scalar::<f32>()?;
        ensure!((got - want).abs() <= want * 1e-4, "visit {visit}: {got}, not {want}");
    }
    Ok(())
}

#[test]
fn components_that_make_room_give_the_same_picture_within_the_limit() -> Result<()> {
    let Some(device) = cuda("gpu_stages, limits")? else { return Ok(()) };
    let options = LoadOptions::new(device.clone(), DType::BF16);
    let whole = Flux2Pipeline::load(&demo(), &options.clone().with_text_encoder(Residency::Stay))?;
    let want = whole.generate_rgb8(&request(), &Silent)?.pixels;
    drop(whole);
    let released = Flux2Pipeline::load(&demo(), &options)?;
    ensure!(released.generate_rgb8(&request(), &Silent)?.pixels == want, "released components: other bytes");
    let peak = released.memory_plan(128, 128)?.peak();
    drop(released);
    for missing in [0, 1 << 20, 2 << 20, 4 << 20] {
        let limited = Flux2Pipeline::load(&demo(), &options.clone().with_max_vram(Some(peak - missing)))?;
        let plan = match limited.memory_plan(128, 128) {
            Ok(plan) => plan,
            Err(error) => {
                println!("{missing} bytes less: {error}");
                continue;
            }
        };
        memory::reset_peak(&device)?;
        ensure!(limited.generate_rgb8(&request(), &Silent)?.pixels == want, "{plan}: other bytes");
        let held = memory::peak(&device)?.unwrap_or(0);
        println!("{plan}; {} MiB were held", held >> 20);
        ensure!(held <= plan.peak(), "{plan}: {} MiB were held", held >> 20);
    }
    Ok(())
}
