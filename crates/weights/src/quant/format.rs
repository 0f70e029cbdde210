//! How the values of a tensor are computed from its stored elements.

use std::fmt;

use candle_fork::quant::Fp8Format;
use serde::{Serialize, Serializer};

use crate::gguf::GgmlType;

/// How many scales a matrix has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Granularity {
    /// None: the stored values are the values.
    Unscaled,
    /// One for all.
    Tensor,
    /// One for each row.
    Rows,
    /// One for each block of 128 by 128.
    Blocks,
}

/// How the values of a quantised tensor are computed from what is stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quantisation {
    /// Signed bytes times a scale (Comfy `int8_tensorwise`).
    Int8 {
        /// Group of the rotation (ConvRot), if the matrix is rotated.
        group: Option<usize>,
        /// Scales.
        scales: Granularity,
        /// The file asks for products in floating point (`full_precision_matrix_mult`).
        full_precision: bool,
    },
    /// Floats of 8 bits.
    Fp8 {
        /// Which.
        format: Fp8Format,
        /// Scales.
        scales: Granularity,
        /// The file asks for products in floating point (`full_precision_matrix_mult`).
        full_precision: bool,
    },
    /// Two signed nibbles in a byte, rotated (Comfy `convrot_w4a4`).
    W4A4 {
        /// Group of the rotation.
        group: usize,
    },
    /// Codes of 4 or 6 bits with a scale per group and one per row, rotated (Comfy `asym_w4a8_int8`).
    W4A8 {
        /// Bits of a code: 4 or 6.
        bits: usize,
        /// Columns that share a scale.
        scale_group: usize,
        /// Group of the rotation, if the matrix is rotated.
        group: Option<usize>,
    },
    /// Blocks of a GGUF file.
    Ggml(GgmlType),
    /// A format that is recognised and not supported.
    Unsupported(String),
}

impl Quantisation {
    /// Name of the format as files spell it, for example `int8_tensorwise` or `Q4_K`.
    pub fn format(&self) -> &str {
        match self {
            Self::Int8 { .. } => INT8,
            Self::Fp8 { format: Fp8Format::E4M3, .. } => E4M3,
            Self::Fp8 { format: Fp8Format::E5M2, .. } => E5M2,
            Self::W4A4 { .. } => W4A4,
            Self::W4A8 { .. } => W4A8,
            Self::Ggml(t) => t.name(),
            Self::Unsupported(name) => name,
        }
    }

    /// Group of the rotation (ConvRot), if the matrix is rotated.
    pub fn convrot(&self) -> Option<usize> {
        match self {
            Self::Int8 { group, .. } | Self::W4A8 { group, .. } => *group,
            Self::W4A4 { group } => Some(*group),
            _ => None,
        }
    }

    /// Whether the values can be computed here.
    pub fn is_supported(&self) -> bool {
        match self {
            Self::Ggml(t) => t.is_supported(),
            Self::Unsupported(_) => false,
            _ => true,
        }
    }

    /// Names of the formats of safetensors files that are supported, for messages.
    pub fn supported() -> String {
        [INT8, E4M3, E5M2, W4A4, W4A8].join(", ")
    }

    /// Whether the file asks for products in floating point.
    pub fn full_precision(&self) -> bool {
        matches!(self, Self::Int8 { full_precision: true, .. } | Self::Fp8 { full_precision: true, .. })
    }
}

pub(super) const INT8: &str = "int8_tensorwise";
pub(super) const E4M3: &str = "float8_e4m3fn";
pub(super) const E5M2: &str = "float8_e5m2";
pub(super) const W4A4: &str = "convrot_w4a4";
pub(super) const W4A8: &str = "asym_w4a8_int8";

/// In a few words: `int8_tensorwise, a scale per row, convrot 256`.
impl fmt::Display for Quantisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.format())?;
        match self {
            Self::Int8 { scales, .. } | Self::Fp8 { scales, .. } => f.write_str(match scales {
                Granularity::Unscaled => ", no scales",
                Granularity::Tensor => ", one scale",
                Granularity::Rows => ", a scale per row",
                Granularity::Blocks => ", a scale per 128x128",
            })?,
            Self::W4A8 { bits, scale_group, .. } => write!(f, ", {bits} bits, a scale per {scale_group}")?,
            _ => {}
        }
        match self.convrot() {
            Some(group) => write!(f, ", convrot {group}"),
            None => Ok(()),
        }
    }
}

impl Serialize for Quantisation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
