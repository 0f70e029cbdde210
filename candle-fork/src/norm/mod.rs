//! Normalisations, each rounded once at its end.

use candle_core::Tensor;

use crate::{
    activation::{Activation, gate_residual, residual},
    element::with_element,
    error::{Error, Result, What},
    frames::tail_frames,
    operand::{check, check_dtype, check_shape, on_cpu, shape_error, to_f32_vec},
};

mod channels;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod group_parts;
mod groups;
pub(crate) mod moments;
#[cfg(any(feature = "cuda", test))]
mod plan;
pub mod reference;
mod rows;
#[cfg(test)]
mod tests;

pub use self::group_parts::{GroupStatistics, group_norm_part, group_statistics};

fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    // NaN is refused too.
    if eps >= 0.0 && eps.is_finite() {
        Ok(())
    } else {
        Err(Error::Argument { op, what: format!("eps is {eps}, expected a finite number of at least 0") })
    }
}

/// Group norm with an activation, rounded once.
///
/// **Shapes**: x `[N, C, ..]` with any strides (one copy if not contiguous), weight and bias `[C]`; result of x's
/// shape, contiguous; on CUDA in x's [memory order](crate::layout::memory_order), with a copy only if x is packed in
/// neither.
/// **Dtypes**: each operand f32, f16 or bf16; statistics in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `activation((x - mean) / sqrt(variance + eps) * weight + bias)` with the moments of each of
/// `num_groups` runs of C / num_groups channels ("Group Normalization", Wu and He, equations 1-6; variance divides by
/// the count).
/// **Numerics**: a large mean costs no digits (two passes per block of 16384, blocks merged in order); within 1e-6 of
/// the exact value, relative to the largest term of the sum. The same bits for every number of threads and on every
/// CPU. CUDA: runs of 32 values in f32, merged in f64; within 4e-6; the same bits from run to run.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x has less than two axes, or weight or bias is not `[C]`.
/// - [`Error::Argument`] if `num_groups` does not divide C, eps is negative or not finite, or an operand tracks
///   gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{Activation, group_norm};
/// let x = Tensor::new(&[[[1f32, 3.0], [10.0, 20.0]]], &Device::Cpu)?;
/// let (one, zero) = (Tensor::ones(2, DType::F32, &Device::Cpu)?, Tensor::zeros(2, DType::F32, &Device::Cpu)?);
/// let y = group_norm(&x, &one, &zero, 2, 0.0, Activation::None)?;
/// assert_eq!(y.to_vec3::<f32>()?[0], [[-1.0, 1.0], [-1.0, 1.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn group_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    num_groups: usize,
    eps: f64,
    activation: Activation,
) -> Result<Tensor> {
    const OP: &str = "group_norm";
    check(OP, &[("x", x), ("weight", weight), ("bias", bias)])?;
    let &[_, channels, ref spatial @ ..] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[N, C, ..]"));
    };
    check_shape(OP, "weight", weight, &[channels])?;
    check_shape(OP, "bias", bias, &[channels])?;
    if num_groups == 0 || channels % num_groups != 0 {
        return Err(Error::Argument {
            op: OP,
            what: format!("{channels} channels do not split into {num_groups} groups"),
        });
    }
    check_eps(OP, eps)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::group_norm(x, weight, bias, num_groups, eps, activation);
    }
    if !on_cpu(x) {
        return device::group_norm(x, weight, bias, num_groups, eps, activation).what(OP);
    }
    let problem = groups::Problem {
        channels,
        extent: spatial.iter().product(),
        num_groups,
        eps,
        weight: to_f32_vec(weight)?,
        bias: to_f32_vec(bias)?,
        activation,
    };
    with_element!(OP, "x", x.dtype(), T => groups::group_norm::<T>(x, None, &problem))
}

