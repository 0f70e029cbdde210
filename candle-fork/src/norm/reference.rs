//! The formulas of this module in f64, for tests. All data in row-major order.

use crate::activation::{Activation, reference::activate};

/// Mean of the values, and mean of their squared distances from it.
pub fn moments(x: &[f64]) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, variance)
}

/// Group norm of x `[batch, channels, extent]` with weight and bias `[channels]`.
pub fn group_norm(
    x: &[f64],
    extent: usize,
    weight: &[f64],
    bias: &[f64],
    num_groups: usize,
    eps: f64,
    activation: Activation,
) -> Vec<f64> {
    let channels = weight.len();
    let mut y = Vec::new();
    for (group_index, group) in x.chunks_exact(channels / num_groups * extent).enumerate() {
        let (mean, variance) = moments(group);
        for (i, x) in group.iter().enumerate() {
            let channel = (group_index * group.len() + i) / extent % channels;
            let normal = (x - mean) / (variance + eps).sqrt();
            y.push(activate(activation, normal * weight[channel] + bias[channel]));
        }
    }
    y
}

/// RMS norm of rows as long as `weight`.
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let n = weight.len();
    let mut y = Vec::new();
    for row in x.chunks_exact(n) {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
        for (x, weight) in row.iter().zip(weight) {
            y.push(x / (mean_square + eps).sqrt() * weight);
        }
    }
    y
}

/// Layer norm of rows of `n` values; row i is scaled by `scale(i)` and shifted by `shift(i)`, both of `n` values.
pub fn layer_norm<'a>(
    x: &[f64],
    n: usize,
    scale: impl Fn(usize) -> &'a [f64],
    shift: impl Fn(usize) -> &'a [f64],
    eps: f64,
) -> Vec<f64> {
    let mut y = Vec::new();
    for (row_index, row) in x.chunks_exact(n).enumerate() {
        let (mean, variance) = moments(row);
        for ((x, scale), shift) in row.iter().zip(scale(row_index)).zip(shift(row_index)) {
            y.push((x - mean) / (variance + eps).sqrt() * scale + shift);
        }
    }
    y
}

/// RMS norm over the channels of x `[N, channels, extent]`: divided by the Euclidean norm, at least 1e-12, times the root
/// of their number.
pub fn channel_rms_norm(x: &[f64], extent: usize, gamma: &[f64], activation: Activation) -> Vec<f64> {
    let channels = gamma.len();
    let mut y = vec![0.0; x.len()];
    for (x, y) in x.chunks_exact(channels * extent).zip(y.chunks_exact_mut(channels * extent)) {
        for position in 0..extent {
            let norm = (0..channels).map(|c| x[c * extent + position].powi(2)).sum::<f64>().sqrt().max(1e-12);
            for (c, gamma) in gamma.iter().enumerate() {
                let at = c * extent + position;
                y[at] = activate(activation, x[at] / norm * (channels as f64).sqrt() * gamma);
            }
        }
    }
    y
}
