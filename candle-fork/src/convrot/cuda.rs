//! Launchers of `convrot.cu`. All arguments have been checked by the ops.

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::group::Group;
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Result, What},
};

const OP: &str = "convrot";
const MODULE: Module = module!(CONVROT);

/// The group that has kernels of its own.
const FAST_GROUP: usize = 256;

/// Groups that a block of `decode_256_*` decodes: 8 by each of its warps.
const GROUPS_PER_BLOCK: u64 = 64;

/// Threads of `quantize_256_*` that take a group, the most groups of a pass, and the most passes.
const GROUP_THREADS: usize = 16;
const MAX_PASS: usize = 16;
const MAX_PASSES: usize = 4;

/// `DecodeParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeParams {
    codes: Address,
    scales: Address,
    out: Address,
    rows: u64,
    columns: u64,
    groups: u32,
    group: u32,
    factor: f32,
    per_row: u32,
    groups_per_row: Divisor,
}

const _: () = assert!(size_of::<DecodeParams>() == 72, "as in convrot.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for DecodeParams {}

/// `QuantizeParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct QuantizeParams {
    x: Address,
    codes: Address,
    scales: Address,
    rows: u64,
    columns: u64,
    group: u32,
    factor: f32,
}

const _: () = assert!(size_of::<QuantizeParams>() == 48, "as in convrot.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for QuantizeParams {}

/// One block for each row, as far as a grid goes; blocks loop over the rest.
fn row_grid(rows: usize, threads: u32) -> Result<Grid> {
    Grid::blocks(OP, [rows.min(i32::MAX as usize) as u64, 1, 1], threads)
}

/// Passes of `quantize_256_*` over a row of `groups`, and the threads of a block: whole warps, few of which are idle.
fn passes(groups: usize) -> (usize, u32) {
    let passes = groups.div_ceil(MAX_PASS).max(1);
    // At most `MAX_PASS` groups.
    (passes, (groups.div_ceil(passes) * GROUP_THREADS).next_multiple_of(32) as u32)
}

/// See [`super::dequantize`].
pub(super) fn dequantize(codes: &Tensor, scales: &Tensor, group: Group, dtype: DType) -> Result<Tensor> {
    let device = device_of(OP, codes)?;
    let (rows, columns) = codes.dims2().what(OP)?;
    let per_row = scales.elem_count() != 1;
    let codes = Operand::new(OP, &codes.contiguous().what(OP)?)?;
    let scales = Operand::new(OP, &scales.contiguous().what(OP)?)?;
    let out = Output::new(OP, device, dtype, rows * columns)?;
    let groups = out.len() / group.size();
    let fast = group.size() == FAST_GROUP && (groups as u64) < Divisor::LIMIT && codes.address().is_multiple_of(4);
    let (name, grid) = if fast {
        ("decode_256", Grid::blocks(OP, [(groups as u64).div_ceil(GROUPS_PER_BLOCK), 1, 1], THREADS)?)
    } else {
        ("decode_any", row_grid(rows, THREADS)?)
    };
    let params = DecodeParams {
        codes: codes.address(),
        scales: scales.address(),
        out: out.address(),
        rows: rows as u64,
        columns: columns as u64,
        // Used, and below 2^31, only if fast.
        groups: groups as u32,
        group: group.size() as u32,
        factor: group.factor(),
        per_row: u32::from(per_row),
        groups_per_row: Divisor::new(OP, if fast { columns / FAST_GROUP } else { 1 })?,
    };
    let kernel = Kernel::load(device, &MODULE, &format!("{name}_{}", kernel_suffix(dtype)))?;
    // SAFETY: `DecodeParams` mirrors that of convrot.cu. Codes and out are packed, `rows` by `columns`; there is a scale for
    // each row if `per_row`, else one. decode_256 reads words, hence the alignment, and whole groups, of which rows consist.
    // out is new memory, all of which is written.
    unsafe { kernel.launch(grid, &params)? };
    out.into_tensor(OP, (rows, columns))
}

/// See [`super::quantize_int8_convrot`].
pub(super) fn quantize(x: &Tensor, group: Group) -> Result<(Tensor, Tensor)> {
    let device = device_of(OP, x)?;
    let (rows, columns) = x.dims2().what(OP)?;
    let x = Operand::new(OP, &x.contiguous().what(OP)?)?;
    let codes = Output::new(OP, device, DType::U8, rows * columns)?;
    let scales = Output::new(OP, device, DType::F32, rows)?;
    let places = [x.address(), codes.address(), scales.address()];
    // SAFETY: x is packed, `rows` by `columns`, as are the new codes; there is a new scale for each row.
    unsafe { quantize_rows(device, x.tensor().dtype(), [rows, columns], group, places)? };
    Ok((codes.into_tensor(OP, (rows, columns))?, scales.into_tensor(OP, rows)?))
}

/// Enqueues the quantisation of packed rows of `dtype`: `[x, codes, scales]`.
///
/// # Errors
/// [`crate::Error::Unsupported`] without rows; [`crate::Error::Candle`] if the driver refuses.
///
/// # Safety
/// x and codes (of bytes) cover `rows` by `columns` elements, scales (f32) one for each row, in memory of `device` until the
/// enqueued work is done; they do not overlap. Rows are whole groups.
pub(super) unsafe fn quantize_rows(
    device: &CudaDevice,
    dtype: DType,
    [rows, columns]: [usize; 2],
    group: Group,
    [x, codes, scales]: [Address; 3],
) -> Result<()> {
    let suffix = kernel_suffix(dtype);
    let (passes, threads) = passes(columns / FAST_GROUP);
    let aligned = [x, codes].iter().all(|address| address.is_multiple_of(16));
    let (name, threads) = if group.size() == FAST_GROUP && passes <= MAX_PASSES && aligned {
        (format!("quantize_256_{suffix}_{passes}"), threads)
    } else {
        (format!("quantize_any_{suffix}"), THREADS)
    };
    let params = QuantizeParams {
        x,
        codes,
        scales,
        rows: rows as u64,
        columns: columns as u64,
        group: group.size() as u32,
        factor: group.factor(),
    };
    let kernel = Kernel::load(device, &MODULE, &name)?;
    // SAFETY: `QuantizeParams` mirrors that of convrot.cu; the caller vouches for the memory. Vectors of 16 bytes only at
    // aligned places: rows of whole groups keep them aligned.
    unsafe { kernel.launch(row_grid(rows, threads)?, &params) }
}
