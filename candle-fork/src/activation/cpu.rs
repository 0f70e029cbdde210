//! CPU kernels: rows over threads, f32 arithmetic, one rounding.

use candle_core::{Device, Tensor};

use super::exp::silu_f32;
use crate::{
    element::Element,
    error::{Result, What},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read, to_f32_vec},
};

/// Elements that an op without axes takes as one row: any number.
const FLAT_ROW: usize = 1024;

struct Silu<'a, T> {
    x: &'a [T],
}

impl<T: Element> RowKernel<T> for Silu<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let x = &self.x[index * FLAT_ROW..][..out.len()];
        for (y, &x) in out.iter_mut().zip(x) {
            *y = T::round(silu_f32(x.widen()));
        }
    }
}

pub(super) fn silu<T: Element>(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous().what("packing of an operand")?;
    let mut out = T::zeros(x.elem_count());
    read("silu", [&x], |[view]| {
        for_each_row(&mut out, FLAT_ROW, &Silu::<T> { x: view.contiguous()? });
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of silu")
}

struct Swiglu<'a, T> {
    x: &'a [T],
    rows: Rows<'a>,
}

impl<T: Element> RowKernel<T> for Swiglu<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let (gate, up) = self.x[self.rows.range(index)].split_at(out.len());
        for ((y, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *y = T::round(silu_f32(gate.widen()) * up.widen());
        }
    }
}

pub(super) fn swiglu<T: Element>(x: &Tensor) -> Result<Tensor> {
    let x = packed_rows(x)?;
    let mut dims = x.dims().to_vec();
    let n = dims.pop().unwrap_or(0) / 2;
    dims.push(n);
    let mut out = T::zeros(dims.iter().product());
    read("swiglu", [&x], |[view]| {
        for_each_row(&mut out, n, &Swiglu::<T> { x: view.storage()?, rows: Rows::new(view.layout) });
        Ok(())
    })?;
    Tensor::from_vec(out, dims, &Device::Cpu).what("result of swiglu")
}

struct GateResidual<'a, T> {
    x: &'a [T],
    x_rows: Rows<'a>,
    y: &'a [T],
    y_rows: Rows<'a>,
    gate: &'a [f32],
    rows_per_batch: usize,
}

impl<T: Element> RowKernel<T> for GateResidual<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let n = out.len();
        let x = &self.x[self.x_rows.range(index)];
        let y = &self.y[self.y_rows.range(index)];
        let gate = &self.gate[index / self.rows_per_batch * n..][..n];
        for (((out, &x), &y), &gate) in out.iter_mut().zip(x).zip(y).zip(gate) {
            *out = T::round(x.widen() + gate * y.widen());
        }
    }
}

pub(super) fn gate_residual<T: Element>(x: &Tensor, gate: &Tensor, y: &Tensor) -> Result<Tensor> {
    let gate = to_f32_vec(gate)?;
    let (x, y) = (packed_rows(x)?, packed_rows(y)?);
    let (rows_per_batch, n) = (x.dims()[1], x.dims()[2]);
    let mut out = T::zeros(x.elem_count());
    read("gate_residual", [&x, &y], |[xv, yv]| {
        let kernel = GateResidual::<T> {
            x: xv.storage()?,
            x_rows: Rows::new(xv.layout),
            y: yv.storage()?,
            y_rows: Rows::new(yv.layout),
            gate: &gate,
            rows_per_batch,
        };
        for_each_row(&mut out, n, &kernel);
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of gate_residual")
}

struct Residual<'a, T> {
    x: &'a [T],
    y: &'a [T],
}

impl<T: Element> RowKernel<T> for Residual<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let (x, y) = (&self.x[index * FLAT_ROW..][..out.len()], &self.y[index * FLAT_ROW..][..out.len()]);
        for ((out, &x), &y) in out.iter_mut().zip(x).zip(y) {
            *out = T::round(x.widen() + y.widen());
        }
    }
}

pub(super) fn residual<T: Element>(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let x = x.contiguous().what("packing of an operand")?;
    let y = y.contiguous().what("packing of an operand")?;
    let mut out = T::zeros(x.elem_count());
    read("residual", [&x, &y], |[xv, yv]| {
        for_each_row(&mut out, FLAT_ROW, &Residual::<T> { x: xv.contiguous()?, y: yv.contiguous()? });
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of residual")
}
