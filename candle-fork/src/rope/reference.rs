//! The rotation in f64, for tests.

/// How the components of a head pair up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Neighbours: (2i, 2i + 1).
    Interleaved,
    /// Halves: (i, i + D / 2).
    Half,
}

/// Rotates every head of x `[batch, rows, heads, 2 n]` by the angles of its row: cos and sin `[rows, n]`.
pub fn rope(x: &[f64], cos: &[f64], sin: &[f64], heads: usize, n: usize, pairing: Pairing) -> Vec<f64> {
    let rows = cos.len() / n;
    let mut y = x.to_vec();
    for (index, (x, y)) in x.chunks_exact(2 * n).zip(y.chunks_exact_mut(2 * n)).enumerate() {
        let row = index / heads % rows;
        for i in 0..n {
            let (first, second) = match pairing {
                Pairing::Interleaved => (2 * i, 2 * i + 1),
                Pairing::Half => (i, i + n),
            };
            let (c, s) = (cos[row * n + i], sin[row * n + i]);
            y[first] = c * x[first] - s * x[second];
            y[second] = s * x[first] + c * x[second];
        }
    }
    y
}
