//! The diffusion decoder of LTX-2.5 on the GPU: goldens, the passes of narrow blocks against ops one after the other, slabs
//! against whole clips, and the memory that it says it takes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    LinearWeight, Pairing, heads_of, linear, memory,
    noise::philox_normal,
    norm_rope, residual, rms_norm, swiglu,
    token_block::{PAIRS, TokenAngles, TokenBlock, TokenBlockWeights},
};
use ltx::{
    DiffusionDecoder, DiffusionDecoderConfig, Error, LoadOptions,
    diffusion_decoder::{BlendedTiles, DecodeOptions, LatentScale, Noise, Tiling},
};
use policy::Silent;
use sampling::NoiseGenerator;
use serde_json::json;
use tests::{
    Golden,
    gpu::{Failures, cuda, noise, poison, seed},
    rel_l2,
};
use weights::{
    Safetensors, TensorSource, ValueCheck,
    write::{TensorData, to_bytes},
};

/// f32 on the GPU against the reference, relative in the Euclidean norm.
const F32: f64 = 1e-4;
/// bf16 against the reference, for networks of a few channels.
const BF16: f64 = 5e-2;
/// The error of the passes, in units of that of ops one after the other, which round more often.
const PASSES: f64 = 1.1;

/// The peak of a device's memory is that of all threads: tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn on_cpu(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?)
}

fn golden(name: &str, dtype: DType, device: &Device) -> Result<(Golden, DiffusionDecoder, DecodeOptions)> {
    let golden = Golden::open(name)?;
    let config = DiffusionDecoderConfig::from_json(&golden.config()?)?;
    let decoder = DiffusionDecoder::load(&config, golden.weights()?, &LoadOptions::new(device.clone(), dtype))?;
    let options = DecodeOptions::default()
        .with_noise(Noise::Given(golden.tensor("in.noise")?))
        .with_latents(LatentScale::Raw)
        .with_steps(Some(golden.number("steps")?));
    let tiles = |kind: &str| -> Result<[usize; 3]> {
        let side = |axis: &str| golden.number(&format!("{kind}_{axis}"));
        Ok([side("num_frames")?, side("height")?, side("width")?])
    };
    let options = match name {
        "ltx-diffusion-tiles" => {
            options.with_tiling(Tiling::Blended(BlendedTiles { tile: tiles("min")?, stride: tiles("stride")? }))
        }
        _ => options,
    };
    Ok((golden, decoder, options))
}

#[test]
fn goldens_hold() -> Result<()> {
    let suite = "gpu_ltx_diffusion goldens";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let _alone = alone();
    let mut failures = Failures::default();
    for name in ["ltx-diffusion", "ltx-diffusion-v", "ltx-diffusion-tiles"] {
        for (dtype, bound) in [(DType::F32, F32), (DType::BF16, BF16)] {
            for scratch_bytes in [0, 3 << 30] {
                let what = format!("{name} {dtype:?} scratch {scratch_bytes}");
                let run = || -> Result<f64> {
                    let (golden, decoder, options) = golden(name, dtype, &device)?;
                    let options = options.with_scratch_bytes(scratch_bytes);
                    let got = decoder.decode(&golden.tensor("in.latent")?, &options, &Silent)?;
                    rel_l2(&on_cpu(&got)?, &golden.tensor("out.video")?)
                };
                let Some(error) = failures.take(run(), || what.clone()) else { continue };
                println!("{what}: error {error:.1e}");
                failures.check(error <= bound, || format!("{what}: error {error:.2e}, allowed {bound:.0e}"));
            }
        }
    }
    failures.finish(suite)
}

/// A denoising stage as published, behind few and narrow others.
fn config() -> Result<DiffusionDecoderConfig> {
    Ok(DiffusionDecoderConfig::from_json(&json!({
        "latent_channels": 16, "out_channels": 3, "patch_size": 4, "decoder_head_dim": 64,
        "decoder_stage_channels": [256, 256, 256], "decoder_stage_depths": [1, 1, 3],
        "decoder_stage_kernels": [[3, 7, 7], [3, 5, 5]],
        "decoder_upsample_strides": [[2, 1, 1], [2, 2, 2]], "decoder_upsample_channel_reductions": [1, 1],
        "decoder_stage5_kernel": [11, 11, 11], "decoder_t_emb_dim": 64, "decoder_timestep_scale_multiplier": 1000.0,
        "decoder_model_output_type": "x0", "decoder_num_inference_steps": 1,
    }))?)
}

