//! Convolutions that candle's autograd sees through.
//!
//! All three gradients are made of ops that exist (`^` is the output's gradient, formulas per group):
//!
//! ```text
//! x^[n, c, i]   = sum over k, tap of w[k, c, tap] y^[n, k, o]  with  o stride + tap dilation - before = i
//!                 a convolution of y^, spread by the stride, with the filters turned round
//! w^[k, c, tap] = sum over n, o of y^[n, k, o] x[n, c, o stride + tap dilation - before]
//!                 for each tap a matrix product with every stride-th element of x
//! b^[k]         = sum over n, o of y^[n, k, o]
//! ```

#[cfg(test)]
mod tests;

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Error as CandleError, Layout, Result as CandleResult, Shape,
    Storage, Tensor, backend::BackendStorage,
};

use super::{ConvParams, ConvProblem, OP, conv_nd};
use crate::{
    error::{Error, Result, What},
    layout::{self, MemoryOrder},
};

/// See [`super::conv_nd_add`]: operands that have been checked, some of which track gradients.
pub(super) fn forward<const D: usize>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    if !(x.device().is_cpu() || x.device().is_cuda()) {
        return Err(Error::Unsupported { op: OP, what: "gradients on this device".into() });
    }
    let y = conv_nd(&x.detach(), &weight.detach(), bias.map(Tensor::detach).as_ref(), params)?;
    let y = if x.track_op() || weight.track_op() || bias.is_some_and(Tensor::track_op) {
        connect(&y, x, weight, bias, params)?
    } else {
        y
    };
    let Some(residual) = residual else { return Ok(y) };
    residual.to_dtype(y.dtype()).and_then(|residual| &y + residual).what("conv: residual")
}

/// A copy of `y` that is the convolution of these operands in candle's graph.
fn connect<const D: usize>(
    y: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &ConvParams<D>,
) -> Result<Tensor> {
    const WHAT: &str = "conv: into the graph";
    // The result of a custom op is row-major.
    let order = layout::memory_order(y);
    let result = match order {
        MemoryOrder::ChannelsFirst => layout::contiguous(y)?,
        MemoryOrder::ChannelsLast => {
            let mut axes: Vec<usize> = (0..y.rank()).collect();
            axes[1..].rotate_left(1);
            y.permute(axes).what(WHAT)?
        }
    };
    let op = Convolution { result: Mutex::new(Some(result)), order, params: *params };
    let y = match bias {
        None => x.apply_op2(weight, op),
        Some(bias) => x.apply_op3(weight, bias, op),
    };
    match order {
        MemoryOrder::ChannelsFirst => y.what(WHAT),
        MemoryOrder::ChannelsLast => layout::from_stored(&y.what(WHAT)?),
    }
}

/// A convolution in candle's graph. It has been computed before: candle calls with bare storages, our paths take tensors.
struct Convolution<const D: usize> {
    /// The result in the order of its memory, until it is handed over; the graph does not keep it twice.
    result: Mutex<Option<Tensor>>,
    order: MemoryOrder,
    params: ConvParams<D>,
}

impl<const D: usize> Convolution<D> {
    /// The result as the storage of a device.
    fn take<S: BackendStorage>(&self, of: impl FnOnce(&Storage) -> Option<&S>) -> CandleResult<(S, Shape)> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(result) = result else { candle_core::bail!("{OP}: a node of a graph is computed once") };
        let (storage, layout) = result.storage_and_layout();
        let Some(storage) = of(&storage) else { candle_core::bail!("{OP}: the result lies on another device") };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn take_cpu(&self) -> CandleResult<(CpuStorage, Shape)> {
        self.take(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            _ => None,
        })
    }

    fn take_cuda(&self) -> CandleResult<(CudaStorage, Shape)> {
        self.take(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        })
    }

    /// The gradients of those operands that track them, each of its operand's shape and dtype.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        if grad.track_op() {
            return Err(Error::Unsupported { op: OP, what: "second derivatives".into() });
        }
        let grad = match self.order {
            MemoryOrder::ChannelsFirst => grad.clone(),
            MemoryOrder::ChannelsLast => layout::from_stored(grad)?,
        };
        let params = &self.params;
        let of_x = x.track_op().then(|| of_input(&grad, &weight.detach(), x.dims(), params));
        let of_weight = weight.track_op().then(|| of_weight(&grad, &x.detach(), weight, params));
        let of_bias = bias.filter(|bias| bias.track_op()).map(|bias| of_bias(&grad, bias.dtype()));
        Ok([of_x.transpose()?, of_weight.transpose()?, of_bias.transpose()?])
    }
}

/// The error as candle carries it, whole.
fn carried(error: Error) -> CandleError {
    CandleError::Cuda(Box::new(error))
}

impl<const D: usize> CustomOp2 for Convolution<D> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> CandleResult<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> CandleResult<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> CandleResult<(Option<Tensor>, Option<Tensor>)> {
        let [x, weight, _] = self.gradients(x, weight, None, grad).map_err(carried)?;
        Ok((x, weight))
    }
}

impl<const D: usize> CustomOp3 for Convolution<D> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> CandleResult<(CpuStorage, Shape)> {
        self.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> CandleResult<(CudaStorage, Shape)> {
        self.take_cuda()
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> CandleResult<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [x, weight, bias] = self.gradients(x, weight, Some(bias), grad).map_err(carried)?;
        Ok((x, weight, bias))
    }
}

