//! Launcher of `rope.cu`. All arguments have been checked by the op.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::reference::Pairing;
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Error, Result},
    layout::contiguous,
    row_layout::{RowLayout, rows_of},
};

const MODULE: Module = module!(ROPE);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    cos: Address,
    sin: Address,
    out: Address,
    x_rows: RowLayout,
    rows: u64,
    n: u64,
    heads: Divisor,
    positions: Divisor,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

pub(super) fn rope(op: &'static str, x: &Tensor, cos: &Tensor, sin: &Tensor, pairing: Pairing) -> Result<Tensor> {
    let device = device_of(op, x)?;
    let (x, x_rows) = rows_of(op, "x", x)?;
    let (cos, sin) = (Operand::new(op, &contiguous(cos)?)?, Operand::new(op, &contiguous(sin)?)?);
    let (dims, dtype) = (x.tensor().dims().to_vec(), x.tensor().dtype());
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let (positions, heads, n) = (dims[1], dims[2], dims[3] / 2);
        let rows = out.len() / dims[3];
        if rows as u64 >= Divisor::LIMIT {
            return Err(Error::Unsupported { op, what: format!("{rows} heads") });
        }
        let elements = WIDE / dtype.size_in_bytes();
        // Pairs that move at once.
        let (kind, pairs) = match pairing {
            Pairing::Interleaved => ("interleaved", elements / 2),
            Pairing::Half => ("half", elements),
        };
        let aligned = [x.address(), out.address()].iter().all(|address| address.is_multiple_of(WIDE as u64));
        let wide = aligned && n.is_multiple_of(pairs) && x_rows.is_multiple_of(elements);
        let params = Params {
            x: x.address(),
            cos: cos.address(),
            sin: sin.address(),
            out: out.address(),
            x_rows,
            rows: rows as u64,
            n: n as u64,
            heads: Divisor::new(op, heads)?,
            positions: Divisor::new(op, positions)?,
        };
        let name = format!("rope_{kind}_{}_{}", if wide { "wide" } else { "1" }, kernel_suffix(dtype));
        let runs = n / if wide { pairs } else { 1 };
        let heads_at_once = THREADS as usize / runs.clamp(1, THREADS as usize);
        let grid = Grid::over_with(rows.div_ceil(heads_at_once) as u64 * u64::from(THREADS), THREADS);
        let kernel = Kernel::load(device, &MODULE, &name)?;
        // SAFETY: `Params` mirrors that of rope.cu. The row layout is that of x, `rows` heads of 2 n elements; cos and
        // sin have n elements for each position, the op has checked that. Wide only for heads of whole vectors at
        // aligned places. out is new memory, all of whose heads are written.
        unsafe { kernel.launch(grid, &params)? };
    }
    out.into_tensor(op, dims)
}
