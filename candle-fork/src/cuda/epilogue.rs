//! Bias and residual onto the sums of a matrix product, rounded once.

use candle_core::{CudaDevice, DType, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    grid::{Divisor, Grid, THREADS},
    launch::Kernel,
    module::{Module, module},
    tensor::{Address, Operand, element_type},
};
use crate::error::Result;

const OP: &str = "epilogue";
const MODULE: Module = module!(EPILOGUE);

/// Most elements of a launch of `epilogue_columns_*`.
const MAX_ELEMENTS: usize = (Divisor::LIMIT - 1) as usize;

/// Parameters of `epilogue_columns_*`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnsParams {
    sums: Address,
    bias: Address,
    residual: Address,
    result: Address,
    elements: u32,
    bias_type: u32,
    packed: u32,
    unused: u32,
    columns: Divisor,
}

const _: () = assert!(size_of::<ColumnsParams>() == 64, "as in epilogue.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for ColumnsParams {}

/// Parameters of `epilogue_planes_f32`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PlanesParams {
    result: Address,
    bias: Address,
    residual: Address,
    planes: u64,
    elements: u64,
    channels: u32,
    bias_type: u32,
}

const _: () = assert!(size_of::<PlanesParams>() == 48, "as in epilogue.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for PlanesParams {}

/// A bias as kernels take it: its address, or 0, and the code of its type.
fn bias_parts(bias: Option<&Operand>) -> Result<(Address, u32)> {
    bias.map_or(Ok((0, 0)), |b| Ok((b.address(), element_type(OP, "bias", b.tensor().dtype())?)))
}

/// Enqueues `result[r, c] = round(sums[r, c] + bias[c] + residual[r, c])` over packed matrices of `rows` by `columns`:
/// sums of f32, residual (0 for none) and result of `dtype`. With f32, the result may be the sums.
///
/// # Errors
/// [`Error::DType`](crate::Error::DType) for other types than f32, f16, bf16; [`Error::Unsupported`](crate::Error) for
/// 2^31 columns or more; [`Error::Candle`](crate::Error) if the driver refuses.
///
/// # Safety
/// The matrices and the bias (contiguous, of `columns` elements) lie in memory of `device` until the enqueued work is
/// done; the result overlaps nothing else.
pub unsafe fn columns(
    device: &CudaDevice,
    dtype: DType,
    [rows, columns]: [usize; 2],
    sums: Address,
    bias: Option<&Operand>,
    residual: Address,
    result: Address,
) -> Result<()> {
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let (bias, bias_type) = bias_parts(bias)?;
    let divisor = Divisor::new(OP, columns)?;
    let size = dtype.size_in_bytes();
    let vector = 16 / size;
    let packed = columns.is_multiple_of(vector) && [sums, residual, result].iter().all(|a| a.is_multiple_of(16));
    let kernel = Kernel::load(device, &MODULE, &format!("epilogue_columns_{}", dtype.as_str()))?;
    let step = (MAX_ELEMENTS / columns).max(1);
    for first in (0..rows).step_by(step) {
        let elements = step.min(rows - first) * columns;
        let offset = |size: usize| (first * columns * size) as u64;
        let params = ColumnsParams {
            sums: sums + offset(4),
            bias,
            residual: if residual == 0 { 0 } else { residual + offset(size) },
            result: result + offset(size),
            // At most `MAX_ELEMENTS`.
            elements: elements as u32,
            bias_type,
            packed: u32::from(packed),
            unused: 0,
            columns: divisor,
        };
        let threads = elements / if packed { vector } else { 1 };
        // SAFETY: `ColumnsParams` mirrors `Columns`; the caller vouches for the memory, of which exactly these rows are
        // touched; accesses of 16 bytes only where columns and addresses are multiples of them.
        unsafe { kernel.launch(Grid::over(threads as u64), &params) }?;
    }
    Ok(())
}

/// Enqueues `result[p, i] += bias[p % channels] + residual[p, i]` over `planes` packed planes of `elements` f32; residual
/// 0 for none.
///
/// # Errors
/// As [`columns`].
///
/// # Safety
/// As [`columns`]: the bias has `channels` elements.
pub unsafe fn planes(
    device: &CudaDevice,
    [planes, elements]: [usize; 2],
    channels: usize,
    bias: Option<&Operand>,
    residual: Address,
    result: Address,
) -> Result<()> {
    if planes == 0 || elements == 0 {
        return Ok(());
    }
    let (bias, bias_type) = bias_parts(bias)?;
    let (planes, elements) = (planes as u64, elements as u64);
    let channels = u32::try_from(channels)
        .map_err(|_| crate::Error::Unsupported { op: OP, what: format!("{channels} channels") })?;
    let params = PlanesParams { result, bias, residual, planes, elements, channels, bias_type };
    let blocks = [elements.div_ceil(u64::from(THREADS)).min(1 << 16), planes.min(65535), 1];
    let grid = Grid::blocks(OP, blocks, THREADS)?;
    // SAFETY: `PlanesParams` mirrors `Planes`; the caller vouches for the memory.
    unsafe { Kernel::load(device, &MODULE, "epilogue_planes_f32")?.launch(grid, &params) }
}
