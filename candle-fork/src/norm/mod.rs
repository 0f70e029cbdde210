//! Normalisations, each rounded once at its end.

use candle_core::Tensor;

use crate::{
    activation::Activation,
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_shape, on_cpu, shape_error, to_f32_vec},
};

mod device;
mod groups;
mod moments;
pub mod reference;
mod rows;
#[cfg(test)]
mod tests;

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
/// **Shapes**: x `[N, C, ..]` with any strides (one copy if not contiguous), weight and bias `[C]`; result of x's shape,
/// contiguous.
/// **Dtypes**: each operand f32, f16 or bf16; statistics in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `activation((x - mean) / sqrt(variance + eps) * weight + bias)` with the moments of each of `num_groups`
/// runs of C / num_groups channels ("Group Normalization", Wu and He, equations 1-6; variance divides by the count).
/// **Numerics**: a large mean costs no digits (two passes per block of 16384, blocks merged in order); within 1e-6 of the
/// exact value, relative to the largest term of the sum. The same bits for every number of threads and on every CPU.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x has less than two axes, or weight or bias is not `[C]`.
/// - [`Error::Argument`] if `num_groups` does not divide C, eps is negative or not finite, or an operand tracks gradients
///   or is on another device.
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
    with_element!(OP, "x", x.dtype(), T => groups::group_norm::<T>(x, &problem))
}

/// RMS norm over the last axis, rounded once.
///
/// **Shapes**: x `[.., H]` with any strides (no copy while the last axis is packed), weight `[H]`; result of x's shape,
/// contiguous.
/// **Dtypes**: each operand f32, f16 or bf16; squares summed in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `x / sqrt(mean(x^2) + eps) * weight` ("Root Mean Square Layer Normalization", Zhang and Sennrich,
/// equation 4).
/// **Numerics**: within 3e-7 of the exact value (relative). The same bits for every number of threads and on every CPU.
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
/// **Numerics**: a large mean costs no digits (two passes); within 1e-6 of the exact value, relative to the largest term
/// of the sum. The same bits for every number of threads and on every CPU.
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
/// **Shapes**: x `[B, S, H]` with any strides (no copy while the last axis is packed), shift and scale `[B, H]`; result of
/// x's shape, contiguous. The argument order is shift, scale: that of the halves in the published FLUX weights.
/// **Dtypes**: each operand f32, f16 or bf16; statistics in f64, the rest in f32, one rounding to x's dtype.
/// **Formula**: `(1 + scale) * (x - mean) / sqrt(variance + eps) + shift` ("Scalable Diffusion Models with Transformers",
/// Peebles and Xie, section 3.2; `black-forest-labs/flux2: src/flux2/model.py`).
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
    if !on_cpu(x) {
        return device::layer_norm_modulate(x, shift, scale, eps).what(OP);
    }
    let mut factors = to_f32_vec(scale)?;
    factors.iter_mut().for_each(|s| *s += 1.0);
    let affine = rows::Affine { scale: factors, shift: to_f32_vec(shift)?, rows_per_batch: rows };
    with_element!(OP, "x", x.dtype(), T => rows::layer_norm::<T>(x, n, &affine, eps))
}
