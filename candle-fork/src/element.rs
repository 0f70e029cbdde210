//! Element types that the CPU ops compute on: read as f32, rounded once on the way out.
//!
//! The conversions are written without branches, so that a loop over them vectorises; a conversion with a branch or a
//! call per element costs several times the arithmetic of a norm.

use candle_core::WithDType;
use half::{bf16, f16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};

/// A float that widens to f32 exactly and rounds from f32 to nearest, ties to even.
pub(crate) trait Element: WithDType + bytemuck::Pod {
    /// The exact value.
    fn widen(self) -> f32;
    /// The nearest value of this type; overflow gives an infinity, NaN stays NaN.
    fn round(value: f32) -> Self;
    /// `len` zeros, from untouched pages where the allocator has them.
    fn zeros(len: usize) -> Vec<Self>;

    /// [`Element::widen`] of each; both of one length.
    #[inline(always)]
    fn widen_slice(src: &[Self], dst: &mut [f32]) {
        for (y, x) in dst.iter_mut().zip(src) {
            *y = x.widen();
        }
    }

    /// [`Element::round`] of each; both of one length.
    #[inline(always)]
    fn round_slice(src: &[f32], dst: &mut [Self]) {
        for (y, x) in dst.iter_mut().zip(src) {
            *y = Self::round(*x);
        }
    }

    /// The same as [`Element::widen_slice`] from little-endian bytes of any alignment.
    fn widen_bytes(src: &[u8], dst: &mut [f32]);
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        value
    }
    fn zeros(len: usize) -> Vec<Self> {
        vec![0.0; len]
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8], dst: &mut [f32]) {
        for (y, x) in dst.iter_mut().zip(src.as_chunks().0) {
            *y = f32::from_le_bytes(*x);
        }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        Self::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
    fn zeros(len: usize) -> Vec<Self> {
        vec![0u16; len].reinterpret_into()
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8], dst: &mut [f32]) {
        for (y, x) in dst.iter_mut().zip(src.as_chunks().0) {
            *y = Self::from_le_bytes(*x).widen();
        }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        // Exponent and mantissa moved into place are off by the difference of the biases, 2^112; the multiplication
        // corrects that, and normalises subnormals on the way.
        let magnitude = (bits & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
        let special = magnitude | 0x7f80_0000;
        let sign = (bits & 0x8000) << 16;
        f32::from_bits(sign | if magnitude >= 0x0f80_0000 { special } else { finite })
    }
    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let normal =
            (magnitude.wrapping_sub(0x3800_0000).wrapping_add(0x0fff + ((magnitude >> 13) & 1)) >> 13).min(0x7c00);
        // Below 2^-14 results are multiples of 2^-24, which is the spacing of f32 just above 0.5: the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let sign = (bits >> 16) & 0x8000;
        Self::from_bits((sign | if value.is_nan() { nan } else { finite }) as u16)
    }
    fn zeros(len: usize) -> Vec<Self> {
        vec![0u16; len].reinterpret_into()
    }
    // By the instructions that most machines have for it.
    #[inline(always)]
    fn widen_slice(src: &[Self], dst: &mut [f32]) {
        src.convert_to_f32_slice(dst);
    }
    #[inline(always)]
    fn round_slice(src: &[f32], dst: &mut [Self]) {
        dst.convert_from_f32_slice(src);
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8], dst: &mut [f32]) {
        let mut block = [f16::ZERO; 64];
        for (y, x) in dst.chunks_mut(64).zip(src.chunks(128)) {
            let block = &mut block[..y.len()];
            for (b, &x) in block.iter_mut().zip(x.as_chunks().0) {
                *b = f16::from_le_bytes(x);
            }
            block.convert_to_f32_slice(y);
        }
    }
}

/// Runs `$body` with `$T` bound to the element type that `$dtype` names; other types are an error of `$op`.
macro_rules! with_element {
    ($op:expr, $operand:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            got => {
                Err($crate::error::Error::DType { op: $op, operand: $operand, got, expected: $crate::element::FLOATS })
            }
        }
    };
}
pub(crate) use with_element;

/// How the names of kernels end that work on elements of `dtype`, one of [`FLOATS`].
#[cfg(feature = "cuda")]
pub(crate) fn kernel_suffix(dtype: candle_core::DType) -> &'static str {
    match dtype {
        candle_core::DType::F16 => "f16",
        candle_core::DType::BF16 => "bf16",
        _ => "f32",
    }
}

/// The element types of [`Element`], in words.
pub(crate) const FLOATS: &str = "f32, f16 or bf16";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (f, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            if f.is_nan() {
                assert!(f.widen().is_nan());
            } else {
                assert_eq!(f.widen().to_bits(), f.to_f32().to_bits(), "f16 {bits:#x}");
            }
            if b.is_nan() {
                assert!(b.widen().is_nan());
            } else {
                assert_eq!(b.widen().to_bits(), b.to_f32().to_bits(), "bf16 {bits:#x}");
            }
        }
    }

    /// However many at once, and wherever they lie.
    #[test]
    fn slices_and_bytes_are_converted_like_single_elements() {
        fn check<T: Element + std::fmt::Debug>() {
            for len in [0, 1, 7, 64, 65, 131] {
                let wide: Vec<f32> = (0..len).map(|i| (i as f32 - 50.0) * 1.2345e-3).collect();
                let mut narrow = T::zeros(len);
                T::round_slice(&wide, &mut narrow);
                assert_eq!(narrow, wide.iter().map(|&v| T::round(v)).collect::<Vec<_>>());
                let back: Vec<f32> = narrow.iter().map(|v| v.widen()).collect();
                let (mut slice, mut unaligned) = (vec![0.0; len], vec![0.0; len]);
                T::widen_slice(&narrow, &mut slice);
                // The bytes of a little-endian machine, from an odd address on.
                let bytes = [&[0], bytemuck::cast_slice::<T, u8>(&narrow)].concat();
                T::widen_bytes(&bytes[1..], &mut unaligned);
                assert_eq!(slice, back);
                assert!(cfg!(target_endian = "big") || unaligned == back);
            }
        }
        check::<f32>();
        check::<f16>();
        check::<bf16>();
    }

    #[test]
    fn rounding_agrees_with_half() {
        // A prime step reaches every exponent and sign; the neighbours of each half hit all ties.
        let spread = (0..=u32::MAX).step_by(1009);
        let ties = (0..=u16::MAX).flat_map(|h| {
            let bits = f16::from_bits(h).to_f32().to_bits();
            [0x0fff, 0x1000, 0x1001].map(|d| bits.wrapping_add(d))
        });
        let bf16_ties =
            (0..=u16::MAX).flat_map(|h| [0x7fff, 0x8000, 0x8001].map(|d| (u32::from(h) << 16).wrapping_add(d)));
        // Halves of the smallest steps, where results are subnormal or zero.
        let tiny = (0..4096u32).map(|i| (i as f32 * 2f32.powi(-26)).to_bits());
        for bits in spread.chain(ties).chain(bf16_ties).chain(tiny) {
            let v = f32::from_bits(bits);
            if v.is_nan() {
                assert!(<f16 as Element>::round(v).is_nan() && <bf16 as Element>::round(v).is_nan());
            } else {
                assert_eq!(<f16 as Element>::round(v).to_bits(), f16::from_f32(v).to_bits(), "f16 of {bits:#x}");
                assert_eq!(<bf16 as Element>::round(v).to_bits(), bf16::from_f32(v).to_bits(), "bf16 of {bits:#x}");
            }
        }
    }
}
