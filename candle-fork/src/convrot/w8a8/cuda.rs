//! The same on a GPU: rows of x are quantised by one kernel for all parts; products run through cuBLASLt in tiles of rows
//! whose sums stay in the second-level cache until the next kernel has put the scales on them.

use std::cell::Cell;

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{OP, count, result_dims, tile_rows};
use crate::{
    convrot::{Group, cuda::quantize_rows},
    cuda::{
        arena,
        blas_lt::{multiply_int8, takes_int8},
        grid::{Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type, small_operand},
    },
    element::kernel_suffix,
    error::{Error, Result, What},
    layout,
    quant::Int8,
};

const MODULE: Module = module!(W8A8);

/// Rows that `few_*` takes at a time: up to so many it is the faster product, since it reads the weight once.
const FEW: usize = 8;

/// Columns of a block of `few_*`.
const FEW_COLUMNS: usize = 8;

/// Most blocks along y; the kernels loop over the rows that are left.
const MAX_BLOCKS_Y: usize = 65535;

/// Rows of a block of `scale_*`: enough that the scales of its columns are loaded rarely.
const ROWS_PER_BLOCK: usize = 4;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    w: Address,
    sums: Address,
    x_scales: Address,
    w_scales: Address,
    bias: Address,
    out: Address,
    rows: u64,
    columns: u64,
    depth: u64,
    pitch: u64,
    bias_type: u32,
    per_column: u32,
}

const _: () = assert!(size_of::<Params>() == 96, "as in w8a8.cu");

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

/// See [`super::linear`].
pub(super) fn linear(x: &Tensor, parts: &[&Int8], group: Group, bias: Option<&Tensor>) -> Result<Tensor> {
    let (device, dtype) = (device_of(OP, x)?, x.dtype());
    let (dims, rows, columns) = result_dims(x, parts);
    let depth = x.dims().last().copied().unwrap_or(0);
    let output = Output::new(OP, device, dtype, rows.saturating_mul(columns))?;
    if output.is_empty() {
        return output.into_tensor(OP, dims);
    }
    let x_operand = Operand::new(OP, &layout::contiguous(x)?)?;
    let bias = bias.map(small_operand).transpose()?;
    let weights = parts.iter().map(|part| Weight::new(part, x)).collect::<Result<Vec<_>>>()?;
    let codes_bytes = (rows * depth).next_multiple_of(256);
    arena::with(device, codes_bytes + rows * 4, |codes| {
        let scales = codes + codes_bytes as u64;
        let places = [x_operand.address(), codes, scales];
        // SAFETY: x is packed, `rows` by `depth`; codes and scales have room in the arena, one behind the other. The rows
        // are whole groups, because those of the weight are.
        unsafe { quantize_rows(device, dtype, [rows, depth], group, places) }?;
        let mut first = 0;
        for weight in &weights {
            let bias_type = bias.as_ref().map_or(Ok(0), |b| element_type(OP, "bias", b.tensor().dtype()))?;
            let bias_address =
                bias.as_ref().map_or(0, |b| b.address() + (first * b.tensor().dtype().size_in_bytes()) as u64);
            let params = Params {
                x: codes,
                w: weight.codes.address(),
                sums: 0,
                x_scales: scales,
                w_scales: weight.scales.address(),
                bias: bias_address,
                out: output.address() + (first * dtype.size_in_bytes()) as u64,
                rows: rows as u64,
                columns: weight.columns as u64,
                depth: depth as u64,
                pitch: columns as u64,
                bias_type,
                per_column: u32::from(weight.per_row),
            };
            // SAFETY: the operands are those of `Params`, with these extents: codes and scales in the arena, a weight that
            // outlives the call, and its columns of every row of the output.
            unsafe { part(device, dtype, params) }?;
            first += weight.columns;
        }
        Ok(())
    })?;
    output.into_tensor(OP, dims)
}

thread_local! {
    /// Whether this thread has reported that a large product runs without cuBLASLt.
    static REPORTED: Cell<bool> = const { Cell::new(false) };
}

/// A part of the weight on the device.
struct Weight {
    codes: Operand,
    scales: Operand,
    columns: usize,
    per_row: bool,
}

impl Weight {
    fn new(part: &Int8, x: &Tensor) -> Result<Self> {
        let codes = part.codes.tensor(x.device())?.contiguous().what(OP)?;
        let scales = part.scales.to_device(x.device()).and_then(|t| t.contiguous()).what(OP)?;
        Ok(Self {
            codes: Operand::new(OP, &codes)?,
            scales: Operand::new(OP, &scales)?,
            columns: part.codes.rows(),
            per_row: part.per_row(),
        })
    }
}