/// Random weights in bf16: maps of unit gain, norms about 1.
fn weights(config: &DiffusionDecoderConfig, seed: u64) -> Result<Arc<dyn TensorSource>> {
    let empty = Safetensors::from_bytes(Arc::new(to_bytes(&[], &Default::default())?), "empty")?;
    let expected = DiffusionDecoder::expected(config, &empty);
    let tensor = |(i, tensor): (usize, &weights::Expected)| -> Result<TensorData> {
        let (name, shape) = (&tensor.name, &tensor.shape);
        let norm = name.contains("norm") || name == "latents_std";
        let fan_in: usize = shape[1..].iter().product();
        let scale = if shape.len() > 1 { (fan_in as f32).powf(-0.5) } else { 0.2 };
        let scale = if name.contains("scale_shift_table") { 0.3 } else { scale };
        let values: Vec<f32> = noise(seed + i as u64, scale, shape, DType::F32)?.flatten_all()?.to_vec1()?;
        let values: Vec<f32> = values.into_iter().map(|v| if norm { 1.0 + v.tanh() / 2.0 } else { v }).collect();
        Ok(TensorData::bf16(name.clone(), shape, &values))
    };
    let tensors = expected.iter().enumerate().map(tensor).collect::<Result<Vec<_>>>()?;
    Ok(Arc::new(Safetensors::from_bytes(Arc::new(to_bytes(&tensors, &Default::default())?), "random")?))
}

fn load(source: &Arc<dyn TensorSource>, dtype: DType, device: &Device) -> Result<DiffusionDecoder> {
    let options = LoadOptions::new(device.clone(), dtype).with_values(ValueCheck::Off);
    Ok(DiffusionDecoder::load(&config()?, source.clone(), &options)?)
}

/// How often this thread ran passes of narrow blocks, and attention by tiles.
#[cfg(feature = "cuda")]
fn fast_calls() -> [u64; 2] {
    use candle_fork::cuda::paths::{Path, taken};
    [taken(Path::TokenBlock), taken(Path::TiledNeighborhood)]
}

#[cfg(not(feature = "cuda"))]
fn fast_calls() -> [u64; 2] {
    [0; 2]
}

/// Passes run in bf16, with the errors of rounding, and a clip in slabs has the bits of the whole.
#[test]
fn passes_are_the_ops_and_slabs_the_whole() -> Result<()> {
    let suite = "gpu_ltx_diffusion passes";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let _alone = alone();
    let seed = seed(suite);
    let mut failures = Failures::default();
    let source = weights(&config()?, seed)?;
    let (exact, half) = (load(&source, DType::F32, &Device::Cpu)?, load(&source, DType::BF16, &device)?);
    let slow = load(&source, DType::BF16, &Device::Cpu)?;
    // Grids of 4 T - 3 frames, 2 H by 2 W tokens: one frame, windows as wide as the grid, many slabs, two clips.
    for dims in [[1, 16, 1, 3, 5], [1, 16, 3, 6, 7], [1, 16, 9, 7, 5], [2, 16, 4, 6, 9]] {
        let what = format!("latents {dims:?}");
        let latents = noise(seed + 1, 1.0, &dims, DType::F32)?;
        let options = DecodeOptions::default();
        let want = exact.decode(&latents, &options, &Silent)?;
        let rounded = rel_l2(&on_cpu(&slow.decode(&latents, &options, &Silent)?)?, &want)?;
        let before = fast_calls();
        poison(&device, 1 << 20)?;
        let Some(got) = failures.take(half.decode(&latents, &options, &Silent), || what.clone()) else { continue };
        let [passes, tiled] = fast_calls();
        let (passes, tiled) = (passes - before[0], tiled - before[1]);
        let clips = dims[0] as u64;
        failures.check(passes == 2 * 3 * clips, || format!("{what}: {passes} passes for 3 blocks of {clips} clips"));
        failures.check(tiled == 2 + 3 * clips, || format!("{what}: {tiled} attentions by tiles"));
        let got = on_cpu(&got)?;
        let error = rel_l2(&got, &want)?;
        println!("{what}: error {error:.2e}, of ops one after the other {rounded:.2e}");
        failures.check(error <= PASSES * rounded, || format!("{what}: error {error:.2e}, of the ops {rounded:.2e}"));
        let plane = 4 * dims[3] * dims[4] * 2048;
        for scratch_bytes in [0, 24 * plane as u64, 37 * plane as u64] {
            let before = fast_calls()[0];
            let options = options.clone().with_scratch_bytes(scratch_bytes);
            let Some(slabs) = failures.take(half.decode(&latents, &options, &Silent), || what.clone()) else {
                continue;
            };
            let passes = fast_calls()[0] - before;
            let cut = 4 * dims[2] - 3 > 11;
            failures.check(!cut || scratch_bytes > 0 || passes > 6 * clips, || format!("{what}: no slabs, {passes}"));
            let differing = differing(&on_cpu(&slabs)?, &got)?;
            failures.check(differing == 0, || format!("{what} in {passes} passes: {differing} values differ"));
        }
    }
    failures.finish(suite)
}

