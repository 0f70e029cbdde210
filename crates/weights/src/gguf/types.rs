//! Element types of GGML, the library behind GGUF files.

use std::fmt;

use candle_core::quantized::GgmlDType;
use candle_fork::{
    HostTensor,
    quant::{Iq4Format, QuantWeight},
};
use serde::{Serialize, Serializer};

use crate::dtype::StoredDType;

macro_rules! block_types {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $block:literal, $bytes:literal, $candle:expr;)+) => {
        /// Block-quantised types of GGML: a row is cut into blocks of elements that share scales.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum GgmlType { $($(#[$doc])* $variant,)+ }

        impl GgmlType {
            /// Every block type, by its number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Number in GGUF files.
            pub fn id(self) -> u32 {
                match self { $(Self::$variant => $id,)+ }
            }

            /// Name in GGML's source, for example `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Elements of one block; the extent of a row is a multiple of it.
            pub fn block(self) -> usize {
                match self { $(Self::$variant => $block,)+ }
            }

            /// Bytes of one block.
            pub fn block_bytes(self) -> usize {
                match self { $(Self::$variant => $bytes,)+ }
            }

            /// candle's name of the type; `None` for those that candle lacks, or cannot compute with.
            pub fn to_candle(self) -> Option<GgmlDType> {
                match self { $(Self::$variant => $candle,)+ }
            }
        }
    };
}

// Numbers and sizes: `ggml-org/ggml`, include/ggml.h (enum ggml_type) and src/ggml-common.h (block structures).
block_types! {
    /// 4 bits, a scale per 32.
    Q4_0 = 2, "Q4_0", 32, 18, Some(GgmlDType::Q4_0);
    /// 4 bits, scale and minimum per 32.
    Q4_1 = 3, "Q4_1", 32, 20, Some(GgmlDType::Q4_1);
    /// 5 bits, a scale per 32.
    Q5_0 = 6, "Q5_0", 32, 22, Some(GgmlDType::Q5_0);
    /// 5 bits, scale and minimum per 32.
    Q5_1 = 7, "Q5_1", 32, 24, Some(GgmlDType::Q5_1);
    /// 8 bits, a scale per 32.
    Q8_0 = 8, "Q8_0", 32, 34, Some(GgmlDType::Q8_0);
    /// 8 bits, scale and sum per 32: a type of intermediate results.
    Q8_1 = 9, "Q8_1", 32, 36, None;
    /// 2 bits in super-blocks of 256.
    Q2K = 10, "Q2_K", 256, 84, Some(GgmlDType::Q2K);
    /// 3 bits in super-blocks of 256.
    Q3K = 11, "Q3_K", 256, 110, Some(GgmlDType::Q3K);
    /// 4 bits in super-blocks of 256.
    Q4K = 12, "Q4_K", 256, 144, Some(GgmlDType::Q4K);
    /// 5 bits in super-blocks of 256.
    Q5K = 13, "Q5_K", 256, 176, Some(GgmlDType::Q5K);
    /// 6 bits in super-blocks of 256.
    Q6K = 14, "Q6_K", 256, 210, Some(GgmlDType::Q6K);
    /// 8 bits in super-blocks of 256: a type of intermediate results.
    Q8K = 15, "Q8_K", 256, 292, None;
    /// 2 bits from a table of vectors.
    Iq2Xxs = 16, "IQ2_XXS", 256, 66, None;
    /// 2 bits from a table of vectors.
    Iq2Xs = 17, "IQ2_XS", 256, 74, None;
    /// 3 bits from a table of vectors.
    Iq3Xxs = 18, "IQ3_XXS", 256, 98, None;
    /// 1.5 bits from a table of vectors.
    Iq1S = 19, "IQ1_S", 256, 50, None;
    /// 4 bits from a table of values.
    Iq4Nl = 20, "IQ4_NL", 32, 18, None;
    /// 3 bits from a table of vectors.
    Iq3S = 21, "IQ3_S", 256, 110, None;
    /// 2 bits from a table of vectors.
    Iq2S = 22, "IQ2_S", 256, 82, None;
    /// 4 bits from a table of values, in super-blocks.
    Iq4Xs = 23, "IQ4_XS", 256, 136, None;
    /// 1.75 bits from a table of vectors.
    Iq1M = 29, "IQ1_M", 256, 56, None;
    /// Three values, 1.6 bits.
    Tq1_0 = 34, "TQ1_0", 256, 54, None;
    /// Three values, 2 bits.
    Tq2_0 = 35, "TQ2_0", 256, 66, None;
    /// 4-bit floats with a power of two per 32.
    Mxfp4 = 39, "MXFP4", 32, 17, None;
    /// 4-bit floats with an 8-bit float per 16.
    Nvfp4 = 40, "NVFP4", 64, 36, None;
    /// 1 bit, a scale per 128.
    Q1_0 = 41, "Q1_0", 128, 18, None;
}

impl GgmlType {
    /// Whether it can be computed with.
    pub fn is_supported(self) -> bool {
        self.to_candle().is_some() || self.iq4().is_some()
    }

