//! Launcher of `neighborhood_plain.cu`.

use candle_core::{CudaDevice, cuda_backend::cudarc::driver::DeviceRepr};

use super::{super::OP, Field, Problem, WIDE, Windows, int, is_aligned, packed};
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::Address,
    },
    element::kernel_suffix,
    error::{Error, Result},
};

const MODULE: Module = module!(NEIGHBORHOOD_PLAIN);

/// Widest head of the kernel.
const WIDEST: usize = 256;

/// `PlainNeighborhood` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    q: Field,
    k: Field,
    v: Field,
    out: Address,
    items: u64,
    grid: Windows,
    heads: u32,
    width: u32,
    keys: u32,
    scale: f32,
    plane: Divisor,
    row: Divisor,
}

const _: () = assert!(size_of::<Params>() == 240, "as in neighborhood_plain.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// Enqueues the plain kernel, which writes all of `out`.
pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, out: Address) -> Result<()> {
    let extents = problem.extents;
    if extents.width > WIDEST {
        return Err(Error::Unsupported { op: OP, what: format!("heads of {} components", extents.width) });
    }
    let [q, k, v] = [packed(problem.q)?, packed(problem.k)?, packed(problem.v)?];
    let [_, h, w] = extents.axes(problem.window).map(|axis| axis.window());
    let keys = extents.axes(problem.window).iter().try_fold(1usize, |n, axis| n.checked_mul(axis.window()));
    let keys = keys.filter(|&n| (n as u64) < Divisor::LIMIT);
    let keys = keys.ok_or_else(|| Error::Unsupported { op: OP, what: format!("windows of {:?}", problem.window) })?;
    let items = (problem.q.elem_count() / extents.width) as u64;
    let params = Params {
        q: Field::new(&q),
        k: Field::new(&k),
        v: Field::new(&v),
        out,
        items,
        grid: Windows::new(problem)?,
        heads: int(extents.heads)?,
        width: int(extents.width)?,
        // Below 2^31.
        keys: keys as u32,
        scale: problem.softmax_scale,
        plane: Divisor::new(OP, h * w)?,
        row: Divisor::new(OP, w)?,
    };
    let dtype = problem.q.dtype();
    let whole = extents.width.is_multiple_of(WIDE / dtype.size_in_bytes());
    let wide = whole && [&q, &k, &v].into_iter().all(is_aligned);
    let name = format!("neighborhood_plain_{}_{}", if wide { "wide" } else { "1" }, kernel_suffix(dtype));
    let grid = Grid::over(items.saturating_mul(u64::from(THREADS)));
    let kernel = Kernel::load(device, &MODULE, &name)?;
    // SAFETY: `Params` mirrors `PlainNeighborhood`; q, k and v are tensors of these extents and strides with packed heads,
    // in 16-byte steps for `wide`; out is new memory for `items` heads, all of which are written; a block of 256 threads,
    // as the kernel is written for, walks over the items.
    unsafe { kernel.launch(grid, &params) }
}
