//! Launchers of `activation.cu`. All arguments have been checked by the ops.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use crate::{
    cuda::{
        grid::{Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::{Result, What},
    layout::{MemoryOrder, contiguous, in_order, memory_order},
    row_layout::{RowLayout, rows_of},
    target::with_address,
};

const MODULE: Module = module!(ACTIVATION);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// Most blocks along y and z; kernels loop over what is left.
const MAX_BLOCKS: u64 = 65535;

/// Rows that a thread takes at a time, as in activation.cu.
const ROWS: u64 = 4;

/// `FlatParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct FlatParams {
    x: Address,
    z: Address,
    out: Address,
    count: u64,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for FlatParams {}

/// `RowParams` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowParams {
    x: Address,
    z: Address,
    gate: Address,
    out: Address,
    x_rows: RowLayout,
    z_rows: RowLayout,
    out_rows: RowLayout,
    n: u64,
    batches: u64,
    rows_per_batch: u64,
    gate_type: u32,
    unused: u32,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for RowParams {}

fn width(wide: bool) -> &'static str {
    if wide { "wide" } else { "1" }
}

fn aligned(addresses: &[Address]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(WIDE as u64))
}

pub(super) fn silu(x: &Tensor) -> Result<Tensor> {
    flat("silu", x, None)
}

pub(super) fn residual(x: &Tensor, z: &Tensor) -> Result<Tensor> {
    flat("residual", x, Some(z))
}

/// An op that treats every element alike, in the memory order of x.
fn flat(op: &'static str, x: &Tensor, z: Option<&Tensor>) -> Result<Tensor> {
    let device = device_of(op, x)?;
    let order = if x.rank() > 2 { memory_order(x) } else { MemoryOrder::ChannelsFirst };
    let x = Operand::new(op, &in_order(x, order)?)?;
    let z = z.map(|z| Operand::new(op, &in_order(z, order)?)).transpose()?;
    let (dims, dtype) = (x.tensor().dims().to_vec(), x.tensor().dtype());
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let params = FlatParams {
            x: x.address(),
            z: z.as_ref().map_or(0, Operand::address),
            out: out.address(),
            count: out.len() as u64,
        };
        let wide = aligned(&[params.x, params.z, params.out]);
        let elements = if wide { WIDE / dtype.size_in_bytes() } else { 1 };
        let kernel = Kernel::load(device, &MODULE, &format!("{op}_{}_{}", width(wide), kernel_suffix(dtype)))?;
        let grid = Grid::over(params.count.div_ceil(elements as u64));
        // SAFETY: `FlatParams` mirrors that of activation.cu. x, z (which only `residual` reads, and always has) and
        // out are packed in one order, `count` elements each; out is new memory, all of which the loops over the grid
        // write.
        unsafe { kernel.launch(grid, &params)? };
    }
    match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(op, &dims),
        MemoryOrder::ChannelsFirst => out.into_tensor(op, dims),
    }
}

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "swiglu";
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= 2;
    }
    let out = Output::new(OP, device_of(OP, x)?, x.dtype(), dims.iter().product())?;
    swiglu_at(OP, x, out.address(), RowLayout::packed(dims.last().copied().unwrap_or(1)))?;
    out.into_tensor(OP, dims)
}

/// `out` is of the result's shape; its last axis is packed.
pub(super) fn swiglu_into(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> {
    match RowLayout::of(out.layout()) {
        Some(rows) => with_address(op, out, |address| swiglu_at(op, x, address, rows)),
        // Three axes or more that lie apart: one item after the other.
        None => (0..out.dims()[0]).try_for_each(|item| {
            let part = |t: &Tensor| t.get(item).what(op);
            swiglu_into(op, &part(x)?, &part(out)?)
        }),
    }
}

/// Writes the result to rows at `out`.
fn swiglu_at(op: &'static str, x: &Tensor, out: Address, out_rows: RowLayout) -> Result<()> {
    let (x, x_rows) = rows_of(op, "x", x)?;
    let n = x.tensor().dims().last().copied().unwrap_or(0) / 2;
    let params = RowParams {
        x: x.address(),
        z: 0,
        gate: 0,
        out,
        x_rows,
        z_rows: x_rows,
        out_rows,
        n: n as u64,
        batches: 1,
        rows_per_batch: x.tensor().elem_count().checked_div(2 * n).unwrap_or(0) as u64,
        gate_type: 0,
        unused: 0,
    };
    // SAFETY: x has these rows of 2 n elements and `out` room for as many of n, at the distances of the layouts.
    unsafe { rows(op, "swiglu", x.tensor(), &params) }
}

pub(super) fn gate_residual(x: &Tensor, gate: &Tensor, z: &Tensor) -> Result<Tensor> {
    const OP: &str = "gate_residual";
    let (x, x_rows) = rows_of(OP, "x", x)?;
    let (z, z_rows) = rows_of(OP, "y", z)?;
    let gate = Operand::new(OP, &contiguous(gate)?)?;
    let dims = x.tensor().dims().to_vec();
    let out = Output::new(OP, device_of(OP, x.tensor())?, x.tensor().dtype(), dims.iter().product())?;
    let params = RowParams {
        x: x.address(),
        z: z.address(),
        gate: gate.address(),
        out: out.address(),
        x_rows,
        z_rows,
        out_rows: RowLayout::packed(dims[2]),
        n: dims[2] as u64,
        batches: dims[0] as u64,
        rows_per_batch: dims[1] as u64,
        gate_type: element_type(OP, "gate", gate.tensor().dtype())?,
        unused: 0,
    };
    // SAFETY: the op has checked the shapes: x, y and the new memory have these rows, the gate n elements for each item.
    unsafe { rows(OP, OP, x.tensor(), &params)? };
    out.into_tensor(OP, dims)
}

/// Launches `kernel` for rows of x's dtype, if there are any.
///
/// # Safety
/// The memory at the addresses of `params` has the rows that it names, until the enqueued work is done; out overlaps
/// nothing else.
unsafe fn rows(op: &'static str, kernel: &str, x: &Tensor, params: &RowParams) -> Result<()> {
    let (device, dtype) = (device_of(op, x)?, x.dtype());
    let RowParams { n, batches, rows_per_batch, .. } = *params;
    if [n, batches, rows_per_batch].contains(&0) {
        return Ok(());
    }
    let elements = WIDE / dtype.size_in_bytes();
    let layouts = [params.x_rows, params.z_rows, params.out_rows];
    let wide = n.is_multiple_of(elements as u64)
        && layouts.iter().all(|layout| layout.is_multiple_of(elements))
        && aligned(&[params.x, params.z, params.gate, params.out]);
    let vectors = n / if wide { elements as u64 } else { 1 };
    // Blocks without idle threads, for the widths of most models.
    let threads = if vectors.is_multiple_of(u64::from(THREADS)) { THREADS } else { THREADS / 2 };
    let kernel = Kernel::load(device, &MODULE, &format!("{kernel}_{}_{}", width(wide), kernel_suffix(dtype)))?;
    let most = |blocks: u64| blocks.min(MAX_BLOCKS);
    let grid = [vectors.div_ceil(u64::from(threads)), most(rows_per_batch.div_ceil(ROWS)), most(batches)];
    // SAFETY: `RowParams` mirrors that of activation.cu; the caller vouches for the memory. Wide kernels only where rows are
    // whole vectors at aligned places. Along x there are as many threads as vectors, along y and z the kernels loop.
    unsafe { kernel.launch(Grid::blocks(op, grid, threads)?, params) }
}
