//! CPU kernel: boxes of neighbouring queries over threads, each walking over the keys that any of them sees with a running
//! softmax.
//!
//! ```text
//! for box of queries Q of one head (one task):
//!     m = -inf, l = 0, O = 0                      per query
//!     for plane along T of the box's panel:
//!         S = Q K^T                               serial product, of the slices along T that see the plane
//!         hide what H and W windows leave out
//!         m, P, l, O as in attention/cpu.rs
//!         O = O + P V                             serial product
//!     out = O / l
//! ```
//!
//! A box is long along T, where slices are skipped whole, and small along H and W, where hidden keys cost as much as seen
//! ones. Boxes depend on the grid alone, so the number of threads does not show in the bits.

use std::ops::Range;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::{OP, Problem, reference::Extents, window::Axis};
use crate::{
    attention::{
        blocks::{Buffers, normalize, widen_rows},
        softmax::Update,
    },
    element::Element,
    error::{Result, What},
    gemm::{Output, Strided, serial},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read},
};

/// Keys of a step, about: whole rows along W.
const KEYS: usize = 512;

/// Sides of a box of `grid` queries along T, H and W, of which there are `keys` along T.
fn sides(grid: [usize; 3], keys: usize) -> [usize; 3] {
    // Grids too flat for slices get boxes of as many queries otherwise: by the keys, so that some planes of queries get the
    // bits of all.
    let sides = if keys < 8 { [8, 8, 8] } else { [16, 4, 4] };
    std::array::from_fn(|i| sides[i].min(grid[i]))
}

struct Operands<'a, T> {
    q: (&'a [T], Rows<'a>),
    k: (&'a [T], Rows<'a>),
    v: (&'a [T], Rows<'a>),
    /// Of the keys.
    extents: Extents,
    axes: [Axis; 3],
    /// Of the queries.
    boxes: Boxes,
    /// Position along T of the first query among the keys.
    first: usize,
    softmax_scale: f32,
}

pub(super) fn neighborhood_attention<T: Element>(problem: &Problem<'_>) -> Result<Tensor> {
    let &Problem { extents, first, frames, window, softmax_scale, .. } = problem;
    let (q, k, v) = (packed_rows(problem.q)?, packed_rows(problem.k)?, packed_rows(problem.v)?);
    let Extents { batch, grid: [t, h, w], heads, width } = extents;
    let boxes = Boxes::new([frames, h, w], t);
    // Boxes apart from one another, so that every task owns one run of the buffer.
    let run = boxes.queries() * width;
    let mut by_box = T::zeros(batch * boxes.count() * heads * run);
    read(OP, [&q, &k, &v], |views| {
        let [q, k, v] = views;
        let operands = Operands::<T> {
            q: (q.storage()?, Rows::new(q.layout)),
            k: (k.storage()?, Rows::new(k.layout)),
            v: (v.storage()?, Rows::new(v.layout)),
            extents,
            axes: extents.axes(window),
            boxes,
            first,
            softmax_scale,
        };
        let tasks = by_box.par_chunks_exact_mut(run).enumerate();
        tasks.for_each_init(Buffers::default, |buffers, (task, out)| operands.attend(task, out, buffers));
        Ok(())
    })?;
    let mut out = T::zeros(q.elem_count());
    for_each_row(&mut out, width, &Gather { by_box: &by_box, heads, boxes });
    Tensor::from_vec(out, (batch, frames, h, w, heads, width), &Device::Cpu).what("result of neighborhood attention")
}

/// A grid cut into boxes, the last of each axis perhaps smaller.
#[derive(Debug, Clone, Copy)]
struct Boxes {
    grid: [usize; 3],
    sides: [usize; 3],
    counts: [usize; 3],
}

impl Boxes {
    fn new(grid: [usize; 3], keys: usize) -> Self {
        let sides = sides(grid, keys);
        Self { grid, sides, counts: std::array::from_fn(|i| grid[i].div_ceil(sides[i])) }
    }

    fn count(&self) -> usize {
        self.counts.iter().product()
    }

    /// Queries of a box that is not cut off.
    fn queries(&self) -> usize {
        self.sides.iter().product()
    }

    /// Queries of box `index` along each axis.
    fn ranges(&self, index: usize) -> [Range<usize>; 3] {
        let [_, rows, columns] = self.counts;
        let at = [index / (rows * columns), index / columns % rows, index % columns];
        std::array::from_fn(|i| {
            let start = at[i] * self.sides[i];
            start..(start + self.sides[i]).min(self.grid[i])
        })
    }

    /// The box of a position, and the position's place in it.
    fn locate(&self, position: [usize; 3]) -> (usize, usize) {
        let at: [usize; 3] = std::array::from_fn(|i| position[i] / self.sides[i]);
        let index = (at[0] * self.counts[1] + at[1]) * self.counts[2] + at[2];
        let ranges = self.ranges(index);
        let [t, h, w] = std::array::from_fn(|i| position[i] - ranges[i].start);
        (index, (t * ranges[1].len() + h) * ranges[2].len() + w)
    }
}

