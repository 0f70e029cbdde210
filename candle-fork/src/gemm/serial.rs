//! A single-threaded product with the right operand packed ahead: the building block of ops that loop over tiles
//! themselves, such as attention.

use super::{
    buffer::AlignedBuffer,
    kernel::{Block, KC, panel_width},
};

/// A matrix inside a slice: element (i, j) lies at `i * row_stride + j * col_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    /// The elements.
    pub(crate) data: &'a [f32],
    /// Distance of rows, in elements.
    pub(crate) row_stride: usize,
    /// Distance of columns, in elements.
    pub(crate) col_stride: usize,
}

/// Where [`serial`] puts its result: row i starts at `i * row_stride` and is contiguous.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    /// The elements.
    pub(crate) data: &'a mut [f32],
    /// Distance of rows, in elements.
    pub(crate) row_stride: usize,
    /// Whether the product is added to what is there.
    pub(crate) accumulate: bool,
}

/// A right operand `[k, n]` packed for the kernel. The buffer is kept between calls of [`PackedCols::pack`].
#[derive(Debug, Default)]
pub(crate) struct PackedCols {
    buffer: AlignedBuffer,
    k: usize,
    n: usize,
}

impl PackedCols {
    /// Packs `b`, `k` rows by `n` columns, replacing earlier contents.
    pub(crate) fn pack(&mut self, b: Strided<'_>, k: usize, n: usize) {
        (self.k, self.n) = (k, n);
        let nr = panel_width(2);
        let panels = n.div_ceil(nr);
        let packed = self.buffer.get(k * panels * nr);
        for k0 in (0..k).step_by(KC) {
            let kc = KC.min(k - k0);
            let block = &mut packed[k0 * panels * nr..][..kc * panels * nr];
            for (p, panel) in block.chunks_exact_mut(kc * nr).enumerate() {
                let cols = nr.min(n - p * nr);
                pack_panel(b, k0, p * nr, cols, nr, panel);
            }
        }
    }
}

/// Fills one panel `[kc][nr]` from row `k0` and column `j0` on; columns at and beyond `cols` become zero.
#[inline]
pub(super) fn pack_panel(b: Strided<'_>, k0: usize, j0: usize, cols: usize, nr: usize, panel: &mut [f32]) {
    if cols < nr {
        panel.fill(0.0);
    }
    let kc = panel.len() / nr;
    let start = k0 * b.row_stride + j0 * b.col_stride;
    if b.col_stride == 1 {
        for (k, row) in panel.chunks_exact_mut(nr).enumerate() {
            row[..cols].copy_from_slice(&b.data[start + k * b.row_stride..][..cols]);
        }
    } else if b.row_stride == 1 {
        // Columns are contiguous: a transposition. Sixteen rows at a time, so that every cache line of the source and
        // of the panel is used up while it is at hand.
        for k1 in (0..kc).step_by(16) {
            let depth = 16.min(kc - k1);
            let rows = &mut panel[k1 * nr..][..depth * nr];
            for j in 0..cols {
                let column = &b.data[start + k1 + j * b.col_stride..][..depth];
                for (row, &x) in rows.chunks_exact_mut(nr).zip(column) {
                    row[j] = x;
                }
            }
        }
    } else {
        for (k, row) in panel.chunks_exact_mut(nr).enumerate() {
            for (j, x) in row[..cols].iter_mut().enumerate() {
                *x = b.data[start + k * b.row_stride + j * b.col_stride];
            }
        }
    }
}

/// Buffers of [`serial`], one per thread, kept between calls.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    a: AlignedBuffer,
    acc: AlignedBuffer,
}

