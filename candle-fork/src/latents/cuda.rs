//! Launcher of `latents.cu`. All arguments have been checked by the op.

use candle_core::{DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::Problem;
use crate::{
    cuda::{
        grid::{Divisor, Grid},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::{Error, Result},
    layout::{MemoryOrder, contiguous, native_order},
};

const MODULE: Module = module!(LATENTS);

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    tokens: Address,
    std: Address,
    mean: Address,
    out: Address,
    strides: [u64; 3],
    elements: u64,
    channels: Divisor,
    rows: Divisor,
    columns: Divisor,
    patch: [Divisor; 2],
    grid_columns: u32,
    tokens_type: u32,
    last: u32,
    unused: u32,
}

const _: () = assert!(size_of::<Params>() == 160, "as in latents.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

pub(super) fn from_tokens(
    op: &'static str,
    tokens: &Tensor,
    std: &Tensor,
    mean: &Tensor,
    dtype: DType,
    problem: &Problem,
) -> Result<Tensor> {
    let device = device_of(op, tokens)?;
    let dims = problem.dims();
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    let last = native_order(tokens.device(), dtype) == MemoryOrder::ChannelsLast;
    if !out.is_empty() {
        if out.len() as u64 >= Divisor::LIMIT {
            return Err(Error::Unsupported { op, what: format!("latents of {} elements", out.len()) });
        }
        let x = Operand::new(op, tokens)?;
        let (std, mean) = (Operand::new(op, &contiguous(std)?)?, Operand::new(op, &contiguous(mean)?)?);
        let divisor = |n: usize| Divisor::new(op, n);
        let [p, q] = problem.patch;
        let params = Params {
            tokens: x.address(),
            std: std.address(),
            mean: mean.address(),
            out: out.address(),
            strides: std::array::from_fn(|axis| x.strides().get(axis).copied().unwrap_or(0) as u64),
            elements: out.len() as u64,
            channels: divisor(dims[1])?,
            rows: divisor(dims[2])?,
            columns: divisor(dims[3])?,
            patch: [divisor(p)?, divisor(q)?],
            // At most as many as elements.
            grid_columns: problem.grid[1] as u32,
            tokens_type: element_type(op, "tokens", tokens.dtype())?,
            last: u32::from(last),
            unused: 0,
        };
        let kernel = Kernel::load(device, &MODULE, &format!("latents_from_tokens_{}", kernel_suffix(dtype)))?;
        // SAFETY: `Params` mirrors that of latents.cu. Every element of the result names one of the tokens, whose extents the
        // op has checked, at their own strides; std and mean have as many elements as a token; out is new memory, all of
        // which the loop over the grid writes.
        unsafe { kernel.launch(Grid::over(out.len() as u64), &params) }?;
    }
    if last { out.into_channels_last(op, &dims) } else { out.into_tensor(op, dims.as_slice()) }
}