/// A block of 256 channels and its operands, rounded to bf16, on the CPU.
struct Narrow {
    weights: Vec<LinearWeight>,
    small: Vec<Tensor>,
    x: Tensor,
    context: Tensor,
    attended: Tensor,
    tables: [Tensor; 3],
}

/// T, H and W of the tokens' grid.
const GRID: [usize; 3] = [9, 7, 17];

impl Narrow {
    fn new(tokens: usize, seed: u64) -> Result<Self> {
        let rounded = |i: u64, scale: f32, dims: &[usize]| noise(seed + i, scale, dims, DType::BF16);
        let matrix = |i: u64, rows: usize, columns: usize| -> Result<LinearWeight> {
            Ok(LinearWeight::from_tensor(rounded(i, (columns as f32).powf(-0.5), &[rows, columns])?)?)
        };
        // Context, query, key and value, output, gate and up, down.
        let weights = vec![
            matrix(0, 256, 256)?,
            matrix(1, 768, 256)?,
            matrix(2, 256, 256)?,
            matrix(3, 1024, 256)?,
            matrix(4, 256, 512)?,
        ];
        let vector =
            |i: u64, mean: f64, n: usize| -> Result<Tensor> { Ok((noise(seed + i, 0.3, &[n], DType::F32)? + mean)?) };
        // Biases of context, of query, key and value, of the output, of gate and up; norms of tokens and of heads.
        let small = [(0.0, 256), (0.0, 768), (0.0, 256), (0.0, 1024), (1.0, 256), (1.0, 256), (1.0, 64), (1.0, 64)];
        let small = small.iter().zip(10..).map(|(&(mean, n), i)| vector(i, mean, n)).collect::<Result<_>>()?;
        let table = |axis: usize| -> Result<Tensor> {
            let (extent, pairs) = (GRID[axis], PAIRS[axis]);
            let angle = |i: usize| (i / pairs) as f32 * 10_000f32.powf(-((i % pairs) as f32) / pairs as f32);
            let values: Vec<f32> = (0..extent * pairs).flat_map(|i| [angle(i).cos(), angle(i).sin()]).collect();
            Ok(Tensor::from_vec(values, (extent, pairs, 2), &Device::Cpu)?)
        };
        let operand = |i: u64| rounded(i, 1.0, &[tokens, 256]);
        let tables = [table(0)?, table(1)?, table(2)?];
        Ok(Self { weights, small, x: operand(20)?, context: operand(21)?, attended: operand(22)?, tables })
    }

    /// Cosines and sines of `count` tokens from `first` on.
    fn angles(&self, first: usize, count: usize) -> Result<[Tensor; 2]> {
        let [t, h, w] = GRID;
        let part = |which: usize| -> Result<Tensor> {
            let along = |axis: usize| -> Result<Tensor> {
                let mut shape = [1, 1, 1, PAIRS[axis]];
                shape[axis] = GRID[axis];
                let table = self.tables[axis].narrow(2, which, 1)?.reshape(&shape)?;
                Ok(table.broadcast_as((t, h, w, PAIRS[axis]))?)
            };
            let all = Tensor::cat(&[along(0)?, along(1)?, along(2)?], 3)?.reshape((t * h * w, 32))?;
            Ok(all.narrow(0, first, count)?.contiguous()?)
        };
        Ok([part(0)?, part(1)?])
    }

