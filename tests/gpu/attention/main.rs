//! Attention on the GPU: this crate's fused kernel, its products, and cuDNN, against attention in f64 on the CPU.
//!
//! In half precision the bound is twice the error of a plain implementation that rounds the weights and the result once to
//! the tested type and does everything else in f64.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_fork::{
    AttentionMask, attention,
    cudnn_policy::{Attention, AttentionCounters, Backend, FallbackReason, Policy, scope, take_counters},
};
use tests::gpu::{Counted, noise, relative_error, skip, values};

mod agreement;
#[cfg(feature = "cuda")]
mod branches;
mod kernels;
mod processes;

/// Errors of half precision, in units of the plain implementation's.
const ROUNDINGS: f64 = 2.0;
/// Largest relative error in f32.
const F32: f64 = 1e-5;

/// A problem: batch, queries, keys, heads, key heads, width.
#[derive(Debug, Clone, Copy)]
struct Case([usize; 6]);

const MASKS: [AttentionMask; 3] = [AttentionMask::Full, AttentionMask::Causal, AttentionMask::Prefix];

const CASES: [Case; 29] = [
    Case([1, 1, 1, 1, 1, 8]),
    // Around the blocks of 128 queries and 64 keys.
    Case([1, 127, 63, 2, 2, 64]),
    Case([1, 128, 64, 2, 2, 64]),
    Case([1, 129, 65, 2, 2, 64]),
    Case([2, 257, 300, 4, 4, 128]),
    Case([1, 513, 513, 2, 2, 128]),
    // Shared key heads, cross-attention, one query, many keys.
    Case([1, 200, 333, 8, 2, 128]),
    Case([3, 40, 77, 6, 1, 64]),
    Case([2, 1, 700, 4, 2, 128]),
    Case([1, 31, 4097, 2, 2, 64]),
    // Other widths, of whole vectors and not.
    Case([1, 150, 150, 3, 3, 72]),
    Case([2, 70, 141, 2, 1, 80]),
    Case([1, 99, 101, 2, 2, 96]),
    Case([1, 130, 130, 2, 2, 16]),
    Case([1, 65, 130, 2, 2, 104]),
    Case([1, 90, 91, 2, 2, 60]),
    Case([1, 90, 91, 2, 1, 136]),
    Case([1, 200, 222, 2, 2, 256]),
    Case([1, 300, 300, 1, 1, 384]),
    Case([2, 256, 256, 1, 1, 512]),
    // A text encoder without and with padding, a short text in a tile, a small picture.
    Case([1, 512, 512, 8, 2, 128]),
    Case([1, 512, 52, 8, 2, 128]),
    Case([2, 300, 129, 2, 1, 64]),
    Case([1, 1536, 1536, 2, 2, 128]),
    // Around steps of 128 keys, and more blocks of queries than there are multiprocessors.
    Case([1, 128, 128, 1, 1, 128]),
    Case([1, 127, 129, 2, 2, 128]),
    Case([2, 256, 255, 2, 1, 96]),
    Case([2, 300, 200, 40, 20, 72]),
    Case([3, 150, 385, 24, 24, 128]),
];

/// Operands on the CPU, and the results that they should give.
struct Reference {
    operands: [Tensor; 3],
    scale: f32,
    mask: AttentionMask,
    exact: Vec<f64>,
    /// Error of the plain implementation.
    plain: f64,
}

impl Reference {
    fn new(Case(case): Case, dtype: DType, mask: AttentionMask, seed: u64) -> Result<Self> {
        let [batch, q_len, k_len, heads, kv_heads, width] = case;
        let operand = |i: u64, len, heads| noise(seed + i, 1.0, &[batch, len, heads, width], dtype);
        let operands = [operand(0, q_len, heads)?, operand(1, k_len, kv_heads)?, operand(2, k_len, kv_heads)?];
        let scale = (width as f32).powf(-0.5);
        Self::of(operands, scale, mask)
    }

