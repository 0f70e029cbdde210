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
    error::Result,
    layout::{MemoryOrder, contiguous, in_order, memory_order},
    row_layout::{RowLayout, rows_of},
};

const MODULE: Module = module!(ACTIVATION);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// Most blocks along y; kernels loop over the rows that are left.
const MAX_BLOCKS_Y: u64 = 65535;

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
    rows: u64,
    n: u64,
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
    let (x, x_rows) = rows_of(OP, "x", x)?;
    let mut dims = x.tensor().dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= 2;
    }
    let params = RowParams {
        x: x.address(),
        z: 0,
        gate: 0,
        out: 0,
        x_rows,
        z_rows: x_rows,
        rows: 0,
        n: 0,
        rows_per_batch: 1,
        gate_type: 0,
        unused: 0,
    };
    rows(OP, x.tensor(), dims, params)
}

pub(super) fn gate_residual(x: &Tensor, gate: &Tensor, z: &Tensor) -> Result<Tensor> {
    const OP: &str = "gate_residual";
    let (x, x_rows) = rows_of(OP, "x", x)?;
    let (z, z_rows) = rows_of(OP, "y", z)?;
    let gate = Operand::new(OP, &contiguous(gate)?)?;
    let dims = x.tensor().dims().to_vec();
    let params = RowParams {
        x: x.address(),
        z: z.address(),
        gate: gate.address(),
        out: 0,
        x_rows,
        z_rows,
        rows: 0,
        n: 0,
        rows_per_batch: dims[1].max(1) as u64,
        gate_type: element_type(OP, "gate", gate.tensor().dtype())?,
        unused: 0,
    };
    rows(OP, x.tensor(), dims, params)
}

/// Launches the kernel of `op` for a result of shape `dims`, whose operands `params` names. Their tensors live until
/// this returns.
fn rows(op: &'static str, x: &Tensor, dims: Vec<usize>, params: RowParams) -> Result<Tensor> {
    let (device, dtype) = (device_of(op, x)?, x.dtype());
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let n = dims.last().copied().unwrap_or(1);
        let params = RowParams { out: out.address(), rows: (out.len() / n) as u64, n: n as u64, ..params };
        let elements = WIDE / dtype.size_in_bytes();
        let whole = n.is_multiple_of(elements)
            && params.x_rows.is_multiple_of(elements)
            && params.z_rows.is_multiple_of(elements);
        let wide = whole && aligned(&[params.x, params.z, params.out]);
        let kernel = Kernel::load(device, &MODULE, &format!("{op}_{}_{}", width(wide), kernel_suffix(dtype)))?;
        let per_block = if wide { elements } else { 1 } * THREADS as usize;
        let grid = Grid::blocks(op, [n.div_ceil(per_block) as u64, params.rows.min(MAX_BLOCKS_Y), 1], THREADS)?;
        // SAFETY: `RowParams` mirrors that of activation.cu. The row layouts are those of the operands, whose shapes
        // the op has checked: `rows` rows of n elements (2 n for swiglu), gates for every `rows_per_batch` of them.
        // Wide kernels only where rows are whole vectors at aligned places. out is new memory, all of whose rows are
        // written.
        unsafe { kernel.launch(grid, &params)? };
    }
    out.into_tensor(op, dims)
}
