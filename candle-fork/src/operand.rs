//! Checked access to the operands of CPU ops: what they must have in common, their elements, where their rows begin.

use std::ops::Range;

use candle_core::{DType, Device, Layout, Storage, Tensor, WithDType};
use rayon::prelude::*;

use crate::{
    element::FLOATS,
    error::{Error, Result, What},
};

/// Fewest elements that one task should own: below this, handing work to a thread costs more than it saves.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Checks what all ops of this layer ask of every operand: one device, a float type, no gradient tracking.
pub(crate) fn check(op: &'static str, operands: &[(&'static str, &Tensor)]) -> Result<()> {
    for (name, tensor) in operands {
        if tensor.track_op() {
            return Err(Error::Argument {
                op,
                what: format!("{name} tracks gradients, but this op has no backward pass"),
            });
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::DType { op, operand: name, got: tensor.dtype(), expected: FLOATS });
        }
        if !tensor.device().same_device(operands[0].1.device()) {
            return Err(Error::Argument { op, what: format!("{name} is on another device than {}", operands[0].0) });
        }
    }
    Ok(())
}

/// The error for a shape that an op does not accept.
pub(crate) fn shape_error(op: &'static str, operand: &'static str, got: &Tensor, expected: impl Into<String>) -> Error {
    Error::Shape { op, operand, got: got.dims().to_vec(), expected: expected.into() }
}

/// Checks that `tensor` has exactly the shape `dims`.
pub(crate) fn check_shape(op: &'static str, operand: &'static str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
    if tensor.dims() == dims { Ok(()) } else { Err(shape_error(op, operand, tensor, format!("{dims:?}"))) }
}

/// Checks that `tensor` has the element type of the op's main operand.
pub(crate) fn check_dtype(op: &'static str, operand: &'static str, tensor: &Tensor, main: &Tensor) -> Result<()> {
    if tensor.dtype() == main.dtype() {
        return Ok(());
    }
    let expected = match main.dtype() {
        DType::F32 => "f32 like the first operand",
        DType::F16 => "f16 like the first operand",
        _ => "bf16 like the first operand",
    };
    Err(Error::DType { op, operand, got: tensor.dtype(), expected })
}

/// Whether the op runs in this crate's CPU code.
pub(crate) fn on_cpu(tensor: &Tensor) -> bool {
    matches!(tensor.device(), Device::Cpu)
}

/// The elements of a small operand (weights, biases, tables) as f32, in row-major order.
pub(crate) fn to_f32_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    let flat = tensor.to_dtype(DType::F32).and_then(|t| t.flatten_all()).what("widening of an operand")?;
    flat.to_vec1().what("widening of an operand")
}

/// The same tensor, or a contiguous copy if its last axis is not packed.
pub(crate) fn packed_rows(tensor: &Tensor) -> Result<Tensor> {
    let packed = tensor.dims().last().is_none_or(|&n| n <= 1) || tensor.stride().last() == Some(&1);
    if packed { Ok(tensor.clone()) } else { tensor.contiguous().what("packing of an operand") }
}

/// A CPU operand while its storage is locked for reading.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    op: &'static str,
    storage: &'a Storage,
    pub(crate) layout: &'a Layout,
}

impl<'a> View<'a> {
    /// All elements of the storage, of which the operand may be a part.
    pub(crate) fn storage<T: WithDType>(&self) -> Result<&'a [T]> {
        match self.storage {
            Storage::Cpu(storage) => storage.as_slice::<T>().what("elements of an operand"),
            _ => Err(Error::Argument { op: self.op, what: "an operand is not on the cpu".to_owned() }),
        }
    }

    /// The elements of a contiguous operand, in row-major order.
    pub(crate) fn contiguous<T: WithDType>(&self) -> Result<&'a [T]> {
        let start = self.layout.start_offset();
        Ok(&self.storage::<T>()?[start..start + self.layout.shape().elem_count()])
    }
}

