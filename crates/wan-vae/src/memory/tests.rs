use candle_core::DeviceLocation;

use super::*;
use crate::{
    BlendedTiles,
    testing::{wan21, wan22},
};

/// f32 on the CPU.
fn cpu() -> Precision {
    Precision::new(DeviceLocation::Cpu, DType::F32)
}

fn cuda(dtype: DType) -> Precision {
    Precision::new(DeviceLocation::Cuda { gpu_id: 0 }, dtype)
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[test]
fn caches_are_those_of_the_published_shapes() {
    // Enumerated from the layers, in bf16: 1.89, 4.36 and 3.22 GB.
    for (architecture, h, w, want) in [(wan21(), 60, 104, 1.89), (wan21(), 90, 160, 4.36), (wan22(), 44, 80, 3.22)] {
        for (precision, wider) in
            [(cpu(), 2.0), (cuda(DType::F32), 2.0), (cuda(DType::BF16), 1.0), (cuda(DType::F16), 1.0)]
        {
            let memory = ClipMemory::decode(&architecture, precision, (21, h, w), ClipPlan::Whole);
            let got = gigabytes(memory.cache) / wider;
            assert!((got / want - 1.0).abs() < 5e-3, "{got} instead of {want}");
        }
    }
}

#[test]
fn a_decode_of_832x480_stays_below_eight_gigabytes() {
    let memory = ClipMemory::decode(&wan21(), cpu(), (3, 60, 104), ClipPlan::Whole);
    let total = gigabytes(memory.total());
    assert!((5.9..8.0).contains(&total), "{total}: {memory:?}");
}

/// Measured with the weights on an H200, in bf16 through cuDNN: 3.38 GiB.
#[test]
fn a_decode_on_cuda_takes_what_was_measured() {
    let memory = ClipMemory::decode(&wan21(), cuda(DType::BF16), (21, 60, 104), ClipPlan::Whole);
    let gib = memory.total() as f64 / f64::from(1 << 30);
    assert!((3.38..1.15 * 3.38).contains(&gib), "{gib}: {memory:?}");
}

#[test]
fn half_precision_on_cuda_takes_half_and_pads_the_ends() {
    let of = |precision, latents| ClipMemory::decode(&wan21(), precision, (latents, 90, 160), ClipPlan::Whole);
    let (half, single) = (of(cuda(DType::BF16), 21), of(cuda(DType::F32), 21));
    assert_eq!((2 * half.weights, 2 * half.cache, 2 * half.cut), (single.weights, single.cache, single.cut));
    // The hungriest layer is in the middle of the network; scratch memory is the same.
    assert_eq!(2 * (half.activations - DEVICE_SCRATCH), single.activations - DEVICE_SCRATCH);
    // Four frames of 8 channels in bf16 and of 3 in f32, three times.
    assert_eq!(half.frames, 4 * 720 * 1280 * (8 * 2 + 3 * 3 * 4));
    assert_eq!(single.frames, 4 * 720 * 1280 * 3 * 3 * 4);
    // Of encoders, three channels come in, in groups of eight.
    let of = |dtype| ClipMemory::encode(&wan21(), cuda(dtype), (81, 720, 1280), ClipPlan::Whole);
    let added = of(DType::BF16).cache - of(DType::F32).cache / 2;
    assert_eq!(added, 5 * 2 * 720 * 1280 * 2);
    // A device takes more latent frames at once, and so holds more of them between the parts.
    assert!(of_cut(cuda(DType::F32)) > of_cut(cpu()));
}

fn of_cut(precision: Precision) -> u64 {
    ClipMemory::decode(&wan21(), precision, (21, 60, 104), ClipPlan::Whole).cut
}

#[test]
fn whole_pictures_take_as_much_for_any_length_and_bands_less() {
    type Of = fn(&Architecture, usize, ClipPlan) -> u64;
    let decode: Of = |a, latents, plan| ClipMemory::decode(a, cpu(), (latents, 90, 160), plan).total();
    let encode: Of = |a, latents, plan| ClipMemory::encode(a, cpu(), (4 * latents - 3, 720, 1280), plan).total();
    for of in [decode, encode] {
        let architecture = wan21();
        assert_eq!(of(&architecture, 9, ClipPlan::Whole), of(&architecture, 81_000, ClipPlan::Whole));
        let bands: Vec<u64> = [1, 2, 4, 8].map(|n| of(&architecture, 21, ClipPlan::Bands(n))).to_vec();
        assert!(bands.is_sorted_by(|a, b| a > b), "{bands:?}");
        assert!(of(&architecture, 21, ClipPlan::Bands(2)) < of(&architecture, 21, ClipPlan::Whole));
    }
}

#[test]
fn the_fewest_bands_that_fit_are_taken_or_the_figure_is_given() {
    let (latents, pixels) = ((21, 90, 160), (81, 720, 1280));
    for decoding in [true, false] {
        let with = |max_bytes, tiling| {
            if decoding {
                let options = DecodeOptions::default().with_max_bytes(max_bytes).with_tiling(tiling);
                decode_plan(&wan21(), cpu(), latents, &options)
            } else {
                let options = EncodeOptions::default().with_max_bytes(max_bytes).with_tiling(tiling);
                encode_plan(&wan21(), cpu(), pixels, &options)
            }
        };
        let needs = |plan| match decoding {
            true => ClipMemory::decode(&wan21(), cpu(), latents, plan).total(),
            false => ClipMemory::encode(&wan21(), cpu(), pixels, plan).total(),
        };
        assert_eq!(with(None, Tiling::Auto).unwrap(), ClipPlan::Whole);
        let whole = needs(ClipPlan::Whole);
        assert_eq!(with(Some(whole), Tiling::Auto).unwrap(), ClipPlan::Whole);
        let ClipPlan::Bands(count) = with(Some(whole - 1), Tiling::Auto).unwrap() else { panic!("whole") };
        assert!(needs(ClipPlan::Bands(count)) < whole);
        assert!(count == 2 || needs(ClipPlan::Bands(count - 1)) >= whole);
        let error = with(Some(1 << 20), Tiling::Auto).unwrap_err();
        assert!(error.to_string().starts_with(if decoding { "decoding needs" } else { "encoding needs" }), "{error}");
        let Error::Memory { needed, .. } = error else { panic!("{error}") };
        assert!(with(Some(needed), Tiling::Auto).is_ok() && with(Some(needed - 1), Tiling::Auto).is_err());
        assert!(matches!(with(Some(whole - 1), Tiling::Whole), Err(Error::Memory { needed, .. }) if needed == whole));
        assert!(matches!(with(None, Tiling::Bands(0)), Err(Error::Tiling { .. })));
        assert!(matches!(with(None, Tiling::Bands(91)), Err(Error::Tiling { .. })));
        assert_eq!(with(None, Tiling::Bands(90)).unwrap(), ClipPlan::Bands(90));
        let tiles = BlendedTiles::default();
        assert!(needs(with(None, Tiling::Blended(tiles)).unwrap()) < whole);
    }
}

/// A picture takes the way of the first frame: one frame in every stage, and no second one to remember.
#[test]
fn a_picture_takes_less_than_a_clip() {
    for architecture in [wan21(), wan22()] {
        let decode = |latents| ClipMemory::decode(&architecture, cpu(), (latents, 64, 64), ClipPlan::Whole);
        let encode = |frames| ClipMemory::encode(&architecture, cpu(), (frames, 512, 512), ClipPlan::Whole);
        for (one, more) in [(decode(1), decode(2)), (encode(1), encode(5))] {
            assert!(3 * one.activations < more.activations && 2 * one.cache <= more.cache, "{one:?} {more:?}");
        }
        let pictures = Architecture { temporal_kernel: 1, ..architecture.clone() };
        assert_eq!(ClipMemory::decode(&pictures, cpu(), (3, 64, 64), ClipPlan::Whole).cache, 0);
    }
}

/// Whatever is asked for: a figure, and no overflow.
#[test]
fn extents_beyond_all_bounds_are_estimated() {
    let tiles = BlendedTiles::default();
    for architecture in [wan21(), wan22()] {
        for extents in [(usize::MAX, 1 << 40, 1 << 40), (1, usize::MAX, 1), (usize::MAX, 0, 0), (0, 1, 1)] {
            for tiling in [Tiling::Whole, Tiling::Bands(1), Tiling::Auto, Tiling::Blended(tiles)] {
                let options = DecodeOptions::default().with_max_bytes(Some(1)).with_tiling(tiling);
                assert!(decode_plan(&architecture, cpu(), extents, &options).is_err());
                let options = EncodeOptions::default().with_max_bytes(Some(1)).with_tiling(tiling);
                assert!(encode_plan(&architecture, cpu(), extents, &options).is_err());
            }
        }
    }
}