    /// What both passes give, op by op in `dtype` on the CPU: x with its context, queries and so on, x behind the block.
    fn by_ops(&self, dtype: DType, context: bool, first: usize) -> Result<[Tensor; 3]> {
        const EPS: f64 = 1e-6;
        let cast = |t: &Tensor| -> Result<Tensor> { Ok(t.to_dtype(dtype)?) };
        let map = |x: &Tensor, i: usize, bias: Option<usize>| -> Result<Tensor> {
            Ok(linear(x, &self.weights[i], bias.map(|bias| &self.small[bias]))?)
        };
        let mut x = cast(&self.x)?;
        if context {
            x = residual(&x, &map(&cast(&self.context)?, 0, Some(0))?)?;
        }
        let tokens = x.dim(0)?;
        let all = map(&rms_norm(&x, &self.small[4], EPS)?, 1, Some(1))?.unsqueeze(0)?;
        let [cos, sin] = self.angles(first, tokens)?;
        let turned = |start: usize, norm: usize| -> Result<Tensor> {
            let part = heads_of(&all, start, 4, 64)?;
            let turned = norm_rope(&part, &self.small[norm], &cos, &sin, EPS, Pairing::Interleaved)?;
            Ok(turned.reshape((tokens, 256))?)
        };
        let v = all.squeeze(0)?.narrow(1, 512, 256)?;
        let qkv = Tensor::cat(&[turned(0, 6)?, turned(256, 7)?, v], 1)?;
        let y = residual(&x, &map(&cast(&self.attended)?, 2, Some(2))?)?;
        let hidden = swiglu(&map(&rms_norm(&y, &self.small[5], EPS)?, 3, Some(3))?)?;
        Ok([x, qkv, residual(&y, &map(&hidden, 4, None)?)?])
    }

    /// The same in passes on a device.
    fn in_passes(&self, device: &Device, context: bool, first: usize) -> Result<[Tensor; 3]> {
        let at = |t: &Tensor| -> Result<Tensor> { Ok(t.to_device(device)?) };
        let small = self.small.iter().map(at).collect::<Result<Vec<_>>>()?;
        let weights = TokenBlockWeights {
            context: context.then_some((&self.weights[0], &small[0])),
            qkv: &self.weights[1],
            head_norms: [&small[6], &small[7]],
            out: (&self.weights[2], &small[2]),
            gate_up: &self.weights[3],
            down: &self.weights[4],
            eps: 1e-6,
        };
        let block = TokenBlock::new(&weights, device)?.context("no kernels for this device")?;
        let entries = block.entries([&small[4], &small[5]], &small[1], Some(&small[3]))?;
        let [t, h, w] = self.tables.each_ref().map(at);
        let angles = TokenAngles::new([&t?, &h?, &w?])?;
        let told = context.then(|| at(&self.context)).transpose()?;
        // Rows of a larger tensor, so that those beyond the last would be seen to change.
        let all = Tensor::cat(&[&self.x, &self.x], 0)?.to_device(device)?;
        let x = all.narrow(0, 0, self.x.dim(0)?)?;
        let carried = at(&Tensor::full(7f32, (3, 768), &Device::Cpu)?.to_dtype(DType::BF16)?)?;
        let qkv = block.project(&x, told.as_ref(), &entries, &angles, first, Some(&carried))?;
        ensure!(differing(&on_cpu(&qkv.narrow(0, 0, 3)?)?, &on_cpu(&carried)?)? == 0, "carried rows changed");
        let between = on_cpu(&x)?;
        block.finish(&x, &at(&self.attended)?, &entries)?;
        let rest = all.narrow(0, self.x.dim(0)?, self.x.dim(0)?)?;
        ensure!(differing(&on_cpu(&rest)?, &on_cpu(&self.x)?)? == 0, "rows beyond the last changed");
        Ok([between, on_cpu(&qkv.narrow(0, 3, self.x.dim(0)?)?)?, on_cpu(&x)?])
    }
}

