//! Convolutions over one, two and three axes.
//!
//! | file | what |
//! |---|---|
//! | `problem.rs` | the geometry, checked once |
//! | `reference.rs` | the definition in loops, f64: the oracle |
//! | `cpu.rs` | the choice between the fast paths on the CPU |
//! | `im2col.rs` | patches packed panel by panel |
//! | `winograd/` | 3 x 3 filters with 4/9 of the products |
//! | `gradient.rs` | a node of candle's graph, and its gradients |
//! | `choose.rs` | which path a problem takes on a CUDA device |
//! | `cuda.rs` | our own there |
//! | `few_filters.rs`, `few_filters.cu` | our own there for the ends of decoders: many channels into three filters |
//! | `implicit_gemm.rs`, `implicit_gemm.cu` | half precision: patches gathered into shared memory, one product |
//! | `tiles.rs`, `im2col.cu` | everything else: patches in tiles, and products |
//! | `cudnn.rs` | cuDNN there |
//! | `upsample.rs` | doubling and a convolution in one |

#[cfg(any(feature = "cuda", test))]
mod choose;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cudnn;
#[cfg(any(feature = "cuda", test))]
mod few_filters;
mod gradient;
mod im2col;
#[cfg(feature = "cuda")]
mod implicit_gemm;
mod problem;
pub mod reference;
#[cfg(test)]
mod tests;
#[cfg(any(feature = "cuda", test))]
mod tiles;
mod upsample;
mod winograd;

use candle_core::{DType, Device, Tensor};

pub use problem::ConvProblem;
pub use upsample::{ParityFilters, upsample_conv2d};

#[cfg(feature = "cuda")]
use crate::cudnn_policy;
use crate::{
    error::{Error, Result, What},
    gemm::unsupported,
};

const OP: &str = "conv";

/// So many filters need not be padded to a group of eight for speed on CUDA: see the policy of [`conv_nd`].
pub const FEW_FILTERS: usize = 3;

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
/// depends on the number of threads. No buffer of columns; scratch memory of at most 100 MiB. The tests hold 1e-5
/// relative to a sum in f64.
///
/// On CUDA: our own kernels (an implicit product in half precision, else tiled im2col), or cuDNN where the thread's [policy](crate::cudnn_policy) wants it; sums in f32 (never
/// TF32 unless the policy says so), rounded once. Half precision gives a [channels-last](crate::layout) result and reads
/// channels-last operands where they lie; f32 gives and reads contiguous ones. Others are copied to that order first, a
/// weight at every call: repack weights once, when they are loaded. On other devices: candle's own convolution on a
/// contiguous weight, padding applied first; one and two axes with equal strides and dilations.
///
/// **Gradients**: of x, weight and bias, by candle's `backward`; on the CPU and CUDA. The result is the same as without,
/// bit for bit, and is copied once. Gradients are summed in f32 and rounded once to their operand's dtype; x's is a
/// convolution under the policy of the thread that calls `backward`. The tests hold 1e-5 relative to differences in f64.
///
/// **Policy**: [`cudnn_policy`](crate::cudnn_policy), on CUDA. Convolutions with filters of one tap, stride 1 and no
/// padding are a matrix product under every policy. In half precision 96 or 128 channels into at most three 3 x 3 (x 3)
/// filters run by a kernel of our own unless the policy requires cuDNN.
///
/// **Errors**: those of [`ConvProblem::new`]; [`Error::Shape`] for a bias that is not `[K]`; [`Error::DType`];
/// [`Error::Argument`] if an operand lies on another device; [`Error::Unsupported`] for what the device has no path for, as
/// gradients outside of the CPU and CUDA; [`Error::FallbackRefused`] if the policy requires cuDNN and it does not serve.
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
    forward(x, weight, bias, None, params)
}

/// [`conv_nd`] with a residual: `y = convolution + bias + residual`.
///
/// **Shapes**: residual as the result. **Dtypes**: residual any float type, converted to x's first.
///
/// **Numerics**: on CUDA the sum is rounded once. Elsewhere the convolution with its bias is rounded to x's dtype, then the
/// sum with the residual; so it is on CUDA if an operand tracks gradients.
///
/// **Errors**: those of [`conv_nd`]; [`Error::Shape`] for a residual of another shape.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::{ConvParams, conv::conv_nd_add};
///
/// let x = Tensor::new(&[[[1f32, 2., 3.]]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[[10f32]]], &Device::Cpu)?;
/// let y = conv_nd_add(&x, &weight, None, &x, &ConvParams::<1>::default())?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[11., 22., 33.]]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn conv_nd_add<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    forward(x, weight, bias, Some(residual), params)
}

/// Checks the operands and hands them to the device.
fn forward<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    let problem = ConvProblem::new(x.dims(), weight.dims(), params)?;
    let dims = problem.output_dims::<D>();
    let shaped = [("bias", bias, vec![problem.k]), ("residual", residual, dims.clone())];
    for (operand, tensor, wanted) in &shaped {
        if let Some(got) = tensor.map(Tensor::dims)
            && got != wanted.as_slice()
        {
            return Err(Error::Shape { op: OP, operand, got: got.to_vec(), expected: format!("{wanted:?}") });
        }
    }
    for (operand, dtype) in [("x", x.dtype()), ("weight", weight.dtype())] {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(unsupported(OP, operand, dtype));
        }
    }
    let others = [Some(weight), bias, residual];
    if others.iter().flatten().any(|operand| !operand.device().same_device(x.device())) {
        return Err(Error::Argument { op: OP, what: "operands lie on different devices".into() });
    }
    if x.track_op() || others.iter().flatten().any(|operand| operand.track_op()) {
        return gradient::forward(x, weight, bias, residual, params);
    }
    let y = match x.device() {
        Device::Cpu => cpu::forward(x, weight, bias, &problem, dims)?,
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => return on_cuda(x, weight, bias, residual, &problem, dims),
        _ => composed(x, weight, bias, params)?,
    };
    let Some(residual) = residual else { return Ok(y) };
    residual.to_dtype(y.dtype()).and_then(|residual| &y + residual).what("conv: residual")
}

/// The path that the policy and the problem choose, and our own where cuDNN does not serve.
#[cfg(feature = "cuda")]
fn on_cuda(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    problem: &ConvProblem,
    dims: Vec<usize>,
) -> Result<Tensor> {
    let backend = cudnn_policy::backend();
    if choose::choose(problem, dims.len() - 2, x.dtype(), residual.is_some(), backend) == choose::Path::Cudnn {
        let policy = cudnn_policy::current();
        match cudnn::forward(x, weight, bias, residual, problem, &dims, &policy)? {
            Ok(y) => return Ok(y),
            Err(refusal) => cudnn::fall_back(refusal, backend)?,
        }
    }
    cuda::forward(x, weight, bias, residual, problem, dims)
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
