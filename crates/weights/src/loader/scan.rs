//! One pass over the stored bits of a tensor: is every value finite, is any value not zero.
//!
//! The magnitude bits of an IEEE float, read as an integer, grow with the magnitude: infinity is larger than every finite
//! number and a NaN larger than infinity. So the largest of them answers both questions, without widening anything, and
//! one bound serves conversions too: a value survives the conversion to a narrower type if its bits lie below those of
//! the smallest value that rounds to infinity there.

use candle_core::DType;
use candle_fork::quant::Fp8Format;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::{dtype::StoredDType, quant::Quantisation};

/// Bytes that one thread looks at in one go.
const PIECE: usize = 1 << 20;

/// What the pass found.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scan {
    /// The first value that is not finite, or not finite any more after conversion.
    pub(crate) bad: Option<Bad>,
    /// No value other than zero (of either sign). False for a tensor without elements and for integers.
    pub(crate) all_zero: bool,
}

/// A value that may not be there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bad {
    /// Flat index.
    pub(crate) index: usize,
    /// `NaN`, `inf`, or a number and the type that cannot hold it.
    pub(crate) value: String,
}

/// Integer with the bits of a float, little-endian in the file.
trait Bits: Copy + Ord + Send + Sync {
    const SIZE: usize;
    const ZERO: Self;
    /// Magnitudes of all values.
    fn magnitudes(bytes: &[u8]) -> impl Iterator<Item = Self>;
    /// The largest magnitude.
    fn largest(bytes: &[u8]) -> Self;
}

macro_rules! bits {
    ($int:ty) => {
        impl Bits for $int {
            const SIZE: usize = size_of::<$int>();
            const ZERO: Self = 0;
            fn magnitudes(bytes: &[u8]) -> impl Iterator<Item = Self> {
                // Clearing the sign leaves a number that is never negative, so signed maxima, which every CPU has, serve.
                bytes.as_chunks().0.iter().map(|raw| Self::from_le_bytes(*raw) & Self::MAX)
            }
            fn largest(bytes: &[u8]) -> Self {
                // Independent maxima, so that they become vectors.
                const LANES: usize = 64;
                let (blocks, rest) = bytes.as_chunks::<{ LANES * size_of::<$int>() }>();
                let mut max = [0; LANES];
                for block in blocks {
                    for (m, raw) in max.iter_mut().zip(block.as_chunks().0) {
                        *m = (*m).max(Self::from_le_bytes(*raw) & Self::MAX);
                    }
                }
                max.into_iter().chain(Self::magnitudes(rest)).fold(0, Self::max)
            }
        }
    };
}
bits!(i8);
bits!(i16);
bits!(i32);
bits!(i64);

/// Looks at all values of a tensor stored as `dtype`; `target` is the type that it will be converted to, if any.
pub(crate) fn scan(bytes: &[u8], dtype: StoredDType, target: Option<DType>) -> Scan {
    let limit = limit(dtype, target);
    let target = target.map_or(String::new(), |t| StoredDType::from_candle(t).map_or(String::new(), |t| t.to_string()));
    let text = |v: f64| {
        if v.is_finite() { format!("{v:e}, too large for {target}") } else { v.to_string() }
    };
    match dtype {
        StoredDType::F16 => run::<i16>(bytes, limit as i16, |b| text(f16::from_le_bytes([b[0], b[1]]).to_f64())),
        StoredDType::BF16 => run::<i16>(bytes, limit as i16, |b| text(bf16::from_le_bytes([b[0], b[1]]).to_f64())),
        StoredDType::F32 => {
            run::<i32>(bytes, limit as i32, |b| text(f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()))
        }
        StoredDType::F64 => {
            run::<i64>(bytes, limit, |b| text(f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])))
        }
        _ => Scan { bad: None, all_zero: false },
    }
}

/// Looks at the codes of a quantised tensor: 8-bit floats for NaN and infinity, blocks for scales that are not finite.
/// Scales that are tensors of their own are looked at where they are read.
pub(crate) fn codes(bytes: &[u8], quantisation: &Quantisation) -> Scan {
    match quantisation {
        Quantisation::Fp8 { format, .. } => {
            let first_bad: i8 = if *format == Fp8Format::E4M3 { 0x7f } else { 0x7c };
            run(bytes, first_bad, |b| format.widen(b[0]).to_string())
        }
        Quantisation::Ggml(blocks) => {
            let (size, scales) = (blocks.block_bytes(), blocks.half_scales());
            let halves = |block: &[u8]| -> [f32; 2] {
                let mut values =
                    scales.iter().filter_map(|&at| Some(f16::from_le_bytes(*block.get(at..)?.first_chunk()?)));
                [(); 2].map(|()| values.next().map_or(0.0, f16::to_f32))
            };
            let bad_scale = |block: &[u8]| halves(block).into_iter().find(|scale| !scale.is_finite());
            let found = bytes.par_chunks_exact(size).position_first(|block| bad_scale(block).is_some());
            let bad = found.map(|block| {
                let scale = bad_scale(&bytes[block * size..][..size]).unwrap_or(f32::NAN);
                Bad { index: block * blocks.block(), value: format!("in a block whose scale is {scale}") }
            });
            let is_zero = |block: &[u8]| halves(block) == [0.0; 2];
            let all_zero = !scales.is_empty() && !bytes.is_empty() && bytes.par_chunks_exact(size).all(is_zero);
            Scan { bad, all_zero }
        }
        Quantisation::Int8 { .. } | Quantisation::W4A4 { .. } => {
            Scan { bad: None, all_zero: !bytes.is_empty() && bytes.par_iter().all(|&b| b == 0) }
        }
        _ => Scan { bad: None, all_zero: false },
    }
}

