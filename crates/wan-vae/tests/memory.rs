//! What clips really take, counted by the allocator, beside what the estimate says. One test, so that nothing else runs
//! in the process.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use candle_core::{Device, Tensor};
use sampling::NoiseGenerator;
use wan_vae::{
    Architecture, BlendedTiles, ClipMemory, DecodeOptions, EncodeOptions, LoadOptions, RawLatents, Silent, Tiling,
    VaeConfig, WanVae, expected,
};
use weights::{
    Safetensors,
    write::{TensorData, to_bytes},
};

/// Transformed inputs of convolutions, in bytes, of which these small pictures need less.
const SCRATCH: f64 = (16 << 20) as f64;

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST.fetch_max(held, Ordering::Relaxed);
}

// SAFETY: every call is passed on as it is to the system's allocator, whose blocks these are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's duties are those of this call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's duties are those of this call.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's duties are those of this call.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that `run` takes at its peak beyond those held before.
fn peak(run: impl FnOnce()) -> f64 {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    run();
    (MOST.load(Ordering::Relaxed) - before) as f64
}

fn noise(scale: f32, dims: &[usize]) -> Tensor {
    let values = NoiseGenerator::Philox.normal(1, dims.iter().product()).into_iter().map(|v| scale * v).collect();
    Tensor::from_vec::<_, f32>(values, dims, &Device::Cpu).unwrap()
}

/// The published networks with a quarter of the widths or less.
fn vae(residual: bool) -> WanVae {
    let (z_dim, channels) = if residual { (48, 12) } else { (16, 3) };
    let config = VaeConfig {
        base_dim: 24,
        decoder_base_dim: Some(if residual { 32 } else { 24 }),
        dim_mult: vec![1, 2, 4, 4],
        z_dim,
        num_res_blocks: 2,
        temperal_downsample: vec![false, true, true],
        is_residual: residual,
        in_channels: channels,
        out_channels: channels,
        patch_size: residual.then_some(2),
        latents_mean: vec![0.0; z_dim],
        latents_std: vec![1.0; z_dim],
    };
    let architecture = Architecture::from_config(&config).unwrap();
    let tensors: Vec<TensorData<'_>> = expected(&architecture)
        .into_iter()
        .map(|t| {
            let fan_in: usize = t.shape[1..].iter().product();
            let values = noise((fan_in as f32).powf(-0.5), &t.shape).flatten_all().unwrap().to_vec1::<f32>().unwrap();
            TensorData::f32(t.name, &t.shape, &values)
        })
        .collect();
    let file = to_bytes(&tensors, &Default::default()).unwrap();
    let source = Arc::new(Safetensors::from_bytes(Arc::new(file), "random").unwrap());
    WanVae::from_architecture(architecture, None, source, &LoadOptions::default()).unwrap()
}

#[test]
fn clips_take_what_the_estimate_says() {
    let mut wrong = Vec::new();
    let mut holds = |found: f64, memory: &ClipMemory, what: String| {
        // The weights lie there before.
        let estimate = (memory.total() - memory.weights) as f64;
        println!("{what}: {:.1} of {:.1} MB, {memory:?}", found / 1e6, estimate / 1e6);
        // Never more; less by what convolutions hold for themselves, which is counted at its most.
        if found > estimate || found + SCRATCH < 0.8 * estimate {
            wrong.push(format!("{what}: {found} of {estimate}"));
        }
    };
    for residual in [false, true] {
        let vae = vae(residual);
        let factor = vae.spatial_factor();
        let (rows, columns) = (24, 8);
        let tiles = BlendedTiles { tile: 12 * factor, stride: 8 * factor };
        for (latents, tiling) in
            [(1, Tiling::Whole), (3, Tiling::Whole), (3, Tiling::Bands(3)), (3, Tiling::Blended(tiles))]
        {
            let z = RawLatents::new(noise(1.0, &[vae.z_dim(), latents, rows, columns])).unwrap();
            let options = DecodeOptions::default().with_tiling(tiling);
            let found = peak(|| vae.decode_clip(&z, &options, &Silent, &mut |_| Ok(())).unwrap());
            let plan = vae.decode_plan((latents, rows, columns), &options).unwrap();
            let memory = ClipMemory::decode(vae.architecture(), vae.precision(), (latents, rows, columns), plan);
            holds(found, &memory, format!("decode of {latents}, {plan:?}"));

            let (frames, height, width) = (vae.frames(latents), rows * factor, columns * factor);
            let x = noise(0.3, &[3, frames, height, width]);
            let options = EncodeOptions::default().with_tiling(tiling);
            let mut pieces = (0..frames).map(|i| Ok(x.narrow(1, i, 1).unwrap()));
            let found = peak(|| {
                vae.encode_clip(&mut pieces, &options, &Silent, &mut |_| Ok(())).unwrap();
            });
            let plan = vae.encode_plan((frames, height, width), &options).unwrap();
            let memory = ClipMemory::encode(vae.architecture(), vae.precision(), (frames, height, width), plan);
            holds(found, &memory, format!("encode of {frames}, {plan:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
