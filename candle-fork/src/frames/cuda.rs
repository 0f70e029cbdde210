//! Launchers of the CUDA kernels, and joining as two strided copies. All arguments have been checked by the ops.

mod depth_to_space;
mod download;
mod pixels;
mod shortcut;
mod surround;

use candle_core::Tensor;

pub(super) use self::{
    depth_to_space::depth_to_space,
    download::Buffers,
    pixels::{clamped_frames, frames_to_rgb8},
    shortcut::{avg_down_add, dup_up_add},
    surround::surround,
};
use crate::{
    cuda::{
        copy::copy_into,
        tensor::{Output, device_of},
    },
    error::Result,
    layout::MemoryOrder,
};

/// Most blocks along y; kernels loop over the rows that are left.
const MAX_BLOCKS_Y: usize = 65535;

/// past, then x, in the given order.
pub(super) fn cat_frames(past: &Tensor, x: &Tensor, order: MemoryOrder) -> Result<Tensor> {
    const OP: &str = "cat_frames";
    let mut dims: [usize; 5] = std::array::from_fn(|axis| x.dims()[axis]);
    dims[2] += past.dims()[2];
    let out = Output::new(OP, device_of(OP, x)?, x.dtype(), dims.iter().product())?;
    let strides = strides(&dims, order);
    copy_into(past, &out, 0, &strides)?;
    copy_into(x, &out, past.dims()[2] * strides[2], &strides)?;
    finish(OP, out, &dims, order)
}

/// Strides of a packed tensor of shape `[N, C, T, H, W]`.
fn strides(dims: &[usize; 5], order: MemoryOrder) -> [usize; 5] {
    let [_, c, t, h, w] = *dims;
    match order {
        MemoryOrder::ChannelsFirst => [c * t * h * w, t * h * w, h * w, w, 1],
        MemoryOrder::ChannelsLast => [t * h * w * c, 1, h * w * c, w * c, c],
    }
}

/// Memory filled in an order as a tensor.
fn finish(op: &'static str, out: Output, dims: &[usize], order: MemoryOrder) -> Result<Tensor> {
    match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(op, dims),
        MemoryOrder::ChannelsFirst => out.into_tensor(op, dims),
    }
}
