//! Launcher of `interleave2d.cu`, and upsampling as a strided copy. All arguments have been checked by the ops.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use crate::{
    cuda::{
        grid::{Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Error, Result, What},
    layout::{MemoryOrder, contiguous, from_stored, in_order, memory_order},
};

const MODULE: Module = module!(INTERLEAVE2D);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// Most blocks along y; kernels loop over the rows that are left.
const MAX_BLOCKS_Y: u64 = 65535;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    parts: [Address; 4],
    out: Address,
    rows: u64,
    width: u64,
    pixel: u64,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

/// The result has the shape `dims` and the memory order of the first part.
pub(super) fn interleave2d(parts: &[Tensor; 4], dims: &[usize]) -> Result<Tensor> {
    const OP: &str = "interleave2d";
    let first = &parts[0];
    let (device, dtype) = (device_of(OP, first)?, first.dtype());
    // Images without an axis of channels are planes.
    let order = if first.rank() > 3 { memory_order(first) } else { MemoryOrder::ChannelsFirst };
    let part = |index: usize| Operand::new(OP, &in_order(&parts[index], order)?);
    let operands = [part(0)?, part(1)?, part(2)?, part(3)?];
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let width = first.dims()[first.rank() - 1];
        let channels = match order {
            MemoryOrder::ChannelsLast => first.dims()[1],
            MemoryOrder::ChannelsFirst => 1,
        };
        let addresses = operands.each_ref().map(Operand::address);
        let elements = WIDE / dtype.size_in_bytes();
        let aligned = addresses.iter().chain([&out.address()]).all(|address| address.is_multiple_of(WIDE as u64));
        let (kind, moved) = match (order, channels.is_multiple_of(elements) && aligned) {
            (MemoryOrder::ChannelsFirst, _) => ("pairs", 1),
            (MemoryOrder::ChannelsLast, true) => ("wide", elements),
            (MemoryOrder::ChannelsLast, false) => ("1", 1),
        };
        let pixel = channels / moved;
        let row = width.checked_mul(pixel).filter(|&n| n < 1 << 31);
        let row = row.ok_or_else(|| Error::Unsupported { op: OP, what: format!("rows of {width} x {channels}") })?;
        let rows = first.elem_count() / (width * channels);
        let params = Params {
            parts: addresses,
            out: out.address(),
            rows: rows as u64,
            width: width as u64,
            pixel: pixel as u64,
        };
        let kernel = Kernel::load(device, &MODULE, &format!("{OP}_{kind}_{}", kernel_suffix(dtype)))?;
        let grid = [row.div_ceil(THREADS as usize) as u64, (rows as u64).min(MAX_BLOCKS_Y), 1];
        // SAFETY: `Params` mirrors that of interleave2d.cu. The parts are packed in one order, `rows` rows of `width`
        // pixels of `pixel` vectors each; out is new memory of four times their size, and every pixel of every part has
        // one thread that writes it there. Wide only for pixels of whole vectors at aligned addresses; pairs lie at
        // even elements of out, whose memory is aligned.
        unsafe { kernel.launch(Grid::blocks(OP, grid, THREADS)?, &params)? };
    }
    match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(OP, dims),
        MemoryOrder::ChannelsFirst => out.into_tensor(OP, dims),
    }
}

/// The result has the shape `out_dims` and the memory order of x.
pub(super) fn upsample_nearest(x: &Tensor, out_dims: &[usize], factors: &[usize]) -> Result<Tensor> {
    const WHAT: &str = "upsample_nearest";
    let order = memory_order(x);
    // Axes of the result in the order of memory, each of the upsampled ones followed by one of stride 0.
    let spatial = 2..x.rank();
    let axes: Vec<usize> = match order {
        MemoryOrder::ChannelsFirst => (0..x.rank()).collect(),
        MemoryOrder::ChannelsLast => [0].into_iter().chain(spatial.clone()).chain([1]).collect(),
    };
    let mut view = x.permute(axes.as_slice()).what(WHAT)?;
    let first = axes.iter().position(|&axis| axis == 2).unwrap_or(0);
    for (index, &factor) in factors.iter().enumerate() {
        let at = first + 2 * index + 1;
        view = view.unsqueeze(at).what(WHAT)?;
        let mut repeated = view.dims().to_vec();
        repeated[at] = factor;
        view = view.broadcast_as(repeated).what(WHAT)?;
    }
    let stored: Vec<usize> = axes.iter().map(|&axis| out_dims[axis]).collect();
    let packed = contiguous(&view)?.reshape(stored).what(WHAT)?;
    match order {
        MemoryOrder::ChannelsFirst => Ok(packed),
        MemoryOrder::ChannelsLast => from_stored(&packed),
    }
}
