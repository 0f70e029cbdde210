//! Neighborhood attention in f64, one query at a time, for tests.

use super::window::Axis;

/// Extents of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Batch items.
    pub batch: usize,
    /// Positions along T, H and W.
    pub grid: [usize; 3],
    /// Heads.
    pub heads: usize,
    /// Components of a head.
    pub width: usize,
}

impl Extents {
    /// Positions of the grid.
    pub fn positions(&self) -> usize {
        self.grid.iter().product()
    }

    /// The windows of each axis.
    pub fn axes(&self, window: [usize; 3]) -> [Axis; 3] {
        std::array::from_fn(|i| Axis::new(self.grid[i], window[i]))
    }
}

/// `softmax(softmax_scale * q k^T) v` over the window of each query; q, k and v `[batch, T, H, W, heads, width]`.
pub fn neighborhood_attention([q, k, v]: [&[f64]; 3], e: Extents, window: [usize; 3], softmax_scale: f64) -> Vec<f64> {
    let (d, [t_len, h_len, w_len]) = (e.width, e.grid);
    let axes = e.axes(window);
    let row = |b: usize, t: usize, h: usize, w: usize, head: usize| {
        ((((b * t_len + t) * h_len + h) * w_len + w) * e.heads + head) * d
    };
    let mut out = Vec::with_capacity(q.len());
    for query in 0..e.batch * e.positions() * e.heads {
        let (head, position) = (query % e.heads, query / e.heads);
        let (w, h, t) = (position % w_len, position / w_len % h_len, position / (w_len * h_len) % t_len);
        let b = position / e.positions();
        let mut keys = Vec::new();
        for kt in axes[0].keys(t) {
            for kh in axes[1].keys(h) {
                keys.extend(axes[2].keys(w).map(|kw| row(b, kt, kh, kw, head)));
            }
        }
        let q = &q[query * d..][..d];
        let score = |&key: &usize| softmax_scale * q.iter().zip(&k[key..]).map(|(q, k)| q * k).sum::<f64>();
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..d).map(|c| weights.iter().zip(&keys).map(|(w, key)| w / total * v[key + c]).sum::<f64>()));
    }
    out
}
