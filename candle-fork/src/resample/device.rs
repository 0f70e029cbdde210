//! The same op composed of candle's, for devices without kernels of their own.

use candle_core::{Result, Tensor};

pub(super) fn upsample_nearest(x: &Tensor, out_dims: &[usize], factors: &[usize]) -> Result<Tensor> {
    // [N, C, a, b] -> [N C, a, 1, b, 1] -> repeated along the axes of length 1.
    let mut split = vec![x.dim(0)? * x.dim(1)?];
    let mut repeated = split.clone();
    for (&extent, &factor) in x.dims()[2..].iter().zip(factors) {
        split.extend([extent, 1]);
        repeated.extend([extent, factor]);
    }
    x.reshape(split)?.broadcast_as(repeated)?.reshape(out_dims)
}

pub(super) fn interleave2d(parts: &[Tensor; 4], dims: Vec<usize>) -> Result<Tensor> {
    // [.., H, W, b], then [.., H, a, W b].
    let rank = dims.len();
    let pair = |left: &Tensor, right: &Tensor| Tensor::stack(&[left, right], rank)?.flatten_from(rank - 1);
    let rows = [pair(&parts[0], &parts[1])?, pair(&parts[2], &parts[3])?];
    Tensor::stack(&rows, rank - 1)?.reshape(dims)
}
