//! Neighborhood attention on CUDA: which kernel runs, and what they share.
//!
//! | path | what |
//! |---|---|
//! | `warp_groups.rs` | tiles of matrix products by groups of warps, for half precision on Hopper |
//! | `tiled.rs` | tiles of matrix products, for half precision |
//! | `plain.rs` | one query at a time, for the rest and to check the others |

mod plain;
mod tiled;
mod warp_groups;

use candle_core::{
    CudaDevice, Tensor,
    cuda_backend::{WrapErr, cudarc::driver::sys::CUdevice_attribute},
};

use super::{Axis, Kernel, OP, Problem};
use crate::{
    cuda::{
        paths,
        tensor::{Address, Operand, Output, device_of},
    },
    error::{Error, Result, What},
    layout,
};

/// Bytes of the widest access.
const WIDE: usize = 16;

/// `[B, T, H, W, heads, D]` with a packed last axis: `Field` of `neighborhood.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Field {
    address: Address,
    batch: u64,
    axes: [u64; 3],
    head: u64,
}

impl Field {
    fn new(operand: &Operand) -> Self {
        let stride = |axis: usize| operand.strides().get(axis).map_or(0, |&stride| stride as u64);
        Self { address: operand.address(), batch: stride(0), axes: [stride(1), stride(2), stride(3)], head: stride(4) }
    }
}

/// `Windows` of `neighborhood.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Windows {
    extents: [u32; 3],
    windows: [u32; 3],
    first: u32,
    frames: u32,
}

impl Windows {
    fn new(problem: &Problem<'_>) -> Result<Self> {
        let [t, h, w] = problem.extents.axes(problem.window);
        let of =
            |value: fn(&Axis) -> usize| -> Result<[u32; 3]> { Ok([int(value(&t))?, int(value(&h))?, int(value(&w))?]) };
        let [first, frames] = [int(problem.first)?, int(problem.frames)?];
        Ok(Self { extents: of(Axis::extent)?, windows: of(Axis::window)?, first, frames })
    }
}

/// An extent for a kernel, in which sums of a few fit.
fn int(n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) if n < 1 << 30 => Ok(n),
        _ => Err(Error::Unsupported { op: OP, what: format!("an extent of {n}") }),
    }
}

/// See [`super::neighborhood_attention`]; there is a query.
pub(super) fn neighborhood_attention(problem: &Problem<'_>, kernel: Kernel) -> Result<Tensor> {
    let device = device_of(OP, problem.q)?;
    let output = Output::new(OP, device, problem.q.dtype(), problem.q.elem_count())?;
    let (fastest, out) = (kernel == Kernel::Fastest, output.address());
    if (fastest || kernel == Kernel::WarpGroups) && warp_groups::run(device, problem, out)? {
        paths::count(paths::Path::WarpGroupNeighborhood);
        paths::count(paths::Path::TiledNeighborhood);
    } else if (fastest || kernel == Kernel::Tiled) && tiled::run(device, problem, out)? {
        paths::count(paths::Path::TiledNeighborhood);
    } else if fastest || kernel == Kernel::Plain {
        plain::run(device, problem, out)?;
    } else {
        return Err(Error::Unsupported { op: OP, what: format!("{:?} with kernel {kernel:?}", problem.extents) });
    }
    output.into_tensor(OP, problem.q.dims())
}

/// Dynamic shared memory that a block may have, in bytes.
fn shared_limit(device: &CudaDevice) -> Result<usize> {
    let limit = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let limit = device.cuda_stream().context().attribute(limit).w().what("shared memory of the device")?;
    Ok(usize::try_from(limit).unwrap_or(0))
}

/// Whether every head of every position begins at a multiple of 16 bytes.
fn is_aligned(operand: &Operand) -> bool {
    let tensor = operand.tensor();
    let elements = WIDE / tensor.dtype().size_in_bytes();
    let mut outer = tensor.stride().iter().zip(tensor.dims()).take(5);
    outer.all(|(stride, &extent)| extent == 1 || stride % elements == 0)
        && operand.address().is_multiple_of(WIDE as u64)
}

/// An operand whose heads are packed: the tensor itself, or a copy.
fn packed(tensor: &Tensor) -> Result<Operand> {
    if tensor.stride().last() == Some(&1) {
        return Operand::new(OP, tensor);
    }
    Operand::new(OP, &layout::contiguous(tensor)?)
}

/// An operand whose heads are packed and begin at multiples of 16 bytes, D being a multiple of them: the tensor itself, or
/// a copy.
fn aligned(tensor: &Tensor) -> Result<Operand> {
    let operand = packed(tensor)?;
    if is_aligned(&operand) {
        return Ok(operand);
    }
    let copy = if tensor.is_contiguous() {
        tensor.force_contiguous().what("neighborhood attention: aligned copy")?
    } else {
        layout::contiguous(tensor)?
    };
    Operand::new(OP, &copy)
}
