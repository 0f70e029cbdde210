//! Whole decodes of a tiny random network.

use std::{cell::RefCell, ops::ControlFlow};

use candle_core::{DType, Device, Tensor};
use policy::{Event, Silent};
use sampling::NoiseGenerator;

use super::{
    BlendedTiles, DecodeOptions, DiffusionDecoder, LatentScale, Noise, ShortClips, Tiling,
    names::Spelling,
    testing::{bits, elements, noise, random, random_file, relative_l2, tiny},
};
use crate::{error::Error, options::LoadOptions};

fn decode(decoder: &DiffusionDecoder, latents: &Tensor, options: &DecodeOptions) -> Tensor {
    decoder.decode(latents, options, &Silent).unwrap()
}

#[test]
fn a_latent_stands_for_its_pixels() {
    let decoder = random(&tiny());
    assert_eq!(decoder.config().compression(), [4, 4, 4]);
    for [t, h, w] in [[1, 3, 2], [2, 1, 1], [3, 4, 5]] {
        let clip = decode(&decoder, &noise(1, 1.0, &[2, 6, t, h, w]), &DecodeOptions::default());
        assert_eq!(clip.dims(), [2, 3, 4 * (t - 1) + 1, 4 * h, 4 * w]);
        assert!(elements(&clip).iter().all(|v| v.is_finite()));
    }
}

#[test]
fn slabs_and_runs_change_nothing() {
    let decoder = random(&tiny());
    let latents = noise(2, 1.0, &[2, 6, 5, 4, 5]);
    let whole = decode(&decoder, &latents, &DecodeOptions::default());
    for scratch_bytes in [0, 200_000] {
        let cut = decode(&decoder, &latents, &DecodeOptions::default().with_scratch_bytes(scratch_bytes));
        let error = relative_l2(&cut, &whole);
        assert!(error < 2e-6, "{scratch_bytes}: {error}");
        // Sums of few rows have another order, so that the bits tell that something was cut.
        assert_ne!(bits(&cut), bits(&whole));
    }
}

#[test]
fn both_spellings_are_one_network() {
    let config = tiny();
    let latents = noise(3, 1.0, &[1, 6, 2, 3, 4]);
    let plain = decode(&random(&config), &latents, &DecodeOptions::default());
    for root in ["", "vae."] {
        let source = random_file(&config, Spelling::Published { root, gated: false });
        assert!(source.info(&format!("{root}decoder.diff_blocks.1.attn.qkv.bias")).is_some());
        let fused = DiffusionDecoder::load(&config, source, &LoadOptions::default()).unwrap();
        assert_eq!(bits(&decode(&fused, &latents, &DecodeOptions::default())), bits(&plain), "root {root:?}");
    }
}

#[test]
fn gates_are_part_of_the_maps_behind_them() {
    let config = tiny();
    let latents = noise(3, 1.0, &[1, 6, 2, 3, 4]);
    let plain = decode(&random(&config), &latents, &DecodeOptions::default());
    // Its maps are those of the other file, divided by gates that are powers of two.
    let source = random_file(&config, Spelling::Published { root: "vae.", gated: true });
    assert_eq!(
        elements(
            &source.host("vae.decoder.diff_blocks.0.gate_ctx").unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap()
        )[..3],
        [0.5, 1.0, 2.0]
    );
    let gated = DiffusionDecoder::load(&config, source, &LoadOptions::default()).unwrap();
    assert_eq!(bits(&decode(&gated, &latents, &DecodeOptions::default())), bits(&plain));
}

#[test]
fn noise_is_that_of_the_seed_and_can_be_given() {
    let decoder = random(&tiny());
    let latents = noise(4, 1.0, &[2, 6, 2, 3, 4]);
    let (seed, generator) = (9, NoiseGenerator::TorchCpu);
    let seeded = decode(&decoder, &latents, &DecodeOptions::default().with_noise(Noise::Seed { seed, generator }));
    let item = |seed| Tensor::from_vec(generator.normal(seed, 3 * 5 * 12 * 16), (3, 5, 12, 16), &Device::Cpu).unwrap();
    let canvas = Tensor::stack(&[item(9), item(10)], 0).unwrap();
    let given = decode(&decoder, &latents, &DecodeOptions::default().with_noise(Noise::Given(canvas)));
    assert_eq!(bits(&seeded), bits(&given));
    let other = decode(&decoder, &latents, &DecodeOptions::default().with_noise(Noise::Seed { seed: 10, generator }));
    assert!(relative_l2(&other, &seeded) > 1e-2);
    // An item has the pixels that it has alone.
    let alone = latents.narrow(0, 1, 1).unwrap();
    let alone = decode(&decoder, &alone, &DecodeOptions::default().with_noise(Noise::Seed { seed: 10, generator }));
    assert!(relative_l2(&alone, &seeded.narrow(0, 1, 1).unwrap()) < 2e-6);
}

#[test]
fn statistics_are_applied_once() {
    let decoder = random(&tiny());
    let latents = noise(5, 1.0, &[1, 6, 2, 3, 4]);
    let [mean, std] = &decoder.statistics;
    let raw = latents.broadcast_mul(std).unwrap().broadcast_add(mean).unwrap();
    let normalised = decode(&decoder, &latents, &DecodeOptions::default());
    let raw = decode(&decoder, &raw, &DecodeOptions::default().with_latents(LatentScale::Raw));
    assert_eq!(bits(&raw), bits(&normalised));
}

