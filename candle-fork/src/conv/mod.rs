//! Convolutions over one, two and three axes.
//!
//! | file | what |
//! |---|---|
//! | `problem.rs` | the geometry, checked once |
//! | `reference.rs` | the definition in loops, f64: the oracle |
//! | `im2col.rs` | patches packed panel by panel |
//! | `winograd/` | 3 x 3 filters with 4/9 of the products |
//! | `cpu.rs` | the choice between the fast paths |

mod cpu;
mod im2col;
mod problem;
pub mod reference;
#[cfg(test)]
mod tests;
mod winograd;

use candle_core::{DType, Device, Tensor};

pub use problem::ConvProblem;

use crate::{
    error::{Error, Result, What},
    gemm::unsupported,
};

const OP: &str = "conv";

/// Parameters of a convolution over `D` spatial axes. The default leaves the input as it is: stride and dilation 1, no
/// padding, one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvParams<const D: usize> {
    /// Step of the output along each axis.
    pub stride: [usize; D],
    /// Distance of filter taps along each axis.
    pub dilation: [usize; D],
    /// Zeros before and after each axis.
    pub padding: [(usize, usize); D],
    /// Channel groups; must divide the channels of input and output.
    pub groups: usize,
}

impl<const D: usize> Default for ConvParams<D> {
    fn default() -> Self {
        Self { stride: [1; D], dilation: [1; D], padding: [(0, 0); D], groups: 1 }
    }
}

/// Convolution (in the sense of neural networks: no flip) over `D` = 1, 2 or 3 spatial axes.
///
/// **Shapes**: x `[N, C, spatial..]`, weight `[K, C / groups, filter..]`, bias `[K]`, all with any strides; result
/// `[N, K, out..]`, contiguous, with `out = (in + before + after - (filter - 1) * dilation - 1) / stride + 1` rounded
/// down.
///
/// **Dtypes**: x and weight f32, f16 or bf16, independently; bias any float type; sums in f32; result in x's dtype,
/// rounded once, after the bias.
///
/// **Formula**: `y[n, k, o] = bias[k] + sum over c, tap of x[n, g C/groups + c, o stride + tap dilation - before]
/// w[k, c, tap]` with g the group of k and x zero outside; [`reference`](mod@reference) is this formula in code.
///
/// **Numerics** (CPU): 3 x 3 filters over the last two axes at stride and dilation 1 run by Winograd's algorithm
/// F(2 x 2, 3 x 3) where there are enough filters and outputs to pay. Otherwise the depth (c, then taps) is summed in
/// blocks of 192, the blocks' sums in order; where a group has one or two filters, one product after another. Never
/// depends on the number of threads. No buffer of columns; scratch memory of at most 100 MiB. The tests hold 1e-5 relative to a sum in f64.
///
/// On other devices: candle's own convolution on a contiguous weight, padding applied first; one and two axes with
/// equal strides and dilations.
///
/// **Errors**: those of [`ConvProblem::new`]; [`Error::Shape`] for a bias that is not `[K]`; [`Error::DType`];
/// [`Error::Argument`] if an operand tracks gradients or lies on another device; [`Error::Unsupported`] for what the
/// device has no path for.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::{ConvParams, conv_nd};
///
/// // Sums of three neighbours; one zero after the end, none before the start.
/// let x = Tensor::new(&[[[1f32, 2., 3., 4.]]], &Device::Cpu)?;
/// let weight = Tensor::ones((1, 1, 3), x.dtype(), &Device::Cpu)?;
/// let y = conv_nd(&x, &weight, None, &ConvParams { padding: [(0, 1)], ..Default::default() })?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[6., 9., 7.]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn conv_nd<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    let problem = ConvProblem::new(x.dims(), weight.dims(), params)?;
    if let Some(bias) = bias
        && bias.dims() != [problem.k]
    {
        let expected = format!("[{}]", problem.k);
        return Err(Error::Shape { op: OP, operand: "bias", got: bias.dims().to_vec(), expected });
    }
    for (operand, dtype) in [("x", x.dtype()), ("weight", weight.dtype())] {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(unsupported(OP, operand, dtype));
        }
    }
    if x.track_op() || weight.track_op() || bias.is_some_and(Tensor::track_op) {
        return Err(Error::Argument { op: OP, what: "operands that track gradients are not supported".into() });
    }
    if !weight.device().same_device(x.device()) || bias.is_some_and(|b| !b.device().same_device(x.device())) {
        return Err(Error::Argument { op: OP, what: "operands lie on different devices".into() });
    }
    match x.device() {
        Device::Cpu => cpu::forward(x, weight, bias, &problem, problem.output_dims::<D>()),
        _ => composed(x, weight, bias, params),
    }
}

