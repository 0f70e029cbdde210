//! What tasks of attention on the CPU share, whatever keys a query sees.

use crate::{
    element::Element,
    gemm::{PackedCols, Scratch},
    operand::Rows,
};

/// What a task needs, kept for the next one.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Scaled queries, [queries, D].
    pub(crate) q: Vec<f32>,
    /// Maximum and sum of each query.
    pub(crate) state: Vec<(f32, f32)>,
    /// Scores, then weights, [queries, keys].
    pub(crate) scores: Vec<f32>,
    /// O, [queries, D].
    pub(crate) acc: Vec<f32>,
    /// Keys or values of a step, [keys, D].
    pub(crate) wide: Vec<f32>,
    pub(crate) packed_k: PackedCols,
    pub(crate) packed_v: PackedCols,
    pub(crate) scratch: Scratch,
}

/// The rows `indices` of keys or values, in f32.
pub(crate) fn widen_rows<T: Element>(
    (data, rows): &(&[T], Rows<'_>),
    indices: impl Iterator<Item = usize>,
    wide: &mut Vec<f32>,
) {
    wide.clear();
    for index in indices {
        wide.extend(data[rows.range(index)].iter().map(|x| x.widen()));
    }
}

/// `out = O / l`, rounded once.
pub(crate) fn normalize<T: Element>(out: &mut [T], acc: &[f32], state: &[(f32, f32)], width: usize) {
    for ((out, acc), (_, sum)) in out.chunks_exact_mut(width).zip(acc.chunks_exact(width)).zip(state) {
        for (y, &x) in out.iter_mut().zip(acc) {
            *y = T::round(x / *sum);
        }
    }
}
