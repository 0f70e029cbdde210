//! Launcher of `neighborhood_sm90.cu`.

use candle_core::{
    CudaDevice, Tensor,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{DeviceRepr, sys::CUdevice_attribute},
    },
};

use super::{
    super::{OP, choose},
    Problem, Windows, aligned, int, shared_limit,
};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand},
        tensor_map::{Boxes, TensorMap},
    },
    cudnn::DeviceInfo,
    element::kernel_suffix,
    error::{Error, Result, What},
    layout,
};

const MODULE: Module = module!(NEIGHBORHOOD_SM90);

/// Components of a box.
const WIDTH: u32 = 64;

/// `Sm90Neighborhood` of the kernels.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Params {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    out: Address,
    items: u64,
    grid: Windows,
    heads: u32,
    width: u32,
    tiles: u32,
    patches: [u32; 2],
    steps: [u32; 2],
    pitch: u32,
    keys: u32,
    rows: u32,
    factor: f32,
    unused: u32,
}

const _: () = assert!(size_of::<Params>() == 512, "as in neighborhood_sm90.cu");

// SAFETY: `repr(C)`, numbers only; the padding at the end is not read.
unsafe impl DeviceRepr for Params {}

/// Enqueues the kernel, which writes all of `out`; whether it serves the problem on this device.
pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, out: Address) -> Result<bool> {
    let extents = problem.extents;
    let plan = choose::warp_groups(problem.shape());
    let context = device.cuda_stream().context().clone();
    let hopper = DeviceInfo::of(context.ordinal()).is_ok_and(|info| info.capability == 900);
    let Some(plan) = plan.filter(|_| hopper) else { return Ok(false) };
    if shared_limit(device)? < choose::SHARED_BYTES {
        return Ok(false);
    }
    let [first, second] = plan.columns;
    let name = format!("neighborhood_sm90_{first}_{second}_{}", kernel_suffix(problem.q.dtype()));
    // Before the maps: a driver that takes the kernel has them.
    let kernel = Kernel::load(device, &MODULE, &name)?;
    let [q, k, v] = [joined(problem.q)?, joined(problem.k)?, joined(problem.v)?];
    let [rows, pitch] = [int(plan.panel[0])?, int(plan.panel[1])?];
    let queries = [choose::FRAMES, choose::LONG, choose::WARP_GROUP_SIDE].map(|n| n as u32);
    let keys = [1, rows, pitch];
    let maps = [(&q, queries), (&k, keys), (&v, keys)].map(|(operand, sides)| map(operand, plan.long, sides));
    if maps.iter().any(|map| matches!(map, Err(Error::Unsupported { .. }))) {
        return Ok(false);
    }
    let [of_q, of_k, of_v] = maps;
    let mut grid = Windows::new(problem)?;
    let mut steps = [int(extents.grid[2])?, 1];
    if plan.long == 1 {
        grid.extents.swap(1, 2);
        grid.windows.swap(1, 2);
        steps.reverse();
    }
    let items = [plan.patches[0], plan.patches[1], extents.heads, plan.tiles, extents.batch];
    let items = items.iter().fold(1u64, |product, &n| product.saturating_mul(n as u64));
    let params = Params {
        q: of_q?,
        k: of_k?,
        v: of_v?,
        out,
        items,
        grid,
        heads: int(extents.heads)?,
        width: int(extents.width)?,
        tiles: int(plan.tiles)?,
        patches: [int(plan.patches[0])?, int(plan.patches[1])?],
        steps,
        pitch,
        keys: int(plan.keys)?,
        rows: pitch * rows,
        factor: plan.factor,
        unused: 0,
    };
    let processors = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    let processors = u64::try_from(processors.w().what("multiprocessors of the device")?).unwrap_or(1);
    let blocks = Grid::blocks(OP, [processors.min(items), 1, 1], choose::THREADS)?;
    let blocks = Grid { shared_bytes: int(choose::SHARED_BYTES)?, ..blocks };
    // SAFETY: `Params` mirrors `Sm90Neighborhood`; the maps describe q, k and v, and boxes of the plan's panel; out is new
    // contiguous memory of these extents, all of whose heads the items of the plan write, over which the blocks loop; a block
    // has the threads and the shared memory of the kernel.
    unsafe { kernel.launch(blocks, &params) }?;
    Ok(true)
}

/// An aligned operand whose planes of all batch items are one axis: the tensor itself, or a copy.
fn joined(tensor: &Tensor) -> Result<Operand> {
    let (&[batch, planes, ..], &[of_batch, of_plane, ..]) = (tensor.dims(), tensor.stride()) else {
        return aligned(tensor);
    };
    if batch > 1 && planes > 1 && of_batch != planes * of_plane {
        return aligned(&layout::contiguous(tensor)?);
    }
    aligned(tensor)
}

/// Boxes of so many positions along T, the long axis (0 for H, 1 for W) and the other, of one head of at most [`WIDTH`]
/// components. Planes of all batch items are one axis.
fn map(operand: &Operand, long: usize, [t, a, b]: [u32; 3]) -> Result<TensorMap> {
    let tensor = operand.tensor();
    let (&[batch, planes, h, w, heads, width], &[of_batch, of_plane, of_h, of_w, of_head, of_component]) =
        (tensor.dims(), tensor.stride())
    else {
        let (got, expected) = (tensor.dims().to_vec(), "[B, T, H, W, heads, D]".into());
        return Err(Error::Shape { op: OP, operand: "operand", got, expected });
    };
    let of_plane = if planes == 1 { of_batch } else { of_plane };
    let mut extents = [width, heads, w, h, batch * planes];
    let mut strides = [of_component, of_head, of_w, of_h, of_plane];
    if long == 1 {
        extents.swap(2, 3);
        strides.swap(2, 3);
    }
    let (address, dtype) = (operand.address(), tensor.dtype());
    TensorMap::new(&Boxes { address, dtype, extents, strides, shape: [WIDTH, 1, b, a, t] })
}
