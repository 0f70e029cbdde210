//! Rounding to 8-bit floats with 4 bits of exponent and 3 of mantissa.

use rayon::prelude::*;

/// The largest value.
const LARGEST: f32 = 448.0;
/// Exponent of the least normal value; the steps below it are those above it.
const LEAST_EXPONENT: i32 = -6;

/// The factor that brings the largest magnitude of a matrix to the largest value; 1 for a matrix of zeros.
pub(super) fn scale(largest: f32) -> f32 {
    let scale = largest / LARGEST;
    if scale > 0.0 { scale } else { 1.0 }
}

/// The codes of the values nearest to `x / scale`, ties to the even code.
pub(super) fn encode(x: &[f32], scale: f32) -> Vec<u8> {
    x.par_iter().map(|x| nearest(x / scale)).collect()
}

fn nearest(x: f32) -> u8 {
    let magnitude = x.abs().min(LARGEST);
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(LEAST_EXPONENT);
    // There are 8 steps from one power of two to the next, and the product with a power of two is exact.
    let steps = (magnitude * power_of_two(3 - exponent)).round_ties_even() as i32;
    // Steps that were rounded up to the next power of two carry into the exponent.
    let code = 8 * (exponent - LEAST_EXPONENT) + steps;
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// `2^exponent`, of a normal number.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use candle_fork::quant::Fp8Format;

    use super::*;

    #[test]
    fn codes_are_candles() {
        let mut x: Vec<f32> = (-4700..4700).map(|i| i as f32 * 0.0953).collect();
        // Ties, the ends, and what lies below the least value.
        x.extend([17.0, 19.0, 18.0, 448.0, 0.0, 0.001_953_125, 0.000_976_562_5, 0.002_929_687_5, 1e-9, -448.0, -0.01]);
        x.extend((0..=0x7e).map(|code| Fp8Format::E4M3.widen(code)));
        x.retain(|v| v.abs() <= LARGEST);
        let candle = Tensor::new(x.as_slice(), &Device::Cpu).unwrap().to_dtype(DType::F8E4M3).unwrap();
        let candle: Vec<f32> = candle.to_dtype(DType::F32).unwrap().to_vec1().unwrap();
        for ((x, code), candle) in x.iter().zip(encode(&x, 1.0)).zip(candle) {
            assert_eq!(Fp8Format::E4M3.widen(code), candle, "{x}");
        }
    }

    #[test]
    fn the_largest_magnitude_is_kept() {
        let x = [0.5f32, -3.0, 2.999];
        let scale = scale(3.0);
        let back: Vec<f32> = encode(&x, scale).into_iter().map(|code| Fp8Format::E4M3.widen(code) * scale).collect();
        assert_eq!(back[1], -3.0);
        assert!(back.iter().zip(x).all(|(y, x)| (y - x).abs() <= x.abs() / 16.0), "{back:?}");
        assert_eq!(super::scale(0.0), 1.0);
        assert_eq!(encode(&[1e9, -1e9], 1.0), [0x7e, 0xfe]);
    }
}
