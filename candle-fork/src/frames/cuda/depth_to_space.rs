//! Launcher of `depth_to_space.cu`.

use candle_core::{DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::MAX_BLOCKS_Y;
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        paths::{self, Path},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::Result,
    layout::{MemoryOrder, in_order, memory_order},
};

const OP: &str = "depth_to_space";
const MODULE: Module = module!(DEPTH_TO_SPACE);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    main: Address,
    x: Address,
    out: Address,
    images: u64,
    vectors: u32,
    channels: u32,
    cells: u32,
    runs: u32,
    frames: u32,
    height: u32,
    width: u32,
    drop: u32,
    by_vectors: Divisor,
    by_height: Divisor,
    by_width: Divisor,
    by_pt: Divisor,
    by_ph: Divisor,
    by_pw: Divisor,
    by_runs: Divisor,
}

const _: () = assert!(size_of::<Params>() == 176, "as in depth_to_space.cu");

// SAFETY: `repr(C)`, integers only, no padding: the 32-bit fields are eight and the words of the divisors.
unsafe impl DeviceRepr for Params {}

/// The op, or none for what the kernels do not serve: another order than channels-last halves, channels that are no whole
/// vectors.
pub(in crate::frames) fn depth_to_space(
    x: &Tensor,
    factor: [usize; 3],
    shortcut: Option<&Tensor>,
    drop: usize,
) -> Result<Option<Tensor>> {
    let dtype = x.dtype();
    if dtype == DType::F32 || memory_order(x) != MemoryOrder::ChannelsLast {
        return Ok(None);
    }
    let [images, wide, frames, height, width] = std::array::from_fn(|axis| x.dims()[axis]);
    let [pt, ph, pw] = factor;
    let cells = pt * ph * pw;
    let channels = wide / cells;
    let elements = WIDE / dtype.size_in_bytes();
    let dims = [images, channels, frames * pt - drop, height * ph, width * pw];
    let vectors = dims[1..].iter().product::<usize>() / elements;
    if !channels.is_multiple_of(elements) || vectors as u64 >= Divisor::LIMIT || wide as u64 >= Divisor::LIMIT {
        return Ok(None);
    }
    let device = device_of(OP, x)?;
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    let runs = shortcut.map_or(1, |shortcut| shortcut.dims()[1] / cells);
    let main = Operand::new(OP, &in_order(x, MemoryOrder::ChannelsLast)?)?;
    let added = shortcut.map(|x| Operand::new(OP, &in_order(x, MemoryOrder::ChannelsLast)?)).transpose()?;
    let aligned = [main.address(), out.address()].iter().all(|address| address.is_multiple_of(WIDE as u64));
    if !aligned || out.is_empty() {
        return Ok(None);
    }
    let params = Params {
        main: main.address(),
        x: added.as_ref().map_or(0, Operand::address),
        out: out.address(),
        images: images as u64,
        vectors: vectors as u32,
        channels: channels as u32,
        cells: cells as u32,
        runs: runs as u32,
        frames: frames as u32,
        height: height as u32,
        width: width as u32,
        drop: drop as u32,
        by_vectors: Divisor::new(OP, channels / elements)?,
        by_height: Divisor::new(OP, dims[3])?,
        by_width: Divisor::new(OP, dims[4])?,
        by_pt: Divisor::new(OP, pt)?,
        by_ph: Divisor::new(OP, ph)?,
        by_pw: Divisor::new(OP, pw)?,
        by_runs: Divisor::new(OP, runs)?,
    };
    let kind = if added.is_some() { "add" } else { "move" };
    let kernel = Kernel::load(device, &MODULE, &format!("{OP}_{kind}_{}", kernel_suffix(dtype)))?;
    let blocks = vectors.div_ceil(THREADS as usize) as u64;
    let grid = Grid::blocks(OP, [blocks, images.min(MAX_BLOCKS_Y) as u64, 1], THREADS)?;
    // SAFETY: `Params` mirrors that of depth_to_space.cu. x and the shortcut are packed channels-last, of the extents that
    // it names, which the op has checked against each other and the factors; channels of the result are whole vectors at
    // aligned addresses, fewer than 2^31 in an image. out is new memory, all of whose vectors the loops over the grid write.
    unsafe { kernel.launch(grid, &params)? };
    paths::count(Path::DepthToSpace);
    out.into_channels_last(OP, &dims).map(Some)
}
