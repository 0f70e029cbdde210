//! Rotary position embeddings.

use candle_core::{DType, Tensor};

#[cfg(feature = "cuda")]
pub(crate) use self::normed::check_norm_and_tables;
pub use self::{
    normed::{HeadNorm, grouped_qk_norm_rope, heads_of, norm_rope, qk_norm_rope},
    reference::Pairing,
};
use crate::{
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_shape, on_cpu, shape_error},
};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod normed;
pub mod reference;
#[cfg(test)]
mod tests;

/// Rotates neighbouring components of each head, as GPT-J and FLUX.2 do.
///
/// **Shapes**: x `[B, S, H, D]` with any strides (no copy while the last axis is packed), D even; cos and sin
/// `[S, D / 2]`, shared by all heads; result of x's shape, contiguous.
/// **Dtypes**: x f32, f16 or bf16, cos and sin f32; computed in f32, rounded once to x's dtype.
/// **Formula**: `y[2i] = cos[i] x[2i] - sin[i] x[2i+1]`, `y[2i+1] = sin[i] x[2i] + cos[i] x[2i+1]` ("RoFormer", Su et al.,
/// equation 34).
/// **Numerics**: within 2e-7 of the exact value, relative to the length of the pair; the same bits for every number of
/// threads and on every CPU.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if x is not of rank 4, D is odd, or cos or sin is not `[S, D / 2]`.
/// - [`Error::DType`] for other element types.
/// - [`Error::Argument`] if an operand tracks gradients or is on another device.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[[1f32, 2.0, 3.0, 4.0]]]], &Device::Cpu)?;
/// // A quarter turn of both pairs.
/// let (cos, sin) = (Tensor::new(&[[0f32, 0.0]], &Device::Cpu)?, Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?);
/// let y = candle_fork::rope_interleaved(&x, &cos, &sin)?.flatten_all()?;
/// assert_eq!(y.to_vec1::<f32>()?, [-2.0, 1.0, -4.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rope_interleaved(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope("rope_interleaved", x, cos, sin, Pairing::Interleaved)
}

/// Rotates component i of each head with component i + D / 2, as Llama and Qwen do.
///
/// **Shapes**, **Dtypes**, **Numerics**, **Policy**: as [`rope_interleaved`].
/// **Formula**: `y[i] = cos[i] x[i] - sin[i] x[i+D/2]`, `y[i+D/2] = sin[i] x[i] + cos[i] x[i+D/2]` ("RoFormer", Su et al.,
/// equation 34 after a permutation of components; `huggingface/transformers: src/transformers/models/qwen3`).
///
/// # Errors
/// As [`rope_interleaved`].
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[[1f32, 2.0, 3.0, 4.0]]]], &Device::Cpu)?;
/// let (cos, sin) = (Tensor::new(&[[0f32, 0.0]], &Device::Cpu)?, Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?);
/// let y = candle_fork::rope_half(&x, &cos, &sin)?.flatten_all()?;
/// assert_eq!(y.to_vec1::<f32>()?, [-3.0, -4.0, 1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rope_half(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope("rope_half", x, cos, sin, Pairing::Half)
}

fn rope(op: &'static str, x: &Tensor, cos: &Tensor, sin: &Tensor, pairing: Pairing) -> Result<Tensor> {
    check(op, &[("x", x), ("cos", cos), ("sin", sin)])?;
    let &[_, rows, _, width] = x.dims() else {
        return Err(shape_error(op, "x", x, "[B, S, H, D]"));
    };
    if width % 2 != 0 {
        return Err(shape_error(op, "x", x, "[B, S, H, D] with even D"));
    }
    for (name, table) in [("cos", cos), ("sin", sin)] {
        check_shape(op, name, table, &[rows, width / 2])?;
        if table.dtype() != DType::F32 {
            return Err(Error::DType { op, operand: name, got: table.dtype(), expected: "f32" });
        }
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::rope(op, x, cos, sin, pairing);
    }
    if !on_cpu(x) {
        return device::rope(x, cos, sin, pairing).what(op);
    }
    with_element!(op, "x", x.dtype(), T => cpu::rope::<T>(x, cos, sin, pairing))
}
