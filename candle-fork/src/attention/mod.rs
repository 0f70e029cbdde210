//! Attention.

use candle_core::Tensor;

use self::reference::Extents;
#[cfg(feature = "cuda")]
use crate::cudnn_policy::{self, FallbackReason};
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
mod softmax;
#[cfg(test)]
mod tests;
#[cfg(any(feature = "cuda", test))]
mod tiles;

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AttentionMask {
    /// All keys.
    #[default]
    Full,
    /// Query i sees keys `0..=i + (Sk - Sq)`: the last query sees all keys. Needs `Sq <= Sk`.
    Causal,
}

/// Attention, without ever holding all scores.
///
/// **Shapes**: q `[B, Sq, H, D]`, k and v `[B, Sk, Hkv, D]`, with any strides (no copy while the last axis is packed: cut
/// q, k and v from one projection); result `[B, Sq, H, D]`, contiguous. Hkv divides H: query head h uses key head
/// `h / (H / Hkv)`.
/// **Dtypes**: f32, f16 or bf16, the same for all; products and softmax in f32, rounded once to that dtype.
/// **Formula**: `softmax(softmax_scale * q k^T + mask) v` ("Attention Is All You Need", Vaswani et al., equation 1), computed
/// over blocks of keys with a running maximum and sum ("FlashAttention", Dao et al., algorithm 1).
/// **Memory**: less than 3 MiB per thread for D up to 512, growing with D and not with S, plus one buffer as large as the
/// result.
/// **Numerics**: within 1e-5 of the exact value, relative to the largest value, for scores up to 10 in magnitude (a
/// score's rounding error becomes the weight's relative error). The same bits for every number of threads; not on every
/// CPU, since products use its fused multiply-add. NaN and infinite scores give NaN; a NaN or an infinity in v may reach
/// a causal query that does not see it.
/// On CUDA: products with f32 sums; scores and softmax in f32; the weights are rounded to the operands' type before they
/// meet the values, at most 128 MiB of scores at a time (more if one query's do not fit). The same device and shapes give
/// the same bits.
/// **Policy**: none yet.
///
/// # Errors
/// - [`Error::Shape`] if q is not of rank 4, k or v does not fit it, there is no key, or `Causal` meets `Sq > Sk`.
/// - [`Error::DType`] for other element types, or if they differ.
/// - [`Error::Argument`] if the scale is not finite, or an operand tracks gradients or is on another device.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::{AttentionMask, attention};
/// // One head of width 1; both keys score alike, so the result is the mean of the values.
/// let q = Tensor::zeros((1, 2, 1, 1), candle_core::DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[1f32, 3.0], &Device::Cpu)?.reshape((1, 2, 1, 1))?;
/// let full = attention(&q, &q, &v, 1.0, AttentionMask::Full)?.flatten_all()?;
/// assert_eq!(full.to_vec1::<f32>()?, [2.0, 2.0]);
/// let causal = attention(&q, &q, &v, 1.0, AttentionMask::Causal)?.flatten_all()?;
/// assert_eq!(causal.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, mask: AttentionMask) -> Result<Tensor> {
    const OP: &str = "attention";
    check(OP, &[("q", q), ("k", k), ("v", v)])?;
    check_dtype(OP, "k", k, q)?;
    check_dtype(OP, "v", v, q)?;
    let &[batch, q_len, heads, width] = q.dims() else {
        return Err(shape_error(OP, "q", q, "[B, Sq, H, D]"));
    };
    let (k_len, kv_heads) = match *k.dims() {
        [b, k_len, kv_heads, d] if b == batch && d == width => (k_len, kv_heads),
        _ => return Err(shape_error(OP, "k", k, format!("[{batch}, Sk, Hkv, {width}]"))),
    };
    if k_len == 0 {
        return Err(shape_error(OP, "k", k, "at least one key"));
    }
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(shape_error(OP, "k", k, format!("a number of heads that divides {heads}")));
    }
    check_shape(OP, "v", v, k.dims())?;
    if mask == AttentionMask::Causal && q_len > k_len {
        return Err(shape_error(OP, "q", q, format!("at most {k_len} queries, one for each key, in causal attention")));
    }
    if !softmax_scale.is_finite() {
        return Err(Error::Argument {
            op: OP,
            what: format!("softmax_scale is {softmax_scale}, expected a finite number"),
        });
    }
    let extents = Extents { batch, q_len, k_len, heads, kv_heads, width };
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        if cudnn_policy::attention() == cudnn_policy::Attention::Required {
            let detail = "there is no fused kernel".into();
            return Err(Error::FallbackRefused { op: OP, reason: FallbackReason::Unsupported, detail });
        }
        return cuda::attention([q, k, v], extents, softmax_scale, mask);
    }
    if !on_cpu(q) {
        return device::attention([q, k, v], extents, softmax_scale, mask).what(OP);
    }
    with_element!(OP, "q", q.dtype(), T => cpu::attention::<T>([q, k, v], extents, softmax_scale, mask))
}
