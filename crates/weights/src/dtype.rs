//! Element types of checkpoints.

use std::fmt;

use candle_core::DType;
use serde::{Serialize, Serializer};

use crate::gguf::GgmlType;

macro_rules! stored_dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal, $candle:expr;)+) => {
        /// Element types that a checkpoint may store: all that the safetensors format names, a superset of candle's
        /// [`DType`], and the block-quantised types of GGUF files.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum StoredDType {
            $($(#[$doc])* $variant,)+
            /// Blocks of a GGUF file.
            Ggml(GgmlType),
        }

        impl StoredDType {
            /// Every type of the safetensors format, narrowest first.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Name as it stands in safetensors headers, for example `BF16`, or GGML's, for example `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ Self::Ggml(t) => t.name() }
            }

            /// Bits of one element: 4, 6, 8, 16, 32 or 64; of blocks the average, rounded up.
            pub fn bits(self) -> usize {
                match self { $(Self::$variant => $bits,)+ Self::Ggml(t) => (8 * t.block_bytes()).div_ceil(t.block()) }
            }

            /// candle's type with the same bits; `None` where candle has none, and for the types below 8 bits, whose
            /// elements candle cannot count.
            pub fn to_candle(self) -> Option<DType> {
                match self { $(Self::$variant => $candle,)+ Self::Ggml(_) => None }
            }
        }
    };
}

stored_dtypes! {
    /// 4-bit float of the OCP microscaling formats.
    F4 = "F4", 4, None;
    /// 6-bit float, 2 exponent and 3 mantissa bits.
    F6E2M3 = "F6_E2M3", 6, None;
    /// 6-bit float, 3 exponent and 2 mantissa bits.
    F6E3M2 = "F6_E3M2", 6, None;
    /// One byte per truth value.
    Bool = "BOOL", 8, None;
    /// Unsigned byte.
    U8 = "U8", 8, Some(DType::U8);
    /// Signed byte.
    I8 = "I8", 8, None;
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8E5M2 = "F8_E5M2", 8, None;
    /// 8-bit float, 4 exponent and 3 mantissa bits.
    F8E4M3 = "F8_E4M3", 8, Some(DType::F8E4M3);
    /// 8-bit power of two: the scales of the microscaling formats.
    F8E8M0 = "F8_E8M0", 8, Some(DType::F8E8M0);
    /// 8-bit float E4M3 without infinities and without a negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8, None;
    /// 8-bit float E5M2 without infinities and without a negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8, None;
    /// Signed 16-bit integer.
    I16 = "I16", 16, Some(DType::I16);
    /// Unsigned 16-bit integer.
    U16 = "U16", 16, None;
    /// Half precision float.
    F16 = "F16", 16, Some(DType::F16);
    /// Brain float.
    BF16 = "BF16", 16, Some(DType::BF16);
    /// Signed 32-bit integer.
    I32 = "I32", 32, Some(DType::I32);
    /// Unsigned 32-bit integer.
    U32 = "U32", 32, Some(DType::U32);
    /// 32-bit float.
    F32 = "F32", 32, Some(DType::F32);
    /// Complex number of two 32-bit floats.
    C64 = "C64", 64, None;
    /// 64-bit float.
    F64 = "F64", 64, Some(DType::F64);
    /// Signed 64-bit integer.
    I64 = "I64", 64, Some(DType::I64);
    /// Unsigned 64-bit integer.
    U64 = "U64", 64, None;
}

impl StoredDType {
    /// The type of that name in a safetensors header; names are case-sensitive.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|d| d.name() == name)
    }

    /// The stored type with the bits of a candle type.
    pub fn from_candle(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F4 => Some(Self::F4),
            DType::F6E2M3 => Some(Self::F6E2M3),
            DType::F6E3M2 => Some(Self::F6E3M2),
            _ => Self::ALL.iter().copied().find(|d| d.to_candle() == Some(dtype)),
        }
    }

    /// Bytes of a tensor of this type; `None` if the count overflows, the bits do not fill whole bytes, or a row is no
    /// whole number of blocks.
    pub fn byte_len(self, shape: &[usize]) -> Option<usize> {
        if let Self::Ggml(t) = self {
            return t.byte_len(shape);
        }
        let bits = shape.iter().try_fold(self.bits(), |n, &d| n.checked_mul(d))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for StoredDType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_are_unique() {
        assert_eq!(StoredDType::ALL.len(), 22);
        for &d in StoredDType::ALL {
            assert_eq!(StoredDType::from_name(d.name()), Some(d));
            assert_eq!(d.to_string(), d.name());
        }
        assert_eq!(StoredDType::from_name("bf16"), None);
        // A safetensors file cannot claim blocks.
        assert_eq!(StoredDType::from_name("Q4_K"), None);
        assert_eq!(StoredDType::Ggml(GgmlType::Q4K).to_string(), "Q4_K");
        assert_eq!(StoredDType::Ggml(GgmlType::Q4K).bits(), 5);
        assert_eq!(format!("{:>6}", StoredDType::BF16), "  BF16");
    }

    #[test]
    fn candle_types_have_the_same_size() {
        for &d in StoredDType::ALL {
            if let Some(c) = d.to_candle() {
                assert_eq!(c.size_in_bytes() * 8, d.bits(), "{d}");
                assert_eq!(StoredDType::from_candle(c), Some(d));
            }
        }
        assert_eq!(StoredDType::from_candle(DType::F4), Some(StoredDType::F4));
        assert_eq!(StoredDType::I8.to_candle(), None);
    }

    #[test]
    fn byte_lengths_are_checked() {
        assert_eq!(StoredDType::BF16.byte_len(&[3, 5]), Some(30));
        assert_eq!(StoredDType::F32.byte_len(&[]), Some(4));
        assert_eq!(StoredDType::F32.byte_len(&[0, 7]), Some(0));
        assert_eq!(StoredDType::F4.byte_len(&[3]), None);
        assert_eq!(StoredDType::F4.byte_len(&[6]), Some(3));
        assert_eq!(StoredDType::F6E2M3.byte_len(&[4]), Some(3));
        assert_eq!(StoredDType::F6E2M3.byte_len(&[2]), None);
        assert_eq!(StoredDType::U8.byte_len(&[usize::MAX]), None);
        assert_eq!(StoredDType::U8.byte_len(&[usize::MAX, usize::MAX, 0]), None);
    }
}
