//! Few vectors times a large matrix: bounded by reading the matrix, which happens once.

use pulp::{Arch, Simd, WithSimd};

use super::{
    buffer::AlignedBuffer,
    kernel::KC,
    parallel::{for_each, work},
    source::RowSource,
};
use crate::element::Element;

/// Most vectors for which [`few`] beats the packed product.
pub(crate) const FEW: usize = 4;

/// Rows of the matrix per task.
const STRIPE: usize = 48;

/// `out[n, m] = (a[m, k] x[n, k]^T + bias[m])^T` for `n` up to [`FEW`], rounded once to `T`.
///
/// Row after row, each from its first element to its last: the order in which memory is fastest.
pub(crate) fn few<T: Element>(
    (m, n, k): (usize, usize, usize),
    a: &impl RowSource,
    x: &[f32],
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    if m == 0 || n == 0 {
        return;
    }
    let mut tasks: Vec<Vec<&mut [T]>> = Vec::new();
    tasks.resize_with(m.div_ceil(STRIPE), Vec::new);
    for row in out.chunks_exact_mut(m) {
        tasks.iter_mut().zip(row.chunks_mut(STRIPE)).for_each(|(task, piece)| task.push(piece));
    }
    for_each(tasks, work(&[m, n, k]), AlignedBuffer::default, |buffer, s, mut out| {
        let m0 = s * STRIPE;
        let rows = STRIPE.min(m - m0);
        let block = buffer.get(KC);
        let mut sums = [[0.0; STRIPE]; FEW];
        for i in 0..rows {
            for k0 in (0..k).step_by(KC) {
                let kc = KC.min(k - k0);
                a.pack(m0 + i..m0 + i + 1, k0..k0 + kc, block);
                for (x, sums) in x.chunks_exact(k).zip(&mut sums) {
                    sums[i] += Arch::new().dispatch(Dot { row: &block[..kc], x: &x[k0..k0 + kc] });
                }
            }
        }
        for (sums, out) in sums.iter_mut().zip(&mut out) {
            if let Some(bias) = bias {
                sums.iter_mut().zip(&bias[m0..m0 + rows]).for_each(|(y, b)| *y += b);
            }
            T::round_slice(&sums[..rows], out);
        }
    });
}

/// `row . x`, both of one length.
struct Dot<'a> {
    row: &'a [f32],
    x: &'a [f32],
}

impl WithSimd for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (x, x_rest) = S::as_simd_f32s(self.x);
        let (row, row_rest) = S::as_simd_f32s(self.row);
        let ((x4, x1), (row4, row1)) = (x.as_chunks::<4>(), row.as_chunks::<4>());
        let mut acc = [simd.splat_f32s(0.0); 4];
        for (x, row) in x4.iter().zip(row4) {
            for i in 0..4 {
                acc[i] = simd.mul_add_e_f32s(x[i], row[i], acc[i]);
            }
        }
        for (&x, &row) in x1.iter().zip(row1) {
            acc[0] = simd.mul_add_e_f32s(x, row, acc[0]);
        }
        let acc = simd.add_f32s(simd.add_f32s(acc[0], acc[1]), simd.add_f32s(acc[2], acc[3]));
        let rest: f32 = x_rest.iter().zip(row_rest).map(|(x, w)| x * w).sum();
        simd.reduce_sum_f32s(acc) + rest
    }
}
