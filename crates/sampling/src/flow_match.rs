//! The flow-match Euler sampler of FLUX.2.
//!
//! A rectified flow carries noise (sigma 1) to a picture (sigma 0) along `x = (1 - sigma) * picture + sigma * noise`;
//! the model answers with the velocity `noise - picture`, and each step walks along it to the next sigma. The sigmas
//! are evenly spaced numbers bent towards 1 by a shift `mu` that grows with the number of image tokens.

use crate::{Error, Result};

/// The largest number of steps of a schedule: as many as the models were trained on.
pub const MAX_STEPS: usize = 1000;

/// Above this many image tokens the shift does not depend on the number of steps.
const LAST_SEQ_LEN_BY_STEPS: usize = 4300;

/// Two straight lines were fitted to the best shift against the number of tokens, at 10 and at 200 steps.
const LINE_AT_10: (f64, f64) = (8.738_095_24e-5, 1.898_333_33);
const LINE_AT_200: (f64, f64) = (1.6927e-4, 0.456_666_66);

/// The shift mu for an image of `image_seq_len` tokens and `num_inference_steps` steps.
///
/// `image_seq_len` is `(height / 16) * (width / 16)` of the picture that is made; reference images do not count.
///
/// **Formula** (`black-forest-labs/flux2`: `src/flux2/sampling.py`, `compute_empirical_mu`). Up to 4300 tokens the
/// line through `(10, m10)` and `(200, m200)`, read at `num_inference_steps`, where
/// `m10 = 8.73809524e-5 * seq + 1.89833333` and `m200 = 1.6927e-4 * seq + 0.45666666`; above 4300 tokens `m200`. With
/// few steps mu therefore falls from 2.31 to 1.18 between 4300 and 4301 tokens (4 steps): the published models are run
/// that way, so it is kept.
///
/// **Numerics.** `f64` throughout.
#[must_use]
pub fn empirical_mu(image_seq_len: usize, num_inference_steps: usize) -> f64 {
    let line = |(slope, intercept): (f64, f64)| slope * image_seq_len as f64 + intercept;
    let at_200 = line(LINE_AT_200);
    if image_seq_len > LAST_SEQ_LEN_BY_STEPS {
        return at_200;
    }
    let slope = (at_200 - line(LINE_AT_10)) / 190.0;
    slope * num_inference_steps as f64 + (at_200 - 200.0 * slope)
}

/// The schedule and its Euler step.
///
/// **Formula** (`huggingface/diffusers`: `scheduling_flow_match_euler_discrete.py` with `use_dynamic_shifting` and
/// exponential shift). `t_i = 1 - i / n` for `i` in `0..n`, `sigma_i = e^mu / (e^mu + 1 / t_i - 1)`, `sigma_n = 0`.
///
/// **Numerics.** The sigmas are computed in `f64` and rounded once to `f32`; diffusers rounds in between, so its last
/// digits differ (at most 1.2e-7, held by `tests/flow_match.rs`).
#[derive(Debug, Clone, PartialEq)]
pub struct FlowMatchEuler {
    /// At least two values.
    sigmas: Vec<f32>,
}

impl FlowMatchEuler {
    /// The schedule with the [`empirical_mu`] of an image of `image_seq_len` tokens.
    ///
    /// # Errors
    /// - [`Error::NoTokens`] if `image_seq_len` is 0.
    /// - [`Error::Steps`] if `num_inference_steps` is 0 or above [`MAX_STEPS`].
    pub fn new(image_seq_len: usize, num_inference_steps: usize) -> Result<Self> {
        if image_seq_len == 0 {
            return Err(Error::NoTokens);
        }
        Self::with_mu(empirical_mu(image_seq_len, num_inference_steps), num_inference_steps)
    }