/// Numbers of tokens around those of a tile and of a block, at places in the grid.
#[test]
fn passes_agree_with_ops() -> Result<()> {
    let suite = "gpu_ltx_diffusion token blocks";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let _alone = alone();
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (tokens, first) in [(1, 0), (63, 5), (64, 119), (65, 300), (127, 0), (128, 17), (129, 942), (1071, 0)] {
        for context in [true, false] {
            let what = format!("{tokens} tokens from {first}, context {context}");
            let narrow = Narrow::new(tokens, seed)?;
            let want = narrow.by_ops(DType::F32, context, first)?;
            let rounded = narrow.by_ops(DType::BF16, context, first)?;
            poison(&device, 1 << 20)?;
            let Some(got) = failures.take(narrow.in_passes(&device, context, first), || what.clone()) else { continue };
            for (i, name) in ["x with context", "queries, keys, values", "x behind the block"].into_iter().enumerate() {
                let error = rel_l2(&got[i], &want[i])?;
                let allowed = PASSES * rel_l2(&on_cpu(&rounded[i])?, &want[i])? + 1e-7;
                failures.check(error <= allowed, || format!("{what}, {name}: {error:.2e}, allowed {allowed:.2e}"));
            }
            let again = narrow.in_passes(&device, context, first)?;
            let same = (0..3).all(|i| differing(&again[i], &got[i]).is_ok_and(|n| n == 0));
            failures.check(same, || format!("{what}: another run gives other bits"));
        }
    }
    failures.finish(suite)
}

/// Noise that a device draws is that of the host.
#[test]
fn noise_is_that_of_the_host() -> Result<()> {
    let suite = "gpu_ltx_diffusion noise";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let _alone = alone();
    let mut failures = Failures::default();
    for seed in [0, 1, u64::MAX - 3] {
        let want = NoiseGenerator::Philox.normal(seed, 300_007);
        let drawn = |dtype| philox_normal(seed, want.len(), dtype, &device);
        let got: Vec<f32> = on_cpu(&drawn(DType::F32)?)?.to_vec1()?;
        let off = got.iter().zip(&want).filter(|(got, want)| got.to_bits() != want.to_bits()).count();
        let far = got.iter().zip(&want).filter(|(got, want)| (*got - *want).abs() > 2e-7 * want.abs()).count();
        println!("seed {seed}: {off} of {} values differ", want.len());
        failures.check(off <= 3 && far == 0, || format!("seed {seed}: {off} values differ, {far} by much"));
        let half: Vec<f32> = on_cpu(&drawn(DType::BF16)?)?.to_vec1()?;
        let off = half.iter().zip(&got).filter(|(half, got)| **half != half::bf16::from_f32(**got).to_f32()).count();
        failures.check(off == 0, || format!("seed {seed}: {off} values are rounded otherwise"));
    }
    failures.finish(suite)
}

fn differing(a: &Tensor, b: &Tensor) -> Result<usize> {
    let values = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.flatten_all()?.to_vec1()?) };
    Ok(values(a)?.iter().zip(values(b)?).filter(|(a, b)| a.to_bits() != b.to_bits()).count())
}

/// A decode keeps to its limit, and one that cannot is refused before it begins.
#[test]
fn memory_stays_within_its_limit() -> Result<()> {
    let suite = "gpu_ltx_diffusion memory";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let _alone = alone();
    let mut failures = Failures::default();
    let source = weights(&config()?, 7)?;
    let decoder = load(&source, DType::BF16, &device)?;
    let dims = [1, 16, 24, 24, 32];
    let latents = noise(8, 1.0, &dims, DType::F32)?;
    let noise = Noise::Seed { seed: 3, generator: NoiseGenerator::Philox };
    let options = DecodeOptions::default().with_noise(noise);
    let least = decoder.decode_memory(&dims, &options)?.least();
    let refused = decoder.decode(&latents, &options.clone().with_max_bytes(Some(least - 1)), &Silent);
    failures.check(matches!(refused, Err(Error::Memory { needed, .. }) if needed == least), || format!("{refused:?}"));
    let whole = decoder.decode(&latents, &options, &Silent)?;
    for max_bytes in [least + least / 8, 2 * least] {
        let options = options.clone().with_max_bytes(Some(max_bytes));
        memory::release_scratch(&device);
        device.synchronize()?;
        memory::reset_peak(&device)?;
        let Some(got) = failures.take(decoder.decode(&latents, &options, &Silent), || format!("{max_bytes}")) else {
            continue;
        };
        let peak = memory::peak(&device)?.unwrap_or(0);
        println!("limit {max_bytes}: peak {peak}, least {least}");
        failures.check(peak <= max_bytes, || format!("limit {max_bytes}: peak {peak}"));
        let differing = differing(&on_cpu(&got)?, &on_cpu(&whole)?)?;
        failures.check(differing == 0, || format!("limit {max_bytes}: {differing} values differ"));
    }
    failures.finish(suite)
}
