//! What a caller may rely on when clips come in pieces: nothing but the clip decides the result.
//!
//! On the trained miniature and on the tiny random networks of the goldens. Equality is of bits, but for bands of tiny
//! pictures: how a convolution sums depends on how large they are, so these agree to rounding.

use std::sync::{Arc, LazyLock};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use policy::Silent;
use proptest::prelude::*;
use sampling::NoiseGenerator;
use tests::{Container, Golden, assert_close, assert_same_bits, data, rel_l2};
use wan_vae::{
    DecodeOptions, DecoderState, EncodeOptions, EncoderState, LoadOptions, RawLatents, Remainder, Tiling, WanVae,
};
use weights::Safetensors;

/// The demonstration model, Wan 2.2 and Qwen-Image.
static VAES: LazyLock<[WanVae; 3]> = LazyLock::new(|| {
    let demo = WanVae::open(data("models/wan-vae-demo"), &LoadOptions::default()).expect("the demonstration vae");
    let tiny = |name| load(&Golden::open(name).expect("a golden").container()).expect("a tiny vae");
    [demo, tiny("wan-22"), tiny("wan-qwen")]
});

fn load(container: &Container) -> Result<WanVae> {
    let source = Safetensors::from_bytes(Arc::new(container.to_bytes()), "tiny")?;
    Ok(WanVae::load(Arc::new(source), None, &LoadOptions::default())?)
}

fn noise(seed: u64, scale: f32, dims: &[usize]) -> Result<Tensor> {
    let values = NoiseGenerator::Philox.normal(seed, dims.iter().product());
    let values = values.into_iter().map(|v| scale * v).collect();
    Ok(Tensor::from_vec(values, dims, &Device::Cpu)?)
}

fn latents(vae: &WanVae, seed: u64, (n, h, w): (usize, usize, usize)) -> Result<RawLatents> {
    Ok(RawLatents::new(noise(seed, 1.0, &[vae.z_dim(), n, h, w])?)?)
}

fn frames(vae: &WanVae, seed: u64, (m, h, w): (usize, usize, usize)) -> Result<Tensor> {
    let side = vae.spatial_factor();
    noise(seed, 0.5, &[3, m, h * side, w * side])
}

/// Decodes latents in pieces of these lengths, from a state on.
fn decode_on(vae: &WanVae, state: &mut DecoderState, latents: &RawLatents, plan: &[usize]) -> Result<Tensor> {
    let (mut parts, mut first) = (Vec::new(), 0);
    for &count in plan {
        parts.push(vae.decode(state, &latents.frames(first, count)?)?);
        first += count;
    }
    anyhow::ensure!(first == latents.extents().1, "{plan:?} does not cover the clip");
    Ok(Tensor::cat(&parts, 1)?)
}

fn decode(vae: &WanVae, latents: &RawLatents, plan: &[usize]) -> Result<Tensor> {
    decode_on(vae, &mut DecoderState::new(vae), latents, plan)
}

/// Encodes frames in pieces of these lengths.
fn encode(vae: &WanVae, frames: &Tensor, plan: &[usize]) -> Result<Tensor> {
    let mut state = EncoderState::new(vae);
    let (mut parts, mut first) = (Vec::new(), 0);
    for &count in plan {
        parts.extend(vae.encode(&mut state, &frames.narrow(1, first, count)?)?.map(RawLatents::into_tensor));
        first += count;
    }
    anyhow::ensure!(first == frames.dim(1)? && state.finish()?.frames == 0, "{plan:?} does not cover the clip");
    Ok(Tensor::cat(&parts, 1)?)
}

fn decode_clip(vae: &WanVae, latents: &RawLatents, options: &DecodeOptions) -> Result<Tensor> {
    let mut parts = Vec::new();
    vae.decode_clip(latents, options, &Silent, &mut |frames| {
        parts.push(frames);
        Ok(())
    })?;
    Ok(Tensor::cat(&parts, 1)?)
}

