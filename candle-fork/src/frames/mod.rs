//! What video networks do to frames besides convolving and normalising them: join and keep them, make two of one, pack
//! pixels into channels and back, repeat and average them, and turn them into bytes.
//!
//! Tensors are `[N, C, T, H, W]`. Results have the memory order of the first operand, contiguous or channels-last
//! ([`crate::layout`]).
//!
//! | file | what |
//! |---|---|
//! | `time.rs` | joining, keeping and splitting along time |
//! | `patches.rs` | squares of pixels as channels |
//! | `shortcut.rs`, `shortcut.cu` | shortcuts without parameters around a stage |
//! | `surround.rs`, `surround.cu` | what a convolution sees around a clip, and the norm before it |
//! | `depth_to_space.rs`, `depth_to_space.cu` | channels as frames and pixels |
//! | `rgb8.rs`, `clamped.rs`, `pixels.cu` | pixels as bytes, and as f32 in their range |
//! | `download.rs` | their way to the host |
//! | `cuda/` | launchers |

mod clamped;
#[cfg(feature = "cuda")]
mod cuda;
mod depth_to_space;
mod download;
mod patches;
mod rgb8;
mod shortcut;
mod surround;
#[cfg(test)]
mod tests;
mod time;

use candle_core::Tensor;

pub use self::{
    clamped::{ClampedFrames, clamped_frames},
    depth_to_space::depth_to_space,
    download::{Downloads, HostFrames},
    patches::{PatchOrder, patchify, unpatchify},
    rgb8::{Rgb8Frames, frames_to_rgb8},
    shortcut::{avg_down_add, dup_up_add},
    surround::{PixelNorm, Surround, surround},
    time::{cat_frames, split_pairs, tail_frames},
};
use crate::{
    error::{Error, Result, What},
    layout::{MemoryOrder, from_stored, in_order},
    operand::shape_error,
};

/// The extents of `[N, C, T, H, W]`.
fn extents(op: &'static str, operand: &'static str, x: &Tensor) -> Result<[usize; 5]> {
    match *x.dims() {
        [n, c, t, h, w] => Ok([n, c, t, h, w]),
        _ => Err(shape_error(op, operand, x, "[N, C, T, H, W]")),
    }
}

fn argument(op: &'static str, what: String) -> Error {
    Error::Argument { op, what }
}

/// x as its memory has it: contiguous, `[N, C, ..]` or `[N, .., C]`. Copied if it is not packed in this order.
fn to_memory(x: &Tensor, order: MemoryOrder) -> Result<Tensor> {
    let packed = in_order(x, order)?;
    match order {
        MemoryOrder::ChannelsFirst => Ok(packed),
        MemoryOrder::ChannelsLast => {
            let mut axes: Vec<usize> = (0..x.rank()).collect();
            axes[1..].rotate_left(1);
            packed.permute(axes).what("memory of frames")
        }
    }
}

/// The reverse of [`to_memory`]; nothing is copied.
fn from_memory(memory: Tensor, order: MemoryOrder) -> Result<Tensor> {
    match order {
        MemoryOrder::ChannelsFirst => Ok(memory),
        MemoryOrder::ChannelsLast => from_stored(&memory),
    }
}
