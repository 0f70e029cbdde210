//! The same ops composed of candle's, in f32, for devices without kernels of their own.

use candle_core::{D, DType, Result, Tensor};

use crate::activation::{Activation, device::activate};

/// Subtracts the mean of the last axis and divides by its deviation.
fn standardise(x: &Tensor, eps: f64) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered.broadcast_div(&(variance + eps)?.sqrt()?)
}

pub(super) fn group_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    num_groups: usize,
    eps: f64,
    activation: Activation,
) -> Result<Tensor> {
    let (batch, channels) = (x.dim(0)?, x.dim(1)?);
    let mut per_channel = vec![1; x.rank()];
    per_channel[1] = channels;
    let affine = |t: &Tensor| t.to_dtype(DType::F32)?.reshape(per_channel.as_slice());
    let groups = x.to_dtype(DType::F32)?.reshape((batch, num_groups, ()))?;
    let normal = standardise(&groups, eps)?.reshape(x.dims())?;
    let y = normal.broadcast_mul(&affine(weight)?)?.broadcast_add(&affine(bias)?)?;
    activate(activation, y)?.to_dtype(x.dtype())
}

/// Mean and inverse deviation of each group, `[N, G, 2]`.
pub(super) fn group_statistics(x: &Tensor, num_groups: usize, eps: f64) -> Result<Tensor> {
    let groups = x.to_dtype(DType::F32)?.reshape((x.dim(0)?, num_groups, ()))?;
    let mean = groups.mean_keepdim(D::Minus1)?;
    let variance = groups.broadcast_sub(&mean)?.sqr()?.mean_keepdim(D::Minus1)?;
    Tensor::cat(&[mean, (variance + eps)?.sqrt()?.recip()?], 2)
}

pub(super) fn group_norm_part(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let (batch, num_groups, _) = statistics.dims3()?;
    let mut per_channel = vec![1; x.rank()];
    per_channel[1] = x.dim(1)?;
    let affine = |t: &Tensor| t.to_dtype(DType::F32)?.reshape(per_channel.as_slice());
    let groups = x.to_dtype(DType::F32)?.reshape((batch, num_groups, ()))?;
    let centered = groups.broadcast_sub(&statistics.narrow(2, 0, 1)?)?;
    let normal = centered.broadcast_mul(&statistics.narrow(2, 1, 1)?)?.reshape(x.dims())?;
    let y = normal.broadcast_mul(&affine(weight)?)?.broadcast_add(&affine(bias)?)?;
    activate(activation, y)?.to_dtype(x.dtype())
}

pub(super) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = wide.broadcast_div(&(mean_square + eps)?.sqrt()?)?;
    normal.broadcast_mul(&weight.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
}

pub(super) fn layer_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let mut y = standardise(&x.to_dtype(DType::F32)?, eps)?;
    if let Some(weight) = weight {
        y = y.broadcast_mul(&weight.to_dtype(DType::F32)?)?;
    }
    if let Some(bias) = bias {
        y = y.broadcast_add(&bias.to_dtype(DType::F32)?)?;
    }
    y.to_dtype(x.dtype())
}

pub(super) fn layer_norm_modulate(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    let per_batch = |t: &Tensor| t.to_dtype(DType::F32)?.unsqueeze(1);
    let normal = standardise(&x.to_dtype(DType::F32)?, eps)?;
    let scaled = normal.broadcast_mul(&(per_batch(scale)? + 1.0)?)?;
    scaled.broadcast_add(&per_batch(shift)?)?.to_dtype(x.dtype())
}

pub(super) fn channel_rms_norm(
    past: Option<&Tensor>,
    x: &Tensor,
    gamma: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let channels = x.dim(1)?;
    let mut per_channel = vec![1; x.rank()];
    per_channel[1] = channels;
    let wide = x.to_dtype(DType::F32)?;
    let norm = wide.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12f32)?;
    let scale = (gamma.to_dtype(DType::F32)?.reshape(per_channel)? * (channels as f64).sqrt())?;
    let y = activate(activation, wide.broadcast_div(&norm)?.broadcast_mul(&scale)?)?.to_dtype(x.dtype())?;
    match past {
        Some(past) => Tensor::cat(&[past, &y], 2),
        None => Ok(y),
    }
}