fn encode_clip(vae: &WanVae, frames: &Tensor, plan: &[usize], options: &EncodeOptions) -> Result<Tensor> {
    let (mut parts, mut first) = (Vec::new(), 0);
    let mut pieces = plan.iter().map(|&count| {
        first += count;
        Ok(frames.narrow(1, first - count, count).expect("frames of the clip"))
    });
    vae.encode_clip(&mut pieces, options, &Silent, &mut |latents| {
        parts.push(latents.into_tensor());
        Ok(())
    })?;
    Ok(Tensor::cat(&parts, 1)?)
}

/// Lengths that add up to `total`, from random cuts.
fn pieces(total: usize, cuts: &[bool]) -> Vec<usize> {
    let mut plan = vec![1];
    for i in 1..total {
        if cuts[i % cuts.len()] {
            plan.push(1);
        } else if let Some(last) = plan.last_mut() {
            *last += 1;
        }
    }
    plan
}

/// Largest relative L2 error of bands.
const BANDS: f64 = 1e-6;

fn ok(result: Result<()>) -> Result<(), TestCaseError> {
    result.map_err(|error| TestCaseError::fail(format!("{error:#}")))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_pieces_of_latents_give_the_frames_of_one_pass(
        which in 0usize..3, seed in 0u64..1000, n in 1usize..7, h in 1usize..8, w in 1usize..8,
        cuts in prop::collection::vec(any::<bool>(), 6),
    ) {
        let vae = &VAES[which];
        ok((|| {
            let z = latents(vae, seed, (n, h, w))?;
            let whole = decode(vae, &z, &[n])?;
            assert_eq!(whole.dims(), [3, 4 * n - 3, h * vae.spatial_factor(), w * vae.spatial_factor()]);
            let plan = pieces(n, &cuts);
            assert_same_bits(&format!("{plan:?}"), &decode(vae, &z, &plan)?, &whole)?;
            assert_same_bits("one by one", &decode(vae, &z, &vec![1; n])?, &whole)?;
            assert_same_bits("a clip", &decode_clip(vae, &z, &DecodeOptions::default())?, &whole)
        })())?;
    }

    #[test]
    fn any_pieces_of_frames_give_the_latents_of_one_pass(
        which in 0usize..3, seed in 0u64..1000, n in 1usize..4, h in 1usize..3, w in 1usize..3,
        cuts in prop::collection::vec(any::<bool>(), 7),
    ) {
        let vae = &VAES[which];
        ok((|| {
            let count = 4 * n - 3;
            let x = frames(vae, seed, (count, h, w))?;
            let whole = encode(vae, &x, &[count])?;
            assert_eq!(whole.dims(), [vae.z_dim(), n, h, w]);
            let plan = pieces(count, &cuts);
            assert_same_bits(&format!("{plan:?}"), &encode(vae, &x, &plan)?, &whole)?;
            assert_same_bits("frame by frame", &encode(vae, &x, &vec![1; count])?, &whole)?;
            assert_same_bits("a clip", &encode_clip(vae, &x, &plan, &EncodeOptions::default())?, &whole)
        })())?;
    }

    #[test]
    fn bands_give_the_frames_of_whole_pictures(
        which in 0usize..3, seed in 0u64..1000, n in 1usize..4, h in 1usize..26, w in 1usize..3, bands in 1usize..6,
    ) {
        let vae = &VAES[which];
        ok((|| {
            let z = latents(vae, seed, (n, h, w))?;
            let with = |tiling| decode_clip(vae, &z, &DecodeOptions::default().with_tiling(tiling));
            let bands = bands.min(h);
            assert_close(&format!("{bands} bands"), &with(Tiling::Bands(bands))?, &with(Tiling::Whole)?, BANDS)
        })())?;
    }

    #[test]
    fn bands_give_the_latents_of_whole_pictures(
        which in 0usize..3, seed in 0u64..1000, n in 1usize..3, h in 1usize..26, w in 1usize..3, bands in 1usize..6,
    ) {
        let vae = &VAES[which];
        ok((|| {
            let x = frames(vae, seed, (4 * n - 3, h, w))?;
            let with = |tiling| encode_clip(vae, &x, &[4 * n - 3], &EncodeOptions::default().with_tiling(tiling));
            let bands = bands.min(h);
            assert_close(&format!("{bands} bands"), &with(Tiling::Bands(bands))?, &with(Tiling::Whole)?, BANDS)
        })())?;
    }

    #[test]
    fn a_prefix_of_a_clip_gives_a_prefix_of_the_result(
        which in 0usize..3, seed in 0u64..1000, n in 2usize..6, kept in 1usize..5, h in 1usize..3, w in 1usize..4,
    ) {
        let vae = &VAES[which];
        ok((|| {
            let kept = kept.min(n - 1);
            let z = latents(vae, seed, (n, h, w))?;
            let (whole, prefix) = (decode(vae, &z, &[n])?, decode(vae, &z.frames(0, kept)?, &[kept])?);
            assert_same_bits("frames", &prefix, &whole.narrow(1, 0, 4 * kept - 3)?)?;
            let x = frames(vae, seed, (4 * n - 3, h, w))?;
            let whole = encode(vae, &x, &[4 * n - 3])?;
            let prefix = encode(vae, &x.narrow(1, 0, 4 * kept - 3)?, &[4 * kept - 3])?;
            assert_same_bits("latents", &prefix, &whole.narrow(1, 0, kept)?)
        })())?;
    }

    #[test]
    fn a_clone_goes_on_as_the_original_would_have(
        which in 0usize..3, seed in 0u64..1000, before in 0usize..4, behind in 1usize..4, h in 1usize..3, w in 1usize..4,
    ) {
        let vae = &VAES[which];
        ok((|| {
            let z = latents(vae, seed, (before + behind, h, w))?;
            let mut state = DecoderState::new(vae);
            if before > 0 {
                vae.decode(&mut state, &z.frames(0, before)?)?;
            }
            let mut copy = state.clone();
            // Whatever else is decoded from this point leaves no trace; nor does a copy that is dropped.
            vae.decode(&mut state.clone(), &latents(vae, seed + 1, (2, h, w))?)?;
            let rest = z.frames(before, behind)?;
            let (original, cloned) = (vae.decode(&mut state, &rest)?, decode_on(vae, &mut copy, &rest, &vec![1; behind])?);
            assert_same_bits("clone", &cloned, &original)?;
            assert_eq!((state.latents(), copy.latents()), (before + behind, before + behind));
            let whole = decode(vae, &z, &[before + behind])?;
            let first = vae.frames(before);
            assert_same_bits("whole", &original, &whole.narrow(1, first, vae.frames(before + behind) - first)?)?;

            // An encoder, at a point where frames wait for the rest of their group.
            let count = 4 * behind + 1;
            let x = frames(vae, seed, (count, h, w))?;
            let mut state = EncoderState::new(vae);
            let at = 1 + before.min(count - 2);
            let head = vae.encode(&mut state, &x.narrow(1, 0, at)?)?.context("no latents of the first frame")?;
            let mut copy = state.clone();
            vae.encode(&mut state.clone(), &frames(vae, seed + 1, (5, h, w))?)?;
            let rest = x.narrow(1, at, count - at)?;
            let original = vae.encode(&mut state, &rest)?.context("no latents")?;
            let cloned = vae.encode(&mut copy, &rest)?.context("no latents")?;
            assert_same_bits("clone", cloned.tensor(), original.tensor())?;
            assert_same_bits(
                "whole",
                &Tensor::cat(&[head.tensor(), original.tensor()], 1)?,
                &encode(vae, &x, &[count])?,
            )
        })())?;
    }
}

