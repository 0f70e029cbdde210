//! Networks of random weights: streams here, bands and whole clips in files of their own.

mod bands;
mod clips;

use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use crate::{
    DecodeOptions, DecoderState, EncodeOptions, EncoderState, Error, NormalizedLatents, RawLatents, Result, Silent,
    WanVae,
    testing::{bits, elements, latents, noise, random, relative_l2, tiny, tiny_configs},
};

/// Frames of a clip, decoded in pieces of these lengths.
fn decode(vae: &WanVae, latents: &RawLatents, plan: &[usize]) -> Tensor {
    let mut state = DecoderState::new(vae);
    let mut first = 0;
    let mut parts = Vec::new();
    for &count in plan {
        let frames = vae.decode(&mut state, &latents.frames(first, count).unwrap()).unwrap();
        assert_eq!(frames.dims()[1], vae.frames(first + count) - vae.frames(first));
        parts.push(frames);
        first += count;
    }
    assert_eq!(state.latents(), first);
    Tensor::cat(&parts, 1).unwrap()
}

/// Latents of a clip, encoded in pieces of these lengths.
fn encode(vae: &WanVae, frames: &Tensor, plan: &[usize]) -> Tensor {
    let mut state = EncoderState::new(vae);
    let mut first = 0;
    let mut parts = Vec::new();
    for &count in plan {
        parts.extend(vae.encode(&mut state, &frames.narrow(1, first, count).unwrap()).unwrap());
        first += count;
    }
    assert_eq!(state.finish().unwrap().frames, 0);
    let parts: Vec<Tensor> = parts.into_iter().map(RawLatents::into_tensor).collect();
    Tensor::cat(&parts, 1).unwrap()
}

fn clip(vae: &WanVae, latents: &RawLatents, options: &DecodeOptions) -> Result<Tensor> {
    let mut parts = Vec::new();
    vae.decode_clip(latents, options, &Silent, &mut |frames| {
        parts.push(frames);
        Ok(())
    })?;
    Ok(Tensor::cat(&parts, 1).unwrap())
}

/// Latents of a clip that comes in pieces of `step` frames.
fn encoded_clip(vae: &WanVae, x: &Tensor, step: usize, options: &EncodeOptions) -> Result<Tensor> {
    let count = x.dims()[1];
    let pieces = (0..count).step_by(step).map(|i| Ok(x.narrow(1, i, step.min(count - i)).unwrap()));
    let mut parts = Vec::new();
    vae.encode_clip(&mut { pieces }, options, &Silent, &mut |z| {
        parts.push(z.into_tensor());
        Ok(())
    })?;
    Ok(Tensor::cat(&parts, 1).unwrap())
}

fn side(vae: &WanVae) -> usize {
    vae.spatial_factor()
}

#[test]
fn frames_do_not_depend_on_how_latents_are_cut() {
    for vae in tiny() {
        let z = latents(1, [4, 7, 2, 3]);
        let whole = decode(&vae, &z, &[7]);
        assert_eq!(whole.dims(), [3, 25, 2 * side(&vae), 3 * side(&vae)]);
        assert!(elements(&whole).iter().any(|v| v.abs() < 1.0) && elements(&whole).iter().all(|v| v.abs() <= 1.0));
        for plan in [&[1; 7][..], &[1, 2, 2, 2], &[1, 6], &[1, 1, 3, 2], &[1, 2, 1, 3], &[2, 1, 1, 1, 1, 1], &[3, 4]] {
            assert_eq!(bits(&decode(&vae, &z, plan)), bits(&whole), "{plan:?}");
        }
    }
}