#[test]
fn short_clips_follow_the_policy() {
    let decoder = random(&tiny());
    let floor = decoder.config().window_floor();
    assert_eq!(floor, [3, 5, 4]);
    let run = |latents: &Tensor, policy| decode(&decoder, latents, &DecodeOptions::default().with_short_clips(policy));
    let large = noise(6, 1.0, &[1, 6, floor[0], floor[1], floor[2]]);
    assert_eq!(bits(&run(&large, ShortClips::PadLatent)), bits(&run(&large, ShortClips::Clamp)));
    let small = noise(6, 1.0, &[1, 6, 1, 2, 2]);
    let (padded, clamped) = (run(&small, ShortClips::PadLatent), run(&small, ShortClips::Clamp));
    assert_eq!((padded.dims(), clamped.dims()), (&[1, 3, 1, 8, 8][..], &[1, 3, 1, 8, 8][..]));
    assert!(relative_l2(&padded, &clamped) > 1e-2);
}

#[test]
fn tiles_are_close_and_one_tile_is_the_clip() {
    let decoder = random(&tiny());
    let latents = noise(7, 1.0, &[1, 6, 5, 6, 7]);
    let whole = decode(&decoder, &latents, &DecodeOptions::default());
    let blended = |tile, stride| {
        let tiling = Tiling::Blended(BlendedTiles { tile, stride });
        decode(&decoder, &latents, &DecodeOptions::default().with_tiling(tiling))
    };
    assert_eq!(bits(&blended([20, 24, 28], [20, 24, 28])), bits(&whole));
    let error = relative_l2(&blended([12, 16, 16], [8, 8, 8]), &whole);
    assert!(error > 1e-4 && error < 0.5, "{error}");
}

#[test]
fn half_precision_is_close() {
    let config = tiny();
    let latents = noise(8, 1.0, &[1, 6, 2, 3, 4]);
    let exact = decode(&random(&config), &latents, &DecodeOptions::default());
    let options = LoadOptions::new(Device::Cpu, DType::BF16);
    let half = DiffusionDecoder::load(&config, random_file(&config, Spelling::Diffusers), &options).unwrap();
    let half = decode(&half, &latents, &DecodeOptions::default());
    assert_eq!(half.dtype(), DType::BF16);
    let error = relative_l2(&half.to_dtype(DType::F32).unwrap(), &exact);
    assert!(error > 1e-4 && error < 3e-2, "{error}");
}

#[test]
fn progress_is_counted_and_can_be_stopped() {
    let decoder = random(&tiny());
    let latents = noise(9, 1.0, &[1, 6, 5, 6, 7]);
    let tiling = Tiling::Blended(BlendedTiles { tile: [12, 16, 16], stride: [8, 8, 8] });
    for options in [DecodeOptions::default().with_steps(Some(3)), DecodeOptions::default().with_tiling(tiling)] {
        let seen = RefCell::new(Vec::new());
        let observer = |event: &Event<'_>| {
            if let Event::Progress { done, total } = event {
                seen.borrow_mut().push((*done, *total));
            }
            ControlFlow::Continue(())
        };
        decoder.decode(&latents, &options, &observer).unwrap();
        let total = seen.borrow().len();
        assert_eq!(seen.into_inner(), (1..=total).map(|done| (done, total)).collect::<Vec<_>>());
    }
    let stop = |event: &Event<'_>| match event {
        Event::Progress { done: 2, .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let stopped = decoder.decode(&latents, &DecodeOptions::default(), &stop);
    assert!(matches!(stopped, Err(Error::Cancelled(_))));
}

#[test]
fn bad_input_is_one_line_before_any_work() {
    let decoder = random(&tiny());
    let never = |_: &Event<'_>| -> ControlFlow<()> { panic!("work began") };
    let refused = |latents: &Tensor, options: DecodeOptions| {
        let error = decoder.decode(latents, &options, &never).unwrap_err();
        assert!(!error.to_string().contains('\n'));
        error
    };
    let good = noise(1, 1.0, &[1, 6, 2, 3, 4]);
    for dims in [&[1, 5, 2, 3, 4][..], &[6, 2, 3, 4], &[1, 6, 0, 3, 4], &[0, 6, 2, 3, 4]] {
        let latents = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(refused(&latents, DecodeOptions::default()), Error::Shape { .. }), "{dims:?}");
    }
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = elements(&good);
        values[77] = value;
        let latents = Tensor::from_vec(values, good.shape(), &Device::Cpu).unwrap();
        assert!(matches!(refused(&latents, DecodeOptions::default()), Error::NonFiniteInput { .. }), "{value}");
    }
    for steps in [0, 1001] {
        assert!(matches!(refused(&good, DecodeOptions::default().with_steps(Some(steps))), Error::Argument { .. }));
    }
    let given = Noise::Given(noise(1, 1.0, &[1, 3, 5, 12, 15]));
    assert!(matches!(refused(&good, DecodeOptions::default().with_noise(given)), Error::Shape { .. }));
    let tiling = Tiling::Blended(BlendedTiles { tile: [4, 4, 4], stride: [4, 4, 3] });
    assert!(matches!(refused(&good, DecodeOptions::default().with_tiling(tiling)), Error::Argument { .. }));
}

#[test]
fn a_foreign_file_is_refused_as_a_whole() {
    let config = tiny();
    let mut other = tiny();
    other.stage_depths = vec![1, 1, 3];
    let load = |config, source| DiffusionDecoder::load(config, source, &LoadOptions::default());
    let missing = load(&other, random_file(&config, Spelling::Diffusers)).unwrap_err().to_string();
    assert!(missing.contains("decoder.diff_blocks.2."), "{missing}");
    let unexpected =
        load(&config, random_file(&other, Spelling::Published { root: "vae.", gated: false })).unwrap_err().to_string();
    assert!(unexpected.contains("vae.decoder.diff_blocks.2."), "{unexpected}");
}