/// Enqueues the product of one part of the weight.
///
/// # Safety
/// `params` names memory of `device` of these extents until the enqueued work is done; the columns of `out` overlap nothing.
unsafe fn part(device: &CudaDevice, dtype: DType, params: Params) -> Result<()> {
    let [rows, columns, depth] = [params.rows, params.columns, params.depth].map(|extent| extent as usize);
    let step = tile_rows(rows, columns);
    let aligned = [params.x, params.w].iter().all(|address| address.is_multiple_of(16)) && depth.is_multiple_of(16);
    if rows <= FEW || !aligned || !takes_int8([step, columns, depth]) {
        // SAFETY: passed on to the caller.
        return unsafe { few(device, dtype, params) };
    }
    let result = arena::with(device, step * columns * 4, |sums| {
        for first in (0..rows).step_by(step) {
            let rows = step.min(rows - first);
            let x = params.x + (first * depth) as u64;
            // SAFETY: these rows of x, the weight, and sums for them in the arena.
            unsafe { multiply_int8(device, [rows, columns, depth], x, params.w, sums) }?;
            let params = Params {
                x,
                sums,
                x_scales: params.x_scales + (first * 4) as u64,
                out: params.out + first as u64 * params.pitch * dtype.size_in_bytes() as u64,
                rows: rows as u64,
                ..params
            };
            // SAFETY: the sums of these rows are enqueued; the caller vouches for the rest.
            unsafe { scale(device, dtype, params) }?;
        }
        Ok(())
    });
    match result {
        // No algorithm on this device: ours works everywhere.
        // SAFETY: passed on to the caller.
        Err(Error::Unsupported { .. }) => unsafe { few(device, dtype, params) },
        Ok(()) => {
            count(|counters| counters.cublas_lt += 1);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Enqueues scales, bias and rounding of sums.
///
/// # Safety
/// As [`part`]; `sums` are packed, `rows` by `columns`.
unsafe fn scale(device: &CudaDevice, dtype: DType, params: Params) -> Result<()> {
    let elements = 16 / dtype.size_in_bytes();
    let whole = [params.columns, params.pitch].iter().all(|extent| extent.is_multiple_of(elements as u64));
    let wide = whole && [params.sums, params.out].iter().all(|address| address.is_multiple_of(16));
    let name = format!("scale_{}_{}", if wide { "wide" } else { "1" }, kernel_suffix(dtype));
    let kernel = Kernel::load(device, &MODULE, &name)?;
    let per_block = if wide { elements } else { 1 } * THREADS as usize;
    let [across, down] = [params.columns as usize, params.rows as usize];
    let blocks = [across.div_ceil(per_block), down.div_ceil(ROWS_PER_BLOCK).min(MAX_BLOCKS_Y), 1];
    // SAFETY: `Params` mirrors that of w8a8.cu; the caller vouches for the memory. Wide only for whole vectors at aligned
    // places.
    unsafe { kernel.launch(Grid::blocks(OP, blocks.map(|n| n as u64), THREADS)?, &params) }
}

/// Enqueues products, scales, bias and rounding by our own kernel.
///
/// # Safety
/// As [`part`].
unsafe fn few(device: &CudaDevice, dtype: DType, params: Params) -> Result<()> {
    let Params { rows, columns, depth, .. } = params;
    if rows > FEW as u64 && !REPORTED.replace(true) {
        tracing::warn!(
            rows,
            columns,
            depth,
            "a product of bytes runs without cuBLASLt; the next ones are not reported"
        );
    }
    let aligned = [params.x, params.w].iter().all(|address| address.is_multiple_of(16));
    let wide = params.depth.is_multiple_of(16) && aligned;
    let name = format!("few_{}_{}", if wide { "wide" } else { "1" }, kernel_suffix(dtype));
    let kernel = Kernel::load(device, &MODULE, &name)?;
    let [across, down] = [params.columns as usize, params.rows as usize];
    let blocks = [across.div_ceil(FEW_COLUMNS), down.div_ceil(FEW).min(MAX_BLOCKS_Y), 1];
    // SAFETY: `Params` mirrors that of w8a8.cu; the caller vouches for the memory. Wide only for whole vectors at aligned
    // places.
    unsafe { kernel.launch(Grid::blocks(OP, blocks.map(|n| n as u64), THREADS)?, &params) }?;
    count(|counters| counters.few += 1);
    Ok(())
}
