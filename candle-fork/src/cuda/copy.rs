//! Copies between any two layouts: changes of memory order, parts of a larger tensor, rows out of a pitched one.

use candle_core::{CudaDevice, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    grid::{Divisor, Grid},
    launch::Kernel,
    module::{Module, module},
    strides::{MAX_RANK, Space, row_major, writes_once},
    tensor::{Address, Operand, Output, device_of},
};
use crate::{
    error::{Error, Result},
    target::with_address,
};

const OP: &str = "strided copy";
const MODULE: Module = module!(STRIDED_COPY);

/// Parameters of the kernels of `strided_copy.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    source: Address,
    destination: Address,
    units: u64,
    rank: u64,
    dims: [u64; MAX_RANK],
    source_strides: [u64; MAX_RANK],
    destination_strides: [u64; MAX_RANK],
    divisors: [Divisor; MAX_RANK],
}

const _: () = assert!(size_of::<Params>() == 352, "as in strided_copy.cu");

// SAFETY: `repr(C)`, integers only, no padding: every field is a multiple of its successor's alignment.
unsafe impl DeviceRepr for Params {}

/// Where the elements of one side of a copy lie: the address of the first and the distances of neighbours, in elements.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Address of the element with index 0 along every axis.
    pub address: Address,
    /// Distances, one for each axis.
    pub strides: &'a [usize],
}

/// Enqueues a copy of `dims` elements of `size` bytes (1, 2, 4 or 8) from one place to another. Axes may come in any
/// order; at most [`MAX_RANK`] may remain after merging.
///
/// # Errors
/// [`Error::Unsupported`] for more axes or another size; [`Error::Candle`] if the driver refuses.
///
/// # Safety
/// Both places cover every index of `dims` with memory of `device`, until the enqueued copy is done; the destination
/// reaches no element twice and overlaps no part of the source.
pub unsafe fn copy_strided(
    device: &CudaDevice,
    size: usize,
    dims: &[usize],
    source: Place<'_>,
    destination: Place<'_>,
) -> Result<()> {
    if !matches!(size, 1 | 2 | 4 | 8) {
        return Err(Error::Unsupported { op: OP, what: format!("elements of {size} bytes") });
    }
    let space = Space::new(OP, dims, [source.strides, destination.strides])?;
    if space.is_empty() {
        return Ok(());
    }
    let access = space.access(size, [source.address, destination.address]);
    let space = space.in_vectors(access / size);
    let units = space.len();
    let mut divisors = [Divisor::new(OP, 1)?; MAX_RANK];
    if units < Divisor::LIMIT {
        for (divisor, &n) in divisors.iter_mut().zip(&space.dims) {
            *divisor = Divisor::new(OP, n as usize)?;
        }
    }
    let [source_strides, destination_strides] = space.strides;
    let params = Params {
        source: source.address,
        destination: destination.address,
        units,
        rank: space.rank as u64,
        dims: space.dims,
        source_strides,
        destination_strides,
        divisors,
    };
    let kernel = Kernel::load(device, &MODULE, &format!("strided_copy_{access}"))?;
    // SAFETY: `Params` mirrors `StridedCopy`; the caller vouches for both places, and `access` keeps every access aligned.
    unsafe { kernel.launch(Grid::over(units), &params) }
}

/// Enqueues a copy of `source` into a part of `output`: index i goes to element `offset + sum of i * strides`.
///
/// # Errors
/// [`Error::Argument`] if the part does not lie within `output`, the element sizes differ, or a stride of zero or two
/// axes would write an element twice; those of [`copy_strided`].
pub fn copy_into(source: &Tensor, output: &Output, offset: usize, strides: &[usize]) -> Result<()> {
    let argument = |what: String| Error::Argument { op: OP, what };
    let (dims, size) = (source.dims(), source.dtype().size_in_bytes());
    if size != output.element_size() {
        return Err(argument(format!("elements of {size} into elements of {} bytes", output.element_size())));
    }
    if dims.contains(&0) {
        return Ok(());
    }
    if strides.len() != dims.len() || !writes_once(dims, strides) {
        return Err(argument(format!("{dims:?} cannot be written with strides {strides:?}")));
    }
    let last: usize = dims.iter().zip(strides).map(|(&n, &stride)| (n - 1) * stride).sum();
    if offset.checked_add(last).is_none_or(|last| last >= output.len()) {
        let what = format!("{dims:?} with strides {strides:?} from {offset} on leaves {} elements", output.len());
        return Err(argument(what));
    }
    let device = device_of(OP, source)?;
    let operand = Operand::new(OP, source)?;
    let place = Place { address: operand.address(), strides: operand.strides() };
    let destination = Place { address: output.address() + (offset * size) as u64, strides };
    // SAFETY: the source is a tensor, and its layout keeps within its storage; the destination has been checked to lie
    // within the output and to reach each element once; the output is new memory, so it overlaps no tensor.
    unsafe { copy_strided(device, size, dims, place, destination) }
}

/// Copies `source` into `target` of the same shape, type and device, which shares no memory with it.
///
/// # Errors
/// Those of [`copy_strided`]; [`Error::Candle`] if the target overlaps itself.
pub fn into(op: &'static str, source: &Tensor, target: &Tensor) -> Result<()> {
    let device = device_of(op, source)?;
    let operand = Operand::new(op, source)?;
    let (dims, size) = (source.dims(), source.dtype().size_in_bytes());
    let from = Place { address: operand.address(), strides: operand.strides() };
    with_address(op, target, |address| {
        // SAFETY: both are tensors of these extents; the target reaches each of its elements once, or candle would have
        // refused to write it, and the caller has seen to it that the two share no memory.
        unsafe { copy_strided(device, size, dims, from, Place { address, strides: target.stride() }) }
    })
}

/// A row-major copy of a tensor of f32, f16, bf16, u8 or u32.
///
/// # Errors
/// Those of [`copy_into`]; [`Error::DType`] for other types.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    let output = Output::new(OP, device_of(OP, tensor)?, tensor.dtype(), tensor.elem_count())?;
    copy_into(tensor, &output, 0, &row_major(tensor.dims()))?;
    output.into_tensor(OP, tensor.dims())
}
