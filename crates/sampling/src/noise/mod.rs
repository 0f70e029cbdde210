//! Seeded Gaussian noise, made on the host.
//!
//! Noise is never drawn on a device: what a seed means must not depend on the graphics card, the number of threads or
//! what was drawn before. A stream belongs to one seed; item `i` of a batch draws from the stream of `seed + i` (modulo
//! 2^64), so it equals the single run with that seed.

mod mt19937;
mod philox;
mod torch_cpu;

use std::fmt;
use std::str::FromStr;

/// The generators; `FromStr` and `Display` use the names of `--rng`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum NoiseGenerator {
    /// Philox4x32-10 counters and the Box-Muller transform (`philox`, also `default`).
    ///
    /// **Stream.** Value `i` depends on `(seed, i)` and on nothing else, so a shorter stream is the beginning of a
    /// longer one. All integers little end first:
    /// - key = `(seed mod 2^32, seed / 2^32)`;
    /// - counter = `(0, 0, i mod 2^32, i / 2^32)`;
    /// - `(x0, x1, _, _)` = Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of
    ///   key and counter;
    /// - `u = (x0 + 1/2) / 2^32`, `v = (x1 + 1/2) / 2^32`, both strictly between 0 and 1;
    /// - value = `sqrt(-2 ln u) * sin(2 pi v)`, so no value exceeds 6.77 in size.
    ///
    /// This is the layout of cuRAND's first normal of subsequence `i`, which `torch.randn` on one CUDA device returns
    /// for tensors of moderate size, and which other programs imitate for that reason: the same seed gives them the
    /// same noise up to the rounding of their `f32` arithmetic.
    ///
    /// **Numerics.** Computed in `f64` with the pure Rust functions of the crate `libm`, then rounded once to `f32`:
    /// the same bits on every machine. Frozen by hashes in the tests.
    #[default]
    Philox,
    /// `torch.Generator().manual_seed(seed)` and `torch.randn` in f32 on a CPU (`torch-cpu`).
    ///
    /// **Stream.** The Mersenne Twister MT19937 seeded with the low 32 bits of the seed, as torch does: seeds that
    /// differ by a multiple of 2^32 give the same noise. A stream depends on its length, and short ones are of another
    /// kind:
    /// - 16 values or more: 24-bit uniforms, transformed in blocks of 16 in `f32`. If the length is not a multiple of
    ///   16, the last 16 values are drawn afresh;
    /// - fewer than 16: 53-bit uniforms, transformed pair by pair in `f64`.
    ///
    /// **Numerics.** The same bits on every machine, within 5e-7 of torch on x86-64 with AVX2 or AVX-512 (its two paths
    /// agree bit for bit), equal to torch below 16 values; held by `tests/torch_noise.rs`. Where torch runs
    /// without those instructions it rounds the angle otherwise and is up to 2.3e-6 from its own AVX2 values.
    TorchCpu,
}

impl NoiseGenerator {
    /// Every generator.
    pub const ALL: &'static [NoiseGenerator] = &[NoiseGenerator::Philox, NoiseGenerator::TorchCpu];

    /// `len` standard normal values of the stream of `seed`.
    #[must_use]
    pub fn normal(self, seed: u64, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        self.normal_into(seed, &mut values);
        values
    }

    /// Overwrites `values` with the standard normal values of the stream of `seed`.
    pub fn normal_into(self, seed: u64, values: &mut [f32]) {
        match self {
            NoiseGenerator::Philox => philox::normal_into(seed, values),
            NoiseGenerator::TorchCpu => torch_cpu::normal_into(seed, values),
        }
    }
}

impl fmt::Display for NoiseGenerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            NoiseGenerator::Philox => "philox",
            NoiseGenerator::TorchCpu => "torch-cpu",
        })
    }
}

impl FromStr for NoiseGenerator {
    type Err = UnknownGenerator;

    fn from_str(name: &str) -> Result<Self, UnknownGenerator> {
        match name {
            "philox" | "default" => Ok(NoiseGenerator::Philox),
            "torch-cpu" => Ok(NoiseGenerator::TorchCpu),
            _ => Err(UnknownGenerator(name.to_owned())),
        }
    }
}

/// The name of a generator is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown noise generator `{0}`, expected one of: philox, torch-cpu")]
pub struct UnknownGenerator(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_others_are_errors() {
        for &generator in NoiseGenerator::ALL {
            assert_eq!(generator.to_string().parse(), Ok(generator));
        }
        assert_eq!("default".parse(), Ok(NoiseGenerator::default()));
        assert_eq!(NoiseGenerator::default(), NoiseGenerator::Philox);
        for name in ["", "Philox", "cuda", "torch", "philox "] {
            assert_eq!(name.parse::<NoiseGenerator>(), Err(UnknownGenerator(name.to_owned())));
        }
        let message = UnknownGenerator("cuda".to_owned()).to_string();
        assert_eq!(message, "unknown noise generator `cuda`, expected one of: philox, torch-cpu");
    }

    /// The first four moments of a large draw, and no correlation between neighbours: the standard errors at a million
    /// values are 1e-3 (mean), 1.4e-3 (variance), 2.4e-3 (skewness), 4.9e-3 (kurtosis), 1e-3 (correlation).
    #[test]
    fn values_are_standard_normal() {
        const LEN: usize = 1_000_000;
        for &generator in NoiseGenerator::ALL {
            for seed in [0, 1, u64::MAX] {
                let values = generator.normal(seed, LEN);
                let moment = |k: i32| values.iter().map(|&x| f64::from(x).powi(k)).sum::<f64>() / LEN as f64;
                let neighbours = values.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1])).sum::<f64>() / LEN as f64;
                assert!(moment(1).abs() < 4e-3, "{generator} {seed}: mean {}", moment(1));
                assert!((moment(2) - 1.0).abs() < 6e-3, "{generator} {seed}: variance {}", moment(2));
                assert!(moment(3).abs() < 1.2e-2, "{generator} {seed}: third moment {}", moment(3));
                assert!((moment(4) - 3.0).abs() < 4e-2, "{generator} {seed}: fourth moment {}", moment(4));
                assert!(neighbours.abs() < 4e-3, "{generator} {seed}: neighbours {neighbours}");
            }
        }
    }

    #[test]
    fn seeds_do_not_share_values() {
        for &generator in NoiseGenerator::ALL {
            let (a, b) = (generator.normal(7, 4096), generator.normal(8, 4096));
            assert!(a.iter().zip(&b).filter(|(x, y)| x == y).count() < 4, "{generator}");
        }
    }

    #[test]
    fn values_do_not_depend_on_what_the_buffer_held() {
        for &generator in NoiseGenerator::ALL {
            for len in [0, 1, 15, 16, 17, 100] {
                let mut values = vec![f32::NAN; len];
                generator.normal_into(3, &mut values);
                assert_eq!(values, generator.normal(3, len), "{generator} {len}");
            }
        }
    }
}