#[test]
fn the_plans_of_other_programs_give_the_same_frames() -> Result<()> {
    for vae in &*VAES {
        // So many latents that the first part of the network, which takes them all at once, has work of another size.
        let z = latents(vae, 1, (7, 5, 7))?;
        let whole = decode(vae, &z, &[7])?;
        for plan in [&[1; 7][..], &[1, 2, 2, 2], &[1, 6], &[1, 1, 3, 2], &[1, 2, 1, 3], &[2, 1, 1, 1, 1, 1]] {
            assert_same_bits(&format!("{plan:?}"), &decode(vae, &z, plan)?, &whole)?;
        }
        let x = frames(vae, 2, (13, 5, 3))?;
        let whole = encode(vae, &x, &[13])?;
        for plan in [&[1, 4, 4, 4][..], &[1, 8, 4], &[1, 12], &[1, 4, 8], &[1, 2, 2, 2, 2, 2, 2]] {
            assert_same_bits(&format!("{plan:?}"), &encode(vae, &x, plan)?, &whole)?;
        }
    }
    Ok(())
}

/// The hardest case for a halo: kernels that look in one direction only carry a row as far as any kernels can.
#[test]
fn bands_are_exact_for_kernels_that_look_one_way() -> Result<()> {
    for name in ["wan-22", "wan-qwen"] {
        for kept in [0, 2] {
            let mut container = Golden::open(name)?.container();
            let is_3x3 = |shape: &[usize]| shape.len() >= 4 && shape.ends_with(&[3, 3]);
            for stored in container.tensors.values_mut().filter(|stored| is_3x3(&stored.shape)) {
                for (i, element) in stored.bytes.chunks_exact_mut(4).enumerate() {
                    // As strong as the three rows together.
                    let value = f32::from_le_bytes([element[0], element[1], element[2], element[3]]);
                    let value = if i / 3 % 3 == kept { 3.0 * value } else { 0.0 };
                    element.copy_from_slice(&value.to_le_bytes());
                }
            }
            let vae = load(&container)?;
            let z = latents(&vae, 3, (2, 24, 1))?;
            let whole = decode_clip(&vae, &z, &DecodeOptions::default().with_tiling(Tiling::Whole))?;
            for bands in [2, 3, 5] {
                let banded = decode_clip(&vae, &z, &DecodeOptions::default().with_tiling(Tiling::Bands(bands)))?;
                assert_close(&format!("{name}, row {kept}, {bands} bands"), &banded, &whole, BANDS)?;
            }
            let x = frames(&vae, 3, (5, 24, 1))?;
            let with = |tiling| encode_clip(&vae, &x, &[5], &EncodeOptions::default().with_tiling(tiling));
            let whole = with(Tiling::Whole)?;
            for bands in [2, 3, 5] {
                let what = format!("{name}, encode, row {kept}, {bands} bands");
                assert_close(&what, &with(Tiling::Bands(bands))?, &whole, BANDS)?;
            }
        }
    }
    Ok(())
}

