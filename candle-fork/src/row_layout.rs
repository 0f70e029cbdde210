//! Rows (runs along the packed last axis) of strided operands as kernels walk them.

use candle_core::Layout;
#[cfg(feature = "cuda")]
use candle_core::Tensor;

#[cfg(feature = "cuda")]
use crate::{cuda::tensor::Operand, error::Result, layout::contiguous, operand::shape_error};

/// Where rows begin: `RowLayout` in `row_layout.cuh`, in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowLayout {
    inner: u64,
    outer_pitch: u64,
    inner_pitch: u64,
}

impl RowLayout {
    /// The rows of a layout, in row-major order of the other axes, if its last axis is packed and the others come down
    /// to
    /// two: whatever is cut along the last axis, and heads cut from rows of several parts.
    pub(crate) fn of(layout: &Layout) -> Option<Self> {
        let (&n, dims) = layout.dims().split_last()?;
        let (&last, strides) = layout.stride().split_last()?;
        if n > 1 && last != 1 {
            return None;
        }
        let mut merged: Vec<(usize, usize)> = Vec::with_capacity(dims.len());
        for (&n, &stride) in dims.iter().zip(strides).filter(|&(&n, _)| n != 1) {
            match merged.last_mut() {
                Some((count, outer)) if *outer == stride * n => {
                    *count *= n;
                    *outer = stride;
                }
                _ => merged.push((n, stride)),
            }
        }
        let (inner, outer_pitch, inner_pitch) = match merged[..] {
            [] => (1, 0, 0),
            [(_, pitch)] => (1, pitch, 0),
            [(_, outer), (n, inner)] => (n, outer, inner),
            _ => return None,
        };
        // No rows at all: any positive number divides.
        Some(Self { inner: inner.max(1) as u64, outer_pitch: outer_pitch as u64, inner_pitch: inner_pitch as u64 })
    }

    /// Packed rows of `n` elements.
    #[cfg(feature = "cuda")]
    pub(crate) fn packed(n: usize) -> Self {
        Self { inner: 1, outer_pitch: n as u64, inner_pitch: 0 }
    }

    /// Whether all rows begin at multiples of `elements`, if the first does.
    pub(crate) fn is_multiple_of(&self, elements: usize) -> bool {
        [self.outer_pitch, self.inner_pitch].iter().all(|pitch| pitch.is_multiple_of(elements as u64))
    }

    /// Where a row begins.
    #[cfg(test)]
    fn start(&self, row: usize) -> usize {
        let row = row as u64;
        (row / self.inner * self.outer_pitch + row % self.inner * self.inner_pitch) as usize
    }
}

/// An operand whose rows a kernel can walk: x where it lies, or a packed copy.
#[cfg(feature = "cuda")]
pub(crate) fn rows_of(op: &'static str, operand: &'static str, x: &Tensor) -> Result<(Operand, RowLayout)> {
    if let Some(layout) = RowLayout::of(x.layout()) {
        return Ok((Operand::new(op, x)?, layout));
    }
    let packed = contiguous(x)?;
    let layout = RowLayout::of(packed.layout()).ok_or_else(|| shape_error(op, operand, x, "rows"))?;
    Ok((Operand::new(op, &packed)?, layout))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::{
        operand::Rows,
        testing::{Data, tensor},
    };

    fn check(x: &Tensor, inner: u64) {
        let layout = RowLayout::of(x.layout()).unwrap();
        assert_eq!(layout.inner, inner, "{:?}", x.layout());
        let rows = Rows::new(x.layout());
        for row in 0..x.elem_count() / x.dims()[x.rank() - 1] {
            assert_eq!(x.layout().start_offset() + layout.start(row), rows.range(row).start, "{:?}", x.layout());
        }
    }

    #[test]
    fn rows_of_cut_and_packed_tensors() {
        let x = tensor(&[2, 3, 4, 12], DType::F32, Data::Normal, 1);
        check(&x, 1);
        check(&x.get(0).unwrap().get(0).unwrap().get(0).unwrap(), 1);
        check(&x.narrow(3, 4, 8).unwrap(), 1);
        check(&x.narrow(2, 1, 2).unwrap(), 2);
        check(&x.narrow(1, 1, 2).unwrap(), 8);
        check(&x.narrow(1, 2, 1).unwrap(), 4);
        // Heads of q, cut from q, k, v in one row.
        let q = x.reshape((2, 3, 48)).unwrap().narrow(2, 16, 16).unwrap().reshape((2, 3, 2, 8)).unwrap();
        check(&q, 1);
        let q = x.reshape((2, 3, 3, 2, 8)).unwrap().narrow(2, 1, 1).unwrap().squeeze(2).unwrap();
        assert!(!q.is_contiguous());
        check(&q, 2);
        check(&x.transpose(0, 2).unwrap().narrow(1, 0, 1).unwrap(), 2);
    }

    #[test]
    fn other_layouts_have_to_be_packed_first() {
        let x = tensor(&[2, 3, 4, 12], DType::F32, Data::Normal, 1);
        assert_eq!(RowLayout::of(x.t().unwrap().layout()), None);
        assert_eq!(RowLayout::of(x.transpose(0, 2).unwrap().layout()), None);
        assert_eq!(RowLayout::of(Tensor::new(1f32, &Device::Cpu).unwrap().layout()), None);
        let none = Tensor::zeros((2, 0, 4), DType::F32, &Device::Cpu).unwrap();
        assert!(RowLayout::of(none.layout()).is_some());
    }

    #[test]
    fn pitches_decide_the_access() {
        let x = tensor(&[2, 3, 24], DType::F32, Data::Normal, 1);
        assert!(RowLayout::of(x.layout()).unwrap().is_multiple_of(8));
        assert!(!RowLayout::of(x.layout()).unwrap().is_multiple_of(16));
        let cut = x.reshape((6, 24)).unwrap().narrow(1, 0, 16).unwrap();
        assert!(!RowLayout::of(cut.layout()).unwrap().is_multiple_of(16));
        assert!(RowLayout::of(cut.get(0).unwrap().layout()).unwrap().is_multiple_of(16));
    }
}
