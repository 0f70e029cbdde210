//! Attention and a feed-forward branch of the same tokens, which need nothing of one another.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::Tensor;

#[cfg(any(feature = "cuda", test))]
use crate::target::shares_storage;
use crate::{
    activation::swiglu_into,
    attention::{AttentionMask, attention_into},
    error::Result,
};

/// The arguments of [`attention_into`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionInto<'a> {
    /// Queries `[B, Sq, H, D]`.
    pub q: &'a Tensor,
    /// Keys `[B, Sk, Hkv, D]`.
    pub k: &'a Tensor,
    /// Values `[B, Sk, Hkv, D]`.
    pub v: &'a Tensor,
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Keys that a query sees.
    pub mask: AttentionMask,
    /// Place of the result `[B, Sq, H, D]`.
    pub out: &'a Tensor,
}

impl AttentionInto<'_> {
    fn run(&self) -> Result<()> {
        let &Self { q, k, v, softmax_scale, mask, out } = self;
        attention_into(q, k, v, softmax_scale, mask, out)
    }
}

/// [`attention_into`], and [`swiglu_into`] of x: the same results as one after the other.
///
/// **Shapes**, **Dtypes**, **Formula**, **Policy**: those of the two.
/// **Numerics**: the bits of the two.
///
/// On CUDA the second, which waits for memory, runs on the multiprocessors that the first, which computes, leaves idle; on a
/// device whose tensors are tracked by events, and for an x that has to be copied first, behind it.
///
/// # Errors
/// Those of the two.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{AttentionInto, AttentionMask, attention_and_swiglu_into};
///
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
/// let (q, joined) = (zeros(&[1, 3, 2, 8])?, zeros(&[1, 3, 16 + 24])?);
/// let out = zeros(&[1, 3, 2, 8])?;
/// let attention = AttentionInto { q: &q, k: &q, v: &q, softmax_scale: 0.3, mask: AttentionMask::Full, out: &out };
/// attention_and_swiglu_into(&attention, &zeros(&[1, 3, 48])?, &joined.narrow(2, 16, 24)?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attention_and_swiglu_into(attention: &AttentionInto<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(device) = x.device()
        && independent(attention, x, out)
        && cuda::run(device, attention, x, out)?
    {
        return Ok(());
    }
    attention.run()?;
    swiglu_into(x, out)
}

/// Whether neither branch uses memory that the other writes, as far as can be told.
#[cfg(any(feature = "cuda", test))]
fn independent(attention: &AttentionInto<'_>, x: &Tensor, out: &Tensor) -> bool {
    let written = attention.out;
    let apart = match (columns(written), columns(out)) {
        (Some((pitch, a)), Some((other, b))) => pitch == other && (a.end <= b.start || b.end <= a.start),
        _ => false,
    };
    (apart || !shares_storage(written, out))
        && !shares_storage(written, x)
        && ![attention.q, attention.k, attention.v].iter().any(|operand| shares_storage(out, operand))
}

/// The columns that a tensor has of a matrix whose rows are its first axes, and the distance of the rows: of
/// `[B, S, n]`, or of `[B, S, H, D]` with its heads side by side.
#[cfg(any(feature = "cuda", test))]
fn columns(t: &Tensor) -> Option<(usize, std::ops::Range<usize>)> {
    let (pitch, batch, width) = match (t.dims(), t.stride()) {
        (&[_, _, n], &[batch, pitch, 1]) => (pitch, batch, n),
        (&[_, _, h, d], &[batch, pitch, head, 1]) if head == d => (pitch, batch, h * d),
        _ => return None,
    };
    let first = t.layout().start_offset().checked_rem(pitch)?;
    (first + width <= pitch && batch % pitch == 0).then_some((pitch, first..first + width))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{Data, tensor, to_f64};

    fn buffers() -> (Tensor, Tensor) {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        (tensor(&[2, 5, 3 * 16 + 24], DType::F32, Data::Normal, 1), zeros(&[2, 5, 16 + 16]))
    }

    fn heads(t: &Tensor, start: usize) -> Tensor {
        crate::heads_of(t, start, 2, 8).unwrap()
    }

    #[test]
    fn both_branches_give_what_they_give_alone() {
        let (projected, joined) = buffers();
        let [q, k, v] = [0, 16, 32].map(|start| heads(&projected, start));
        let (out, x) = (heads(&joined, 0), projected.narrow(2, 48, 24).unwrap());
        let call = AttentionInto { q: &q, k: &k, v: &v, softmax_scale: 0.3, mask: AttentionMask::Full, out: &out };
        attention_and_swiglu_into(&call, &x, &joined.narrow(2, 16, 12).unwrap()).unwrap();
        let attended = crate::attention(&q, &k, &v, 0.3, AttentionMask::Full).unwrap().flatten(2, 3).unwrap();
        let alone = Tensor::cat(&[attended, crate::swiglu(&x).unwrap()], 2).unwrap();
        assert_eq!(to_f64(&joined.narrow(2, 0, 28).unwrap()), to_f64(&alone));
        assert!(to_f64(&joined.narrow(2, 28, 4).unwrap()).iter().all(|&rest| rest == 0.0));
    }

    #[test]
    fn branches_that_share_memory_are_told_from_those_that_do_not() {
        let (projected, joined) = buffers();
        let [q, k, v] = [0, 16, 32].map(|start| heads(&projected, start));
        let x = projected.narrow(2, 48, 24).unwrap();
        let independent = |to: &Tensor, x: &Tensor, out: &Tensor| {
            let (q, k, v) = (&q, &k, &v);
            let call = AttentionInto { q, k, v, softmax_scale: 0.3, mask: AttentionMask::Full, out: to };
            super::independent(&call, x, out)
        };
        let part = |start| joined.narrow(2, start, 12).unwrap();
        assert!(independent(&heads(&joined, 0), &x, &part(16)));
        assert!(independent(&heads(&joined, 0), &x, &part(20)));
        assert!(independent(&heads(&joined, 16), &x, &part(4)));
        assert!(!independent(&heads(&joined, 0), &x, &part(15)), "one column of both");
        assert!(!independent(&heads(&joined, 0), &joined, &part(16)), "x is what attention writes");
        assert!(!independent(&heads(&joined, 0), &x, &projected.narrow(2, 60, 12).unwrap()), "out is what it reads");
        let (one, other) = (joined.narrow(0, 0, 1).unwrap(), joined.narrow(0, 1, 1).unwrap());
        assert!(!independent(&heads(&one, 0), &x, &other.narrow(2, 0, 12).unwrap()), "rows apart are not looked at");
        let own = Tensor::zeros((2, 5, 12), DType::F32, &Device::Cpu).unwrap();
        assert!(independent(&heads(&joined, 0), &x, &own));
    }
}
