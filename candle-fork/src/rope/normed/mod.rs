//! The RMS norm of heads and their rotation in one pass: what becomes of queries and keys between their projection and
//! attention.

use candle_core::{DType, Layout, Shape, Tensor};

use super::{reference::Pairing, rope};
use crate::{
    element::with_element,
    error::{Error, Result, What},
    norm::rms_norm,
    operand::{check, check_shape, on_cpu, packed_rows, shape_error, to_f32_vec},
};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

/// Weights of the RMS norms of a run of tokens: text and image tokens have their own.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm<'a> {
    /// Tokens of the run.
    pub tokens: usize,
    /// Weight of every query head, `[D]`.
    pub query: &'a Tensor,
    /// Weight of every key head, `[D]`.
    pub key: &'a Tensor,
}

/// Queries and keys out of a fused projection, normed per head and rotated, in one pass.
///
/// **Shapes**: projected `[B, S, W]` with any strides (no copy while the last axis is packed): columns `0..H D` are the
/// queries, `H D..2 H D` the keys, head-major; what follows them (values, a feed-forward branch) is not read. `norms` are
/// consecutive runs of tokens, S in all, with weights `[D]`; cos and sin `[S, D / 2]`. Results q and k `[B, S, H, D]`: parts
/// of one buffer `[B, S, 2, H, D]`.
/// **Dtypes**: projected f32, f16 or bf16; weights any of these; cos and sin f32; computed in f32, rounded once to
/// projected's dtype.
/// **Formula**: `rope_interleaved(x / sqrt(mean(x^2) + eps) * weight)` for each head x
/// (`black-forest-labs/flux2: src/flux2/model.py`).
/// **Numerics**: within 1e-6 of the exact value, relative to the length of a pair, before the one rounding; in f32 the bits
/// of [`rms_norm`] and [`rope_interleaved`](super::rope_interleaved) one after the other on the CPU. A head's bits depend on
/// nothing but the head, its weight and its angles.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if projected is not of rank 3 or has fewer than 2 H D columns, D is odd, or a weight or a table has
///   another shape.
/// - [`Error::Argument`] if there is no run or head, the runs are not S tokens in all, eps is negative or not finite, or an
///   operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::rope::{HeadNorm, qk_norm_rope};
/// // One token, one head of two components: query (3, 3), key (-3, 3). Nothing is rotated.
/// let projected = Tensor::new(&[[[3f32, 3.0, -3.0, 3.0]]], &Device::Cpu)?;
/// let one = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let (cos, sin) = (Tensor::ones((1, 1), DType::F32, &Device::Cpu)?, Tensor::zeros((1, 1), DType::F32, &Device::Cpu)?);
/// let norms = [HeadNorm { tokens: 1, query: &one, key: &one }];
/// let (q, k) = qk_norm_rope(&projected, 1, &norms, &cos, &sin, 0.0)?;
/// assert_eq!(q.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0]);
/// assert_eq!(k.flatten_all()?.to_vec1::<f32>()?, [-1.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn qk_norm_rope(
    projected: &Tensor,
    heads: usize,
    norms: &[HeadNorm<'_>],
    cos: &Tensor,
    sin: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    queries_and_keys("qk_norm_rope", projected, [heads, heads], norms, cos, sin, eps, Pairing::Interleaved)
}

/// [`qk_norm_rope`] where several query heads share a key head, with pairs as `pairing` says.
///
/// **Shapes**: columns `0..H D` of projected are the queries, `H D..(H + Hkv) D` the keys; results q `[B, S, H, D]` and k
/// `[B, S, Hkv, D]`, parts of one buffer `[B, S, H + Hkv, D]`. Everything else as [`qk_norm_rope`].
///
/// # Errors
/// As [`qk_norm_rope`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::rope::{HeadNorm, Pairing, grouped_qk_norm_rope};
/// // One token, two query heads and one key head of two components; nothing is rotated.
/// let projected = Tensor::new(&[[[3f32, 3.0, -5.0, 5.0, 2.0, 2.0]]], &Device::Cpu)?;
/// let one = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let (cos, sin) = (Tensor::ones((1, 1), DType::F32, &Device::Cpu)?, Tensor::zeros((1, 1), DType::F32, &Device::Cpu)?);
/// let norms = [HeadNorm { tokens: 1, query: &one, key: &(&one * 7.0)? }];
/// let (q, k) = grouped_qk_norm_rope(&projected, [2, 1], &norms, &cos, &sin, 0.0, Pairing::Half)?;
/// assert_eq!(q.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0, -1.0, 1.0]);
/// assert_eq!(k.flatten_all()?.to_vec1::<f32>()?, [7.0, 7.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn grouped_qk_norm_rope(
    projected: &Tensor,
    heads: [usize; 2],
    norms: &[HeadNorm<'_>],
    cos: &Tensor,
    sin: &Tensor,
    eps: f64,
    pairing: Pairing,
) -> Result<(Tensor, Tensor)> {
    queries_and_keys("grouped_qk_norm_rope", projected, heads, norms, cos, sin, eps, pairing)
}