/// Where a frame of latents is not tiny, bands are summed as whole pictures are.
#[test]
fn bands_of_larger_pictures_have_the_bits_of_whole_ones() -> Result<()> {
    for vae in &*VAES {
        let z = latents(vae, 7, (2, 24, 24))?;
        let x = frames(vae, 7, (1, 24, 32))?;
        let frames = |tiling| decode_clip(vae, &z, &DecodeOptions::default().with_tiling(tiling));
        let latents = |tiling| encode_clip(vae, &x, &[1], &EncodeOptions::default().with_tiling(tiling));
        let (video, encoded) = (frames(Tiling::Whole)?, latents(Tiling::Whole)?);
        for bands in [2, 3] {
            assert_same_bits(&format!("frames, {bands} bands"), &frames(Tiling::Bands(bands))?, &video)?;
            assert_same_bits(&format!("latents, {bands} bands"), &latents(Tiling::Bands(bands))?, &encoded)?;
        }
    }
    Ok(())
}

#[test]
fn a_budget_leads_to_bands_of_the_same_frames() -> Result<()> {
    for vae in &*VAES {
        let z = latents(vae, 4, (2, 40, 2))?;
        let whole = decode_clip(vae, &z, &DecodeOptions::default())?;
        let mut max_bytes = u64::MAX;
        let mut plans = Vec::new();
        // Always a little less than what was needed, down to what nothing fits.
        loop {
            let options = DecodeOptions::default().with_max_bytes(Some(max_bytes));
            match vae.decode_plan(z_extents(&z), &options) {
                Ok(plan) => {
                    assert_close(&format!("{plan:?}"), &decode_clip(vae, &z, &options)?, &whole, BANDS)?;
                    plans.push(format!("{plan:?}"));
                }
                Err(wan_vae::Error::Memory { .. }) => break,
                Err(other) => return Err(other.into()),
            }
            max_bytes = max_bytes.min(64 << 20) / 8 * 7;
        }
        plans.dedup();
        println!("{plans:?}");
        assert!(plans[0] == "Whole" && plans.len() > 1, "{plans:?}");
    }
    Ok(())
}