    /// The schedule with a given shift: 0 spaces the sigmas evenly, larger values spend more steps near sigma 1.
    ///
    /// # Errors
    /// - [`Error::Shift`] if `mu` is not finite.
    /// - [`Error::Steps`] if `num_inference_steps` is 0 or above [`MAX_STEPS`].
    pub fn with_mu(mu: f64, num_inference_steps: usize) -> Result<Self> {
        if num_inference_steps == 0 || num_inference_steps > MAX_STEPS {
            return Err(Error::Steps { num_inference_steps, max: MAX_STEPS });
        }
        if !mu.is_finite() {
            return Err(Error::Shift { mu });
        }
        // Divided by e^mu, so that a large shift cannot overflow to infinity over infinity; finite, so that the first
        // sigma of a very negative one is not infinity times 0.
        let shrink = libm::exp(-mu).min(f64::MAX);
        let n = num_inference_steps as f64;
        let sigma = |i: usize| 1.0 / (1.0 + shrink * (n / (n - i as f64) - 1.0));
        let sigmas = (0..num_inference_steps).map(|i| sigma(i) as f32).chain([0.0]).collect();
        Ok(Self { sigmas })
    }

    /// `num_inference_steps + 1` values from 1 down to 0: the noise levels before each step, and the end.
    #[must_use]
    pub fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    /// The `num_inference_steps` values that the model is asked at, one per step: the sigmas without the final 0.
    /// In the unit interval; diffusers' `scheduler.timesteps` are these times 1000.
    #[must_use]
    pub fn timesteps(&self) -> &[f32] {
        &self.sigmas[..self.num_inference_steps()]
    }