impl<T: Element> Operands<'_, T> {
    /// Box `task / heads` of all batch items, for head `task % heads`.
    fn attend(&self, task: usize, out: &mut [T], buffers: &mut Buffers) {
        let Extents { grid: [t_len, h_len, w_len], heads, width, .. } = self.extents;
        let (head, index) = (task % heads, task / heads);
        let (batch, index) = (index / self.boxes.count(), index % self.boxes.count());
        let [q_t, q_h, q_w] = self.boxes.ranges(index);
        let row = |planes: usize, t: usize, h: usize, w: usize| {
            (((batch * planes + t) * h_len + h) * w_len + w) * heads + head
        };
        let of_query = |t: usize, h: usize, w: usize| row(self.boxes.grid[0], t - self.first, h, w);
        let of_key = |t: usize, h: usize, w: usize| row(t_len, t, h, w);
        // Among the keys from here on.
        let q_t = q_t.start + self.first..q_t.end + self.first;
        let [panel_t, panel_h, panel_w] = [(0, &q_t), (1, &q_h), (2, &q_w)].map(|(i, range)| self.axes[i].panel(range));
        // Queries of a slice along T.
        let slice = q_h.len() * q_w.len();
        let Buffers { q, state, scores, acc, wide, packed_k, packed_v, scratch } = buffers;

        q.clear();
        for t in q_t.clone() {
            for h in q_h.clone() {
                for w in q_w.clone() {
                    q.extend(
                        self.q.0[self.q.1.range(of_query(t, h, w))].iter().map(|x| x.widen() * self.softmax_scale),
                    );
                }
            }
        }
        state.clear();
        state.resize(q_t.len() * slice, (f32::NEG_INFINITY, 0.0));
        acc.clear();
        acc.resize(q.len(), 0.0);

        let rows_at_once = (KEYS / panel_w.len()).max(1);
        for kt in panel_t {
            // Windows never move back, so the slices that see a plane follow one another.
            let sees = |t: &usize| self.axes[0].keys(*t).contains(&kt);
            let before = q_t.clone().take_while(|t| !sees(t)).count();
            let slices = q_t.clone().filter(sees).count();
            let (first, count) = (before * slice, slices * slice);
            let active = first * width..(first + count) * width;
            for first_row in panel_h.clone().step_by(rows_at_once) {
                let rows = first_row..(first_row + rows_at_once).min(panel_h.end);
                let keys = rows.len() * panel_w.len();
                let of_keys = || rows.clone().flat_map(|kh| panel_w.clone().map(move |kw| of_key(kt, kh, kw)));
                scores.resize(count * keys, 0.0);
                widen_rows(&self.k, of_keys(), wide);
                packed_k.pack(Strided { data: wide, row_stride: 1, col_stride: width }, width, keys);
                let left = Strided { data: &q[active.clone()], row_stride: width, col_stride: 1 };
                serial(count, left, packed_k, Output { data: scores, row_stride: keys, accumulate: false }, scratch);

                for (i, scores) in scores.chunks_exact_mut(keys).enumerate() {
                    let (h, w) = (q_h.start + i % slice / q_w.len(), q_w.start + i % q_w.len());
                    let columns = self.axes[2].keys(w);
                    let (from, to) = (columns.start - panel_w.start, columns.end - panel_w.start);
                    for (kh, scores) in rows.clone().zip(scores.chunks_exact_mut(panel_w.len())) {
                        let seen = if self.axes[1].keys(h).contains(&kh) { from..to } else { 0..0 };
                        scores[..seen.start].fill(f32::NEG_INFINITY);
                        scores[seen.end..].fill(f32::NEG_INFINITY);
                    }
                }
                // A query that sees none of these rows is passed over.
                let seen = |i: usize| {
                    let window = self.axes[1].keys(q_h.start + i % slice / q_w.len());
                    if window.start < rows.end && rows.start < window.end { keys } else { 0 }
                };
                let (state, acc) = (&mut state[first..first + count], &mut acc[active.clone()]);
                pulp::Arch::new().dispatch(Update { scores, keys, seen, state, acc, width });

                widen_rows(&self.v, of_keys(), wide);
                packed_v.pack(Strided { data: wide, row_stride: width, col_stride: 1 }, keys, width);
                let left = Strided { data: scores, row_stride: keys, col_stride: 1 };
                serial(count, left, packed_v, Output { data: acc, row_stride: width, accumulate: true }, scratch);
            }
        }
        normalize(out, acc, state, width);
    }
}

/// Boxes to `[B, T, H, W, heads, D]`.
struct Gather<'a, T> {
    by_box: &'a [T],
    heads: usize,
    boxes: Boxes,
}

impl<T: Element> RowKernel<T> for Gather<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let ([t_len, h_len, w_len], heads) = (self.boxes.grid, self.heads);
        let (head, position) = (index % heads, index / heads);
        let (batch, position) = (position / (t_len * h_len * w_len), position % (t_len * h_len * w_len));
        let (at, place) = self.boxes.locate([position / (h_len * w_len), position / w_len % h_len, position % w_len]);
        let run = (batch * self.boxes.count() + at) * heads + head;
        out.copy_from_slice(&self.by_box[(run * self.boxes.queries() + place) * out.len()..][..out.len()]);
    }
}
