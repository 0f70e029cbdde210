//! Attention by cuDNN: tensors into a graph, and its execution.

use std::{
    ptr::from_ref,
    sync::atomic::{AtomicU32, Ordering},
};

use candle_core::{CudaDevice, DType, cuda_backend::WrapErr};

use super::{
    super::{OP, Problem},
    Target, aligned, distinct,
};
use crate::{
    cuda::{
        arena,
        tensor::{Address, Operand, Output},
    },
    cudnn::{AttentionSpec, Element, OnDevice, Plan, Refusal, Session, TensorSpec, may_build, time},
    cudnn_policy::{self, Attention, FallbackReason, PlanChoice, count},
    error::{Error, Result, What},
};

/// Enqueues attention. The inner result says why cuDNN did not serve; nothing has been computed then.
pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, target: Target) -> Result<Result<(), Refusal>> {
    count(|c| c.attention.attempts += 1);
    let session = match OnDevice::open(device)? {
        Ok(session) => session,
        Err(refusal) => return Ok(Err(refusal)),
    };
    if !target.is_aligned() {
        let text = "a result that does not begin at multiples of 16 bytes";
        return Ok(Err(Refusal::lasting(FallbackReason::Unsupported, text)));
    }
    let call = Call::new(problem, target)?;
    let Some(spec) = call.spec(&session) else {
        return Ok(Err(Refusal::lasting(FallbackReason::Unsupported, "extents beyond 64 bits")));
    };
    let policy = cudnn_policy::current();
    let mut timer = |plan: &Plan, limit: f64| call.time(device, &session, &spec, plan, policy.choice, limit);
    let plan = match session.plan(&spec, &policy, || may_build(device), &mut timer) {
        Ok(plan) => plan,
        Err(refusal) => return Ok(Err(refusal)),
    };
    if let Err(refusal) = call.execute(device, &session, &spec, &plan, target.address) {
        // An execution may fail because of the device, whose failures stay: then there is nothing to fall back to.
        device.cuda_stream().synchronize().w().what("cudnn failed, and with it the device")?;
        return Ok(Err(refusal));
    }
    count(|c| {
        c.attention.dispatched += 1;
        c.workspace_high_water = c.workspace_high_water.max(plan.workspace());
        c.last_engine = Some(plan.engine().clone());
    });
    Ok(Ok(()))
}

/// Counts and reports that cuDNN did not serve.
///
/// # Errors
/// [`Error::FallbackRefused`] if the policy allows nothing else.
pub(super) fn fall_back(refusal: Refusal, policy: Attention) -> Result<()> {
    /// One bit per reason that a warning has told of.
    static TOLD: AtomicU32 = AtomicU32::new(0);
    let reason = refusal.reason;
    count(|c| *c.attention.fallbacks.entry(reason).or_default() += 1);
    if policy == Attention::Required {
        return Err(Error::FallbackRefused { op: OP, reason, detail: refusal.to_string() });
    }
    let bit = 1 << reason as u32;
    if TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        tracing::warn!(%refusal, "attention runs without cudnn; the next calls for this reason are not reported");
    } else {
        tracing::debug!(%refusal, "attention runs without cudnn");
    }
    Ok(())
}

/// What cuDNN reads, ready to be read, and how the result lies.
struct Call {
    dtype: DType,
    q: Operand,
    k: Operand,
    v: Operand,
    out_strides: [usize; 3],
    softmax_scale: f32,
}

impl Call {
    fn new(problem: &Problem<'_>, target: Target) -> Result<Self> {
        Ok(Self {
            dtype: problem.q.dtype(),
            q: aligned(&distinct(problem.q)?)?,
            k: aligned(&distinct(problem.k)?)?,
            v: aligned(&distinct(problem.v)?)?,
            out_strides: target.strides,
            softmax_scale: problem.softmax_scale,
        })
    }

    fn spec(&self, session: &Session) -> Option<AttentionSpec> {
        let (&[b, s, h, d], &[out_batch, out_position, out_head]) = (self.q.tensor().dims(), &self.out_strides) else {
            return None;
        };
        Some(AttentionSpec {
            element: match self.dtype {
                DType::F16 => Element::F16,
                DType::BF16 => Element::Bf16,
                _ => Element::F32,
            },
            q: by_heads(self.q.tensor().dims(), self.q.strides())?,
            k: by_heads(self.k.tensor().dims(), self.k.strides())?,
            v: by_heads(self.v.tensor().dims(), self.v.strides())?,
            o: by_heads(&[b, s, h, d], &[out_batch, out_position, out_head, 1])?,
            form: session.attention_form(),
        })
    }

    /// Enqueues `plan` into the result at `out`.
    fn execute(
        &self,
        device: &CudaDevice,
        session: &Session,
        spec: &AttentionSpec,
        plan: &Plan,
        out: Address,
    ) -> Result<(), Refusal> {
        let workspace = plan.workspace().next_multiple_of(256);
        let Ok(bytes) = usize::try_from(workspace.saturating_add(spec.statistics_bytes())) else {
            return Err(Refusal::lasting(FallbackReason::Workspace, "more bytes than there are addresses"));
        };
        let run = |memory: Address| {
            let scale = from_ref(&self.softmax_scale) as Address;
            let mut addresses = vec![self.q.address(), self.k.address(), self.v.address(), out, scale];
            if spec.statistics_bytes() > 0 {
                addresses.push(memory + workspace);
            }
            // SAFETY: q, k and v are aligned and lie as the graph says; out is memory of the result's extents and strides
            // that overlaps none of them; the scale is this call's. Workspace and statistics are this thread's scratch, one
            // behind the other. All of it is freed in the order of the stream.
            unsafe { session.execute(plan, &addresses, memory) }
        };
        if bytes == 0 {
            return run(0);
        }
        arena::with(device, bytes, |memory| Ok(run(memory)))
            .unwrap_or_else(|error| Err(Refusal::passing(FallbackReason::Workspace, error.to_string())))
    }

    /// Milliseconds of an execution into scratch memory.
    fn time(
        &self,
        device: &CudaDevice,
        session: &Session,
        spec: &AttentionSpec,
        plan: &Plan,
        choice: PlanChoice,
        limit: f64,
    ) -> Result<f64, Refusal> {
        let dims = self.q.tensor().dims();
        // From the first element of the result to its last.
        let spread: usize = dims.iter().zip(&self.out_strides).map(|(&n, stride)| n.saturating_sub(1) * stride).sum();
        let len = spread + dims.last().copied().unwrap_or(1);
        let out = Output::new(OP, device, self.dtype, len)
            .map_err(|error| Refusal::passing(FallbackReason::Failed, format!("a plan was not timed: {error}")))?;
        time(&device.cuda_stream(), choice, limit, || self.execute(device, session, spec, plan, out.address()))
    }
}

/// `[B, S, H, D]` in the order of the graph, `[B, H, S, D]`. `None` for more than 64 bits.
fn by_heads(dims: &[usize], strides: &[usize]) -> Option<TensorSpec> {
    let (&[b, s, h, d], &[batch, position, head, component]) = (dims, strides) else { return None };
    // The stride of a single one means nothing, and must not make another plan.
    let all = (s * position).max(h * head).max(d * component);
    let of = |extent: usize, stride: usize| if extent == 1 { all } else { stride };
    TensorSpec::new(&[b, h, s, d], &[of(b, batch), of(h, head), of(s, position), component])
}