/// `out[m, n] (+)= a[m, k] b[k, n]` on the calling thread, accumulated in f32.
///
/// `a` may have any strides (unit column stride is the fast case). Costs one copy of `a` and of the result, so `n` and
/// `m` of 32 and more are where it pays; the accumulator takes `m * n` floats, keep it within the second-level cache.
pub(crate) fn serial(m: usize, a: Strided<'_>, b: &PackedCols, out: Output<'_>, scratch: &mut Scratch) {
    let (k, n) = (b.k, b.n);
    let nr = panel_width(2);
    let panels = n.div_ceil(nr);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !out.accumulate {
            (0..m).for_each(|i| out.data[i * out.row_stride..][..n].fill(0.0));
        }
        return;
    }
    let packed = b.buffer.filled(k * panels * nr);
    for k0 in (0..k).step_by(KC) {
        let kc = KC.min(k - k0);
        let rows = scratch.a.get(m * KC);
        for (i, row) in rows.chunks_exact_mut(KC).enumerate() {
            let start = i * a.row_stride + k0 * a.col_stride;
            if a.col_stride == 1 {
                row[..kc].copy_from_slice(&a.data[start..][..kc]);
            } else {
                for (j, x) in row[..kc].iter_mut().enumerate() {
                    *x = a.data[start + j * a.col_stride];
                }
            }
        }
        Block {
            a: rows,
            b: &packed[k0 * panels * nr..][..kc * panels * nr],
            acc: scratch.acc.get(m * panels * nr),
            kc,
            vectors: 2,
            first: k0 == 0,
        }
        .run();
    }
    let acc = scratch.acc.filled(m * panels * nr);
    for (p, panel) in acc.chunks_exact(m * nr).enumerate() {
        let cols = nr.min(n - p * nr);
        for (i, row) in panel.chunks_exact(nr).enumerate() {
            let to = &mut out.data[i * out.row_stride + p * nr..][..cols];
            if out.accumulate {
                to.iter_mut().zip(row).for_each(|(y, x)| *y += x);
            } else {
                to.copy_from_slice(&row[..cols]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::test_data::noise;

    /// Sums in f64.
    fn naive(m: usize, n: usize, k: usize, a: Strided<'_>, b: Strided<'_>) -> Vec<f64> {
        let at = |m: Strided<'_>, i: usize, j: usize| f64::from(m.data[i * m.row_stride + j * m.col_stride]);
        (0..m * n).map(|ij| (0..k).map(|p| at(a, ij / n, p) * at(b, p, ij % n)).sum()).collect()
    }

    #[test]
    fn agrees_with_the_sum_in_f64() {
        let (mut packed, mut scratch) = (PackedCols::default(), Scratch::default());
        for (m, n, k) in [
            (1, 1, 1),
            (12, 32, 256),
            (13, 33, 257),
            (11, 31, 255),
            (5, 64, 128),
            (24, 7, 300),
            (6, 100, 513),
            (64, 64, 64),
            (3, 1, 700),
            (7, 5, 0),
            (0, 4, 4),
            (25, 96, 1),
            (14, 16, 17),
        ] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            for transposed in 0..4 {
                let a = match transposed & 1 {
                    0 => Strided { data: &a, row_stride: k, col_stride: 1 },
                    _ => Strided { data: &a, row_stride: 1, col_stride: m },
                };
                let b = match transposed & 2 {
                    0 => Strided { data: &b, row_stride: n, col_stride: 1 },
                    _ => Strided { data: &b, row_stride: 1, col_stride: k },
                };
                packed.pack(b, k, n);
                let want = naive(m, n, k, a, b);
                let mut got = vec![f32::NAN; m * (n + 3)];
                for accumulate in [false, true] {
                    serial(m, a, &packed, Output { data: &mut got, row_stride: n + 3, accumulate }, &mut scratch);
                    let factor = if accumulate { 2.0 } else { 1.0 };
                    for (i, row) in got.chunks_exact(n + 3).enumerate() {
                        for (j, &y) in row[..n].iter().enumerate() {
                            let error = (f64::from(y) - factor * want[i * n + j]).abs();
                            assert!(error <= 2e-6 * (k as f64).sqrt().max(1.0), "{m} {n} {k} {i} {j}: {error}");
                        }
                        assert!(row[n..].iter().all(|y| y.is_nan()), "wrote beyond the row");
                    }
                }
            }
        }
    }
}
