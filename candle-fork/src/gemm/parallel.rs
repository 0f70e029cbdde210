//! The two parallel products. Both are row-major in their result and give the same bits for any number of threads:
//! a task owns a stripe of the result and runs its k-blocks in order.
//!
//! | | packed once, shared | packed per task | result |
//! |---|---|---|---|
//! | [`transposed`]: few columns (tokens), many rows (weights) | columns | a stripe of rows, per k-block | `[n, m]` |
//! | [`direct`]: few rows (filters), many columns (pixels) | nothing | rows and a stripe of columns, per k-block | `[m, n]` |
//!
//! The shared operand is bounded by [`SHARED_FLOATS`]; above it the product runs in several rounds.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    buffer::AlignedBuffer,
    kernel::{Block, KC, panel_width},
    source::{ColSource, RowSource},
};
use crate::element::Element;

/// Largest shared operand, in floats: 64 MiB.
const SHARED_FLOATS: usize = 16 << 20;

/// Columns per round of [`transposed`].
const ROUND_COLS: usize = 768;

/// Rows of a task of [`transposed`], a multiple of the register tile's 12 and 6 rows. Panels of columns come from the
/// third level once per task and k-block, so the more rows share them the better: 131 GFLOP/s per core at 96 rows, 145
/// at 240, where accumulator (720 KiB at 768 columns) and packed rows (180 KiB) still fit a second level of 2 MiB.
const STRIPE_ROWS: usize = 240;

/// Rows per round of [`direct`]: their packed k-block takes at most 576 KiB.
const ROUND_ROWS: usize = 768;

/// Accumulator and packed columns of a task of [`direct`], in floats: 1 MiB.
const STRIPE_FLOATS: usize = 256 << 10;

/// Multiply-adds below which a product runs on the calling thread: waking others costs tens of microseconds.
const SERIAL_WORK: usize = 1 << 19;

/// Buffers of one task, reused by the next task of the thread.
#[derive(Default)]
struct Scratch {
    a: AlignedBuffer,
    b: AlignedBuffer,
    acc: AlignedBuffer,
}

/// Multiply-adds of a product, for [`for_each`].
pub(crate) fn work(extents: &[usize]) -> usize {
    extents.iter().fold(1, |n, &extent| n.saturating_mul(extent))
}

/// Runs `f` on all `tasks`, in parallel if it is worth it.
pub(crate) fn for_each<T: Send, S>(
    tasks: Vec<T>,
    work: usize,
    init: impl Fn() -> S + Send + Sync,
    f: impl Fn(&mut S, usize, T) + Send + Sync,
) {
    if work < SERIAL_WORK || tasks.len() < 2 {
        let mut scratch = init();
        tasks.into_iter().enumerate().for_each(|(i, task)| f(&mut scratch, i, task));
    } else {
        tasks.into_par_iter().enumerate().for_each_init(init, |scratch, (i, task)| f(scratch, i, task));
    }
}

/// Splits a row-major matrix `[.., cols]` into stripes of `width` columns; each is the list of its row pieces.
fn stripes<T>(matrix: &mut [T], cols: usize, width: usize) -> Vec<Vec<&mut [T]>> {
    let mut stripes: Vec<Vec<&mut [T]>> = Vec::new();
    stripes.resize_with(cols.div_ceil(width), Vec::new);
    for row in matrix.chunks_exact_mut(cols) {
        for (stripe, piece) in stripes.iter_mut().zip(row.chunks_mut(width)) {
            stripe.push(piece);
        }
    }
    stripes
}

/// Width of stripes of about `limit` or less that keep the threads evenly busy, in whole `unit`s. The result of a product
/// does not depend on it.
fn even(extent: usize, limit: usize, unit: usize) -> usize {
    let threads = rayon::current_num_threads();
    let tasks = extent.div_ceil(limit).next_multiple_of(threads).max(2 * threads);
    extent.div_ceil(tasks).next_multiple_of(unit)
}

/// Registers per panel row: narrow panels where a wide one would be mostly padding.
fn vectors(n: usize) -> usize {
    if n <= panel_width(1) { 1 } else { 2 }
}

