//! Launcher of `channel_rms_norm.cu`.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{MAX_BLOCKS, MAX_BLOCKS_Y, THREADS, WIDE, aligned};
use crate::{
    activation::Activation,
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::Result,
    layout::{MemoryOrder, contiguous, in_order, memory_order},
    norm::plan::{Share, blocks},
};

const OP: &str = "channel_rms_norm";
const MODULE: Module = module!(CHANNEL_RMS_NORM);

/// Threads of a row at most.
const WARP: usize = 32;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    past: Address,
    x: Address,
    gamma: Address,
    out: Address,
    tail: Address,
    images: u64,
    lead: u64,
    extent: u64,
    kept: u64,
    channels: u64,
    norm_blocks: u32,
    lanes: u32,
    gamma_type: u32,
    silu: u32,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

/// The result has the shape `dims` and the memory order of x. With it come its last `keep` frames, if the kernel of this
/// order and these channels writes them along.
pub(in crate::norm) fn channel_rms_norm(
    past: Option<&Tensor>,
    x: &Tensor,
    gamma: &Tensor,
    dims: &[usize],
    activation: Activation,
    keep: usize,
) -> Result<(Tensor, Option<Tensor>)> {
    let device = device_of(OP, x)?;
    let order = memory_order(x);
    let x = Operand::new(OP, &in_order(x, order)?)?;
    let past = past.map(|past| Operand::new(OP, &in_order(past, order)?)).transpose()?;
    let gamma = Operand::new(OP, &contiguous(gamma)?)?;
    let dtype = x.tensor().dtype();
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    let (images, channels) = (dims[0], dims[1]);
    let positions = |dims: &[usize]| dims[2..].iter().product::<usize>();
    let (extent, lead) = (positions(x.tensor().dims()), positions(dims) - positions(x.tensor().dims()));
    let elements = WIDE / dtype.size_in_bytes();
    let addresses = [x.address(), out.address(), past.as_ref().map_or(0, Operand::address)];
    let share = if channels.is_multiple_of(elements) && aligned(&addresses) {
        Share::of(channels / elements, WARP)
    } else {
        None
    };
    // Frames of the past are not within reach of the kernel that writes the tail.
    let keeps = order == MemoryOrder::ChannelsLast && share.is_some() && (1..=x.tensor().dims()[2]).contains(&keep);
    let tail_dims = |keep| [&dims[..2], &[keep], &dims[3..]].concat();
    let tail = if keeps { Some(Output::new(OP, device, dtype, tail_dims(keep).iter().product())?) } else { None };
    // Name, rows of a block, elements that the copy of past moves at once.
    let (kernel, rows, moved) = match (order, share) {
        (MemoryOrder::ChannelsLast, Some(share)) => {
            (format!("last_{}", share.held), THREADS as usize / share.lanes as usize, elements)
        }
        (MemoryOrder::ChannelsLast, None) => ("last_any".to_owned(), THREADS as usize / WARP, 1),
        (MemoryOrder::ChannelsFirst, _) => ("first".to_owned(), WARP, 1),
    };
    if !out.is_empty() {
        let norm_blocks = blocks(extent, rows, MAX_BLOCKS);
        let copy_blocks =
            if lead == 0 { 0 } else { blocks(lead * channels, moved * THREADS as usize * 4, MAX_BLOCKS / 4) };
        let params = Params {
            past: past.as_ref().map_or(0, Operand::address),
            x: x.address(),
            gamma: gamma.address(),
            out: out.address(),
            tail: tail.as_ref().map_or(0, Output::address),
            images: images as u64,
            lead: lead as u64,
            extent: extent as u64,
            kept: tail.as_ref().map_or(0, |tail| (tail.len() / (images * channels).max(1)) as u64),
            channels: channels as u64,
            norm_blocks: norm_blocks as u32,
            lanes: share.map_or(0, |share| share.lanes),
            gamma_type: element_type(OP, "gamma", gamma.tensor().dtype())?,
            silu: u32::from(activation == Activation::Silu),
        };
        let name = format!("{OP}_{kernel}_{}", kernel_suffix(dtype));
        let kernel = Kernel::load(device, &MODULE, &name)?;
        let grid = Grid::blocks(OP, [norm_blocks + copy_blocks, images.min(MAX_BLOCKS_Y) as u64, 1], THREADS)?;
        // SAFETY: `Params` mirrors that of channel_rms_norm.cu. x, past and out are packed in one order, with the
        // extents that it names, and gamma has `channels` elements: the op has checked the shapes. `lanes` and the name
        // come from one share, made only for rows of whole vectors at aligned addresses. out is new memory, and the
        // blocks write all of it: norm_blocks the positions of x, the others, of which there are some unless lead is 0,
        // those of past. tail is new memory too, of the last positions of x: norm_blocks write all of it.
        unsafe { kernel.launch(grid, &params)? };
    }
    let y = match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(OP, dims)?,
        MemoryOrder::ChannelsFirst => out.into_tensor(OP, dims)?,
    };
    let tail = tail.map(|tail| tail.into_channels_last(OP, &tail_dims(keep))).transpose()?;
    Ok((y, tail))
}