    /// Number of steps.
    #[must_use]
    pub fn num_inference_steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// Walks from `sigmas[index]` to `sigmas[index + 1]`: `latents += (sigma[index + 1] - sigma[index]) * velocity`,
    /// in `f32`, product and sum each rounded. The latents are untouched on error.
    ///
    /// # Errors
    /// - [`Error::StepIndex`] if `index` is not below the number of steps.
    /// - [`Error::Length`] if the two slices differ in length.
    pub fn step(&self, index: usize, latents: &mut [f32], velocity: &[f32]) -> Result<()> {
        let num_inference_steps = self.num_inference_steps();
        if index >= num_inference_steps {
            return Err(Error::StepIndex { index, num_inference_steps });
        }
        if latents.len() != velocity.len() {
            return Err(Error::Length { latents: latents.len(), velocity: velocity.len() });
        }
        let delta = self.sigmas[index + 1] - self.sigmas[index];
        for (x, v) in latents.iter_mut().zip(velocity) {
            *x += delta * v;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(width: usize, height: usize) -> usize {
        (width / 16) * (height / 16)
    }

    /// Size, mu at 4 steps, the inner sigmas at 4 steps, mu at 50 steps: six decimals as published.
    type Row = ((usize, usize), f64, [f32; 3], Option<f64>);
    const TABLE: [Row; 7] = [
        ((64, 64), 1.945216, [0.954515, 0.874924, 0.699854], None),
        ((256, 256), 1.965567, [0.955391, 0.877134, 0.704112], Some(1.621607)),
        ((512, 512), 2.030690, [0.958085, 0.883982, 0.717497], Some(1.701956)),
        ((768, 768), 2.139227, [0.962234, 0.894658, 0.738969], None),
        ((1024, 1024), 2.291180, [0.967384, 0.908144, 0.767200], Some(2.023351)),
        ((1360, 768), 2.289823, [0.967341, 0.908031, 0.766958], None),
        ((1792, 1792), 2.579990, [0.975364, 0.929563, 0.814781], Some(2.579990)),
    ];

    #[test]
    fn shifts_and_sigmas_have_the_published_digits() {
        for ((width, height), mu, inner, mu_50) in TABLE {
            let seq = tokens(width, height);
            assert_eq!(format!("{:.6}", empirical_mu(seq, 4)), format!("{mu:.6}"), "{width}x{height}");
            if let Some(mu_50) = mu_50 {
                assert_eq!(format!("{:.6}", empirical_mu(seq, 50)), format!("{mu_50:.6}"), "{width}x{height}");
            }
            let sampler = FlowMatchEuler::new(seq, 4).unwrap();
            let [first, middle @ .., last] = sampler.sigmas() else { panic!("no sigmas") };
            assert_eq!((*first, *last), (1.0, 0.0));
            let printed: Vec<_> = middle.iter().map(|s| format!("{s:.6}")).collect();
            assert_eq!(printed, inner.map(|s| format!("{s:.6}")), "{width}x{height}");
        }
    }

    #[test]
    fn the_shift_jumps_above_4300_tokens() {
        assert_eq!(format!("{:.6}", empirical_mu(4300, 4)), "2.308478");
        assert_eq!(format!("{:.6}", empirical_mu(4301, 4)), "1.184697");
        assert_eq!(empirical_mu(4301, 4), empirical_mu(4301, 50));
    }

    #[test]
    fn schedules_fall_from_one_to_zero() {
        for steps in [1, 2, 4, 50, MAX_STEPS] {
            for seq in [1, 16, 4300, 4301, 12_544] {
                let sampler = FlowMatchEuler::new(seq, steps).unwrap();
                assert_eq!(sampler.num_inference_steps(), steps);
                assert_eq!(sampler.sigmas().len(), steps + 1);
                assert_eq!(sampler.timesteps(), &sampler.sigmas()[..steps]);
                assert_eq!((sampler.sigmas()[0], sampler.sigmas()[steps]), (1.0, 0.0));
                assert!(sampler.sigmas().windows(2).all(|pair| pair[0] > pair[1]), "{seq} tokens, {steps} steps");
            }
        }
    }

    #[test]
    fn one_step_is_the_whole_way() {
        let sampler = FlowMatchEuler::new(4096, 1).unwrap();
        assert_eq!(sampler.sigmas(), [1.0, 0.0]);
        let mut latents = [3.0, -1.0];
        sampler.step(0, &mut latents, &[1.0, 0.5]).unwrap();
        assert_eq!(latents, [2.0, -1.5]);
    }

    #[test]
    fn constant_velocity_arrives_wherever_the_sigmas_lie() {
        // The step lengths add up to -1, so noise - picture leads from noise to picture on any schedule.
        let (noise, picture) = (1.5_f32, -0.25_f32);
        for steps in [1, 4, 50] {
            let sampler = FlowMatchEuler::new(1024, steps).unwrap();
            let mut latents = [noise];
            for index in 0..steps {
                sampler.step(index, &mut latents, &[noise - picture]).unwrap();
            }
            assert!((latents[0] - picture).abs() < 2e-6, "{steps} steps end at {}", latents[0]);
        }
    }

    #[test]
    fn a_shift_of_zero_is_the_even_spacing() {
        assert_eq!(FlowMatchEuler::with_mu(0.0, 4).unwrap().sigmas(), [1.0, 0.75, 0.5, 0.25, 0.0]);
    }

    #[test]
    fn extreme_shifts_stay_finite() {
        for mu in [-1e308, -800.0, 800.0, 1e308] {
            let sampler = FlowMatchEuler::with_mu(mu, 3).unwrap();
            assert!(sampler.sigmas().iter().all(|s| (0.0..=1.0).contains(s)), "{mu}: {:?}", sampler.sigmas());
        }
    }

    #[test]
    fn bad_arguments_are_typed_errors() {
        assert_eq!(FlowMatchEuler::new(0, 4), Err(Error::NoTokens));
        for num_inference_steps in [0, MAX_STEPS + 1, usize::MAX] {
            let expected = Error::Steps { num_inference_steps, max: MAX_STEPS };
            assert_eq!(FlowMatchEuler::new(16, num_inference_steps), Err(expected));
        }
        assert!(matches!(FlowMatchEuler::with_mu(f64::NAN, 4), Err(Error::Shift { .. })));
        assert_eq!(FlowMatchEuler::new(16, 0).unwrap_err().to_string(), "0 steps asked for, expected 1 to 1000");
    }

    #[test]
    fn a_step_that_cannot_be_made_leaves_the_latents_alone() {
        let sampler = FlowMatchEuler::new(16, 4).unwrap();
        let mut latents = [1.0, 2.0];
        for index in [4, usize::MAX] {
            let expected = Error::StepIndex { index, num_inference_steps: 4 };
            assert_eq!(sampler.step(index, &mut latents, &[1.0, 1.0]), Err(expected));
        }
        assert_eq!(sampler.step(0, &mut latents, &[1.0]), Err(Error::Length { latents: 2, velocity: 1 }));
        assert_eq!(latents, [1.0, 2.0]);
    }
}
