//! Attention in f64, one query at a time, for tests.

use super::AttentionMask;

/// Extents of an attention problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Batch items.
    pub batch: usize,
    /// Queries of each batch item.
    pub q_len: usize,
    /// Keys of each batch item.
    pub k_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head h reads head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Components of a head.
    pub width: usize,
}

impl Extents {
    /// How many keys query `i` sees: those from 0 on.
    pub fn visible(&self, mask: AttentionMask, i: usize) -> usize {
        match mask {
            AttentionMask::Full => self.k_len,
            AttentionMask::Causal => i + 1 + self.k_len - self.q_len,
            AttentionMask::Prefix => (i + 1).min(self.k_len),
        }
    }
}

/// `softmax(softmax_scale * q k^T) v`, q `[batch, q_len, heads, width]`, k and v `[batch, k_len, kv_heads, width]`.
pub fn attention(q: &[f64], k: &[f64], v: &[f64], e: Extents, softmax_scale: f64, mask: AttentionMask) -> Vec<f64> {
    let d = e.width;
    let mut out = Vec::new();
    for b in 0..e.batch {
        for i in 0..e.q_len {
            for h in 0..e.heads {
                let q = &q[((b * e.q_len + i) * e.heads + h) * d..][..d];
                let kv_head = h / (e.heads / e.kv_heads);
                let row = |j: usize| ((b * e.k_len + j) * e.kv_heads + kv_head) * d;
                let scores: Vec<f64> = (0..e.visible(mask, i))
                    .map(|j| softmax_scale * q.iter().zip(&k[row(j)..]).map(|(q, k)| q * k).sum::<f64>())
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                for c in 0..d {
                    out.push(weights.iter().enumerate().map(|(j, w)| w / total * v[row(j) + c]).sum());
                }
            }
        }
    }
    out
}
