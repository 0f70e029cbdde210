//! The default generator; what it computes is told at [`NoiseGenerator::Philox`](super::NoiseGenerator::Philox).

use std::f64::consts::TAU;

use rayon::prelude::*;

/// Multipliers and key increments of Philox4x32, and its number of rounds (Salmon et al. 2011, table 2 and section 4.3).
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The block function Philox4x32-10: a bijection of 128-bit counters under a 64-bit key.
fn philox4x32_10(mut key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    for _ in 0..ROUNDS {
        let (hi0, lo0) = multiply(MULTIPLIERS[0], c0);
        let (hi1, lo1) = multiply(MULTIPLIERS[1], c2);
        (c0, c1, c2, c3) = (hi1 ^ c1 ^ key[0], lo1, hi0 ^ c3 ^ key[1], lo0);
        // The increment after the last round is not used.
        key = [key[0].wrapping_add(KEY_INCREMENTS[0]), key[1].wrapping_add(KEY_INCREMENTS[1])];
    }
    [c0, c1, c2, c3]
}

/// High and low half of a product.
fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// The middle of the `x`-th of 2^32 equal parts of the unit interval; exact.
fn unit_interval(x: u32) -> f64 {
    const PART: f64 = 1.0 / 4_294_967_296.0;
    (f64::from(x) + 0.5) * PART
}

/// Value `index` of the stream of `seed`.
fn normal(seed: u64, index: u64) -> f32 {
    let [x0, x1, ..] = philox4x32_10(halves(seed), {
        let [low, high] = halves(index);
        [0, 0, low, high]
    });
    let radius = libm::sqrt(-2.0 * libm::log(unit_interval(x0)));
    (radius * libm::sin(TAU * unit_interval(x1))) as f32
}

/// Low and high half.
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Values of a task: a fraction of a millisecond.
const TASK: usize = 4096;

/// Overwrites `values` with the beginning of the stream of `seed`. Values depend on nothing but their index, so threads
/// share them.
pub(super) fn normal_into(seed: u64, values: &mut [f32]) {
    values.par_chunks_mut(TASK).enumerate().for_each(|(task, values)| {
        for (index, value) in ((task * TASK) as u64..).zip(values) {
            *value = normal(seed, index);
        }
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::NoiseGenerator::Philox;
    use super::*;

    /// The known answers that the authors of Random123 publish (`kat_vectors`, `philox4x32 10`).
    #[test]
    fn block_function_gives_the_published_answers() {
        let cases = [
            ([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (key, counter, expected) in cases {
            assert_eq!(philox4x32_10(key, counter), expected, "{key:x?} {counter:x?}");
        }
    }

    /// What `torch.randn(5, device="cuda")` prints after `torch.manual_seed(0)`, to more digits as the imitations
    /// of it in other programs document them.
    #[test]
    fn seed_zero_begins_as_on_a_cuda_device() {
        let expected = [-0.924_662_6, -0.425_344_15, -2.643_845_8, 0.145_183_88, -0.120_866_47_f32];
        for (value, expected) in Philox.normal(0, 5).into_iter().zip(expected) {
            assert!((value - expected).abs() < 1e-6, "{value} {expected}");
        }
    }

    #[test]
    fn uniforms_lie_strictly_inside_the_unit_interval() {
        assert_eq!(unit_interval(0), 0.5_f64.powi(33));
        assert_eq!(unit_interval(u32::MAX), 1.0 - 0.5_f64.powi(33));
        // The largest size of a value, as documented.
        let largest = libm::sqrt(-2.0 * libm::log(unit_interval(0)));
        assert!(largest < 6.77 && largest > 6.76);
    }

    #[test]
    fn both_halves_of_seed_and_index_count() {
        let value = normal(5, 9);
        for (seed, index) in [(4, 9), (5 + (1 << 32), 9), (5, 8), (5, 9 + (1 << 32)), (9, 5)] {
            assert_ne!(value, normal(seed, index), "{seed} {index}");
        }
    }

    /// FNV-1a, 64 bits, of the little-endian bytes.
    fn hash(values: &[f32]) -> u64 {
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    }

    /// A picture belongs to its seed for ever. If this fails, every archived seed has lost its picture.
    #[test]
    fn streams_are_frozen() {
        assert_eq!(hash(&[]), 0xcbf2_9ce4_8422_2325);
        let frozen = [
            (0, 0x1232_0bb3_0207_498c),
            (1, 0x0805_aae5_dd44_1e1a),
            (1 << 32, 0x4952_0fe0_c7c3_8726),
            (u64::MAX, 0x8e9a_4f16_5b21_49dd),
        ];
        for (seed, expected) in frozen {
            let hash = hash(&Philox.normal(seed, 1_000_000));
            assert_eq!(hash, expected, "seed {seed}: {hash:#018x}");
        }
    }

    proptest! {
        #[test]
        fn a_shorter_stream_is_the_beginning_of_a_longer_one(seed: u64, short in 0..200_usize, more in 0..200_usize) {
            let long = Philox.normal(seed, short + more);
            prop_assert_eq!(&Philox.normal(seed, short)[..], &long[..short]);
        }
    }
}
