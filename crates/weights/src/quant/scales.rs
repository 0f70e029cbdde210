//! The numbers of side tensors.

use candle_fork::quant::{Fp8Format, Fp8Scales};
use half::{bf16, f16};

use super::{Granularity, refuse};
use crate::{
    dtype::StoredDType,
    error::{Result, shown},
    source::{TensorInfo, TensorSource},
};

/// Rows and columns of the blocks that share a scale.
pub(super) const BLOCK: usize = 128;

/// How many scales a side tensor of `shape` holds for a matrix `[rows, columns]`; `None` if it fits none.
pub(super) fn granularity(shape: &[usize], [rows, columns]: [usize; 2], blocks: bool) -> Option<Granularity> {
    let elements: usize = shape.iter().product();
    match *shape {
        _ if elements == 1 => Some(Granularity::Tensor),
        [n, ref rest @ ..] if n == rows && rest.iter().all(|&d| d == 1) => Some(Granularity::Rows),
        [n, m] if blocks && n == rows.div_ceil(BLOCK) && m == columns.div_ceil(BLOCK) => Some(Granularity::Blocks),
        _ => None,
    }
}

/// The values of a small float tensor; 32 bits are kept of 64.
pub(super) fn values(source: &dyn TensorSource, name: &str) -> Result<Vec<f32>> {
    let info = source.require(name)?;
    let bytes = source.bytes(name)?;
    let f32s = |size: usize, value: &dyn Fn(&[u8]) -> f32| bytes.chunks_exact(size).map(value).collect();
    Ok(match info.dtype {
        StoredDType::F64 => f32s(8, &|b| b.first_chunk().map_or(0.0, |b| f64::from_le_bytes(*b) as f32)),
        StoredDType::F32 => f32s(4, &|b| b.first_chunk().map_or(0.0, |b| f32::from_le_bytes(*b))),
        StoredDType::F16 => f32s(2, &|b| b.first_chunk().map_or(0.0, |b| f16::from_le_bytes(*b).to_f32())),
        StoredDType::BF16 => f32s(2, &|b| b.first_chunk().map_or(0.0, |b| bf16::from_le_bytes(*b).to_f32())),
        // Some writers store the bits of such floats as plain bytes.
        StoredDType::F8E4M3 | StoredDType::U8 => bytes.iter().map(|&b| Fp8Format::E4M3.widen(b)).collect(),
        dtype => return Err(refuse(source, info, format!("holds scales, but its element type is {dtype}"))),
    })
}

/// One number.
pub(super) fn single(source: &dyn TensorSource, name: &str) -> Result<f32> {
    match values(source, name)?.as_slice() {
        &[value] => Ok(value),
        found => {
            let problem = format!("holds {} numbers where one is needed", found.len());
            Err(refuse(source, source.require(name)?, problem))
        }
    }
}

/// Scales of 8-bit floats.
pub(super) fn fp8(source: &dyn TensorSource, scale: Option<&str>, granularity: Granularity) -> Result<Fp8Scales> {
    Ok(match (scale, granularity) {
        (None, _) | (_, Granularity::Unscaled) => Fp8Scales::Tensor(1.0),
        (Some(name), Granularity::Tensor) => Fp8Scales::Tensor(single(source, name)?),
        (Some(name), Granularity::Rows) => Fp8Scales::Rows(values(source, name)?),
        (Some(name), Granularity::Blocks) => {
            Fp8Scales::Blocks { scales: values(source, name)?, rows: BLOCK, columns: BLOCK }
        }
    })
}

/// A scale that fits its matrix in none of the known ways.
pub(super) fn misfit(source: &dyn TensorSource, weight: &TensorInfo, scale: &TensorInfo) -> crate::Error {
    let problem = format!("has shape {:?}, but its scale `{}` has {:?}", weight.shape, shown(&scale.name), scale.shape);
    refuse(source, weight, problem)
}
