//! Launcher of `surround.cu`.

use candle_core::{DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::MAX_BLOCKS_Y;
use crate::{
    activation::Activation,
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        paths::{self, Path},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::Result,
    frames::{PixelNorm, Surround, surround::share},
    layout::{MemoryOrder, in_order, memory_order},
};

const OP: &str = "surround";
const MODULE: Module = module!(SURROUND);

/// Bytes of the widest access.
const WIDE: usize = 16;
/// Blocks that work on rows at most, and that copy the past.
const MAX_BLOCKS: usize = 1 << 14;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    past: Address,
    x: Address,
    out: Address,
    images: u64,
    channels: u64,
    lead: u64,
    rows: u32,
    row_blocks: u32,
    lanes: u32,
    norm: u32,
    eps: f32,
    frames: u32,
    height: u32,
    width: u32,
    before: u32,
    mirrored: u32,
    by_height: Divisor,
    by_width: Divisor,
}

const _: () = assert!(size_of::<Params>() == 120, "as in surround.cu");

// SAFETY: `repr(C)`, integers and a float, no padding: the 32-bit fields are ten.
unsafe impl DeviceRepr for Params {}

/// The op, or none for what the kernels do not serve: another order than channels-last halves, channels that are no whole
/// vectors.
pub(in crate::frames) fn surround(
    past: Option<&Tensor>,
    x: &Tensor,
    norm: Option<PixelNorm>,
    around: Surround,
) -> Result<Option<Tensor>> {
    let dtype = x.dtype();
    if dtype == DType::F32 || memory_order(x) != MemoryOrder::ChannelsLast {
        return Ok(None);
    }
    let [images, channels, frames, height, width] = std::array::from_fn(|axis| x.dims()[axis]);
    let elements = WIDE / dtype.size_in_bytes();
    let Some((lanes, held)) = share(channels / elements).filter(|_| channels.is_multiple_of(elements)) else {
        return Ok(None);
    };
    let Surround { before, after, mirrored } = around;
    let (t, h, w) = (before + frames + after, height + 2 * mirrored, width + 2 * mirrored);
    let rows = t * h * w;
    let device = device_of(OP, x)?;
    let lead = past.map_or(0, |past| past.dims()[2]);
    let dims = [images, channels, lead + t, h, w];
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    let x = Operand::new(OP, &in_order(x, MemoryOrder::ChannelsLast)?)?;
    let past = past.map(|past| Operand::new(OP, &in_order(past, MemoryOrder::ChannelsLast)?)).transpose()?;
    let addresses = [x.address(), out.address(), past.as_ref().map_or(0, Operand::address)];
    let aligned = addresses.iter().all(|address| address.is_multiple_of(WIDE as u64));
    if !aligned || rows as u64 >= Divisor::LIMIT || out.is_empty() {
        return Ok(None);
    }
    let row_blocks = rows.div_ceil(THREADS as usize / lanes).clamp(1, MAX_BLOCKS);
    let copied = lead * h * w * channels / elements;
    let copy_blocks = if copied == 0 { 0 } else { copied.div_ceil(THREADS as usize * 4).clamp(1, MAX_BLOCKS / 4) };
    let params = Params {
        past: past.as_ref().map_or(0, Operand::address),
        x: x.address(),
        out: out.address(),
        images: images as u64,
        channels: channels as u64,
        lead: (lead * h * w) as u64,
        rows: rows as u32,
        row_blocks: row_blocks as u32,
        lanes: lanes as u32,
        norm: match norm.map(|norm| norm.activation) {
            None => 0,
            Some(Activation::None) => 1,
            Some(Activation::Silu) => 2,
        },
        eps: norm.map_or(0.0, |norm| norm.eps as f32),
        frames: frames as u32,
        height: height as u32,
        width: width as u32,
        before: before as u32,
        mirrored: mirrored as u32,
        by_height: Divisor::new(OP, h)?,
        by_width: Divisor::new(OP, w)?,
    };
    let kernel = Kernel::load(device, &MODULE, &format!("{OP}_{held}_{}", kernel_suffix(dtype)))?;
    let grid = Grid::blocks(OP, [(row_blocks + copy_blocks) as u64, images.min(MAX_BLOCKS_Y) as u64, 1], THREADS)?;
    // SAFETY: `Params` mirrors that of surround.cu. x and past are packed channels-last, of the extents that it names,
    // which the op has checked against each other; lanes times held vectors cover the channels, in whole vectors at
    // aligned addresses; an image of the result has fewer than 2^31 positions. out is new memory, and the blocks write all
    // of it: row_blocks what lies behind the past, the others, of which there are some if it is not empty, the past.
    unsafe { kernel.launch(grid, &params)? };
    paths::count(Path::Surround);
    out.into_channels_last(OP, &dims).map(Some)
}