/// Candle's convolution behind explicit padding, on a contiguous weight.
fn composed<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    let equal = |values: &[usize; D]| values.iter().all(|&v| v == values[0]);
    if D > 2 || !equal(&params.stride) || !equal(&params.dilation) {
        let what = format!("{D} axes, stride {:?}, dilation {:?} on this device", params.stride, params.dilation);
        return Err(Error::Unsupported { op: OP, what });
    }
    let (stride, dilation, groups) = (params.stride[0], params.dilation[0], params.groups);
    let run = || {
        let mut x = x.clone();
        for (axis, &(before, after)) in params.padding.iter().enumerate() {
            x = x.pad_with_zeros(axis + 2, before, after)?;
        }
        let weight = weight.to_dtype(x.dtype())?.contiguous()?;
        let y = match D {
            1 => x.conv1d(&weight, 0, stride, dilation, groups)?,
            _ => x.conv2d(&weight, 0, stride, dilation, groups)?,
        };
        let Some(bias) = bias else { return Ok(y) };
        let mut shape = vec![1; D + 2];
        shape[1] = bias.dim(0)?;
        y.broadcast_add(&bias.to_dtype(y.dtype())?.reshape(shape)?)
    };
    run().what("conv: composition of candle ops")
}

/// [`conv_nd`] over one axis, with the arguments of candle's `Tensor::conv1d`: x `[N, C, L]`, kernel
/// `[K, C / groups, S]`.
///
/// # Errors
/// As [`conv_nd`].
pub fn conv1d(
    x: &Tensor,
    kernel: &Tensor,
    padding: usize,
    stride: usize,
    dilation: usize,
    groups: usize,
) -> Result<Tensor> {
    conv_nd::<1>(x, kernel, None, &symmetric(padding, stride, dilation, groups))
}

/// [`conv_nd`] over two axes, with the arguments of candle's `Tensor::conv2d`: x `[N, C, H, W]`, kernel
/// `[K, C / groups, R, S]`.
///
/// # Errors
/// As [`conv_nd`].
pub fn conv2d(
    x: &Tensor,
    kernel: &Tensor,
    padding: usize,
    stride: usize,
    dilation: usize,
    groups: usize,
) -> Result<Tensor> {
    conv_nd::<2>(x, kernel, None, &symmetric(padding, stride, dilation, groups))
}

/// [`conv_nd`] over three axes, with the same arguments: x `[N, C, D, H, W]`, kernel `[K, C / groups, T, R, S]`.
///
/// # Errors
/// As [`conv_nd`].
pub fn conv3d(
    x: &Tensor,
    kernel: &Tensor,
    padding: usize,
    stride: usize,
    dilation: usize,
    groups: usize,
) -> Result<Tensor> {
    conv_nd::<3>(x, kernel, None, &symmetric(padding, stride, dilation, groups))
}

fn symmetric<const D: usize>(padding: usize, stride: usize, dilation: usize, groups: usize) -> ConvParams<D> {
    ConvParams { stride: [stride; D], dilation: [dilation; D], padding: [(padding, padding); D], groups }
}
