//! Activations, and the sums that end a residual branch.

use candle_core::Tensor;

use crate::{
    element::with_element,
    error::{Result, What},
    operand::{check, check_dtype, check_shape, on_cpu, shape_error},
    target::{check_target, store},
};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod device;
pub(crate) mod exp;
pub mod reference;
#[cfg(test)]
mod tests;

/// Activation that an op applies to its result before rounding it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Activation {
    /// Identity.
    #[default]
    None,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// SiLU of every element, in one pass.
///
/// **Shapes**: x of any shape and strides; result of the same shape, contiguous; on CUDA in x's
/// [memory order](crate::layout::memory_order).
/// **Dtypes**: f32, f16 or bf16; computed in f32, rounded once to x's dtype.
/// **Formula**: `x / (1 + exp(-x))` ("Gaussian Error Linear Units", Hendrycks and Gimpel, section 2).
/// **Numerics**: within 5e-7 of the exact value (relative), also where `exp(-x)` overflows f32; the same bits for every
/// number of threads and on every CPU. Minus infinity gives NaN, like the formula. On CUDA, f16 and bf16: within 1e-5
/// before rounding.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::DType`] for other element types.
/// - [`crate::Error::Argument`] if x tracks gradients: the op has no backward pass.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[0f32, 1.0, -1.0], &Device::Cpu)?;
/// let y = candle_fork::silu(&x)?.to_vec1::<f32>()?;
/// assert!((y[1] - 0.731_058_6).abs() < 1e-6 && (y[1] + y[2] * -1.0 - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn silu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "silu";
    check(OP, &[("x", x)])?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::silu(x);
    }
    if !on_cpu(x) {
        return device::silu(x).what(OP);
    }
    with_element!(OP, "x", x.dtype(), T => cpu::silu::<T>(x))
}

/// SwiGLU: the first half of the last axis gates the second.
///
/// **Shapes**: x `[.., 2n]` with any strides; result `[.., n]`, contiguous.
/// **Dtypes**: f32, f16 or bf16; computed in f32, rounded once to x's dtype.
/// **Formula**: `silu(x[.., ..n]) * x[.., n..]` ("GLU Variants Improve Transformer", Shazeer, equation 6, both linear
/// maps stacked with the gate first).
/// **Numerics**: within 6e-7 of the exact value (relative); the same bits for every number of threads and on every CPU.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x has no axis or an odd last one.
/// - [`crate::Error::DType`] for other element types.
/// - [`crate::Error::Argument`] if x tracks gradients: the op has no backward pass.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[1f32, 10.0]], &Device::Cpu)?;
/// let y = candle_fork::swiglu(&x)?.to_vec2::<f32>()?;
/// assert!((y[0][0] - 7.310_586).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    check(OP, &[("x", x)])?;
    if x.dims().last().is_none_or(|n| n % 2 != 0) {
        return Err(shape_error(OP, "x", x, "[.., 2n]"));
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::swiglu(x);
    }
    if !on_cpu(x) {
        return device::swiglu(x).what(OP);
    }
    with_element!(OP, "x", x.dtype(), T => cpu::swiglu::<T>(x))
}

/// [`swiglu`] into a part of a tensor that exists: columns of the input of the next linear map.
///
/// **Shapes**: x `[.., 2n]` with any strides, out `[.., n]` with a packed last axis; whoever shares out's memory sees the
/// result. **Dtypes**, **Formula**, **Numerics**, **Policy**: as [`swiglu`].
///
/// # Errors
/// As [`swiglu`], and for an out of another shape or dtype, whose last axis is not packed, which overlaps itself or shares
/// its memory with x; [`crate::Error::Unsupported`] on other devices than CPU and CUDA.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let joined = Tensor::zeros((1, 2), DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[[1f32, 10.0]], &Device::Cpu)?;
/// candle_fork::swiglu_into(&x, &joined.narrow(1, 1, 1)?)?;
/// let joined = joined.to_vec2::<f32>()?;
/// assert!(joined[0][0] == 0.0 && (joined[0][1] - 7.310_586).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn swiglu_into(x: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "swiglu_into";
    check(OP, &[("x", x)])?;
    let Some((&n, lead)) = x.dims().split_last().filter(|(n, _)| n.is_multiple_of(2)) else {
        return Err(shape_error(OP, "x", x, "[.., 2n]"));
    };
    let dims: Vec<usize> = lead.iter().copied().chain([n / 2]).collect();
    check_target(OP, out, &dims, x, &[x])?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::swiglu_into(OP, x, out);
    }
    store(OP, out, &swiglu(x)?)
}

/// Adds a gated branch to a residual stream, in one pass.
///
/// **Shapes**: x and y `[B, S, H]`, gate `[B, H]`, all with any strides; result `[B, S, H]`, contiguous.
/// **Dtypes**: x and y f32, f16 or bf16, the same; gate any of these; computed in f32, rounded once to x's dtype.
/// **Formula**: `x[b, s, h] + gate[b, h] * y[b, s, h]` (`black-forest-labs/flux2: src/flux2/model.py`).
/// **Numerics**: two roundings in f32 before the last; the same bits for every number of threads and on every CPU.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 3, or the others do not fit it.
/// - [`crate::Error::DType`] for other element types, or if y's differs from x's.
/// - [`crate::Error::Argument`] if an operand tracks gradients or is on another device.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let x = Tensor::ones((1, 2, 3), DType::F32, &Device::Cpu)?;
/// let gate = Tensor::new(&[[0f32, 1.0, 2.0]], &Device::Cpu)?;
/// let y = candle_fork::gate_residual(&x, &gate, &x)?;
/// assert_eq!(y.to_vec3::<f32>()?[0], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gate_residual(x: &Tensor, gate: &Tensor, y: &Tensor) -> Result<Tensor> {
    const OP: &str = "gate_residual";
    check(OP, &[("x", x), ("gate", gate), ("y", y)])?;
    check_dtype(OP, "y", y, x)?;
    let &[b, _, h] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[B, S, H]"));
    };
    check_shape(OP, "y", y, x.dims())?;
    check_shape(OP, "gate", gate, &[b, h])?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::gate_residual(x, gate, y);
    }
    if !on_cpu(x) {
        return device::gate_residual(x, gate, y).what(OP);
    }
    with_element!(OP, "x", x.dtype(), T => cpu::gate_residual::<T>(x, gate, y))
}

/// Adds a branch to a residual stream, over all threads.
///
/// **Shapes**: x and y alike, of any shape and strides; result of the same shape, contiguous; on CUDA in x's
/// [memory order](crate::layout::memory_order).
/// **Dtypes**: f32, f16 or bf16, the same; added in f32, rounded once to that dtype.
/// **Formula**: `x + y`.
/// **Numerics**: one rounding; the same bits for every number of threads and on every CPU.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if the shapes differ.
/// - [`crate::Error::DType`] for other element types, or if they differ.
/// - [`crate::Error::Argument`] if an operand tracks gradients or is on another device.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// assert_eq!(candle_fork::residual(&x, &x)?.to_vec1::<f32>()?, [2.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn residual(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    const OP: &str = "residual";
    check(OP, &[("x", x), ("y", y)])?;
    check_dtype(OP, "y", y, x)?;
    check_shape(OP, "y", y, x.dims())?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::residual(x, y);
    }
    if !on_cpu(x) {
        return device::residual(x, y).what(OP);
    }
    with_element!(OP, "x", x.dtype(), T => cpu::residual::<T>(x, y))
}
