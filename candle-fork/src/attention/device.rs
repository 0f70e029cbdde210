//! The same op composed of candle's, in f32, for devices without kernels of their own.

use candle_core::{D, DType, Device, Result, Tensor};

use super::{AttentionMask, reference::Extents};

/// Most scores that exist at a time, over all heads and batch items: 256 MiB of f32.
const MAX_SCORES: usize = 64 << 20;

pub(super) fn attention(
    [q, k, v]: [&Tensor; 3],
    extents: Extents,
    softmax_scale: f32,
    mask: AttentionMask,
) -> Result<Tensor> {
    let Extents { batch, q_len, k_len, heads, kv_heads, width } = extents;
    let by_head = |t: &Tensor| t.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let repeat = |t: &Tensor| {
        let shared = by_head(t)?.unsqueeze(2)?;
        shared.broadcast_as((batch, kv_heads, heads / kv_heads, k_len, width))?.reshape((batch, heads, k_len, width))
    };
    let (wide_q, k, v) = ((by_head(q)? * f64::from(softmax_scale))?, repeat(k)?.t()?.contiguous()?, repeat(v)?);
    let rows = (MAX_SCORES / (batch * heads * k_len).max(1)).clamp(1, q_len.max(1));
    let mut parts = Vec::new();
    for first in (0..q_len).step_by(rows) {
        let rows = rows.min(q_len - first);
        let mut scores = wide_q.narrow(2, first, rows)?.contiguous()?.matmul(&k)?;
        if mask != AttentionMask::Full {
            scores = scores.broadcast_add(&hidden(extents, mask, first, rows, q.device())?)?;
        }
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        parts.push(weights.matmul(&v)?);
    }
    Tensor::cat(&parts, 2)?.transpose(1, 2)?.contiguous()?.to_dtype(q.dtype())
}

/// 0 where a query sees a key, minus infinity elsewhere.
fn hidden(extents: Extents, mask: AttentionMask, first: usize, rows: usize, device: &Device) -> Result<Tensor> {
    let entries: Vec<f32> = (first..first + rows)
        .flat_map(|i| {
            let visible = extents.visible(mask, i);
            (0..extents.k_len).map(move |j| if j < visible { 0.0 } else { f32::NEG_INFINITY })
        })
        .collect();
    Tensor::from_vec(entries, (rows, extents.k_len), device)
}
