//! Products whose results leave them finished: heads normed and rotated, feed-forward branches behind their SwiGLU.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::Tensor;

use crate::{
    activation::{swiglu, swiglu_into},
    error::{Error, Result, What},
    linear::{LinearWeight, linear},
    operand::shape_error,
    rope::{HeadNorm, heads_of, qk_norm_rope},
    target::check_target,
};
#[cfg(feature = "cuda")]
use crate::{operand::check, rope::check_norm_and_tables};

const OP: &str = "heads_and_swiglu";

/// What becomes of the heads of [`heads_and_swiglu_into`].
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// How many of query, of key and of value, H.
    pub count: usize,
    /// Weights `[D]` of the norms of query and key, for all tokens.
    pub norm: HeadNorm<'a>,
    /// Cosines of the rotation, `[S, D / 2]` f32.
    pub cos: &'a Tensor,
    /// Its sines.
    pub sin: &'a Tensor,
    /// Added to the mean of squares.
    pub eps: f64,
}

#[cfg(feature = "cuda")]
impl Heads<'_> {
    /// What [`qk_norm_rope`] asks of its operands.
    fn check(&self, x: &Tensor, tokens: usize, width: usize) -> Result<()> {
        let Self { norm, cos, sin, eps, .. } = *self;
        check(OP, &[("x", x), ("cos", cos), ("sin", sin)])?;
        if norm.tokens != tokens {
            let what = format!("a norm of {} tokens for {tokens} tokens", norm.tokens);
            return Err(Error::Argument { op: OP, what });
        }
        check_norm_and_tables(OP, x, &[norm.query, norm.key], [cos, sin], [tokens, width], eps)
    }
}

/// Queries, keys and values, and a feed-forward branch behind its SwiGLU, of one fused projection.
///
/// **Shapes**: x `[B, S, K]`; weight `[3 H D + 2 N, K]`, rows of query, key and value heads, then the gates of the branch, then
/// what they gate; branch `[B, S, N]` with a packed last axis, which is written. Result q, k and v `[B, S, H, D]`, views of a
/// larger buffer.
/// **Dtypes**: as [`linear`], branch x's.
/// **Formula**: with `z = x W^T`: q and k are [`qk_norm_rope`] of z, v its columns, branch is [`swiglu`] of the last 2 N.
/// **Numerics**: z is rounded to x's dtype, and what follows is that of these ops. On compute capability 9.0 nothing is rounded
/// in between: the error is a bf16's or f16's own. A token's bits depend on nothing but the token there.
/// **Policy**: [`linear`]'s.
///
/// On compute capability 9.0 in half precision one kernel does all of it, if the weight is one tensor on the device, D is 128, K a
/// multiple of 64, N one of 128, H even, and there are so many tokens that tiles of one item fill the device.
///
/// # Errors
/// Those of [`linear`], [`qk_norm_rope`] and [`swiglu_into`]; [`Error::Shape`] for a weight or a branch of another shape.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{HeadNorm, LinearWeight, projection::{Heads, heads_and_swiglu_into}};
///
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
/// let (one, table) = (zeros(&[8])?, zeros(&[5, 4])?);
/// let norm = HeadNorm { tokens: 5, query: &one, key: &one };
/// let heads = Heads { count: 2, norm, cos: &table, sin: &table, eps: 1e-6 };
/// let weight = LinearWeight::from_tensor(zeros(&[3 * 2 * 8 + 2 * 24, 16])?)?;
/// let branch = zeros(&[1, 5, 24])?;
/// let [q, _, v] = heads_and_swiglu_into(&zeros(&[1, 5, 16])?, &weight, &heads, &branch)?;
/// assert_eq!((q.dims(), v.dims()), (&[1, 5, 2, 8][..], &[1, 5, 2, 8][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn heads_and_swiglu_into(
    x: &Tensor,
    weight: &LinearWeight,
    heads: &Heads<'_>,
    branch: &Tensor,
) -> Result<[Tensor; 3]> {
    let &Heads { count, norm, cos, sin, eps } = heads;
    let &[width] = norm.query.dims() else { return Err(shape_error(OP, "query", norm.query, "[D]")) };
    let &[_, _, n] = branch.dims() else { return Err(shape_error(OP, "branch", branch, "[B, S, N]")) };
    let columns = count.saturating_mul(width);
    let rows = columns.saturating_mul(3).saturating_add(n.saturating_mul(2));
    if weight.out_features() != rows {
        let got = vec![weight.out_features(), weight.in_features()];
        return Err(Error::Shape { op: OP, operand: "weight", got, expected: format!("[{rows}, K]") });
    }
    let &[batch, tokens, _] = x.dims() else { return Err(shape_error(OP, "x", x, "[B, S, K]")) };
    check_target(OP, branch, &[batch, tokens, n], x, &[x, cos, sin, norm.query, norm.key])?;
    #[cfg(feature = "cuda")]
    if let Some(results) = cuda::run(x, weight, heads, branch)? {
        return Ok(results);
    }
    let z = linear(x, weight, None)?;
    let (q, k) = qk_norm_rope(&z, count, &[norm], cos, sin, eps)?;
    swiglu_into(&z.narrow(2, 3 * columns, 2 * n).what(OP)?, branch)?;
    Ok([q, k, heads_of(&z, 2 * columns, count, width)?])
}

/// Whether [`heads_and_swiglu_into`] does all of this in one kernel. Where it does not, a caller that attends next is better off
/// with [`attention_and_swiglu_into`](crate::attention_and_swiglu_into).
pub fn in_one_kernel(x: &Tensor, weight: &LinearWeight, heads: &Heads<'_>, branch: &Tensor) -> bool {
    #[cfg(feature = "cuda")]
    return cuda::serves(x, weight, heads, branch);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (x, weight, heads, branch);
        false
    }
}

/// [`swiglu`] of [`linear`] of each of `products`: inputs with weights of their own, for example those of two streams.
///
/// **Shapes**: x `[B, S, K]`, weight `[2 N, K]`; results `[B, S, N]`.
/// **Dtypes**, **Policy**: as [`linear`].
/// **Formula**: `silu(g) * u` with `(g, u)` the halves of `x W^T`.
/// **Numerics**: as [`heads_and_swiglu_into`]: on compute capability 9.0 in half precision, one kernel does one or two products of
/// the same K and N, multiples of 64 and 128, whose tiles fill the device, and rounds once.
///
/// # Errors
/// Those of [`linear`] and [`swiglu`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{LinearWeight, projection::linear_swiglu};
///
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
/// let weight = LinearWeight::from_tensor(zeros(&[2 * 24, 16])?)?;
/// let [a, b] = linear_swiglu([(&zeros(&[1, 5, 16])?, &weight), (&zeros(&[1, 3, 16])?, &weight)])?;
/// assert_eq!([a.dims(), b.dims()], [[1, 5, 24], [1, 3, 24]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn linear_swiglu<const N: usize>(products: [(&Tensor, &LinearWeight); N]) -> Result<[Tensor; N]> {
    let all = |results: Vec<Tensor>| results.try_into().unwrap_or_else(|_| unreachable!("each product has a result"));
    #[cfg(feature = "cuda")]
    if let Some(results) = cuda::swiglu(&products)? {
        return Ok(all(results));
    }
    Ok(all(products.iter().map(|(x, weight)| swiglu(&linear(x, weight, None)?)).collect::<Result<_>>()?))
}
