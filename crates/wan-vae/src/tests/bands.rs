//! Pictures in bands, and limits of memory.

use candle_core::Tensor;

use super::{clip, decode, encode, encoded_clip, side};
use crate::{
    ClipMemory, ClipPlan, DecodeOptions, EncodeOptions, Error, Remainder, Silent, Tiling,
    bands::{self, Halo},
    testing::{bits, latents, noise, relative_l2, tiny},
};

#[test]
fn bands_give_the_bits_of_whole_pictures() {
    for vae in tiny() {
        for (h, w) in [(20, 8), (17, 1), (3, 2)] {
            let z = latents(7, [4, 3, h, w]);
            let whole = clip(&vae, &z, &DecodeOptions::default().with_tiling(Tiling::Whole)).unwrap();
            assert!(bits(&whole) == bits(&decode(&vae, &z, &[1, 1, 1])));
            for count in [1, 2, 3] {
                let banded = clip(&vae, &z, &DecodeOptions::default().with_tiling(Tiling::Bands(count))).unwrap();
                assert!(relative_l2(&banded, &whole) < 1e-6, "{count} bands of {h} rows");
                // Bands of few positions may be convolved by another algorithm.
                assert!(w < 8 || bits(&banded) == bits(&whole), "{count} bands of {h} rows");
            }
        }
    }
}

#[test]
fn a_halo_that_is_too_small_shows() {
    for vae in tiny() {
        let z = latents(7, [4, 2, 20, 8]);
        let whole = decode(&vae, &z, &[2]);
        let halos = bands::decoder_halos(vae.architecture().decoder.as_ref().unwrap());
        assert_eq!(halos[0], Halo { before: 7, behind: 7 });
        let with = |halo: usize| {
            let mut halos = halos.clone();
            halos[0] = Halo { before: halo, behind: halo };
            let mut parts = Vec::new();
            let input = vae.input(&z).unwrap();
            vae.decode_bands(&input, 2, &halos, 1, &mut || Ok(()), &mut |packed| {
                parts.push(vae.frames_of(&packed)?);
                Ok(())
            })
            .unwrap();
            Tensor::cat(&parts, 1).unwrap()
        };
        assert!(bits(&with(7)) == bits(&whole));
        assert!(bits(&with(9)) == bits(&whole));
        assert!(relative_l2(&with(3), &whole) > 1e-5);
        assert!(bits(&with(5)) != bits(&whole));
    }
}

#[test]
fn encoder_bands_give_the_bits_of_whole_pictures() {
    for vae in tiny() {
        for (rows, columns) in [(24, 8), (17, 1), (3, 1)] {
            let x = noise(7, 0.5, &[3, 5, rows * side(&vae), columns * side(&vae)]);
            let with = |tiling| encoded_clip(&vae, &x, 4, &EncodeOptions::default().with_tiling(tiling)).unwrap();
            let whole = with(Tiling::Whole);
            assert_eq!(bits(&whole), bits(&encode(&vae, &x, &[5])));
            for count in [1, 2, 3] {
                let banded = with(Tiling::Bands(count));
                assert!(relative_l2(&banded, &whole) < 1e-6, "{count} bands of {rows} rows");
                assert!(columns < 8 || bits(&banded) == bits(&whole), "{count} bands of {rows} rows");
            }
        }
    }
}

#[test]
fn an_encoder_halo_that_is_too_small_shows() {
    for vae in tiny() {
        let x = noise(7, 0.5, &[3, 5, 24 * side(&vae), 8 * side(&vae)]);
        let groups = [x.narrow(1, 0, 1).unwrap(), x.narrow(1, 1, 4).unwrap()];
        let whole = encode(&vae, &x, &[5]);
        let halos = bands::encoder_halos(vae.architecture().encoder.as_ref().unwrap());
        let with = |change: &dyn Fn(&mut Halo)| {
            let mut halos = halos.clone();
            change(&mut halos[0]);
            let mut parts = Vec::new();
            vae.encode_bands(&groups, 2, &halos, &mut || Ok(()), &mut |z| {
                parts.push(z.into_tensor());
                Ok(())
            })
            .unwrap();
            bits(&Tensor::cat(&parts, 1).unwrap())
        };
        assert!(with(&|_| ()) == bits(&whole));
        assert!(with(&|halo| (halo.before, halo.behind) = (80, 80)) == bits(&whole));
        assert!(with(&|halo| halo.before = 48) != bits(&whole));
        assert!(with(&|halo| halo.behind = 48) != bits(&whole));
    }
}

