//! Results that go into a part of a tensor that exists already, as with `Tensor::slice_set`: columns or rows of a buffer that
//! several ops fill side by side, so that nothing has to be concatenated.

#[cfg(feature = "cuda")]
use std::cell::RefCell;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Storage, Tensor, WithDType};

use crate::{
    error::{Error, Result, What},
    operand::{Rows, check_dtype, check_shape, on_cpu, shape_error},
};

/// Checks that a result of shape `dims` and of `main`'s dtype and device can be written into `out` while `operands` are
/// read.
pub(crate) fn check_target(
    op: &'static str,
    out: &Tensor,
    dims: &[usize],
    main: &Tensor,
    operands: &[&Tensor],
) -> Result<()> {
    if out.track_op() {
        return Err(Error::Argument { op, what: "out tracks gradients, but this op has no backward pass".into() });
    }
    check_shape(op, "out", out, dims)?;
    check_dtype(op, "out", out, main)?;
    if !out.device().same_device(main.device()) {
        return Err(Error::Argument { op, what: "out is on another device than the operands".into() });
    }
    if out.dims().last().is_none_or(|&n| n > 1 && out.stride().last() != Some(&1)) {
        return Err(shape_error(op, "out", out, "a packed last axis"));
    }
    if out.elem_count() > 0 && operands.iter().any(|operand| shares_storage(out, operand)) {
        return Err(Error::Argument { op, what: "out shares its memory with an operand".into() });
    }
    Ok(())
}

/// Whether two tensors lie in the same memory, be it in places apart.
pub(crate) fn shares_storage(a: &Tensor, b: &Tensor) -> bool {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0).addr();
    address(a) == address(b)
}

/// Copies `value`, contiguous and of `out`'s shape and dtype, into `out`, which [`check_target`] let pass.
///
/// # Errors
/// [`Error::Unsupported`] for devices without an implementation.
pub(crate) fn store(op: &'static str, out: &Tensor, value: &Tensor) -> Result<()> {
    if !on_cpu(out) {
        return Err(Error::Unsupported { op, what: "results inside of a tensor on this device".into() });
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    out.inplace_op1(&Store { op, value }).what(op)
}

struct Store<'a> {
    op: &'static str,
    value: &'a Tensor,
}

impl InplaceOp1 for Store<'_> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match storage {
            CpuStorage::F32(to) => copy_rows(self.value, to, layout),
            CpuStorage::F16(to) => copy_rows(self.value, to, layout),
            CpuStorage::BF16(to) => copy_rows(self.value, to, layout),
            _ => Err(candle_core::Error::UnsupportedDTypeForOp(DType::U8, self.op)),
        }
    }
}

fn copy_rows<T: WithDType>(value: &Tensor, to: &mut [T], layout: &Layout) -> candle_core::Result<()> {
    let (storage, from) = value.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("a result is not on the cpu") };
    let values = &storage.as_slice::<T>()?[from.start_offset()..];
    let rows = Rows::new(layout);
    let width = layout.dims().last().copied().unwrap_or(1);
    for (row, values) in values.chunks_exact(width).take(layout.shape().elem_count() / width).enumerate() {
        to[rows.range(row)].copy_from_slice(values);
    }
    Ok(())
}

/// Calls `f` with the address of the first element of `out`, which [`check_target`] let pass, for work that `f` enqueues on
/// the stream of `out`'s device. `f` may read any other tensor.
///
/// # Errors
/// Whatever `f` returns; [`Error::Argument`] if `out` is not on a CUDA device; [`Error::Candle`] if it overlaps itself.
#[cfg(feature = "cuda")]
pub(crate) fn with_address<F>(op: &'static str, out: &Tensor, f: F) -> Result<()>
where
    F: FnOnce(crate::cuda::tensor::Address) -> Result<()>,
{
    crate::cuda::tensor::device_of(op, out)?;
    let enqueue = Enqueue { op, f: RefCell::new(Some(f)), result: RefCell::new(Ok(())) };
    out.inplace_op1(&enqueue).what(op)?;
    enqueue.result.into_inner()
}

/// Work on a device, and what came of it: candle's errors do not carry those of this crate.
#[cfg(feature = "cuda")]
struct Enqueue<F> {
    op: &'static str,
    f: RefCell<Option<F>>,
    result: RefCell<Result<()>>,
}

#[cfg(feature = "cuda")]
impl<F: FnOnce(crate::cuda::tensor::Address) -> Result<()>> InplaceOp1 for Enqueue<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("{}: out is not on a CUDA device", self.op)
    }

    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        if let Some(f) = self.f.take() {
            let result = crate::cuda::tensor::written(storage, layout.start_offset(), f);
            *self.result.borrow_mut() = result;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{DTYPES, Data, tensor, to_f64};

    const OP: &str = "test";

    #[test]
    fn a_part_is_written_and_nothing_else() {
        for dtype in DTYPES {
            let buffer = tensor(&[2, 5, 7], dtype, Data::Normal, 1);
            let before = to_f64(&buffer);
            let out = buffer.narrow(1, 1, 3).unwrap().narrow(2, 2, 4).unwrap();
            let value = tensor(&[2, 3, 4], dtype, Data::LargeMean, 2);
            check_target(OP, &out, value.dims(), &value, &[&value]).unwrap();
            store(OP, &out, &value).unwrap();
            assert_eq!(to_f64(&out), to_f64(&value));
            let inside = |i: usize| (1..4).contains(&(i / 7 % 5)) && (2..6).contains(&(i % 7));
            for (i, (after, before)) in to_f64(&buffer).iter().zip(&before).enumerate() {
                assert!(inside(i) || after == before, "{dtype:?} {i}");
            }
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let value = tensor(&[2, 4], DType::F32, Data::Normal, 1);
        let refused = |out: &Tensor, operand: &Tensor| check_target(OP, out, &[2, 4], &value, &[operand]).unwrap_err();
        let wide = Tensor::zeros((2, 9), DType::F32, &Device::Cpu).unwrap();
        assert!(matches!(refused(&wide, &value), Error::Shape { operand: "out", .. }));
        let half = Tensor::zeros((2, 4), DType::BF16, &Device::Cpu).unwrap();
        assert!(matches!(refused(&half, &value), Error::DType { operand: "out", .. }));
        let unpacked = Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap().t().unwrap();
        assert!(matches!(refused(&unpacked, &value), Error::Shape { operand: "out", .. }));
        let part = wide.narrow(1, 0, 4).unwrap();
        assert!(matches!(refused(&part, &wide.narrow(1, 4, 4).unwrap()), Error::Argument { .. }));
        let repeated = Tensor::zeros((1, 4), DType::F32, &Device::Cpu).unwrap().broadcast_as((2, 4)).unwrap();
        check_target(OP, &repeated, &[2, 4], &value, &[&value]).unwrap();
        assert!(matches!(store(OP, &repeated, &value), Err(Error::Candle { .. })));
    }
}
