//! Resampling by whole factors.

use candle_core::Tensor;

use crate::{
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_dtype, check_shape, on_cpu, shape_error},
};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
pub mod reference;
#[cfg(test)]
mod tests;

/// Nearest upsampling of `[N, C, H, W]` by the same whole factor along both axes.
///
/// [`upsample_nearest`] with `[factor, factor]`; see there for everything else.
///
/// # Errors
/// As [`upsample_nearest`].
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[[1f32, 2.0]]]], &Device::Cpu)?;
/// let y = candle_fork::upsample_nearest2d(&x, 2)?;
/// assert_eq!(y.squeeze(0)?.squeeze(0)?.to_vec2::<f32>()?, [[1.0, 1.0, 2.0, 2.0]; 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn upsample_nearest2d(x: &Tensor, factor: usize) -> Result<Tensor> {
    upsample("upsample_nearest2d", x, [factor; 2])
}

/// Nearest upsampling along `D` axes, each by its whole factor.
///
/// **Shapes**: x `[N, C, X1, .., XD]` with any strides (no copy while the last axis is packed); result
/// `[N, C, X1 f1, .., XD fD]`, contiguous; on CUDA in x's [memory order](crate::layout::memory_order).
/// **Dtypes**: f32, f16 or bf16; elements are copied.
/// **Formula**: `y[n, c, i1, .., iD] = x[n, c, i1 / f1, .., iD / fD]`, rounding down.
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x is not of rank `D + 2`, or the result would have more elements than memory has addresses.
/// - [`Error::Argument`] if D or a factor is 0, or x tracks gradients.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[1f32, 2.0]]], &Device::Cpu)?;
/// let y = candle_fork::upsample_nearest(&x, [3])?;
/// assert_eq!(y.to_vec3::<f32>()?[0][0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn upsample_nearest<const D: usize>(x: &Tensor, factors: [usize; D]) -> Result<Tensor> {
    upsample("upsample_nearest", x, factors)
}

fn upsample<const D: usize>(op: &'static str, x: &Tensor, factors: [usize; D]) -> Result<Tensor> {
    check(op, &[("x", x)])?;
    if x.rank() != D + 2 {
        return Err(shape_error(op, "x", x, format!("[N, C] and {D} axes")));
    }
    if D == 0 || factors.contains(&0) {
        return Err(Error::Argument {
            op,
            what: format!("factors are {factors:?}, expected at least 1 for 1 or more axes"),
        });
    }
    let mut out_dims = x.dims().to_vec();
    for (n, factor) in out_dims[2..].iter_mut().zip(factors) {
        *n = n.saturating_mul(factor);
    }
    let bytes = out_dims.iter().try_fold(x.dtype().size_in_bytes(), |n, &d| n.checked_mul(d));
    if bytes.is_none_or(|n| n > isize::MAX as usize) {
        return Err(shape_error(op, "x", x, format!("few enough elements for factors {factors:?}")));
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::upsample_nearest(x, &out_dims, &factors);
    }
    if !on_cpu(x) {
        return device::upsample_nearest(x, &out_dims, &factors).what(op);
    }
    with_element!(op, "x", x.dtype(), T => cpu::upsample_nearest::<T, D>(x, &out_dims, factors))
}

/// Four images become one of twice the extents: each holds the pixels of one parity.
///
/// **Shapes**: four of `[.., H, W]`, alike, with any strides (one copy if not contiguous); result `[.., 2 H, 2 W]`,
/// contiguous; on CUDA, from rank 4 on, in the [memory order](crate::layout::memory_order) of the first.
/// **Dtypes**: f32, f16 or bf16, the same for all; elements are copied.
/// **Formula**: `y[.., 2 i + a, 2 j + b] = parts[2 a + b][.., i, j]` for a and b in 0..2. With it, nearest doubling
/// followed by a 3 x 3 convolution is four 2 x 2 convolutions of the small image.
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if a part has less than two axes or another shape than the first.
/// - [`Error::Argument`] if a part tracks gradients or is on another device.
/// - [`Error::DType`] for other element types, or if they differ.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let parts = [1f32, 2.0, 3.0, 4.0].map(|v| Tensor::new(&[[v]], &Device::Cpu).unwrap());
/// let y = candle_fork::interleave2d(&parts)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0, 2.0], [3.0, 4.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn interleave2d(parts: &[Tensor; 4]) -> Result<Tensor> {
    const OP: &str = "interleave2d";
    let first = &parts[0];
    for part in parts {
        check(OP, &[("first part", first), ("part", part)])?;
        check_dtype(OP, "part", part, first)?;
        check_shape(OP, "part", part, first.dims())?;
    }
    let &[ref lead @ .., h, w] = first.dims() else {
        return Err(shape_error(OP, "part", first, "[.., H, W]"));
    };
    let mut dims = lead.to_vec();
    dims.extend([h.saturating_mul(2), w.saturating_mul(2)]);
    #[cfg(feature = "cuda")]
    if first.device().is_cuda() {
        return cuda::interleave2d(parts, &dims);
    }
    if !on_cpu(first) {
        return device::interleave2d(parts, dims).what(OP);
    }
    with_element!(OP, "part", first.dtype(), T => cpu::interleave2d::<T>(parts, dims))
}
