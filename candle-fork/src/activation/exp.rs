//! An exponential that vectorises.

/// `exp(x)` for `x <= 0`, within 1 ulp of the exact value; results below `f32::MIN_POSITIVE` become 0, NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `exp(r) = 1 + r + r^2 p(r)` with a minimax polynomial `p` of degree 4
/// (relative error 3.3e-9). No branches, table or call, and no fused multiply-add: a loop over it becomes vector code,
/// and its bits are the same on every machine. Held by the test `exp_is_within_one_ulp`.
#[inline(always)]
pub(crate) fn exp_nonpositive(x: f32) -> f32 {
    // ln 2 in two parts; the high one has few enough bits that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to a whole number and leaves that number in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Below this exp(x) is subnormal, and n would leave the range of the exponent.
    const LOWEST: f32 = -87.336_54;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let p = 0.001_381_314_2 * r + 0.008_369_419;
    let p = p * r + 0.041_668_456;
    let p = p * r + 0.166_665_15;
    let p = p * r + 0.499_999_94;
    let mantissa = (p * r) * r + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < LOWEST { 0.0 } else { mantissa * scale }
}

/// `x / (1 + exp(-x))`, accurate down to the smallest results.
///
/// Both signs use `h = exp(-|x| / 2)`: positive x gives `x / (1 + h^2)`, negative x gives `x h^2 / (1 + h^2)` with one
/// factor h applied last. The textbook form overflows in `exp(-x)` at x = -88.7, where the result is still 3e-37.
#[inline(always)]
pub(crate) fn silu_f32(x: f32) -> f32 {
    let h = exp_nonpositive(x.abs() * -0.5);
    let negative = x < 0.0;
    let first = if negative { h } else { 1.0 };
    (x * first / (1.0 + h * h)) * first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_one_ulp() {
        // Every 37th float from -0 to the threshold: 31 million arguments.
        let last = (-87.336_54f32).to_bits();
        let mut worst = (0.0, 0.0);
        for bits in ((-0.0f32).to_bits()..=last).step_by(37).chain([last]) {
            let x = f32::from_bits(bits);
            let want = f64::from(x).exp();
            let ulp = f64::from((want as f32).next_up()) - f64::from(want as f32);
            let error = (f64::from(exp_nonpositive(x)) - want).abs() / ulp;
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 <= 1.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-0.0), 1.0);
        assert_eq!(exp_nonpositive(-1e-30), 1.0);
        assert!(exp_nonpositive(-87.33) > 0.0);
        for x in [-87.4, -104.0, -1e4, -1e38, f32::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x), 0.0, "{x}");
        }
        assert!(exp_nonpositive(f32::NAN).is_nan());
    }

    #[test]
    fn silu_where_the_textbook_form_fails() {
        for x in [-89.0f32, -95.0, -100.0, -0.0, 0.0, -1e-30, 1e-30, -1e30, 1e30, -20.0, 20.0] {
            let want = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(silu_f32(x)) - want).abs();
            // The smallest subnormal is 1.4e-45.
            assert!(error <= 5e-7 * want.abs() + 1.5e-45, "{x}: {} instead of {want}", silu_f32(x));
        }
        assert_eq!(silu_f32(f32::INFINITY), f32::INFINITY);
        assert!(silu_f32(f32::NAN).is_nan());
    }
}