    /// The format, if it is one of those that candle lacks and candle-fork has.
    fn iq4(self) -> Option<Iq4Format> {
        match self {
            Self::Iq4Nl => Some(Iq4Format::NonLinear),
            Self::Iq4Xs => Some(Iq4Format::Super),
            _ => None,
        }
    }

    /// All bytes of a matrix of this type as a weight; `None` if it cannot be computed with.
    pub(crate) fn weight(self, blocks: HostTensor, dims: [usize; 2]) -> Option<candle_fork::Result<QuantWeight>> {
        match (self.to_candle(), self.iq4()) {
            (Some(candle), _) => Some(QuantWeight::ggml(blocks, candle, dims)),
            (None, Some(format)) => Some(QuantWeight::iq4(blocks, format, dims)),
            (None, None) => None,
        }
    }

    /// Names of the types that can be computed with, for messages.
    pub fn supported() -> String {
        let names: Vec<_> = Self::ALL.iter().filter(|t| t.is_supported()).map(|t| t.name()).collect();
        names.join(", ")
    }

    /// Offsets of the half-precision scales and minima inside a block, for the types that can be computed with.
    pub(crate) fn half_scales(self) -> &'static [usize] {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl | Self::Iq4Xs => &[0],
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => &[0, 2],
            Self::Q2K => &[80, 82],
            Self::Q3K => &[108],
            Self::Q6K => &[208],
            _ => &[],
        }
    }

    /// Bytes of a tensor of this type; `None` if a row is no whole number of blocks, or the count overflows.
    pub fn byte_len(self, shape: &[usize]) -> Option<usize> {
        let row = shape.last()?;
        if !row.is_multiple_of(self.block()) {
            return None;
        }
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        (elements / self.block()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for GgmlType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The stored type of a GGUF type number; `Err` says what the number was once, or that it is unknown.
pub(super) fn stored(id: u32) -> Result<StoredDType, &'static str> {
    Ok(match id {
        0 => StoredDType::F32,
        1 => StoredDType::F16,
        24 => StoredDType::I8,
        25 => StoredDType::I16,
        26 => StoredDType::I32,
        27 => StoredDType::I64,
        28 => StoredDType::F64,
        30 => StoredDType::BF16,
        4 | 5 | 31..=33 | 36..=38 => return Err("a type that GGML has removed"),
        _ => match GgmlType::ALL.iter().find(|t| t.id() == id) {
            Some(&found) => StoredDType::Ggml(found),
            None => return Err("a type that is not known here"),
        },
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{DType, Device};

    use super::*;

    /// Every number up to the last known one is a type or is said to be gone.
    #[test]
    fn numbers_are_types() {
        let mut names = std::collections::BTreeSet::new();
        for id in 0..=41 {
            match stored(id) {
                Ok(StoredDType::Ggml(t)) => {
                    assert_eq!(t.id(), id);
                    assert!(names.insert(t.name()), "{id}");
                }
                Ok(plain) => assert!(matches!(id, 0 | 1 | 24..=28 | 30), "{id} is {plain}"),
                Err(_) => assert!(matches!(id, 4 | 5 | 31..=33 | 36..=38), "{id}"),
            }
        }
        assert_eq!(names.len(), GgmlType::ALL.len());
        assert!(stored(42).is_err() && stored(u32::MAX).is_err());
        assert!(GgmlType::ALL.is_sorted_by_key(|t| t.id()));
    }

    /// The structures that decode have the sizes of the table, and their scales lie where the check of values looks.
    #[test]
    fn blocks_are_those_that_are_decoded() {
        for &t in GgmlType::ALL.iter().filter(|t| t.is_supported()) {
            let sizes = match (t.to_candle(), t.iq4()) {
                (Some(candle), _) => (candle.block_size(), candle.type_size()),
                (None, iq4) => iq4.map_or((0, 0), |format| (format.block(), format.block_bytes())),
            };
            assert_eq!(sizes, (t.block(), t.block_bytes()), "{t}");
            // Of a block of noise, the scales are the halves whose becoming NaN makes every element NaN.
            let mut block = vec![0x11u8; t.block_bytes()];
            for &at in t.half_scales() {
                block[at..at + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
            }
            let blocks = HostTensor::new(Arc::new(block), 0..t.block_bytes(), DType::U8, t.block_bytes()).unwrap();
            let values = t.weight(blocks, [1, t.block()]).unwrap().unwrap().dequantize(DType::F32, &Device::Cpu);
            let values = values.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(values.iter().all(|v| v.is_nan()), "{t}");
        }
        let supported = GgmlType::supported();
        assert!(supported.contains("Q4_K") && supported.contains("IQ4_XS") && !supported.contains("IQ3"));
    }

    #[test]
    fn lengths_are_of_whole_blocks() {
        assert_eq!(GgmlType::Q8_0.byte_len(&[3, 64]), Some(3 * 2 * 34));
        assert_eq!(GgmlType::Q8_0.byte_len(&[64, 3]), None);
        assert_eq!(GgmlType::Q4K.byte_len(&[2, 128]), None);
        assert_eq!(GgmlType::Q4K.byte_len(&[]), None);
        assert_eq!(GgmlType::Q4K.byte_len(&[usize::MAX, 256]), None);
    }
}
