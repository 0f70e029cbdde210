//! Attention.

use candle_core::Tensor;

use self::reference::Extents;
use crate::{
    element::with_element,
    error::{Error, Result, What},
    operand::{check, check_dtype, check_shape, on_cpu, shape_error},
    target,
};

pub(crate) mod blocks;
#[cfg(any(feature = "cuda", test))]
mod choose;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
pub mod reference;
pub(crate) mod softmax;
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
    /// Query i sees keys `0..=i`, and all of them from query `Sk - 1` on: a causal text before padding, where nothing sees
    /// the padding. For `Sq == Sk` the same as [`Self::Causal`].
    Prefix,
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
/// On CUDA, half precision in heads whose width is a multiple of 8 up to 128 runs as one kernel, other heads and f32 as
/// matrix products over tiles, at most 128 MiB of scores at a time (more if one query's do not fit). Either way sums,
/// scores and softmax are f32, and the weights are rounded to the operands' type before they meet the values. The same
/// device and shapes give the same bits, and a batch item those that it has alone.
/// **Policy**: [`cudnn_policy`](crate::cudnn_policy), on CUDA: cuDNN's kernel in half precision, for
/// [`AttentionMask::Full`].
///
/// # Errors
/// - [`Error::Shape`] if q is not of rank 4, k or v does not fit it, there is no key, or `Causal` meets `Sq > Sk`.
/// - [`Error::DType`] for other element types, or if they differ.
/// - [`Error::Argument`] if the scale is not finite, or an operand tracks gradients or is on another device.
/// - [`Error::FallbackRefused`] if the policy requires a fused kernel and none serves.
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
    let problem = Problem::new(q, k, v, softmax_scale, mask)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return cuda::attention(&problem);
    }
    if !on_cpu(q) {
        return device::attention([q, k, v], problem.extents, softmax_scale, mask).what(OP);
    }
    with_element!(OP, "q", q.dtype(), T => cpu::attention::<T>([q, k, v], problem.extents, softmax_scale, mask))
}

/// [`attention`] into a part of another tensor, such as the columns of a buffer that holds more than the result.
///
/// **Shapes**: out `[B, Sq, H, D]` with a packed last axis and otherwise any strides; its memory is no operand's.
/// **Dtypes**: out as the operands. **Numerics**: the bits of [`attention`].
///
/// # Errors
/// Those of [`attention`]; [`Error::Shape`], [`Error::DType`] or [`Error::Argument`] for an `out` that is not as above;
/// [`Error::Unsupported`] on devices other than CPU and CUDA.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{AttentionMask, attention_into};
/// let q = Tensor::zeros((1, 2, 1, 1), DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[1f32, 3.0], &Device::Cpu)?.reshape((1, 2, 1, 1))?;
/// let wide = Tensor::zeros((1, 2, 1, 3), DType::F32, &Device::Cpu)?;
/// attention_into(&q, &q, &v, 1.0, AttentionMask::Full, &wide.narrow(3, 1, 1)?)?;
/// assert_eq!(wide.flatten_all()?.to_vec1::<f32>()?, [0.0, 2.0, 0.0, 0.0, 2.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attention_into(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    mask: AttentionMask,
    out: &Tensor,
) -> Result<()> {
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "elsewhere the check is what counts"))]
    let problem = Problem::new(q, k, v, softmax_scale, mask)?;
    target::check_target(OP, out, q.dims(), q, &[q, k, v])?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return cuda::attention_into(&problem, out);
    }
    if !on_cpu(q) {
        return Err(Error::Unsupported { op: OP, what: "results inside of a tensor on this device".into() });
    }
    target::store(OP, out, &attention(q, k, v, softmax_scale, mask)?)
}

const OP: &str = "attention";

/// Operands that fit each other.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "elsewhere the operands are passed on one by one"))]
struct Problem<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    extents: Extents,
    softmax_scale: f32,
    mask: AttentionMask,
}

impl<'a> Problem<'a> {
    /// # Errors
    /// See [`attention`].
    fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor, softmax_scale: f32, mask: AttentionMask) -> Result<Self> {
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
            let expected = format!("at most {k_len} queries, one for each key, in causal attention");
            return Err(shape_error(OP, "q", q, expected));
        }
        if !softmax_scale.is_finite() {
            let what = format!("softmax_scale is {softmax_scale}, expected a finite number");
            return Err(Error::Argument { op: OP, what });
        }
        let extents = Extents { batch, q_len, k_len, heads, kv_heads, width };
        Ok(Self { q, k, v, extents, softmax_scale, mask })
    }
}