#[test]
fn latents_do_not_depend_on_how_frames_are_cut() {
    for vae in tiny() {
        let x = noise(2, 0.5, &[3, 13, 2 * side(&vae), side(&vae)]);
        let whole = encode(&vae, &x, &[13]);
        assert_eq!(whole.dims(), [4, 4, 2, 1]);
        for plan in [&[1; 13][..], &[1, 4, 4, 4], &[1, 8, 4], &[1, 12], &[1, 4, 8], &[3, 3, 3, 4], &[2, 11]] {
            assert_eq!(bits(&encode(&vae, &x, plan)), bits(&whole), "{plan:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    #[test]
    fn any_partition_gives_the_same_bits(
        which in 0usize..2, seed in 0u64..1000, cuts in prop::collection::vec(1usize..4, 1..4), h in 1usize..3,
    ) {
        let vae = random(crate::Architecture::from_config(&tiny_configs()[which]).unwrap());
        let count = cuts.iter().sum();
        let z = latents(seed, [4, count, h, 1]);
        prop_assert_eq!(bits(&decode(&vae, &z, &cuts)), bits(&decode(&vae, &z, &vec![1; count])));
        let x = noise(seed, 0.5, &[3, 4 * count - 3, h * side(&vae), side(&vae)]);
        let mut plan: Vec<usize> = cuts.iter().map(|cut| 4 * cut).collect();
        plan[0] -= 3;
        prop_assert_eq!(bits(&encode(&vae, &x, &plan)), bits(&encode(&vae, &x, &vec![1; 4 * count - 3])));
    }
}

#[test]
fn prefixes_are_stable() {
    for vae in tiny() {
        let z = latents(3, [4, 5, 1, 2]);
        let whole = decode(&vae, &z, &[5]);
        for count in 1..5 {
            let prefix = decode(&vae, &z.frames(0, count).unwrap(), &[count]);
            assert_eq!(prefix.dims()[1], 4 * count - 3);
            assert_eq!(bits(&prefix), bits(&whole.narrow(1, 0, 4 * count - 3).unwrap()));
        }
    }
}

#[test]
fn a_clone_goes_on_like_the_original() {
    for vae in tiny() {
        let z = latents(4, [4, 5, 2, 1]);
        let mut state = DecoderState::new(&vae);
        vae.decode(&mut state, &z.frames(0, 3).unwrap()).unwrap();
        let bytes = state.bytes();
        assert!(bytes > 0);
        let mut copy = state.clone();
        // Something else in between must not show.
        vae.decode(&mut copy.clone(), &latents(5, [4, 2, 2, 1])).unwrap();
        let a = vae.decode(&mut state, &z.frames(3, 2).unwrap()).unwrap();
        let b = vae.decode(&mut copy, &z.frames(3, 2).unwrap()).unwrap();
        assert_eq!(bits(&a), bits(&b));
        let whole = decode(&vae, &z, &[5]);
        assert_eq!(bits(&a), bits(&whole.narrow(1, 9, 8).unwrap()));

        let x = noise(6, 0.5, &[3, 9, side(&vae), side(&vae)]);
        let mut state = EncoderState::new(&vae);
        vae.encode(&mut state, &x.narrow(1, 0, 3).unwrap()).unwrap();
        let mut copy = state.clone();
        let a = vae.encode(&mut state, &x.narrow(1, 3, 6).unwrap()).unwrap().unwrap();
        let b = vae.encode(&mut copy, &x.narrow(1, 3, 6).unwrap()).unwrap().unwrap();
        assert_eq!(bits(a.tensor()), bits(b.tensor()));
    }
}

#[test]
fn a_state_does_not_grow() {
    for vae in tiny() {
        let z = latents(4, [4, 2, 2, 2]);
        let mut state = DecoderState::new(&vae);
        vae.decode(&mut state, &z).unwrap();
        vae.decode(&mut state, &z).unwrap();
        let bytes = state.bytes();
        for _ in 0..3 {
            vae.decode(&mut state, &z).unwrap();
            assert_eq!(state.bytes(), bytes);
        }
        // What the estimate says.
        let memory = crate::ClipMemory::decode(vae.architecture(), vae.precision(), (9, 2, 2), crate::ClipPlan::Whole);
        assert_eq!(memory.cache, bytes);
    }
}

#[test]
fn threads_decode_different_clips_at_once() {
    for vae in tiny() {
        let clips: Vec<RawLatents> = (0..4).map(|seed| latents(seed, [4, 3, 2, 2])).collect();
        let alone: Vec<Vec<u32>> = clips.iter().map(|z| bits(&decode(&vae, z, &[3]))).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = clips.iter().map(|z| scope.spawn(|| bits(&decode(&vae, z, &[1, 2])))).collect();
            for (thread, alone) in threads.into_iter().zip(&alone) {
                assert_eq!(&thread.join().unwrap(), alone);
            }
        });
    }
}

#[test]
fn a_round_trip_keeps_the_extents() {
    for vae in tiny() {
        let x = noise(8, 0.5, &[3, 5, side(&vae), 2 * side(&vae)]);
        let z = RawLatents::new(encode(&vae, &x, &[5])).unwrap();
        assert_eq!(z.extents(), (4, 2, 1, 2));
        assert_eq!(decode(&vae, &z, &[2]).dims(), x.dims());
    }
}

#[test]
fn normalisation_is_undone() {
    let [vae, _] = tiny();
    let z = latents(9, [4, 2, 1, 3]);
    let normalized = vae.normalize(&z).unwrap();
    let want: Vec<f32> = elements(z.tensor()).iter().map(|v| (v - 0.5) / 2.0).collect();
    assert_eq!(elements(normalized.tensor()), want);
    assert!(relative_l2(vae.denormalize(&normalized).unwrap().tensor(), z.tensor()) < 1e-6);
    let other = NormalizedLatents::new(noise(1, 1.0, &[3, 1, 1, 1])).unwrap();
    assert!(matches!(vae.denormalize(&other), Err(Error::Channels { got: 3, expected: 4 })));
}

#[test]
fn bad_latents_are_errors_and_leave_the_state_as_it_was() {
    let [vae, other] = tiny();
    let z = latents(1, [4, 2, 2, 2]);
    let mut state = DecoderState::new(&vae);
    vae.decode(&mut state, &z).unwrap();
    let undisturbed = vae.decode(&mut state.clone(), &z).unwrap();
    let mut refuse = |latents: &RawLatents| vae.decode(&mut state, latents).unwrap_err();
    for (value, channel, frame) in [(f32::NAN, 3, 1), (f32::INFINITY, 0, 0)] {
        let mut values = elements(z.tensor());
        values[(channel * 2 + frame) * 4 + 3] = value;
        let bad = RawLatents::new(Tensor::from_vec(values, (4, 2, 2, 2), &Device::Cpu).unwrap()).unwrap();
        let error = refuse(&bad);
        assert!(matches!(error, Error::NonFiniteLatents { channel: c, frame: f, .. } if (c, f) == (channel, frame)));
        assert!(error.to_string().contains("the sampler"), "{error}");
    }
    assert!(matches!(refuse(&latents(1, [16, 1, 2, 2])), Error::Channels { got: 16, expected: 4 }));
    assert!(matches!(refuse(&latents(1, [4, 1, 2, 3])), Error::ExtentsChanged { began: (2, 2), got: (2, 3) }));
    assert!(matches!(other.decode(&mut state, &z), Err(Error::ForeignState)));
    assert_eq!(bits(&vae.decode(&mut state, &z).unwrap()), bits(&undisturbed));

    for dims in [&[4, 0, 2, 2][..], &[4, 1, 0, 2], &[2, 4, 1, 2, 2], &[4, 2]] {
        let empty = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(RawLatents::new(empty), Err(Error::Shape { .. })), "{dims:?}");
    }
}