#[test]
fn an_encode_keeps_to_its_limit_or_gives_the_figure() {
    for vae in tiny() {
        let (height, width) = (96 * side(&vae), side(&vae));
        let x = noise(7, 0.5, &[3, 9, height, width]);
        let whole = encode(&vae, &x, &[9]);
        let needs = |frames, plan| {
            ClipMemory::encode(vae.architecture(), vae.precision(), (frames, height, width), plan).total()
        };
        let limited = |bytes| EncodeOptions::default().with_max_bytes(Some(bytes));
        let enough = needs(9, ClipPlan::Whole);
        assert_eq!(bits(&encoded_clip(&vae, &x, 4, &limited(enough)).unwrap()), bits(&whole));
        // In bands, as nothing else fits, and with frames left over.
        let less = needs(9, ClipPlan::Bands(2));
        assert!(less < enough);
        assert_eq!(vae.encode_plan((9, height, width), &limited(less)).unwrap(), ClipPlan::Bands(2));
        assert!(relative_l2(&encoded_clip(&vae, &x, 2, &limited(less)).unwrap(), &whole) < 1e-6);
        let seven = x.narrow(1, 0, 7).unwrap();
        assert!(matches!(encoded_clip(&vae, &seven, 1, &limited(less)), Err(Error::Frames { got: 7, .. })));
        let trimmed = encoded_clip(&vae, &seven, 1, &limited(less).with_remainder(Remainder::Trim)).unwrap();
        assert!(relative_l2(&trimmed, &whole.narrow(1, 0, 2).unwrap()) < 1e-6);
        let repeated = encoded_clip(&vae, &seven, 1, &limited(less).with_remainder(Remainder::Repeat)).unwrap();
        let last = seven.narrow(1, 6, 1).unwrap();
        let nine = Tensor::cat(&[&seven, &last, &last], 1).unwrap();
        assert!(relative_l2(&repeated, &encode(&vae, &nine, &[9])) < 1e-6);
        // Nothing fits; and a clip without end is not taken in for ever.
        let error = encoded_clip(&vae, &x, 4, &limited(1000)).unwrap_err();
        assert!(matches!(error, Error::Memory { what: "encoding", max_bytes: 1000, .. }), "{error}");
        let mut taken = 0;
        let mut endless = std::iter::repeat_with(|| {
            taken += 4;
            Ok(x.narrow(1, 0, 4).unwrap())
        });
        let result = vae.encode_clip(&mut endless, &limited(less), &Silent, &mut |_| Ok(()));
        assert!(matches!(result, Err(Error::Memory { needed, .. }) if needed > less));
        assert!(taken as u64 * (12 * height * width) as u64 <= less + (48 * height * width) as u64, "{taken}");
        // Frames of another size in between.
        let mut mixed = [x.clone(), noise(1, 0.5, &[3, 1, height, 2 * width])].map(Ok).into_iter();
        let result = vae.encode_clip(&mut mixed, &limited(less), &Silent, &mut |_| Ok(()));
        assert!(matches!(result, Err(Error::ExtentsChanged { .. })));
    }
}

#[test]
fn a_limit_that_nothing_fits_gives_the_figure() {
    let [vae, _] = tiny();
    let z = latents(1, [4, 3, 4, 4]);
    let options = DecodeOptions::default().with_max_bytes(Some(1000));
    let error = clip(&vae, &z, &options).unwrap_err();
    assert!(matches!(error, Error::Memory { max_bytes: 1000, .. }), "{error}");
    let whole = ClipMemory::decode(vae.architecture(), vae.precision(), (3, 4, 4), ClipPlan::Whole).total();
    assert!(clip(&vae, &z, &DecodeOptions::default().with_max_bytes(Some(whole))).is_ok());
}
