//! Matrices of elements, wherever they lie.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout};
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};

use super::{kernel::KC, source::RowSource};
use crate::{
    element::{Element, FLOATS},
    error::{Error, Result},
    host::HostTensor,
};

/// Elements of a matrix: a slice of their type, or bytes that are not aligned for it.
#[derive(Debug, Clone, Copy)]
enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    F32Bytes(&'a [u8]),
    F16Bytes(&'a [u8]),
    Bf16Bytes(&'a [u8]),
    Wide(&'a dyn WideRows),
}

/// A matrix that decodes its rows.
pub(crate) trait WideRows: std::fmt::Debug + Sync {
    /// How many.
    fn rows(&self) -> usize;
    /// Writes columns `k` of row `row`.
    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]);
}

/// A read-only matrix in memory owned by somebody else.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    elements: Elements<'a>,
    start: usize,
    rows: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// The matrix of a CPU tensor of rank 2, given its locked storage.
    pub(crate) fn of_storage(op: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let elements = match storage {
            CpuStorage::F32(data) => Elements::F32(data),
            CpuStorage::F16(data) => Elements::F16(data),
            CpuStorage::BF16(data) => Elements::Bf16(data),
            other => return Err(unsupported(op, "weight", candle_core::backend::BackendStorage::dtype(other))),
        };
        let (&[rows, _], &[row_stride, col_stride]) = (layout.dims(), layout.stride()) else {
            return Err(rank2(op, layout.dims()));
        };
        Ok(Self { elements, start: layout.start_offset(), rows, row_stride, col_stride })
    }

    /// The matrix of a host tensor of rank 2, read where it lies.
    pub(crate) fn of_host(op: &'static str, host: &'a HostTensor) -> Result<Self> {
        let &[rows, cols] = host.dims() else {
            return Err(rank2(op, host.dims()));
        };
        let bytes = host.bytes();
        // The bytes are little-endian, so the typed view is right only where the machine is too.
        let typed = cfg!(target_endian = "little");
        let elements = match host.dtype() {
            DType::F32 => match bytemuck::try_cast_slice(bytes) {
                Ok(data) if typed => Elements::F32(data),
                _ => Elements::F32Bytes(bytes),
            },
            DType::F16 => match bytemuck::try_cast_slice(bytes) {
                Ok(data) if typed => Elements::F16(data),
                _ => Elements::F16Bytes(bytes),
            },
            DType::BF16 => match bytemuck::try_cast_slice(bytes) {
                Ok(data) if typed => Elements::Bf16(data),
                _ => Elements::Bf16Bytes(bytes),
            },
            other => return Err(unsupported(op, "weight", other)),
        };
        Ok(Self { elements, start: 0, rows, row_stride: cols, col_stride: 1 })
    }

    /// A matrix that decodes its rows itself.
    pub(crate) fn of_rows(rows: &'a dyn WideRows) -> Self {
        Self { elements: Elements::Wide(rows), start: 0, rows: rows.rows(), row_stride: 0, col_stride: 0 }
    }

    /// Columns `k` of row `row` as f32.
    #[inline(always)]
    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]) {
        let start = self.start + row * self.row_stride + k.start * self.col_stride;
        match self.elements {
            Elements::F32(data) => gather(data, start, self.col_stride, dst),
            Elements::F16(data) => gather(data, start, self.col_stride, dst),
            Elements::Bf16(data) => gather(data, start, self.col_stride, dst),
            // Host matrices are row-major.
            Elements::F32Bytes(data) => f32::widen_bytes(&data[4 * start..][..4 * dst.len()], dst),
            Elements::F16Bytes(data) => f16::widen_bytes(&data[2 * start..][..2 * dst.len()], dst),
            Elements::Bf16Bytes(data) => bf16::widen_bytes(&data[2 * start..][..2 * dst.len()], dst),
            Elements::Wide(rows) => rows.widen(row, k, dst),
        }
    }
}

/// `dst[i] = data[start + i * stride]`.
#[inline(always)]
pub(crate) fn gather<T: Element>(data: &[T], start: usize, stride: usize, dst: &mut [f32]) {
    if stride == 1 {
        T::widen_slice(&data[start..][..dst.len()], dst);
    } else {
        for (i, y) in dst.iter_mut().enumerate() {
            *y = data[start + i * stride].widen();
        }
    }
}

/// Matrices of equal width, rows one after another.
#[derive(Debug, Clone)]
pub(crate) struct Stack<'a> {
    parts: Vec<Matrix<'a>>,
}

impl<'a> Stack<'a> {
    /// Takes the parts in order.
    pub(crate) fn new(parts: Vec<Matrix<'a>>) -> Self {
        Self { parts }
    }
}

impl RowSource for Stack<'_> {
    fn pack(&self, rows: Range<usize>, k: Range<usize>, dst: &mut [f32]) {
        Arch::new().dispatch(PackStack { stack: self, rows, k, dst });
    }
}

struct PackStack<'a, 'b> {
    stack: &'a Stack<'b>,
    rows: Range<usize>,
    k: Range<usize>,
    dst: &'a mut [f32],
}

impl WithSimd for PackStack<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut first = 0;
        for part in &self.stack.parts {
            for row in self.rows.start.max(first)..self.rows.end.min(first + part.rows) {
                let dst = &mut self.dst[(row - self.rows.start) * KC..][..self.k.len()];
                part.widen(row - first, self.k.clone(), dst);
            }
            first += part.rows;
        }
    }
}

/// `len` zeros, or an error where even the address space could not hold them.
pub(crate) fn zeros<T: Element>(op: &'static str, len: usize) -> Result<Vec<T>> {
    // `vec!` would abort the process; asking first costs nothing beside filling them.
    Vec::<T>::new()
        .try_reserve_exact(len)
        .map_err(|_| Error::Argument { op, what: format!("a result of {len} elements does not fit into memory") })?;
    Ok(T::zeros(len))
}

/// The error for an element type that no fast path takes.
pub(crate) fn unsupported(op: &'static str, operand: &'static str, got: DType) -> Error {
    Error::DType { op, operand, got, expected: FLOATS }
}

fn rank2(op: &'static str, got: &[usize]) -> Error {
    Error::Shape { op, operand: "weight", got: got.to_vec(), expected: "[out_features, in_features]".into() }
}
