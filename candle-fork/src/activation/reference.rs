//! The formulas of this module in f64, for tests.

use super::Activation;

/// `x / (1 + exp(-x))`.
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The activation of one value.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Silu => silu(x),
    }
}

/// `silu(x[..n]) * x[n..]` of each row of 2n values.
pub fn swiglu(x: &[f64], n: usize) -> Vec<f64> {
    let mut y = Vec::new();
    for row in x.chunks_exact(2 * n) {
        for i in 0..n {
            y.push(silu(row[i]) * row[n + i]);
        }
    }
    y
}

/// `x + gate * y`: x and y `[batch, rows, n]`, gate `[batch, n]`.
pub fn gate_residual(x: &[f64], gate: &[f64], y: &[f64], rows: usize, n: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for (i, (x, y)) in x.iter().zip(y).enumerate() {
        let (batch, column) = (i / (rows * n), i % n);
        out.push(x + gate[batch * n + column] * y);
    }
    out
}
