//! Attention on CUDA: which path runs, and what the paths share.
//!
//! | path | what |
//! |---|---|
//! | `cudnn.rs` | cuDNN's kernel, where the policy wants it |
//! | `fused.rs` | this crate's own kernels, for half precision |
//! | `groups.rs` | that of them for groups of warps |
//! | `products.rs` | matrix products and a softmax, for the rest |

mod cudnn;
mod fused;
mod groups;
mod products;

use candle_core::{CudaDevice, Tensor};

use super::{OP, Problem, choose, reference::Extents};
use crate::{
    cuda::tensor::{Address, Operand, Output, device_of},
    cudnn::Refusal,
    cudnn_policy::{self, Attention, FallbackReason, count},
    error::{Result, What},
    layout, target,
};

/// Elements of half precision in the 16 bytes that kernels move at a time.
const PACK: usize = 8;

/// Bytes to whose multiples those elements are aligned.
const ALIGNMENT: u64 = 16;

/// Where the result `[B, Sq, H, D]` lies; its last axis is packed.
#[derive(Clone, Copy)]
struct Target {
    address: Address,
    /// Distances of batch items, positions and heads in elements.
    strides: [usize; 3],
}

impl Target {
    /// Whether every head of every position begins at a multiple of 16 bytes, for elements of two bytes.
    fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(ALIGNMENT) && self.strides.iter().all(|stride| stride % PACK == 0)
    }
}

/// See [`super::attention`].
pub(super) fn attention(problem: &Problem<'_>) -> Result<Tensor> {
    let Extents { batch, q_len, heads, width, .. } = problem.extents;
    let device = device_of(OP, problem.q)?;
    let output = Output::new(OP, device, problem.q.dtype(), batch * q_len * heads * width)?;
    if !output.is_empty() {
        let strides = [q_len * heads * width, heads * width, width];
        run(device, problem, Target { address: output.address(), strides })?;
    }
    output.into_tensor(OP, (batch, q_len, heads, width))
}

/// See [`super::attention_into`], which has checked `out`.
pub(super) fn attention_into(problem: &Problem<'_>, out: &Tensor) -> Result<()> {
    let device = device_of(OP, problem.q)?;
    match *out.stride() {
        [batch, position, head, _] if out.elem_count() > 0 => target::with_address(OP, out, |address| {
            run(device, problem, Target { address, strides: [batch, position, head] })
        }),
        _ => Ok(()),
    }
}

/// The path that policy and problem choose, and our own where cuDNN does not serve.
fn run(device: &CudaDevice, problem: &Problem<'_>, target: Target) -> Result<()> {
    let policy = cudnn_policy::attention();
    let (dtype, width) = (problem.q.dtype(), problem.extents.width);
    if choose::asks_cudnn(policy, dtype, problem.mask) {
        match cudnn::run(device, problem, target)? {
            Ok(()) => return Ok(()),
            Err(refusal) => cudnn::fall_back(refusal, policy)?,
        }
    }
    if let Some(factor) = choose::fused_factor(dtype, width, problem.softmax_scale) {
        fused::run(device, problem, factor, target)?;
        count(|c| c.attention.fused += 1);
        return Ok(());
    }
    if policy == Attention::Required {
        let text =
            format!("there is no fused kernel for masked attention in {dtype:?} with heads of {width} components");
        cudnn::fall_back(Refusal::lasting(FallbackReason::Unsupported, text), policy)?;
    }
    products::run(device, problem, target)?;
    count(|c| c.attention.products += 1);
    Ok(())
}

/// An operand whose heads are packed and begin at multiples of 16 bytes: the tensor itself, or a copy.
fn aligned(tensor: &Tensor) -> Result<Operand> {
    let operand = Operand::new(OP, tensor)?;
    let (strides, dims) = (tensor.stride(), tensor.dims());
    let steps = strides.iter().zip(dims).take(3).all(|(stride, &extent)| extent == 1 || stride % PACK == 0);
    if steps && strides.last() == Some(&1) && operand.address().is_multiple_of(ALIGNMENT) {
        return Ok(operand);
    }
    let copy = if tensor.is_contiguous() {
        tensor.force_contiguous().what("attention: aligned copy")?
    } else {
        layout::contiguous(tensor)?
    };
    Operand::new(OP, &copy)
}

/// The tensor, or a copy if elements of it lie in the same place, which neither a graph nor a map describes.
fn distinct(tensor: &Tensor) -> Result<Tensor> {
    let repeated = tensor.dims().iter().zip(tensor.stride()).any(|(&extent, &stride)| extent > 1 && stride == 0);
    if repeated { layout::contiguous(tensor) } else { Ok(tensor.clone()) }
}