/// RMS norm over the last axis, rounded once.
///
/// **Shapes**: x `[.., H]` with any strides (no copy while the last axis is packed), weight `[H]`; result of x's shape,
/// contiguous.
/// **Dtypes**: each operand f32, f16 or bf16; squares summed in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `x / sqrt(mean(x^2) + eps) * weight` ("Root Mean Square Layer Normalization", Zhang and Sennrich,
/// equation 4).
/// **Numerics**: within 3e-7 of the exact value (relative). The same bits for every number of threads and on every CPU.
/// CUDA: squares summed in f32 by each thread, in f64 over threads; within 1e-6 while squares stay inside of f32's
/// range; the same bits from run to run.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x has no axis or weight is not `[H]`.
/// - [`Error::Argument`] if eps is negative or not finite, or an operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[3f32, 3.0, -3.0, 3.0]], &Device::Cpu)?;
/// let weight = Tensor::new(&[1f32, 2.0, 1.0, 0.5], &Device::Cpu)?;
/// assert_eq!(candle_fork::rms_norm(&x, &weight, 0.0)?.to_vec2::<f32>()?[0], [1.0, 2.0, -1.0, 0.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    const OP: &str = "rms_norm";
    check(OP, &[("x", x), ("weight", weight)])?;
    let Some(&n) = x.dims().last() else {
        return Err(shape_error(OP, "x", x, "[.., H]"));
    };
    check_shape(OP, "weight", weight, &[n])?;
    check_eps(OP, eps)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::rms_norm(x, weight, eps);
    }
    if !on_cpu(x) {
        return device::rms_norm(x, weight, eps).what(OP);
    }
    let weight = to_f32_vec(weight)?;
    with_element!(OP, "x", x.dtype(), T => rows::rms_norm::<T>(x, &weight, eps))
}

/// Layer norm over the last axis, rounded once.
///
/// **Shapes**: x `[.., H]` with any strides (no copy while the last axis is packed), weight and bias `[H]` if given;
/// result of x's shape, contiguous.
/// **Dtypes**: each operand f32, f16 or bf16; statistics in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `(x - mean) / sqrt(variance + eps) * weight + bias` ("Layer Normalization", Ba, Kiros and Hinton,
/// equations 3 and 4; variance divides by the count). No weight means ones, no bias means zeros.
/// **Numerics**: a large mean costs no digits (two passes); within 1e-6 of the exact value, relative to the largest
/// term of the sum. The same bits for every number of threads and on every CPU. CUDA: as [`rms_norm`], around a mean in
/// f32 and its correction; within 2e-6.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x has no axis, or weight or bias is not `[H]`.
/// - [`Error::Argument`] if eps is negative or not finite, or an operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[999f32, 1001.0]], &Device::Cpu)?;
/// assert_eq!(candle_fork::layer_norm(&x, None, None, 0.0)?.to_vec2::<f32>()?[0], [-1.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn layer_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    const OP: &str = "layer_norm";
    check(OP, &[("x", x)])?;
    let Some(&n) = x.dims().last() else {
        return Err(shape_error(OP, "x", x, "[.., H]"));
    };
    for (name, operand) in [("weight", weight), ("bias", bias)] {
        if let Some(operand) = operand {
            check(OP, &[("x", x), (name, operand)])?;
            check_shape(OP, name, operand, &[n])?;
        }
    }
    check_eps(OP, eps)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::layer_norm(x, weight, bias, eps);
    }
    if !on_cpu(x) {
        return device::layer_norm(x, weight, bias, eps).what(OP);
    }
    let affine = rows::Affine {
        scale: weight.map_or_else(|| Ok(vec![1.0; n]), to_f32_vec)?,
        shift: bias.map_or_else(|| Ok(vec![0.0; n]), to_f32_vec)?,
        rows_per_batch: usize::MAX,
    };
    with_element!(OP, "x", x.dtype(), T => rows::layer_norm::<T>(x, n, &affine, eps))
}