#[expect(clippy::too_many_arguments, reason = "those of the two ops, and which of them it is")]
fn queries_and_keys(
    op: &'static str,
    projected: &Tensor,
    [heads, kv_heads]: [usize; 2],
    norms: &[HeadNorm<'_>],
    cos: &Tensor,
    sin: &Tensor,
    eps: f64,
    pairing: Pairing,
) -> Result<(Tensor, Tensor)> {
    check(op, &[("projected", projected), ("cos", cos), ("sin", sin)])?;
    let (Some(&HeadNorm { query: first, .. }), true) = (norms.first(), heads > 0 && kv_heads > 0) else {
        return Err(Error::Argument { op, what: "there is no run of tokens, or no head".into() });
    };
    let &[width] = first.dims() else {
        return Err(shape_error(op, "query", first, "[D]"));
    };
    let &[batch, tokens, columns] = projected.dims() else {
        return Err(shape_error(op, "projected", projected, "[B, S, W]"));
    };
    let all_heads = heads.saturating_add(kv_heads);
    if all_heads.checked_mul(width).is_none_or(|n| n > columns) {
        let expected = format!("[B, S, W] with W of at least ({heads} + {kv_heads}) x {width}");
        return Err(shape_error(op, "projected", projected, expected));
    }
    let given = norms.iter().fold(0usize, |n, run| n.saturating_add(run.tokens));
    if given != tokens {
        return Err(Error::Argument { op, what: format!("runs of {given} tokens in all for {tokens} tokens") });
    }
    let x = packed_rows(projected)?;
    let &[every_item, every_token, _] = x.stride() else {
        return Err(shape_error(op, "projected", projected, "[B, S, W]"));
    };
    let layout = Layout::new(
        Shape::from((batch, tokens, all_heads, width)),
        vec![every_item, every_token, width, 1],
        x.layout().start_offset(),
    );
    let runs = norms.iter().map(|run| Run { tokens: run.tokens, weights: vec![run.query, run.key] }).collect();
    let both = Problem { op, x: &x, layout, heads, runs, cos, sin, eps, pairing }.run()?;
    let part = |start, count| both.narrow(2, start, count).what(op);
    Ok((part(0, heads)?, part(heads, kv_heads)?))
}

/// Heads normed and rotated in one pass.
///
/// **Shapes**: x `[B, S, H, D]` with any strides (no copy while the last axis is packed), weight `[D]`, cos and sin
/// `[S, D / 2]`; result of x's shape, contiguous.
/// **Formula**: `rope(x / sqrt(mean(x^2) + eps) * weight)`, with pairs as `pairing` says.
/// **Dtypes**, **Numerics**, **Policy**: as [`qk_norm_rope`].
///
/// # Errors
/// As [`qk_norm_rope`].
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::rope::{Pairing, norm_rope};
/// // (1, 2) after the norm and its weight, turned by a quarter.
/// let x = Tensor::new(&[[[[3f32, 3.0]]]], &Device::Cpu)?;
/// let (weight, cos, sin) = (Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[[0f32]], &Device::Cpu)?,
///     Tensor::new(&[[1f32]], &Device::Cpu)?);
/// let y = norm_rope(&x, &weight, &cos, &sin, 0.0, Pairing::Half)?.flatten_all()?;
/// assert_eq!(y.to_vec1::<f32>()?, [-2.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn norm_rope(
    x: &Tensor,
    weight: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    eps: f64,
    pairing: Pairing,
) -> Result<Tensor> {
    const OP: &str = "norm_rope";
    check(OP, &[("x", x), ("cos", cos), ("sin", sin)])?;
    let &[_, tokens, heads, _] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[B, S, H, D]"));
    };
    let x = packed_rows(x)?;
    let runs = vec![Run { tokens, weights: vec![weight] }];
    Problem { op: OP, x: &x, layout: x.layout().clone(), heads, runs, cos, sin, eps, pairing }.run()
}

