//! Squares of pixels as channels.

use candle_core::Tensor;
use candle_fork::{
    What,
    frames::{self, PatchOrder},
};

use crate::{architecture::Unpack, error::Result};

/// Frames `[C, T, H, W]` to `[1, C p p, T, H / p, W / p]`.
pub(crate) fn patchify(x: &Tensor, p: usize) -> Result<Tensor> {
    Ok(frames::patchify(&x.unsqueeze(0).what("patches")?, p, PatchOrder::ColumnMajor)?)
}

/// What a decoder gives, `[1, C p p, T, H, W]`, as frames `[C, T, H p, W p]`.
pub(crate) fn unpack(x: &Tensor, unpack: Unpack) -> Result<Tensor> {
    let pixels = frames::unpatchify(x, unpack.side(), pixel_order(unpack))?;
    Ok(pixels.squeeze(0).what("pixels")?)
}

/// In which order channels become pixels.
pub(crate) fn pixel_order(unpack: Unpack) -> PatchOrder {
    match unpack {
        Unpack::Patches(_) => PatchOrder::ColumnMajor,
        Unpack::PixelShuffle(_) => PatchOrder::RowMajor,
    }
}