/// Layer norm without weights, then a scale and a shift for each batch item (adaptive norm), rounded once.
///
/// **Shapes**: x `[B, S, H]` with any strides (no copy while the last axis is packed), shift and scale `[B, H]`; result
/// of x's shape, contiguous. The argument order is shift, scale: that of the halves in the published FLUX weights.
/// **Dtypes**: each operand f32, f16 or bf16; statistics in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `(1 + scale) * (x - mean) / sqrt(variance + eps) + shift` ("Scalable Diffusion Models with
/// Transformers", Peebles and Xie, section 3.2; `black-forest-labs/flux2: src/flux2/model.py`).
/// **Numerics**: as [`layer_norm`].
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x is not of rank 3, or shift or scale is not `[B, H]`.
/// - [`Error::Argument`] if eps is negative or not finite, or an operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[999f32, 1001.0]]], &Device::Cpu)?;
/// let (shift, scale) = (Tensor::new(&[[10f32, 20.0]], &Device::Cpu)?, Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?);
/// let y = candle_fork::layer_norm_modulate(&x, &shift, &scale, 0.0)?;
/// assert_eq!(y.to_vec3::<f32>()?[0][0], [8.0, 21.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn layer_norm_modulate(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    const OP: &str = "layer_norm_modulate";
    check(OP, &[("x", x), ("shift", shift), ("scale", scale)])?;
    let &[batch, rows, n] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[B, S, H]"));
    };
    check_shape(OP, "shift", shift, &[batch, n])?;
    check_shape(OP, "scale", scale, &[batch, n])?;
    check_eps(OP, eps)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::layer_norm_modulate(x, shift, scale, eps);
    }
    if !on_cpu(x) {
        return device::layer_norm_modulate(x, shift, scale, eps).what(OP);
    }
    let mut factors = to_f32_vec(scale)?;
    factors.iter_mut().for_each(|s| *s += 1.0);
    let affine = rows::Affine { scale: factors, shift: to_f32_vec(shift)?, rows_per_batch: rows };
    with_element!(OP, "x", x.dtype(), T => rows::layer_norm::<T>(x, n, &affine, eps))
}

/// The end of a residual branch and the beginning of the next in one pass: [`gate_residual`], then
/// [`layer_norm_modulate`] of its result. Gives both results, with the bits of the two ops.
///
/// **Shapes**: x and y `[B, S, H]` with any strides (no copy while the last axis is packed), gate, shift and scale `[B, H]`;
/// results `[B, S, H]`, contiguous.
/// **Dtypes**: x and y f32, f16 or bf16, the same; the others any of these.
/// **Formula**: `x' = x + gate * y`, rounded; `(1 + scale) * (x' - mean(x')) / sqrt(variance(x') + eps) + shift`.
/// **Numerics**, **Policy**: as the two ops.
///
/// # Errors
/// Those of the two ops.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[0f32, 1.0]]], &Device::Cpu)?;
/// let y = Tensor::new(&[[[1f32, 2.0]]], &Device::Cpu)?;
/// let (gate, zero) = (Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?, Tensor::new(&[[0f32, 0.0]], &Device::Cpu)?);
/// let (sum, normed) = candle_fork::gate_residual_modulate(&x, &gate, &y, &zero, &zero, 0.0)?;
/// assert_eq!(sum.to_vec3::<f32>()?, [[[1.0, 3.0]]]);
/// assert_eq!(normed.to_vec3::<f32>()?, [[[-1.0, 1.0]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gate_residual_modulate(
    x: &Tensor,
    gate: &Tensor,
    y: &Tensor,
    shift: &Tensor,
    scale: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        const OP: &str = "gate_residual_modulate";
        check(OP, &[("x", x), ("gate", gate), ("y", y), ("shift", shift), ("scale", scale)])?;
        check_dtype(OP, "y", y, x)?;
        let &[batch, _, n] = x.dims() else {
            return Err(shape_error(OP, "x", x, "[B, S, H]"));
        };
        check_shape(OP, "y", y, x.dims())?;
        for (name, operand) in [("gate", gate), ("shift", shift), ("scale", scale)] {
            check_shape(OP, name, operand, &[batch, n])?;
        }
        check_eps(OP, eps)?;
        return cuda::gate_residual_modulate(x, gate, y, shift, scale, eps);
    }
    let sum = gate_residual(x, gate, y)?;
    let normed = layer_norm_modulate(&sum, shift, scale, eps)?;
    Ok((sum, normed))
}

