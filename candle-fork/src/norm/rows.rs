//! CPU kernels of the norms over the last axis.

use candle_core::{Device, Tensor};

use super::moments::{Center, Moments, sum_of_squares};
use crate::{
    element::Element,
    error::{Result, What},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read},
};

struct RmsNorm<'a, T> {
    x: &'a [T],
    rows: Rows<'a>,
    weight: &'a [f32],
    eps: f64,
}

impl<T: Element> RowKernel<T> for RmsNorm<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let x = &self.x[self.rows.range(index)];
        let inverse = (1.0 / (sum_of_squares(x) / x.len() as f64 + self.eps).sqrt()) as f32;
        for ((y, &x), &weight) in out.iter_mut().zip(x).zip(self.weight) {
            *y = T::round(x.widen() * inverse * weight);
        }
    }
}

pub(super) fn rms_norm<T: Element>(x: &Tensor, weight: &[f32], eps: f64) -> Result<Tensor> {
    let x = packed_rows(x)?;
    let mut out = T::zeros(x.elem_count());
    read("rms_norm", [&x], |[view]| {
        let kernel = RmsNorm::<T> { x: view.storage()?, rows: Rows::new(view.layout), weight, eps };
        for_each_row(&mut out, weight.len(), &kernel);
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of rms_norm")
}

/// What a layer norm multiplies and adds after normalising, for each batch (or one for all).
pub(super) struct Affine {
    /// Factors `[batch, n]`.
    pub(super) scale: Vec<f32>,
    /// Summands `[batch, n]`.
    pub(super) shift: Vec<f32>,
    /// Rows of x that share one row of these.
    pub(super) rows_per_batch: usize,
}

struct LayerNorm<'a, T> {
    x: &'a [T],
    rows: Rows<'a>,
    affine: &'a Affine,
    eps: f64,
}

impl<T: Element> RowKernel<T> for LayerNorm<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let x = &self.x[self.rows.range(index)];
        let n = out.len();
        let batch = index / self.affine.rows_per_batch * n;
        let (scale, shift) = (&self.affine.scale[batch..][..n], &self.affine.shift[batch..][..n]);
        let moments = Moments::of(x);
        let (center, inverse) = (Center::new(moments.mean), moments.inverse_deviation(self.eps) as f32);
        for (((y, &x), &scale), &shift) in out.iter_mut().zip(x).zip(scale).zip(shift) {
            *y = T::round(center.distance(x.widen()) * inverse * scale + shift);
        }
    }
}

pub(super) fn layer_norm<T: Element>(x: &Tensor, n: usize, affine: &Affine, eps: f64) -> Result<Tensor> {
    let x = packed_rows(x)?;
    let mut out = T::zeros(x.elem_count());
    read("layer_norm", [&x], |[view]| {
        for_each_row(&mut out, n, &LayerNorm::<T> { x: view.storage()?, rows: Rows::new(view.layout), affine, eps });
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of layer_norm")
}
