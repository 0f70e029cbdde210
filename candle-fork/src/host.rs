//! Tensors that lie in somebody else's host memory: a mapped file, a buffer, a static.
//!
//! candle's CPU storage owns its elements, so a checkpoint that is mapped would have to be copied to become a `Tensor`.
//! A [`HostTensor`] borrows the bytes instead; [`crate::linear()`] reads such weights where they lie.

use std::{ops::Range, sync::Arc};

use candle_core::{DType, Device, Shape, Tensor};

use crate::error::{Error, Result, What};

/// Owner of the bytes behind a [`HostTensor`].
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A read-only tensor in row-major order inside a shared byte buffer. Cloning is cheap.
#[derive(Clone)]
pub struct HostTensor {
    owner: HostBytes,
    range: Range<usize>,
    dtype: DType,
    shape: Shape,
}

impl std::fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostTensor").field("dtype", &self.dtype).field("shape", &self.shape).finish()
    }
}

impl HostTensor {
    /// Takes `range` of `owner` as a tensor; little-endian elements, any alignment.
    ///
    /// # Errors
    /// [`Error::HostRange`] if the range lies outside the buffer or its length is not what `dtype` and `shape` need.
    pub fn new(owner: HostBytes, range: Range<usize>, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let len = (*owner).as_ref().len();
        let expected =
            shape.dims().iter().try_fold(dtype.size_in_bytes(), |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
        if range.start > range.end || range.end > len || range.end - range.start != expected {
            return Err(Error::HostRange { start: range.start, end: range.end, expected, len });
        }
        Ok(Self { owner, range, dtype, shape })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// The elements' bytes, little-endian, not necessarily aligned.
    pub fn bytes(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// `len` slices of the first axis from `start` on; nothing is copied.
    ///
    /// # Errors
    /// [`Error::Argument`] if the tensor has no such slices.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let mut dims = self.dims().to_vec();
        let rows = dims.first().copied().unwrap_or(0);
        if start.checked_add(len).is_none_or(|end| end > rows) {
            let what = format!("rows {start} to {start} + {len} of a tensor of shape {dims:?}");
            return Err(Error::Argument { op: "host tensor", what });
        }
        // No product overflows: the whole tensor has been measured in `new`.
        let row = self.range.len().checked_div(rows).unwrap_or(0);
        let first = self.range.start + start * row;
        dims[0] = len;
        Self::new(self.owner.clone(), first..first + len * row, self.dtype, dims)
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::HostRange`] if it has another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        Self::new(self.owner.clone(), self.range.clone(), self.dtype, shape)
    }

    /// Copies into a candle tensor of the same dtype, then converts to `dtype` on `device`.
    ///
    /// # Errors
    /// [`Error::Candle`] if candle cannot hold or convert the elements.
    pub fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let raw =
            Tensor::from_raw_buffer(self.bytes(), self.dtype, self.dims(), device).what("copy of a host tensor")?;
        if self.dtype == dtype { Ok(raw) } else { raw.to_dtype(dtype).what("conversion of a host tensor") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_the_buffer() {
        let values: Vec<u8> = (0..12u8).flat_map(|v| f32::from(v).to_le_bytes()).collect();
        let host = HostTensor::new(Arc::new(values), 0..48, DType::F32, (4, 3)).unwrap();
        let rows = host.rows(1, 2).unwrap();
        assert_eq!(rows.bytes().as_ptr(), host.bytes()[12..].as_ptr());
        let rows = rows.to_tensor(DType::F32, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(rows, [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]);
        assert_eq!(host.rows(4, 0).unwrap().dims(), [0, 3]);
        for (start, len) in [(0, 5), (4, 1), (usize::MAX, 2)] {
            assert!(matches!(host.rows(start, len), Err(Error::Argument { .. })), "{start} {len}");
        }
    }
}