/// The gradient of x, whose shape is `dims`.
fn of_input<const D: usize>(grad: &Tensor, weight: &Tensor, dims: &[usize], params: &ConvParams<D>) -> Result<Tensor> {
    let problem = ConvProblem::new(dims, weight.dims(), params)?;
    let spread = spread(grad, &params.stride).what("conv: spread gradient")?;
    let filters = turn(weight, &problem).what("conv: turned filters")?;
    let mut turned = ConvParams { dilation: params.dilation, groups: params.groups, ..Default::default() };
    for (axis, filter) in weight.dims()[2..].iter().enumerate() {
        let (reach, (before, _)) = ((filter - 1) * params.dilation[axis], params.padding[axis]);
        let after = (dims[axis + 2] + before).saturating_sub(spread.dims()[axis + 2]);
        turned.padding[axis] = (reach.saturating_sub(before), after);
    }
    let mut x = conv_nd(&spread, &filters, None, &turned)?;
    for (axis, filter) in weight.dims()[2..].iter().enumerate() {
        // More zeros than taps: the first elements are gradients of padding.
        let skipped = params.padding[axis].0.saturating_sub((filter - 1) * params.dilation[axis]);
        x = x.narrow(axis + 2, skipped, dims[axis + 2]).what("conv: gradient of x")?;
    }
    Ok(x)
}

/// `[N, K, out..]` with `stride - 1` zeros between neighbours.
fn spread(grad: &Tensor, stride: &[usize]) -> CandleResult<Tensor> {
    let mut spread = grad.clone();
    for (axis, &stride) in (2..).zip(stride) {
        let len = spread.dim(axis)?;
        if stride > 1 && len > 1 {
            let spaced = spread.unsqueeze(axis + 1)?.pad_with_zeros(axis + 1, 0, stride - 1)?;
            spread = spaced.flatten(axis, axis + 1)?.narrow(axis, 0, (len - 1) * stride + 1)?;
        }
    }
    Ok(spread)
}

/// Filters `[K, C / groups, filter..]` as `[C, K / groups, filter..]`, every axis of them reversed.
fn turn(weight: &Tensor, problem: &ConvProblem) -> CandleResult<Tensor> {
    let filter = &weight.dims()[2..];
    let (cg, kg) = (problem.channels_per_group(), problem.filters_per_group());
    let axes: Vec<usize> = (2..weight.rank()).filter(|&axis| weight.dims()[axis] > 1).collect();
    let of_groups = [&[problem.groups, kg, cg], filter].concat();
    let of_channels = [&[problem.c, kg], filter].concat();
    weight.contiguous()?.flip(&axes)?.reshape(of_groups)?.transpose(1, 2)?.reshape(of_channels)
}

/// The gradient of the weight. Besides x in f32, a copy of the part of x that one tap meets is alive.
fn of_weight<const D: usize>(grad: &Tensor, x: &Tensor, weight: &Tensor, params: &ConvParams<D>) -> Result<Tensor> {
    let problem = ConvProblem::new(x.dims(), weight.dims(), params)?;
    let (n, groups, pixels) = (problem.n, problem.groups, problem.pixels());
    let (filter, output) = (&weight.dims()[2..], &problem.output[3 - D..]);
    // The step along an axis with one output is never made, and may be a large one.
    let strides: [usize; D] = std::array::from_fn(|axis| if output[axis] == 1 { 1 } else { params.stride[axis] });
    let run = || {
        let grad = grad.to_dtype(DType::F32)?.reshape((n, groups, problem.filters_per_group(), pixels))?;
        // x with its padding, every axis split by the stride, long enough for every tap to meet `output` blocks.
        let mut x = x.to_dtype(DType::F32)?;
        let mut split = vec![n, problem.c];
        for (axis, &stride) in strides.iter().enumerate() {
            let blocks = (filter[axis] - 1) * params.dilation[axis] / stride + output[axis];
            let (len, before) = (blocks * stride, params.padding[axis].0);
            let after = len.saturating_sub(before + x.dim(axis + 2)?);
            x = x.pad_with_zeros(axis + 2, before, after)?.narrow(axis + 2, 0, len)?;
            split.extend([blocks, stride]);
        }
        let x = x.reshape(split)?;
        let mut taps = Vec::new();
        for tap in 0..filter.iter().product() {
            let (mut met, mut rest) = (x.clone(), tap);
            for (axis, &stride) in strides.iter().enumerate().rev() {
                let at = rest % filter[axis] * params.dilation[axis];
                rest /= filter[axis];
                met = met.narrow(2 + 2 * axis, at / stride, output[axis])?.narrow(3 + 2 * axis, at % stride, 1)?;
            }
            let met = met.reshape((n, groups, problem.channels_per_group(), pixels))?;
            taps.push(grad.matmul(&met.t()?)?.sum(0)?);
        }
        Tensor::stack(&taps, 3)?.reshape(weight.dims())?.to_dtype(weight.dtype())
    };
    run().what("conv: gradient of the weight")
}

/// The gradient of the bias: axis by axis, which keeps f32's error small.
fn of_bias(grad: &Tensor, dtype: DType) -> Result<Tensor> {
    let run = || {
        let mut sum = grad.to_dtype(DType::F32)?;
        for axis in (2..sum.rank()).rev() {
            sum = sum.sum(axis)?;
        }
        sum.sum(0)?.to_dtype(dtype)
    };
    run().what("conv: gradient of the bias")
}