    fn of(operands: [Tensor; 3], scale: f32, mask: AttentionMask) -> Result<Self> {
        let [q, k, v] = &operands;
        let (dtype, heads, q_len, k_len) = (q.dtype(), q.dim(2)?, q.dim(1)?, k.dim(1)?);
        let by_head = |t: &Tensor| -> Result<Tensor> {
            let t = t.to_dtype(DType::F64)?.transpose(1, 2)?;
            let (b, own, s, d) = t.dims4()?;
            let shared = t.unsqueeze(2)?.broadcast_as((b, own, heads / own, s, d))?;
            Ok(shared.reshape((b, heads, s, d))?.contiguous()?)
        };
        let mut scores = (by_head(q)?.matmul(&by_head(k)?.t()?.contiguous()?)? * f64::from(scale))?;
        if mask != AttentionMask::Full {
            let ahead = if mask == AttentionMask::Causal { k_len - q_len } else { 0 };
            let hidden = |i: usize, j: usize| if j <= i + ahead { 0.0 } else { f64::NEG_INFINITY };
            let entries: Vec<f64> = (0..q_len).flat_map(|i| (0..k_len).map(move |j| hidden(i, j))).collect();
            scores = scores.broadcast_add(&Tensor::from_vec(entries, (q_len, k_len), &Device::Cpu)?)?;
        }
        let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        let rounded = |t: &Tensor| t.to_dtype(dtype)?.to_dtype(DType::F64);
        let (v, positions) = (by_head(v)?, |t: Tensor| t.transpose(1, 2));
        let exact = values(&positions(weights.matmul(&v)?)?)?;
        let plain = values(&positions(rounded(&rounded(&weights)?.matmul(&v)?)?)?)?;
        let plain = relative_error(&plain, &exact);
        Ok(Self { operands, scale, mask, exact, plain })
    }

    fn bound(&self) -> f64 {
        if self.operands[0].dtype() == DType::F32 { F32 } else { ROUNDINGS * self.plain + 1e-7 }
    }

    fn on(&self, device: &Device, place: impl Fn(&Tensor) -> Result<Tensor>) -> Result<[Tensor; 3]> {
        let [q, k, v] = &self.operands;
        let placed = |t: &Tensor| -> Result<Tensor> { Ok(place(t)?.to_device(device)?) };
        Ok([placed(q)?, placed(k)?, placed(v)?])
    }

    fn run(&self, [q, k, v]: &[Tensor; 3]) -> Result<Tensor> {
        Ok(attention(q, k, v, self.scale, self.mask)?)
    }
}

fn policy(attention: Attention) -> Policy {
    let mut policy = Policy::new(Backend::Im2col);
    policy.attention = attention;
    policy
}

/// What `f` gives under a policy, and what was counted.
fn under<R>(attention: Attention, f: impl FnOnce() -> Result<R>) -> Counted<R> {
    take_counters();
    let result = scope(policy(attention), f);
    Counted { result, counters: take_counters() }
}

/// Which kernel a call should run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Cudnn,
    Fused,
    /// Matrix products and a softmax.
    Products,
}

impl Kernel {
    /// This crate's own.
    fn own(dtype: DType, width: usize) -> Self {
        if dtype != DType::F32 && width.is_multiple_of(8) && width <= 128 { Kernel::Fused } else { Kernel::Products }
    }

    /// The one under [`Attention::Auto`] with a cuDNN that serves, and whether it is a fallback.
    fn auto(dtype: DType, width: usize, mask: AttentionMask) -> (Self, bool) {
        if dtype == DType::F32 || mask != AttentionMask::Full {
            (Self::own(dtype, width), false)
        } else if width.is_multiple_of(8) && width <= 256 {
            (Kernel::Cudnn, false)
        } else {
            (Self::own(dtype, width), true)
        }
    }

    fn counted(self, fell_back: bool, counters: &AttentionCounters) -> bool {
        let one = |yes: bool| u64::from(yes);
        let asked = fell_back || self == Kernel::Cudnn;
        (counters.attempts, counters.dispatched) == (one(asked), one(self == Kernel::Cudnn))
            && (counters.fused, counters.products) == (one(self == Kernel::Fused), one(self == Kernel::Products))
            && counters.fallback_total() == one(fell_back)
            && counters
                .fallbacks
                .keys()
                .all(|reason| matches!(reason, FallbackReason::Unsupported | FallbackReason::Errata))
    }
}

/// Whether cuDNN runs a plain attention on `device`; if not, `suite` says that it leaves its cuDNN half out.
fn cudnn_serves(suite: &str, device: &Device) -> Result<bool> {
    let x = Tensor::zeros((1, 64, 2, 64), DType::BF16, device)?;
    let Err(error) = scope(policy(Attention::Required), || attention(&x, &x, &x, 0.125, AttentionMask::Full)) else {
        return Ok(true);
    };
    skip(&format!("the cuDNN half of {suite}"), &error.to_string())?;
    Ok(false)
}

/// Bits of a result.
fn bits(tensor: &Tensor) -> Result<Vec<u64>> {
    Ok(values(tensor)?.into_iter().map(f64::to_bits).collect())
}
