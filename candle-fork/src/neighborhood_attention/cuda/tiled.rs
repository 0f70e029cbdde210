//! Launcher of `neighborhood_tiled.cu`.

use candle_core::{CudaDevice, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    super::{
        OP,
        choose::{self, Plan},
        reference::Extents,
    },
    Field, Problem, Windows, aligned, int, shared_limit,
};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::Address,
    },
    element::kernel_suffix,
    error::Result,
};

const MODULE: Module = module!(NEIGHBORHOOD_TILED);

/// `TiledNeighborhood` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    q: Field,
    k: Field,
    v: Field,
    out: Address,
    grid: Windows,
    heads: u32,
    width: u32,
    tiles: u32,
    patches: [u32; 2],
    keys: u32,
    factor: f32,
    unused: u32,
}

const _: () = assert!(size_of::<Params>() == 216, "as in neighborhood_tiled.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// How the tiled kernel would run a problem, if it serves it on this device.
fn plan(device: &CudaDevice, problem: &Problem<'_>) -> Result<Option<Plan>> {
    let limit = shared_limit(device)?;
    let plan = choose::tiled(problem.shape(), limit);
    // Offsets inside of a plane of a panel have 32 bits, in an operand as it is or in a copy of it.
    let Extents { grid: [_, _, columns], heads, width, .. } = problem.extents;
    let copy = [columns.saturating_mul(heads * width), heads * width];
    let reach = |strides: &[usize]| strides.iter().fold(0u64, |sum, &stride| sum.saturating_add(stride as u64));
    let fits = |plan: &Plan| {
        let strides = [problem.k, problem.v].map(|t| reach(t.stride().get(2..4).unwrap_or(&[])));
        strides.into_iter().chain([reach(&copy)]).all(|reach| reach.saturating_mul(plan.keys as u64) < 1 << 32)
    };
    Ok(plan.filter(fits))
}

/// Enqueues the tiled kernel, which writes all of `out`; whether it serves the problem on this device.
pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, out: Address) -> Result<bool> {
    let Some(plan) = plan(device, problem)? else { return Ok(false) };
    let extents = problem.extents;
    let [q, k, v] = [aligned(problem.q)?, aligned(problem.k)?, aligned(problem.v)?];
    let [rows, columns] = plan.patches;
    let params = Params {
        q: Field::new(&q),
        k: Field::new(&k),
        v: Field::new(&v),
        out,
        grid: Windows::new(problem)?,
        heads: int(extents.heads)?,
        width: int(extents.width)?,
        tiles: int(plan.tiles)?,
        patches: [int(rows)?, int(columns)?],
        keys: int(plan.keys)?,
        factor: plan.factor,
        unused: 0,
    };
    let blocks = [rows, columns, extents.heads, plan.tiles, extents.batch];
    let blocks = blocks.iter().fold(1u64, |product, &n| product.saturating_mul(n as u64));
    let shared_bytes = int(plan.shared_bytes)?;
    let grid = Grid { shared_bytes, ..Grid::blocks(OP, [blocks, 1, 1], 32 * int(plan.warps)?)? };
    let ([first, second], width) = (plan.form.groups, plan.form.width);
    let name = format!("neighborhood_{width}_{first}_{second}_{}", kernel_suffix(problem.q.dtype()));
    let kernel = Kernel::load(device, &MODULE, &name)?;
    // SAFETY: `Params` mirrors `TiledNeighborhood`; q, k and v are tensors of these extents and strides whose heads begin
    // at multiples of 16 bytes; out is new contiguous memory, all of whose heads are written by the blocks of the plan,
    // which has the threads and the shared memory of the kernel of its form.
    unsafe { kernel.launch(grid, &params) }?;
    Ok(true)
}