fn run<B: Bits>(bytes: &[u8], limit: B, text: impl Fn(&[u8]) -> String) -> Scan {
    let max = if bytes.len() <= PIECE {
        B::largest(bytes)
    } else {
        bytes.par_chunks(PIECE).map(B::largest).reduce(|| B::ZERO, Ord::max)
    };
    let bad = if max < limit {
        None
    } else {
        let index = B::magnitudes(bytes).position(|m| m >= limit);
        index.map(|index| Bad { index, value: text(&bytes[index * B::SIZE..]) })
    };
    Scan { bad, all_zero: max == B::ZERO && !bytes.is_empty() }
}

/// Magnitude bits from which on a value of type `stored` is not finite, or rounds to infinity in `target`. Ties round to
/// even, so the value half a step above the largest finite one is the first that becomes infinite.
fn limit(stored: StoredDType, target: Option<DType>) -> i64 {
    let infinity = match stored {
        StoredDType::F16 => 0x7c00,
        StoredDType::BF16 => 0x7f80,
        StoredDType::F32 => 0x7f80_0000,
        _ => 0x7ff0_0000_0000_0000,
    };
    let overflow = match (stored, target) {
        // 65520, or the next bf16 above it, 65536.
        (StoredDType::BF16, Some(DType::F16)) => i64::from(bf16::from_f32(65536.0).to_bits()),
        (StoredDType::F32, Some(DType::F16)) => i64::from(65520.0f32.to_bits()),
        // 2^128 - 2^119: half a step above the largest bf16.
        (StoredDType::F32, Some(DType::BF16)) => 0x7f7f_8000,
        // 2^128 - 2^103: half a step above the largest f32.
        (StoredDType::F64, Some(DType::F32)) => 0x47ef_ffff_f000_0000,
        // Converted in two roundings or by truncation, depending on the CPU: the largest finite value is the bound.
        (StoredDType::F64, Some(DType::F16)) => f16::MAX.to_f64().to_bits().cast_signed() + 1,
        (StoredDType::F64, Some(DType::BF16)) => bf16::MAX.to_f64().to_bits().cast_signed() + 1,
        _ => infinity,
    };
    overflow.min(infinity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// The bounds, against the conversions of candle's own number types, one step below and at the bound.
    #[test]
    fn bounds_are_the_first_values_that_overflow() {
        let f = |bits: i64| f32::from_bits(bits as u32);
        let d = |bits: i64| f64::from_bits(bits as u64);
        let at = |s, t| limit(s, Some(t));
        let b = at(StoredDType::F32, DType::F16);
        assert!(f16::from_f32(f(b)).is_infinite() && f16::from_f32(f(b - 1)).is_finite());
        let b = at(StoredDType::F32, DType::BF16);
        assert!(bf16::from_f32(f(b)).is_infinite() && bf16::from_f32(f(b - 1)).is_finite());
        let b = at(StoredDType::F64, DType::F32);
        assert!((d(b) as f32).is_infinite() && (d(b - 1) as f32).is_finite());
        let b = at(StoredDType::F64, DType::F16);
        assert!(d(b) > 65504.0 && f16::from_f64(d(b - 1)) == f16::MAX);
        let b = at(StoredDType::F64, DType::BF16);
        assert!(d(b) > bf16::MAX.to_f64() && bf16::from_f64(d(b - 1)) == bf16::MAX);
        let b = at(StoredDType::BF16, DType::F16);
        let v = |bits: i64| f16::from_f32(bf16::from_bits(bits as u16).to_f32());
        assert!(v(b).is_infinite() && v(b - 1).is_finite());
        // Widening never overflows.
        assert_eq!(at(StoredDType::F16, DType::F32), 0x7c00);
        assert_eq!(at(StoredDType::F16, DType::BF16), 0x7c00);
        assert_eq!(at(StoredDType::F32, DType::F64), 0x7f80_0000);
    }

    #[test]
    fn nan_and_infinity_are_found_with_their_index() {
        let n = 3 * PIECE / 4 + 5;
        for (bad, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (-f32::NAN, "NaN")]
        {
            for index in [0, 1, n / 2, n - 1] {
                let mut values = vec![-1.5f32; n];
                values[index] = bad;
                let found = scan(&f32s(&values), StoredDType::F32, None).bad;
                assert_eq!(found, Some(Bad { index, value: text.to_owned() }));
            }
        }
        for dtype in [StoredDType::F16, StoredDType::BF16] {
            let nan = match dtype {
                StoredDType::F16 => f16::NAN.to_le_bytes(),
                _ => bf16::NAN.to_le_bytes(),
            };
            let bytes = [[0, 0x3c], nan, nan].concat();
            assert_eq!(scan(&bytes, dtype, None).bad.map(|b| b.index), Some(1));
        }
        assert_eq!(scan(&f64::NAN.to_le_bytes(), StoredDType::F64, None).bad.map(|b| b.index), Some(0));
    }

    #[test]
    fn conversions_that_overflow_are_found() {
        let bytes = f32s(&[1.0, -7.0e4]);
        assert_eq!(scan(&bytes, StoredDType::F32, Some(DType::F32)).bad, None);
        let bad = scan(&bytes, StoredDType::F32, Some(DType::F16)).bad;
        assert_eq!(bad, Some(Bad { index: 1, value: "-7e4, too large for F16".to_owned() }));
    }

    #[test]
    fn zeros_are_found() {
        assert!(scan(&f32s(&[0.0, -0.0, 0.0]), StoredDType::F32, None).all_zero);
        assert!(!scan(&f32s(&[0.0, 1e-45, 0.0]), StoredDType::F32, None).all_zero);
        assert!(!scan(&[], StoredDType::F32, None).all_zero);
        assert!(!scan(&[0, 0], StoredDType::U8, None).all_zero);
    }
}