#[test]
fn bad_frames_are_errors_and_leave_the_state_as_it_was() {
    for vae in tiny() {
        let s = side(&vae);
        let x = noise(1, 0.5, &[3, 5, s, s]);
        let mut state = EncoderState::new(&vae);
        vae.encode(&mut state, &x.narrow(1, 0, 2).unwrap()).unwrap();
        let mut refuse = |dims: &[usize]| vae.encode(&mut state, &noise(1, 0.5, dims)).unwrap_err();
        assert!(matches!(refuse(&[4, 1, s, s]), Error::Shape { .. }));
        assert!(matches!(refuse(&[3, 0, s, s]), Error::Shape { .. }));
        assert!(matches!(refuse(&[3, 1, s + 1, s]), Error::Size { axis: "height", .. }));
        assert!(matches!(refuse(&[3, 1, s, s / 2]), Error::Size { axis: "width", .. }));
        assert!(matches!(refuse(&[3, 1, 0, s]), Error::Size { axis: "height", got: 0, .. }));
        assert!(matches!(refuse(&[3, 1, s, 2 * s]), Error::ExtentsChanged { .. }));
        let nan = Tensor::full(f32::NAN, (3, 1, s, s), &Device::Cpu).unwrap();
        assert!(matches!(vae.encode(&mut state, &nan), Err(Error::NonFiniteFrames { channel: 0, frame: 0, .. })));
        vae.encode(&mut state, &x.narrow(1, 2, 3).unwrap()).unwrap().unwrap();
        assert_eq!(state.frames(), 5);
    }
}

#[test]
fn a_state_that_stopped_half_way_is_refused() {
    let [vae, _] = tiny();
    let z = latents(1, [4, 2, 1, 1]);
    let mut state = DecoderState::new(&vae);
    let before = state.clone();
    let failing = &mut || Err(Error::Cancelled(crate::Cancelled));
    let input = vae.input(&z).unwrap();
    assert!(matches!(vae.decode_with(&mut state, &input, failing, &mut |_| Ok(())), Err(Error::Cancelled(_))));
    assert!(matches!(vae.decode(&mut state, &z), Err(Error::BrokenState)));
    assert!(vae.decode(&mut before.clone(), &z).is_ok());
    let mut state = EncoderState::new(&vae);
    let x = noise(1, 0.5, &[3, 1, 8, 8]);
    assert!(vae.encode_with(&mut state, &x, failing).is_err());
    assert!(matches!(state.finish(), Err(Error::BrokenState)));
}
