//! CPU kernel: heads over threads, squares summed in f64, the rest in f32, one rounding.

use candle_core::{Device, Tensor};

use super::{Pairing, Problem};
use crate::{
    element::Element,
    error::{Result, What},
    norm::moments::sum_of_squares,
    operand::{RowKernel, Rows, for_each_row, read},
};

struct NormRope<'a, T, const INTERLEAVED: bool> {
    x: &'a [T],
    rows: Rows<'a>,
    /// For each run of tokens that of the first [`Problem::heads`] heads, and that of the others if there are any.
    weights: &'a [Vec<f32>],
    /// One past the last token of each run.
    ends: &'a [usize],
    tokens: usize,
    all_heads: usize,
    heads: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    eps: f64,
}

impl<T: Element, const INTERLEAVED: bool> RowKernel<T> for NormRope<'_, T, INTERLEAVED> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let x = &self.x[self.rows.range(index)];
        let n = out.len() / 2;
        let (token, head) = (index / self.all_heads % self.tokens, index % self.all_heads);
        let run = self.ends.iter().filter(|&&end| end <= token).count();
        let groups = 1 + usize::from(self.heads < self.all_heads);
        let weight = &self.weights[run * groups + usize::from(head >= self.heads)];
        let inverse = (1.0 / (sum_of_squares(x) / x.len() as f64 + self.eps).sqrt()) as f32;
        let normed = |i: usize| x[i].widen() * inverse * weight[i];
        let (cos, sin) = (&self.cos[token * n..][..n], &self.sin[token * n..][..n]);
        for (i, (&c, &s)) in cos.iter().zip(sin).enumerate() {
            let (first, second) = if INTERLEAVED { (2 * i, 2 * i + 1) } else { (i, i + n) };
            let (a, b) = (normed(first), normed(second));
            out[first] = T::round(c * a - s * b);
            out[second] = T::round(s * a + c * b);
        }
    }
}

pub(super) fn norm_rope<T: Element>(problem: &Problem<'_>, weights: &[Vec<f32>]) -> Result<Tensor> {
    let Problem { op, x, ref layout, heads, ref runs, cos, sin, eps, pairing } = *problem;
    let cos = cos.contiguous().what("packing of an operand")?;
    let sin = sin.contiguous().what("packing of an operand")?;
    let [batch, tokens, all_heads, width] = problem.dims();
    let ends: Vec<usize> = runs
        .iter()
        .scan(0, |end, run| {
            *end += run.tokens;
            Some(*end)
        })
        .collect();
    let mut out = T::zeros(batch * tokens * all_heads * width);
    read(op, [x, &cos, &sin], |[x, cos, sin]| {
        let (x, rows, ends) = (x.storage::<T>()?, Rows::new(layout), ends.as_slice());
        let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
        match pairing {
            Pairing::Interleaved => {
                let kernel = NormRope::<T, true> { x, rows, weights, ends, tokens, all_heads, heads, cos, sin, eps };
                for_each_row(&mut out, width, &kernel);
            }
            Pairing::Half => {
                let kernel = NormRope::<T, false> { x, rows, weights, ends, tokens, all_heads, heads, cos, sin, eps };
                for_each_row(&mut out, width, &kernel);
            }
        }
        Ok(())
    })?;
    Tensor::from_vec(out, (batch, tokens, all_heads, width), &Device::Cpu).what(op)
}