/// Calls `f` with views of `tensors`, which must be on the CPU.
///
/// Tensors that share a storage (q, k and v cut from one projection) share one guard: candle's lock is not reentrant, and
/// a second guard of the same storage could wait for ever behind a writer that waits for the first.
pub(crate) fn read<const N: usize, R>(
    op: &'static str,
    tensors: [&Tensor; N],
    f: impl FnOnce([View<'_>; N]) -> Result<R>,
) -> Result<R> {
    let addresses = tensors.map(|t| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr());
    let mut guards = Vec::with_capacity(N);
    let mut slots = [0; N];
    for (i, tensor) in tensors.iter().enumerate() {
        slots[i] = match addresses[..i].iter().position(|&a| a == addresses[i]) {
            Some(earlier) => slots[earlier],
            None => {
                guards.push(tensor.storage_and_layout().0);
                guards.len() - 1
            }
        };
    }
    f(std::array::from_fn(|i| View { op, storage: &guards[slots[i]], layout: tensors[i].layout() }))
}

/// Where the rows (runs along the packed last axis) of a strided operand begin, in row-major order of the other axes.
pub(crate) struct Rows<'a> {
    dims: &'a [usize],
    strides: &'a [usize],
    offset: usize,
    len: usize,
}

impl<'a> Rows<'a> {
    /// Rows of a layout that [`packed_rows`] let pass; rank 1 or more.
    pub(crate) fn new(layout: &'a Layout) -> Self {
        let rank = layout.dims().len() - 1;
        Self {
            dims: &layout.dims()[..rank],
            strides: &layout.stride()[..rank],
            offset: layout.start_offset(),
            len: layout.dims()[rank],
        }
    }

    /// Range of row `index` in the storage.
    #[inline]
    pub(crate) fn range(&self, mut index: usize) -> Range<usize> {
        let mut start = self.offset;
        for (&n, &stride) in self.dims.iter().zip(self.strides).rev() {
            start += index % n * stride;
            index /= n;
        }
        start..start + self.len
    }
}

/// Computes one row of a result. Implementations mark `row` as `#[inline(always)]`: only then is it compiled for the
/// widest vectors of the machine.
pub(crate) trait RowKernel<T>: Sync {
    /// Fills row `index` of the result.
    fn row(&self, index: usize, out: &mut [T]);
}

/// Fills `out`, rows of `len` elements (the last may be shorter), over all threads. Each row is computed by one thread, whatever their number.
pub(crate) fn for_each_row<T: Send>(out: &mut [T], len: usize, kernel: &impl RowKernel<T>) {
    if out.is_empty() {
        return;
    }
    let rows = TASK_ELEMENTS.div_ceil(len);
    let arch = pulp::Arch::new();
    out.par_chunks_mut(rows * len)
        .enumerate()
        .for_each(|(task, out)| arch.dispatch(Task { kernel, first: task * rows, len, out }));
}

/// A run of rows. A struct and not a closure, because a closure cannot be told to be inlined into the code that pulp
/// compiles for each instruction set, and without that it is compiled for the oldest one.
struct Task<'a, T, K> {
    kernel: &'a K,
    first: usize,
    len: usize,
    out: &'a mut [T],
}

impl<T, K: RowKernel<T>> pulp::NullaryFnOnce for Task<'_, T, K> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (i, row) in self.out.chunks_mut(self.len).enumerate() {
            self.kernel.row(self.first + i, row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_of_one_storage_share_a_guard() {
        let qkv = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((2, 12)).unwrap();
        let parts: Vec<_> = (0..3).map(|i| qkv.narrow(1, i * 4, 4).unwrap()).collect();
        let other = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
        let firsts = read("test", [&parts[0], &parts[1], &other, &other, &parts[2]], |views| {
            views.iter().map(|v| Ok(v.storage::<f32>()?[v.layout.start_offset()])).collect::<Result<Vec<_>>>()
        });
        assert_eq!(firsts.unwrap(), [0.0, 4.0, 1.0, 1.0, 8.0]);
    }

    #[test]
    fn rows_of_a_permuted_narrowed_view() {
        let x = Tensor::arange(0f32, 60.0, &Device::Cpu).unwrap().reshape((3, 4, 5)).unwrap();
        let view = x.narrow(1, 1, 2).unwrap().transpose(0, 1).unwrap();
        assert!(!view.is_contiguous());
        let want = view.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let rows = Rows::new(view.layout());
        let got = read("test", [&view], |[v]| {
            let data = v.storage::<f32>()?;
            Ok((0..6).flat_map(|i| data[rows.range(i)].to_vec()).collect::<Vec<_>>())
        });
        assert_eq!(got.unwrap(), want);
    }

    #[test]
    fn only_unpacked_last_axes_are_copied() {
        let x = Tensor::zeros((4, 6), DType::F32, &Device::Cpu).unwrap();
        assert!(!packed_rows(&x.narrow(1, 0, 3).unwrap()).unwrap().is_contiguous());
        assert!(packed_rows(&x.t().unwrap()).unwrap().is_contiguous());
    }
}
