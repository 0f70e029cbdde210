//! CPU kernel: blocks of queries over threads, each walking over blocks of keys with a running softmax.
//!
//! ```text
//! for block of queries Q of one head (one task):
//!     m = -inf, l = 0, O = 0                      per query
//!     for block of keys K, values V:
//!         S = Q K^T                               serial product, Q already scaled
//!         m' = max(m, max S),  P = exp(S - m')    masked keys: P = 0
//!         l = l exp(m - m') + sum P
//!         O = O exp(m - m') + P V                 serial product
//!     out = O / l
//! ```
//!
//! Every number of a query's row is summed in the same order however queries are cut into blocks and tasks, so the number
//! of threads does not show in the bits ("FlashAttention", Dao et al., algorithm 1, with the loops exchanged).

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::{
    AttentionMask,
    blocks::{Buffers, normalize, widen_rows},
    reference::Extents,
    softmax::Update,
};
use crate::{
    element::Element,
    error::{Result, What},
    gemm::{Output, Strided, serial},
    operand::{RowKernel, Rows, for_each_row, packed_rows, read},
};

/// Most queries of a block. Each block packs all keys and values once, which costs 1/8 of its products at 128 queries.
const MAX_QUERIES: usize = 192;
/// Fewest queries of a block, when more tasks are wanted.
const MIN_QUERIES: usize = 24;

/// Keys of a block. Decides the order of summation, so it must depend on nothing but the head's width.
fn key_block(width: usize) -> usize {
    if width <= 256 { 256 } else { 128 }
}

struct Problem<'a, T> {
    q: (&'a [T], Rows<'a>),
    k: (&'a [T], Rows<'a>),
    v: (&'a [T], Rows<'a>),
    extents: Extents,
    softmax_scale: f32,
    mask: AttentionMask,
}

pub(super) fn attention<T: Element>(
    [q, k, v]: [&Tensor; 3],
    extents: Extents,
    softmax_scale: f32,
    mask: AttentionMask,
) -> Result<Tensor> {
    let (q, k, v) = (packed_rows(q)?, packed_rows(k)?, packed_rows(v)?);
    let Extents { batch, q_len, heads, width, .. } = extents;
    // Heads apart from one another, [B, H, Sq, D], so that every task owns one run of the buffer.
    let mut by_head = T::zeros(q.elem_count());
    if !by_head.is_empty() {
        read("attention", [&q, &k, &v], |views| {
            let [q, k, v] = views;
            let problem = Problem::<T> {
                q: (q.storage()?, Rows::new(q.layout)),
                k: (k.storage()?, Rows::new(k.layout)),
                v: (v.storage()?, Rows::new(v.layout)),
                extents,
                softmax_scale,
                mask,
            };
            problem.run(&mut by_head);
            Ok(())
        })?;
    }
    let out = if heads == 1 || q_len == 1 {
        by_head
    } else {
        let mut out = T::zeros(by_head.len());
        for_each_row(&mut out, width, &Interleave { by_head: &by_head, heads, q_len });
        out
    };
    Tensor::from_vec(out, (batch, q_len, heads, width), &Device::Cpu).what("result of attention")
}

impl<T: Element> Problem<'_, T> {
    fn run(&self, by_head: &mut [T]) {
        let Extents { batch, q_len, heads, width, .. } = self.extents;
        let wanted_tasks = 4 * rayon::current_num_threads();
        let queries = (batch * heads * q_len).div_ceil(wanted_tasks).next_multiple_of(MIN_QUERIES);
        let queries = queries.min(MAX_QUERIES);
        let tasks: Vec<_> = by_head
            .chunks_mut(q_len * width)
            .enumerate()
            .flat_map(|(head, rows)| {
                rows.chunks_mut(queries * width).enumerate().map(move |(block, out)| (head, block * queries, out))
            })
            .collect();
        tasks
            .into_par_iter()
            .for_each_init(Buffers::default, |buffers, (head, first, out)| self.block(head, first, out, buffers));
    }

    /// Queries from `first` on of one head of one batch item; `out` says how many.
    fn block(&self, batch_head: usize, first: usize, out: &mut [T], buffers: &mut Buffers) {
        let Extents { q_len, k_len, heads, kv_heads, width, .. } = self.extents;
        let (batch, head) = (batch_head / heads, batch_head % heads);
        let kv_head = head / (heads / kv_heads);
        let kv_row = |key: usize| (batch * k_len + key) * kv_heads + kv_head;
        let queries = out.len() / width;
        let keys_per_block = key_block(width);
        let Buffers { q, state, scores, acc, wide, packed_k, packed_v, scratch } = buffers;

        q.clear();
        for i in first..first + queries {
            let row = &self.q.0[self.q.1.range((batch * q_len + i) * heads + head)];
            q.extend(row.iter().map(|x| x.widen() * self.softmax_scale));
        }
        state.clear();
        state.resize(queries, (f32::NEG_INFINITY, 0.0));
        acc.clear();
        acc.resize(queries * width, 0.0);
        scores.resize(queries * keys_per_block, 0.0);

        let last = first + queries - 1;
        let visible = self.extents.visible(self.mask, last);
        for start in (0..visible).step_by(keys_per_block) {
            let keys = keys_per_block.min(visible - start);
            let scores = &mut scores[..queries * keys];
            widen_rows(&self.k, (start..start + keys).map(kv_row), wide);
            packed_k.pack(Strided { data: wide, row_stride: 1, col_stride: width }, width, keys);
            let q = Strided { data: q, row_stride: width, col_stride: 1 };
            serial(queries, q, packed_k, Output { data: scores, row_stride: keys, accumulate: false }, scratch);
            // Keys of this block that query i of this block sees.
            let seen = |i: usize| self.extents.visible(self.mask, first + i).saturating_sub(start).min(keys);
            pulp::Arch::new().dispatch(Update { scores, keys, seen, state, acc, width });
            widen_rows(&self.v, (start..start + keys).map(kv_row), wide);
            packed_v.pack(Strided { data: wide, row_stride: width, col_stride: 1 }, keys, width);
            let p = Strided { data: scores, row_stride: keys, col_stride: 1 };
            serial(queries, p, packed_v, Output { data: acc, row_stride: width, accumulate: true }, scratch);
        }
        normalize(out, acc, state, width);
    }
}

/// `[B, H, S, D]` to `[B, S, H, D]`.
struct Interleave<'a, T> {
    by_head: &'a [T],
    heads: usize,
    q_len: usize,
}

impl<T: Element> RowKernel<T> for Interleave<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let (position, head) = (index / self.heads, index % self.heads);
        let (batch, i) = (position / self.q_len, position % self.q_len);
        let source = (batch * self.heads + head) * self.q_len + i;
        out.copy_from_slice(&self.by_head[source * out.len()..][..out.len()]);
    }
}
