//! CPU kernels: heads over threads, f32 arithmetic, one rounding.

use candle_core::{Device, Tensor};

use super::reference::Pairing;
use crate::{
    element::Element,
    error::{Result, What},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read},
};

struct Rope<'a, T, const INTERLEAVED: bool> {
    x: &'a [T],
    heads_of: Rows<'a>,
    cos: &'a [f32],
    sin: &'a [f32],
    rows: usize,
    heads: usize,
}

impl<T: Element, const INTERLEAVED: bool> RowKernel<T> for Rope<'_, T, INTERLEAVED> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let x = &self.x[self.heads_of.range(index)];
        let n = out.len() / 2;
        let row = index / self.heads % self.rows * n;
        let (cos, sin) = (&self.cos[row..][..n], &self.sin[row..][..n]);
        if INTERLEAVED {
            let (x, y) = (x.as_chunks::<2>().0, out.as_chunks_mut::<2>().0);
            for (((y, x), &c), &s) in y.iter_mut().zip(x).zip(cos).zip(sin) {
                let (a, b) = (x[0].widen(), x[1].widen());
                *y = [T::round(c * a - s * b), T::round(s * a + c * b)];
            }
        } else {
            let (x0, x1) = x.split_at(n);
            let (y0, y1) = out.split_at_mut(n);
            for (((((y0, y1), x0), x1), &c), &s) in y0.iter_mut().zip(y1).zip(x0).zip(x1).zip(cos).zip(sin) {
                let (a, b) = (x0.widen(), x1.widen());
                *y0 = T::round(c * a - s * b);
                *y1 = T::round(s * a + c * b);
            }
        }
    }
}

pub(super) fn rope<T: Element>(x: &Tensor, cos: &Tensor, sin: &Tensor, pairing: Pairing) -> Result<Tensor> {
    let x = packed_rows(x)?;
    let cos = cos.contiguous().what("packing of an operand")?;
    let sin = sin.contiguous().what("packing of an operand")?;
    let mut out = T::zeros(x.elem_count());
    read("rope", [&x, &cos, &sin], |[xv, cos, sin]| {
        let (rows, heads, width) = (xv.layout.dims()[1], xv.layout.dims()[2], xv.layout.dims()[3]);
        let (x, heads_of) = (xv.storage::<T>()?, Rows::new(xv.layout));
        let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
        match pairing {
            Pairing::Interleaved => {
                for_each_row(&mut out, width, &Rope::<T, true> { x, heads_of, cos, sin, rows, heads });
            }
            Pairing::Half => {
                for_each_row(&mut out, width, &Rope::<T, false> { x, heads_of, cos, sin, rows, heads });
            }
        }
        Ok(())
    })?;
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of rope")
}