/// The end of a residual branch and the beginning of the next in one pass: [`residual`], then [`rms_norm`] of its result.
/// Gives both results, with the bits of the two ops.
///
/// **Shapes**: x and y `[.., H]` with any strides (no copy while the last axis is packed), weight `[H]`; results of x's
/// shape, contiguous.
/// **Dtypes**: x and y f32, f16 or bf16, the same; weight any of these.
/// **Formula**: `x' = x + y`, rounded; `x' / sqrt(mean(x'^2) + eps) * weight`.
/// **Numerics**, **Policy**: as the two ops.
///
/// # Errors
/// Those of the two ops.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let (x, y) = (Tensor::new(&[1f32, 1.0], &Device::Cpu)?, Tensor::new(&[2f32, -4.0], &Device::Cpu)?);
/// let (sum, normed) = candle_fork::residual_rms_norm(&x, &y, &Tensor::new(&[1f32, 2.0], &Device::Cpu)?, 0.0)?;
/// assert_eq!(sum.to_vec1::<f32>()?, [3.0, -3.0]);
/// assert_eq!(normed.to_vec1::<f32>()?, [1.0, -2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn residual_rms_norm(x: &Tensor, y: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        const OP: &str = "residual_rms_norm";
        check(OP, &[("x", x), ("y", y), ("weight", weight)])?;
        check_dtype(OP, "y", y, x)?;
        check_shape(OP, "y", y, x.dims())?;
        let Some(&n) = x.dims().last() else {
            return Err(shape_error(OP, "x", x, "[.., H]"));
        };
        check_shape(OP, "weight", weight, &[n])?;
        check_eps(OP, eps)?;
        return cuda::residual_rms_norm(x, y, weight, eps);
    }
    let sum = residual(x, y)?;
    let normed = rms_norm(&sum, weight, eps)?;
    Ok((sum, normed))
}

/// RMS norm over the channels of each position, with an activation, rounded once.
///
/// [`channel_rms_norm_after`] without a past; see there for everything else.
///
/// # Errors
/// As [`channel_rms_norm_after`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{Activation, channel_rms_norm};
/// // Two channels of two positions: (3, 4) and nothing.
/// let x = Tensor::new(&[[[3f32, 0.0], [4.0, 0.0]]], &Device::Cpu)?;
/// let gamma = Tensor::new(&[5f32, 10.0], &Device::Cpu)?;
/// let y = channel_rms_norm(&x, &gamma, Activation::None)?.to_vec3::<f32>()?;
/// let root = 2f32.sqrt();
/// assert!((y[0][0][0] - 3.0 * root).abs() < 1e-5 && (y[0][1][0] - 8.0 * root).abs() < 1e-5);
/// assert_eq!([y[0][0][1], y[0][1][1]], [0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn channel_rms_norm(x: &Tensor, gamma: &Tensor, activation: Activation) -> Result<Tensor> {
    channel_rms_norm_after(None, x, gamma, activation)
}

/// RMS norm over the channels of each position, with an activation, written behind what came before: the input of a
/// causal convolution in one pass.
///
/// **Shapes**: x `[N, C, T, ..]`, past `[N, C, P, ..]`, gamma `[C]` or `[C, 1, ..]`; result `[N, C, P + T, ..]`,
/// contiguous. x and past are copied first if not contiguous. On CUDA the result is in x's
/// [memory order](crate::layout::memory_order), and x and past are copied first if they are not packed in it.
/// **Dtypes**: x f32, f16 or bf16, past the same; gamma any of these; computed in f32, rounded once to x's dtype. The
/// elements of past are copied.
/// **Formula**: `activation(x / max(norm(x), 1e-12) * sqrt(C) * gamma)` with the Euclidean norm over the channels of
/// one position (`Wan-Video/Wan2.1: wan/modules/vae.py`, `RMS_norm`). All-zero channels give 0. There is no epsilon
/// inside of the root and no mean.
/// **Numerics**: squares summed 16 channels at a time; within 2e-6 of the exact value (relative, before the activation)
/// while they stay inside of f32's range, that is for magnitudes from 1e-18 to 1e18. A position's bits depend on
/// nothing but its channels: not on the other positions, nor on the number of threads. The same bits on every CPU. On
/// CUDA a position's bits depend on its channels, and on whether they are packed at 16-byte boundaries.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x has less than three axes, past differs from x in another axis than the third, or gamma is
///   not `[C]` but for axes of extent 1.
/// - [`Error::Argument`] if an operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types, or if past's differs from x's.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{Activation, channel_rms_norm_after};
/// let (past, x) = (Tensor::new(&[[[7f32, 8.0]]], &Device::Cpu)?, Tensor::new(&[[[-5f32]]], &Device::Cpu)?);
/// let gamma = Tensor::ones(1, DType::F32, &Device::Cpu)?;
/// let y = channel_rms_norm_after(Some(&past), &x, &gamma, Activation::None)?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[7.0, 8.0, -1.0]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn channel_rms_norm_after(
    past: Option<&Tensor>,
    x: &Tensor,
    gamma: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    channel_rms_norm_keeping(past, x, gamma, activation, 0).map(|(y, _)| y)
}

