//! Convolutions by cuDNN: tensors into graphs, operands in the order and alignment that its kernels read, the result.
//!
//! Half precision is channels-last and carries bias and residual in the graph, so it rounds once and needs no pass of its
//! own for them. f32 is channels-first and in true f32: the graph is the bare convolution, since no other one has an
//! engine without TF32, and bias and residual follow in one pass over the result.

use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::WrapErr};

use super::{ConvProblem, OP};
use crate::{
    cuda::{
        arena, epilogue,
        tensor::{Address, Operand, Output, device_of},
    },
    cudnn::{
        ALIGNMENT, ConvolutionSpec, Element, OnDevice, Pattern, Plan, Refusal, Session, TensorSpec, may_build,
        packed_strides, time,
    },
    cudnn_policy::{Backend, FallbackReason, PlanChoice, Policy, count},
    error::{Error, Result, What},
    layout,
};

/// See [`super::conv_nd_add`], which has checked the operands. The inner result says why cuDNN did not serve; nothing has
/// been computed then.
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    problem: &ConvProblem,
    output_dims: &[usize],
    policy: &Policy,
) -> Result<Result<Tensor, Refusal>> {
    count(|c| c.attempts += 1);
    let device = device_of(OP, x)?;
    let session = match OnDevice::open(device)? {
        Ok(session) => session,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let operands = Operands::new(device, x, weight, bias, residual, problem, output_dims)?;
    let Some(spec) = operands.spec(problem) else {
        return Ok(Err(Refusal::lasting(FallbackReason::Unsupported, "extents beyond 64 bits")));
    };
    let mut timer = |plan: &Plan, limit: f64| operands.time(device, &session, plan, policy.choice, limit);
    let plan = match session.plan(&spec, policy, || may_build(device), &mut timer) {
        Ok(plan) => plan,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let output = operands.output(device)?;
    if let Err(refusal) = operands.run(device, &session, &plan, output.address()) {
        // An execution may fail because of the device, whose failures stay: then there is nothing to fall back to.
        device.cuda_stream().synchronize().w().what("cudnn failed, and with it the device")?;
        return Ok(Err(refusal));
    }
    count(|c| {
        c.dispatched += 1;
        c.workspace_high_water = c.workspace_high_water.max(plan.workspace());
        c.last_engine = Some(plan.engine().clone());
    });
    operands.finish(device, output).map(Ok)
}

/// Counts and reports that cuDNN did not serve.
///
/// # Errors
/// [`Error::FallbackRefused`] if `backend` allows nothing else.
pub(super) fn fall_back(refusal: Refusal, backend: Backend) -> Result<()> {
    /// One bit per reason that a warning has told of.
    static TOLD: AtomicU32 = AtomicU32::new(0);
    let reason = refusal.reason;
    count(|c| *c.fallbacks.entry(reason).or_default() += 1);
    if backend == Backend::Required {
        return Err(Error::FallbackRefused { op: OP, reason, detail: refusal.to_string() });
    }
    let bit = 1 << reason as u32;
    if TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        tracing::warn!(%refusal, "a convolution runs without cudnn; the next ones for this reason are not reported");
    } else {
        tracing::debug!(%refusal, "a convolution runs without cudnn");
    }
    Ok(())
}

/// What cuDNN reads, ready to be read.
struct Operands {
    element: Element,
    dtype: DType,
    x: Operand,
    weight: Operand,
    bias: Option<Operand>,
    residual: Option<Operand>,
    /// Extents `[N, K, out..]` as the caller knows them.
    output_dims: Vec<usize>,
}

impl Operands {
    fn new(
        device: &CudaDevice,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        problem: &ConvProblem,
        output_dims: &[usize],
    ) -> Result<Self> {
        let dtype = x.dtype();
        let element = match dtype {
            DType::F16 => Element::F16,
            DType::BF16 => Element::Bf16,
            _ => Element::F32,
        };
        let converted = |t: &Tensor| t.to_dtype(dtype).what("conv: an operand in the dtype of x");
        let weight = packed(&converted(weight)?, element)?;
        let residual = residual.map(|r| ready(&packed(&converted(r)?, element)?)).transpose()?;
        let bias = match bias {
            Some(bias) => Some(layout::contiguous(&converted(bias)?)?),
            // A graph with a residual has a bias.
            None if residual.is_some() && element != Element::F32 => {
                let device = candle_core::Device::Cuda(device.clone());
                Some(Tensor::zeros(problem.k, dtype, &device).what("conv: a bias of zeros")?)
            }
            None => None,
        };
        let x = if image_is_packed(x, element) { x.clone() } else { packed(x, element)? };
        Ok(Self {
            element,
            dtype,
            x: ready(&x)?,
            weight: ready(&weight)?,
            bias: bias.map(|bias| ready(&bias)).transpose()?,
            residual,
            output_dims: output_dims.to_vec(),
        })
    }

    /// The graph of these operands.
    fn spec(&self, problem: &ConvProblem) -> Option<ConvolutionSpec> {
        let pictures = self.pictures(problem);
        let axes = if pictures.is_some() { 2 } else { (self.output_dims.len() - 2).max(2) };
        let problem = pictures.as_ref().unwrap_or(problem);
        let skipped = 3 - axes;
        let lifted = |lead: [usize; 2], space: [usize; 3]| -> Vec<usize> {
            lead.into_iter().chain(space[skipped..].iter().copied()).collect()
        };
        let tensor = |dims: &[usize]| TensorSpec::new(dims, &packed_strides(dims, self.element));
        let x_dims = lifted([problem.n, problem.c], problem.input);
        let mut x_strides = packed_strides(&x_dims, self.element);
        if problem.n > 1 && pictures.is_none() {
            x_strides[0] = self.x.strides()[0];
        }
        let fixed = |values: [usize; 3]| -> Option<[i64; 3]> {
            let mut fixed = [0; 3];
            for (to, &from) in fixed.iter_mut().zip(&values[skipped..]) {
                *to = i64::try_from(from).ok()?;
            }
            Some(fixed)
        };
        let fused = self.element != Element::F32;
        Some(ConvolutionSpec {
            element: self.element,
            x: TensorSpec::new(&x_dims, &x_strides)?,
            w: tensor(&lifted([problem.k, problem.channels_per_group()], problem.filter))?,
            y: tensor(&lifted([problem.n, problem.k], problem.output))?,
            before: fixed(problem.padding)?,
            after: fixed(problem.padding_after())?,
            stride: fixed(problem.stride)?,
            dilation: fixed(problem.dilation)?,
            pattern: match (&self.bias, &self.residual) {
                (Some(_), Some(_)) if fused => Pattern::ResidualBias,
                (Some(_), None) if fused => Pattern::Bias,
                _ => Pattern::Plain,
            },
        })
    }

    /// A convolution that does not look along time, over one clip, as one over pictures: channels-last frames lie like a
    /// batch of them.
    fn pictures(&self, problem: &ConvProblem) -> Option<ConvProblem> {
        let &ConvProblem { n, input, filter, output, stride, padding, .. } = problem;
        let still = filter[0] == 1 && stride[0] == 1 && padding[0] == 0 && output[0] == input[0];
        let clip = n == 1 && self.output_dims.len() == 5 && self.element != Element::F32;
        let one = |[_, h, w]: [usize; 3]| [1, h, w];
        (still && clip).then_some(ConvProblem { n: input[0], input: one(input), output: one(output), ..*problem })
    }

    fn output(&self, device: &CudaDevice) -> Result<Output> {
        Output::new(OP, device, self.dtype, self.output_dims.iter().product())
    }

    /// Enqueues `plan` into `y`.
    fn run(&self, device: &CudaDevice, session: &Session, plan: &Plan, y: Address) -> Result<(), Refusal> {
        let mut addresses = vec![self.x.address(), self.weight.address(), y];
        if self.element != Element::F32 {
            addresses.extend(self.bias.iter().chain(&self.residual).map(Operand::address));
        }
        let execute = |workspace: Address| {
            // SAFETY: x, weight, bias and residual are aligned and lie as the graph says (`ready`, `packed`, `spec`); y is
            // new memory of the output's size, aligned as allocations are; all of it is freed in the order of the stream.
            // The workspace is this thread's scratch of that size.
            unsafe { session.execute(plan, &addresses, workspace) }
        };
        match usize::try_from(plan.workspace()) {
            Ok(0) => execute(0),
            Ok(bytes) => arena::with(device, bytes, |workspace| Ok(execute(workspace)))
                .unwrap_or_else(|error| Err(Refusal::passing(FallbackReason::Workspace, error.to_string()))),
            Err(_) => Err(Refusal::lasting(FallbackReason::Workspace, "more bytes than there are addresses")),
        }
    }

    /// Milliseconds of an execution into scratch memory.
    fn time(
        &self,
        device: &CudaDevice,
        session: &Session,
        plan: &Plan,
        choice: PlanChoice,
        limit: f64,
    ) -> Result<f64, Refusal> {
        let y = self
            .output(device)
            .map_err(|error| Refusal::passing(FallbackReason::Failed, format!("a plan was not timed: {error}")))?;
        time(&device.cuda_stream(), choice, limit, || self.run(device, session, plan, y.address()))
    }

    /// What the graph left to do, and the result.
    fn finish(&self, device: &CudaDevice, output: Output) -> Result<Tensor> {
        if self.element != Element::F32 {
            return output.into_channels_last(OP, &self.output_dims);
        }
        if self.bias.is_some() || self.residual.is_some() {
            let (n, k) = (self.output_dims[0], self.output_dims[1]);
            let pixels = self.output_dims[2..].iter().product();
            let residual = self.residual.as_ref().map_or(0, Operand::address);
            // SAFETY: residual and result are n x k packed planes, the bias has k elements; the result is new memory, which
            // the work enqueued before has filled.
            unsafe { epilogue::planes(device, [n * k, pixels], k, self.bias.as_ref(), residual, output.address()) }?;
        }
        output.into_tensor(OP, self.output_dims.as_slice())
    }
}

/// The tensor in the order of its precision, packed; a copy if it is not.
fn packed(tensor: &Tensor, element: Element) -> Result<Tensor> {
    match element {
        Element::F32 => layout::contiguous(tensor),
        _ => layout::channels_last(tensor),
    }
}

/// Whether every image of a tensor is packed in the order of its precision. The distance of images is free, so some frames
/// of a clip, or some channels of planes, are read where they lie.
fn image_is_packed(x: &Tensor, element: Element) -> bool {
    let expected = packed_strides(x.dims(), element);
    let axes = x.dims().iter().zip(x.stride().iter().zip(expected)).skip(1);
    let inside = axes.into_iter().all(|(&extent, (&stride, expected))| extent == 1 || stride == expected);
    let image: usize = x.dims()[1..].iter().product();
    inside && (x.dims()[0] == 1 || x.stride()[0] >= image)
}

/// An operand at an address that the kernels can read: the tensor itself, or a copy at the start of its own memory, in the
/// order of its dtype: channels last in half precision.
pub(super) fn ready(tensor: &Tensor) -> Result<Operand> {
    let operand = Operand::new(OP, tensor)?;
    if operand.address().is_multiple_of(ALIGNMENT) {
        return Ok(operand);
    }
    let copied = |tensor: &Tensor| tensor.force_contiguous().what("conv: aligned copy");
    let copy = if tensor.rank() > 2 && tensor.dtype() != DType::F32 {
        let stored: Vec<usize> = [0].into_iter().chain(2..tensor.rank()).chain([1]).collect();
        layout::from_stored(&copied(&tensor.permute(stored).what("conv: aligned copy")?)?)?
    } else {
        copied(tensor)?
    };
    Operand::new(OP, &copy)
}