fn z_extents(latents: &RawLatents) -> (usize, usize, usize) {
    let (_, n, h, w) = latents.extents();
    (n, h, w)
}

#[test]
fn threads_share_a_model() -> Result<()> {
    for vae in &*VAES {
        let clips: Vec<_> = (0..4).map(|seed| latents(vae, seed, (3, 2, 2))).collect::<Result<_>>()?;
        let alone: Vec<_> = clips.iter().map(|z| decode(vae, z, &[3])).collect::<Result<_>>()?;
        let x = frames(vae, 9, (5, 1, 2))?;
        let encoded = encode(vae, &x, &[5])?;
        std::thread::scope(|scope| -> Result<()> {
            let decodes: Vec<_> = clips.iter().map(|z| scope.spawn(|| decode(vae, z, &[1, 2]))).collect();
            let encodes: Vec<_> = (0..2).map(|_| scope.spawn(|| encode(vae, &x, &[1; 5]))).collect();
            for (thread, alone) in decodes.into_iter().zip(&alone) {
                assert_same_bits("decode in a thread", &thread.join().expect("no panic")?, alone)?;
            }
            for thread in encodes {
                assert_same_bits("encode in a thread", &thread.join().expect("no panic")?, &encoded)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Nothing is dropped in silence: frames behind the last group are told, refused, left out or filled up as asked.
#[test]
fn frames_left_over_are_told() -> Result<()> {
    for vae in &*VAES {
        for count in 1..=9usize {
            let x = frames(vae, 5, (count, 1, 1))?;
            let mut state = EncoderState::new(vae);
            let latents = vae.encode(&mut state, &x)?.context("no latents")?;
            let left = state.finish()?;
            assert_eq!((left.latents, left.frames), (1 + (count - 1) / 4, (count - 1) % 4));
            assert_eq!(latents.extents().1, left.latents);
            let with = |remainder| encode_clip(vae, &x, &[count], &EncodeOptions::default().with_remainder(remainder));
            assert_eq!(with(Remainder::Refuse).is_ok(), count % 4 == 1, "{count} frames");
            assert_same_bits("trimmed", &with(Remainder::Trim)?, latents.tensor())?;
            assert_eq!(with(Remainder::Repeat)?.dim(1)?, 1 + (count - 1).div_ceil(4));
        }
    }
    Ok(())
}

/// The comparisons above are of bits; this one shows that they compare something: pieces that begin anew are not the clip.
#[test]
fn a_clip_that_begins_anew_differs() -> Result<()> {
    for vae in &*VAES {
        let z = latents(vae, 6, (4, 2, 2))?;
        let whole = decode(vae, &z, &[4])?;
        let anew = decode(vae, &z.frames(2, 2)?, &[2])?;
        assert_eq!(anew.dim(1)?, 5);
        let error = rel_l2(&anew.narrow(1, 1, 4)?, &whole.narrow(1, 9, 4)?)?;
        assert!(error > 1e-3, "{error}");
    }
    Ok(())
}