/// Columns `start..start + H D` of x `[B, S, W]` as heads `[B, S, H, D]`, head-major. A view where the width D divides W and
/// `start` and x is contiguous; a copy otherwise.
///
/// # Errors
/// - [`Error::Shape`] if x is not of rank 3 or has no such columns.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::new(&[[[0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]], &Device::Cpu)?;
/// let heads = candle_fork::rope::heads_of(&x, 2, 2, 2)?;
/// assert_eq!(heads.squeeze(0)?.to_vec3::<f32>()?, [[[2.0, 3.0], [4.0, 5.0]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn heads_of(x: &Tensor, start: usize, heads: usize, width: usize) -> Result<Tensor> {
    const OP: &str = "heads_of";
    let &[batch, tokens, columns] = x.dims() else {
        return Err(shape_error(OP, "x", x, "[B, S, W]"));
    };
    let len = heads.saturating_mul(width);
    if start.saturating_add(len) > columns {
        return Err(shape_error(OP, "x", x, format!("[B, S, W] with columns {start} to {start} + {len}")));
    }
    let whole = width > 0 && columns.is_multiple_of(width) && start.is_multiple_of(width) && x.is_contiguous();
    let view = if whole {
        x.reshape((batch, tokens, columns / width, width)).and_then(|x| x.narrow(2, start / width, heads))
    } else {
        x.narrow(2, start, len).and_then(|x| x.reshape((batch, tokens, heads, width)))
    };
    view.what(OP)
}

/// A run of tokens with the weights of its heads: of the first [`Problem::heads`], and of the others if there are any.
struct Run<'a> {
    tokens: usize,
    weights: Vec<&'a Tensor>,
}

/// Heads to be normed and rotated.
struct Problem<'a> {
    op: &'static str,
    /// Holds the heads.
    x: &'a Tensor,
    /// Where they lie in x's storage: `[B, S, G, D]` with a packed last axis.
    layout: Layout,
    /// Heads that have the first weight of their run, from the first on; at most G.
    heads: usize,
    runs: Vec<Run<'a>>,
    cos: &'a Tensor,
    sin: &'a Tensor,
    eps: f64,
    pairing: Pairing,
}

impl Problem<'_> {
    /// `[batch, tokens, heads of all weights, width]`.
    fn dims(&self) -> [usize; 4] {
        std::array::from_fn(|axis| self.layout.dims().get(axis).copied().unwrap_or(1))
    }

    /// Checks what both ops have in common; `[B, S, G, D]`, contiguous.
    fn run(&self) -> Result<Tensor> {
        let op = self.op;
        let [_, tokens, _, width] = self.dims();
        let weights: Vec<&Tensor> = self.runs.iter().flat_map(|run| run.weights.iter().copied()).collect();
        check_norm_and_tables(op, self.x, &weights, [self.cos, self.sin], [tokens, width], self.eps)?;
        #[cfg(feature = "cuda")]
        if self.x.device().is_cuda() {
            return cuda::norm_rope(self);
        }
        if !on_cpu(self.x) {
            return self.composed();
        }
        let weights = weights.into_iter().map(to_f32_vec).collect::<Result<Vec<_>>>()?;
        with_element!(op, "x", self.x.dtype(), T => cpu::norm_rope::<T>(self, &weights))
    }

    /// The same as two ops, for devices without a kernel. Rounds after the norm, too.
    fn composed(&self) -> Result<Tensor> {
        let op = self.op;
        let [_, tokens, heads, width] = self.dims();
        // x itself, or columns of it.
        let x = if self.x.rank() == 4 { self.x.clone() } else { heads_of(self.x, 0, heads, width)? };
        let parts = [(0, self.heads), (self.heads, heads - self.heads)];
        let groups = parts.into_iter().filter(|part| part.1 > 0).enumerate().map(|(group, (start, count))| {
            let part = x.narrow(2, start, count).what(op)?;
            let mut first = 0;
            let normed = self.runs.iter().map(|run| {
                let rows = part.narrow(1, first, run.tokens).what(op)?;
                first += run.tokens;
                rms_norm(&rows, run.weights[group], self.eps)
            });
            let normed = Tensor::cat(&normed.collect::<Result<Vec<_>>>()?, 1).what(op)?;
            debug_assert_eq!(first, tokens);
            rope(op, &normed, self.cos, self.sin, self.pairing)
        });
        Tensor::cat(&groups.collect::<Result<Vec<_>>>()?, 2).what(op)
    }
}

/// Checks what heads of `[tokens, width]` are normed and rotated by: a weight for each, tables of angles, the norm's `eps`.
pub(crate) fn check_norm_and_tables(
    op: &'static str,
    x: &Tensor,
    weights: &[&Tensor],
    [cos, sin]: [&Tensor; 2],
    [tokens, width]: [usize; 2],
    eps: f64,
) -> Result<()> {
    if width % 2 != 0 {
        return Err(shape_error(op, "x", x, "heads of an even width"));
    }
    for weight in weights {
        check(op, &[("x", x), ("weight", weight)])?;
        check_shape(op, "weight", weight, &[width])?;
    }
    for (name, table) in [("cos", cos), ("sin", sin)] {
        check_shape(op, name, table, &[tokens, width / 2])?;
        if table.dtype() != DType::F32 {
            return Err(Error::DType { op, operand: name, got: table.dtype(), expected: "f32" });
        }
    }
    if !(eps >= 0.0 && eps.is_finite()) {
        let what = format!("eps is {eps}, expected a finite number of at least 0");
        return Err(Error::Argument { op, what });
    }
    Ok(())
}