/// `out[n, m] = (a[m, k] b[k, n] + bias[m])^T`, rounded once to `T`.
pub(crate) fn transposed<T: Element>(
    (m, n, k): (usize, usize, usize),
    a: &impl RowSource,
    b: &impl ColSource,
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    if m == 0 || n == 0 {
        return;
    }
    let vectors = vectors(n);
    let nr = panel_width(vectors);
    let limit = ROUND_COLS.min(SHARED_FLOATS / k.max(1)).max(nr);
    // Rounds of equal size, whole panels.
    let round = n.div_ceil(n.div_ceil(limit)).next_multiple_of(nr);
    let stripe = even(m, STRIPE_ROWS, 12);
    let mut shared = AlignedBuffer::default();
    for (r, out) in out.chunks_mut(round * m).enumerate() {
        let (n0, n) = (r * round, out.len() / m);
        let panels = n.div_ceil(nr);
        let packed = shared.get(k * panels * nr);
        let pieces: Vec<_> = packed
            .chunks_mut(KC * panels * nr)
            .enumerate()
            .flat_map(|(kb, block)| {
                let kc = block.len() / (panels * nr);
                block.chunks_exact_mut(kc * nr).enumerate().map(move |(p, panel)| (kb * KC, kc, p, panel))
            })
            .collect();
        for_each(
            pieces,
            work(&[16, n, k]),
            || (),
            |(), _, (k0, kc, p, panel)| {
                let cols = n0 + p * nr..n0 + n.min((p + 1) * nr);
                b.pack(k0..k0 + kc, cols, nr, panel);
            },
        );
        let packed = &*packed;
        for_each(stripes(out, m, stripe), work(&[m, n, k]), Scratch::default, |scratch, s, mut out| {
            let m0 = s * stripe;
            let rows = stripe.min(m - m0);
            let acc = scratch.acc.get(rows * panels * nr);
            if k == 0 {
                acc.fill(0.0);
            }
            for k0 in (0..k).step_by(KC) {
                let kc = KC.min(k - k0);
                let a_block = scratch.a.get(rows * KC);
                a.pack(m0..m0 + rows, k0..k0 + kc, a_block);
                let b = &packed[k0 * panels * nr..][..kc * panels * nr];
                Block { a: a_block, b, acc, kc, vectors, first: k0 == 0 }.run();
            }
            let bias = bias.map(|bias| &bias[m0..m0 + rows]);
            let line = scratch.a.get(rows);
            for (panel, out) in acc.chunks_exact(rows * nr).zip(out.chunks_mut(nr)) {
                for (j, out) in out.iter_mut().enumerate() {
                    for (y, row) in line.iter_mut().zip(panel.chunks_exact(nr)) {
                        *y = row[j];
                    }
                    if let Some(bias) = bias {
                        line.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                    }
                    T::round_slice(line, out);
                }
            }
        });
    }
}

/// `out[m, n] = a[rows, k] b[k, n] + bias[rows]`, rounded once to `T`, for m `rows` of the left operand.
pub(crate) fn direct<T: Element>(
    a: &impl RowSource,
    rows: Range<usize>,
    (n, k): (usize, usize),
    b: &impl ColSource,
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    if rows.is_empty() || n == 0 {
        return;
    }
    let vectors = vectors(n);
    let nr = panel_width(vectors);
    // Rounds of equal size.
    let round = rows.len().div_ceil(rows.len().div_ceil(ROUND_ROWS));
    for (r, out) in out.chunks_mut(round * n).enumerate() {
        let (first, m) = (rows.start + r * round, out.len() / n);
        let bias = bias.map(|bias| &bias[first..first + m]);
        let stripe = even(n, (STRIPE_FLOATS / (m + KC)).clamp(nr, 1024.max(nr)), nr);
        for_each(stripes(out, n, stripe), work(&[m, n, k]), Scratch::default, |scratch, s, out| {
            let n0 = s * stripe;
            let cols = n0..n.min(n0 + stripe);
            direct_stripe(a, first..first + m, (cols, k), b, bias, out, scratch);
        });
    }
}

/// The columns `cols` of [`direct`], given as pieces of the result's rows.
fn direct_stripe<T: Element>(
    a: &impl RowSource,
    rows: Range<usize>,
    (cols, k): (Range<usize>, usize),
    b: &impl ColSource,
    bias: Option<&[f32]>,
    mut out: Vec<&mut [T]>,
    scratch: &mut Scratch,
) {
    let m = rows.len();
    let vectors = vectors(cols.len());
    let nr = panel_width(vectors);
    let width = cols.len().next_multiple_of(nr);
    let acc = scratch.acc.get(m * width);
    if k == 0 {
        acc.fill(0.0);
    }
    for k0 in (0..k).step_by(KC) {
        let kc = KC.min(k - k0);
        let a_block = scratch.a.get(m * KC);
        a.pack(rows.clone(), k0..k0 + kc, a_block);
        let panels = scratch.b.get(kc * width);
        b.pack(k0..k0 + kc, cols.clone(), nr, panels);
        Block { a: a_block, b: panels, acc, kc, vectors, first: k0 == 0 }.run();
    }
    for (i, out) in out.iter_mut().enumerate() {
        for (panel, out) in acc.chunks_exact_mut(m * nr).zip(out.chunks_mut(nr)) {
            let row = &mut panel[i * nr..][..out.len()];
            if let Some(bias) = bias {
                row.iter_mut().for_each(|y| *y += bias[i]);
            }
            T::round_slice(row, out);
        }
    }
}
