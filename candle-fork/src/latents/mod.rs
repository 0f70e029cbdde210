//! From the tokens that an image transformer works on to the latents that its VAE decodes.

use candle_core::{DType, Tensor};

use crate::{
    error::{Error, Result, What},
    layout,
    operand::{check, check_shape, shape_error},
};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

/// Tokens, one for each patch of a grid, become latents: denormalised and unpacked in one pass.
///
/// **Shapes**: tokens `[B, h w, c p q]` with any strides, row by row of a `grid` of h rows and w columns; std and mean
/// `[c p q]`; result `[B, c, h p, w q]` for the patch `[p, q]`, in the [native order](crate::layout::native_order) of its
/// device and dtype.
/// **Dtypes**: tokens f32, f16 or bf16, std and mean f32; computed in f32, rounded once to `dtype`, any of these.
/// **Formula**: `y[b, k, i p + r, j q + s] = tokens[b, i w + j, n] std[n] + mean[n]` with `n = (k p + r) q + s`
/// (`huggingface/diffusers: src/diffusers/pipelines/flux2`).
/// **Numerics**: product and sum are rounded in f32; the same bits on every device.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if tokens are not of the grid, p q does not divide their width, or std or mean has another shape.
/// - [`Error::Argument`] if a side of the patch is 0, or an operand tracks gradients or is on another device.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// // One token of one channel in a patch of 1 x 2.
/// let tokens = Tensor::new(&[[[1f32, 2.0]]], &Device::Cpu)?;
/// let (std, mean) = (Tensor::new(&[10f32, 100.0], &Device::Cpu)?, Tensor::new(&[0f32, 5.0], &Device::Cpu)?);
/// let y = candle_fork::latents_from_tokens(&tokens, (1, 1), [1, 2], &std, &mean, DType::F32)?;
/// assert_eq!((y.dims(), y.flatten_all()?.to_vec1::<f32>()?), (&[1, 1, 1, 2][..], vec![10.0, 205.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn latents_from_tokens(
    tokens: &Tensor,
    (rows, columns): (usize, usize),
    [p, q]: [usize; 2],
    std: &Tensor,
    mean: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    const OP: &str = "latents_from_tokens";
    check(OP, &[("tokens", tokens), ("std", std), ("mean", mean)])?;
    let cell = p.checked_mul(q).filter(|&cell| cell > 0);
    let cell = cell.ok_or_else(|| Error::Argument { op: OP, what: format!("a patch of {p} x {q}") })?;
    let (batch, width) = match *tokens.dims() {
        [batch, count, width] if rows.checked_mul(columns) == Some(count) && width.is_multiple_of(cell) => {
            (batch, width)
        }
        _ => return Err(shape_error(OP, "tokens", tokens, format!("[B, {rows} x {columns}, {cell} c]"))),
    };
    for (name, statistic) in [("std", std), ("mean", mean)] {
        check_shape(OP, name, statistic, &[width])?;
        if statistic.dtype() != DType::F32 {
            return Err(Error::DType { op: OP, operand: name, got: statistic.dtype(), expected: "f32" });
        }
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::DType { op: OP, operand: "result", got: dtype, expected: crate::element::FLOATS });
    }
    let problem = Problem { batch, channels: width / cell, grid: [rows, columns], patch: [p, q] };
    #[cfg(feature = "cuda")]
    if tokens.device().is_cuda() {
        return cuda::from_tokens(OP, tokens, std, mean, dtype, &problem);
    }
    composed(tokens, std, mean, dtype, &problem).what(OP)
}

/// Extents of a call.
struct Problem {
    batch: usize,
    channels: usize,
    grid: [usize; 2],
    patch: [usize; 2],
}

impl Problem {
    /// `[B, c, h p, w q]`.
    fn dims(&self) -> [usize; 4] {
        let ([h, w], [p, q]) = (self.grid, self.patch);
        [self.batch, self.channels, h * p, w * q]
    }
}

fn composed(
    tokens: &Tensor,
    std: &Tensor,
    mean: &Tensor,
    dtype: DType,
    problem: &Problem,
) -> candle_core::Result<Tensor> {
    let &Problem { batch, channels, grid: [h, w], patch: [p, q] } = problem;
    let raw = tokens.to_dtype(DType::F32)?.broadcast_mul(std)?.broadcast_add(mean)?.to_dtype(dtype)?;
    let split = raw.reshape((batch, h, w, channels, p, q))?.permute((0, 3, 1, 4, 2, 5))?;
    let latents = split.reshape(problem.dims().as_slice())?;
    layout::native(&latents).map_err(candle_core::Error::wrap)
}