/// [`channel_rms_norm_after`] with a copy of the last frames of its result, which a causal layer remembers: `tail` is
/// [`frames::tail_frames`](crate::frames::tail_frames)`(y, keep)`. On CUDA the norm writes channels-last frames of x to both.
///
/// # Errors
/// As [`channel_rms_norm_after`]; [`Error::Shape`] if x is not `[N, C, T, H, W]`.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{Activation, norm::channel_rms_norm_with_tail};
/// let x = Tensor::new(&[2f32, -5.0], &Device::Cpu)?.reshape((1, 1, 2, 1, 1))?;
/// let gamma = Tensor::ones(1, DType::F32, &Device::Cpu)?;
/// let (y, tail) = channel_rms_norm_with_tail(None, &x, &gamma, Activation::None, 1)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, -1.0]);
/// assert_eq!(tail.flatten_all()?.to_vec1::<f32>()?, [-1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn channel_rms_norm_with_tail(
    past: Option<&Tensor>,
    x: &Tensor,
    gamma: &Tensor,
    activation: Activation,
    keep: usize,
) -> Result<(Tensor, Tensor)> {
    let (y, tail) = channel_rms_norm_keeping(past, x, gamma, activation, keep)?;
    let tail = tail.map_or_else(|| tail_frames(&y, keep), Ok)?;
    Ok((y, tail))
}

/// The norm, and its last frames where that costs nothing.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only a device keeps frames"))]
fn channel_rms_norm_keeping(
    past: Option<&Tensor>,
    x: &Tensor,
    gamma: &Tensor,
    activation: Activation,
    keep: usize,
) -> Result<(Tensor, Option<Tensor>)> {
    const OP: &str = "channel_rms_norm";
    check(OP, &[("x", x), ("gamma", gamma)])?;
    let &[_, channels, frames, ref inner @ ..] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[N, C, T, ..]"));
    };
    if gamma.dims().first() != Some(&channels) || gamma.elem_count() != channels {
        return Err(shape_error(OP, "gamma", gamma, format!("[{channels}]")));
    }
    let mut dims = x.dims().to_vec();
    if let Some(past) = past {
        check(OP, &[("x", x), ("past", past)])?;
        check_dtype(OP, "past", past, x)?;
        let fits = past.rank() == x.rank() && (0..x.rank()).all(|axis| axis == 2 || past.dims()[axis] == dims[axis]);
        if !fits {
            return Err(shape_error(OP, "past", past, format!("{dims:?} but for the third extent")));
        }
        dims[2] += past.dims()[2];
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::channel_rms_norm(past, x, gamma, &dims, activation, keep);
    }
    if !on_cpu(x) {
        return device::channel_rms_norm(past, x, gamma, activation).what(OP).map(|y| (y, None));
    }
    let inner: usize = inner.iter().product();
    let problem = channels::Problem {
        lead: (dims[2] - frames) * inner,
        extent: frames * inner,
        weight: to_f32_vec(gamma)?,
        activation,
    };
    let y = with_element!(OP, "x", x.dtype(), T => channels::channel_rms_norm::<T>(past, x, dims, &problem))?;
    Ok((y, None))
}
