//! One step of the running softmax, over the scores of one block of keys.

use crate::activation::exp::exp_nonpositive;

/// Independent partial sums and maxima: one of the widest vectors.
const LANES: usize = 16;

/// Turns scores into weights and brings the state of each query up to date.
pub(crate) struct Update<'a, F> {
    /// Scores `[queries, keys]`; becomes `exp(score - maximum)`, and 0 for keys that the query does not see.
    pub(crate) scores: &'a mut [f32],
    pub(crate) keys: usize,
    /// How many keys, from the first, query i sees.
    pub(crate) seen: F,
    /// Maximum and sum of each query so far.
    pub(crate) state: &'a mut [(f32, f32)],
    /// Weighted sum of values so far `[queries, width]`, relative to the maximum.
    pub(crate) acc: &'a mut [f32],
    pub(crate) width: usize,
}

impl<F: Fn(usize) -> usize> pulp::NullaryFnOnce for Update<'_, F> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let rows = self.scores.chunks_exact_mut(self.keys).zip(self.acc.chunks_exact_mut(self.width));
        for (i, ((row, acc), (max, sum))) in rows.zip(self.state.iter_mut().map(|(m, l)| (m, l))).enumerate() {
            let (seen, hidden) = row.split_at_mut((self.seen)(i));
            hidden.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let new_max = larger(*max, maximum(seen));
            let correction = exp_nonpositive(*max - new_max);
            *sum = *sum * correction + exponentials(seen, new_max);
            *max = new_max;
            if correction != 1.0 {
                acc.iter_mut().for_each(|x| *x *= correction);
            }
        }
    }
}

/// The larger of two numbers in one instruction; a NaN in `b` is passed over, and comes back through the exponential.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn maximum(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    let mut all = f32::NEG_INFINITY;
    for &x in lanes.iter().chain(rest) {
        all = larger(all, x);
    }
    all
}

/// Replaces each x by `exp(x - max)` and gives their sum.
#[inline(always)]
fn exponentials(x: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            chunk[i] = exp_nonpositive(chunk[i] - max);
            lanes[i] += chunk[i];
        }
    }
    for (x, lane) in rest.iter_mut().zip(&mut lanes) {
        *x = exp_nonpositive(*x - max);
        *lane += *x;
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::NullaryFnOnce;

    /// Blocks one after another give what one softmax over all scores gives. The maximum rises a little in each block, so
    /// a correction left out shows.
    #[test]
    fn running_softmax_equals_softmax() {
        let scores: Vec<f32> = (0..77).map(|i| (i * 37 % 101) as f32 * 0.02 + i as f32 * 0.01).collect();
        let want: f64 = {
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter().map(|&s| f64::from(s - max).exp()).sum()
        };
        let (mut state, mut acc) = ([(f32::NEG_INFINITY, 0.0)], [0.0f32]);
        for block in scores.chunks(20) {
            let mut weights = block.to_vec();
            let keys = block.len();
            Update { scores: &mut weights, keys, seen: |_| keys, state: &mut state, acc: &mut acc, width: 1 }.call();
            // The values are all 1.
            acc[0] += weights.iter().sum::<f32>();
        }
        assert_eq!(state[0].0, scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert!((f64::from(state[0].1) / want - 1.0).abs() < 1e-6);
        assert!((acc[0] / state[0].1 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn hidden_keys_weigh_nothing_and_nan_comes_through() {
        let mut weights = [1.0, 2.0, f32::INFINITY, f32::NAN, 5.0, f32::NAN];
        let (mut state, mut acc) = ([(f32::NEG_INFINITY, 0.0); 2], [0.0; 2]);
        let seen = |i: usize| [2, 3][i];
        Update { scores: &mut weights, keys: 3, seen, state: &mut state, acc: &mut acc, width: 1 }.call();
        assert_eq!((weights[1], weights[2]), (1.0, 0.0));
        assert!(state[0].1.is_finite() && state[1].1.is_nan());
    }
}
