//! CPU kernel: one row of the result at a time, read from the row of x that it repeats.

use candle_core::{Device, Tensor};

use crate::{
    element::Element,
    error::{Result, What},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read},
};

struct Upsample<'a, T, const D: usize> {
    x: &'a [T],
    rows: Rows<'a>,
    extents: [usize; D],
    factors: [usize; D],
}

impl<T: Element, const D: usize> RowKernel<T> for Upsample<'_, T, D> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        // Row index of the result to row index of x: divide the coordinate of each axis but the last by its factor.
        let (mut rest, mut source, mut stride) = (index, 0, 1);
        for (&extent, &factor) in self.extents.iter().zip(&self.factors).take(D - 1).rev() {
            source += rest % (extent * factor) / factor * stride;
            rest /= extent * factor;
            stride *= extent;
        }
        let x = &self.x[self.rows.range(rest * stride + source)];
        match self.factors[D - 1] {
            1 => out.copy_from_slice(x),
            2 => out.as_chunks_mut::<2>().0.iter_mut().zip(x).for_each(|(y, &x)| *y = [x, x]),
            factor => out.chunks_exact_mut(factor).zip(x).for_each(|(y, &x)| y.fill(x)),
        }
    }
}

pub(super) fn upsample_nearest<T: Element, const D: usize>(
    x: &Tensor,
    out_dims: &[usize],
    factors: [usize; D],
) -> Result<Tensor> {
    let x = packed_rows(x)?;
    let mut out = T::zeros(out_dims.iter().product());
    read("upsample_nearest", [&x], |[view]| {
        let extents = std::array::from_fn(|axis| view.layout.dims()[axis + 2]);
        let kernel = Upsample::<T, D> { x: view.storage()?, rows: Rows::new(view.layout), extents, factors };
        for_each_row(&mut out, extents[D - 1] * factors[D - 1], &kernel);
        Ok(())
    })?;
    Tensor::from_vec(out, out_dims, &Device::Cpu).what("result of upsample_nearest")
}

struct Interleave<'a, T> {
    parts: [&'a [T]; 4],
}

impl<T: Element> RowKernel<T> for Interleave<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        // Rows of the parts are half as long and half as many, so the index of a part's row is that of the pair.
        let (pair, a, w) = (index / 2, index % 2, out.len() / 2);
        let (left, right) = (&self.parts[2 * a][pair * w..][..w], &self.parts[2 * a + 1][pair * w..][..w]);
        for ((y, &left), &right) in out.as_chunks_mut::<2>().0.iter_mut().zip(left).zip(right) {
            *y = [left, right];
        }
    }
}

pub(super) fn interleave2d<T: Element>(parts: &[Tensor; 4], dims: Vec<usize>) -> Result<Tensor> {
    let mut packed = parts.clone();
    for part in &mut packed {
        *part = part.contiguous().what("packing of an operand")?;
    }
    let mut out = T::zeros(dims.iter().product());
    if !out.is_empty() {
        read("interleave2d", packed.each_ref(), |[a, b, c, d]| {
            let parts = [a.contiguous()?, b.contiguous()?, c.contiguous()?, d.contiguous()?];
            for_each_row(&mut out, dims[dims.len() - 1], &Interleave::<T> { parts });
            Ok(())
        })?;
    }
    Tensor::from_vec(out, dims, &Device::Cpu).what("result of interleave2d")
}
