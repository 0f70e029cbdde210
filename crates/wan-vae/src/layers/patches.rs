//! Squares of pixels as channels.

use candle_core::Tensor;
use candle_fork::What;

use crate::{architecture::Unpack, error::Result};

/// Frames `[C, T, H, W]` to `[1, C p p, T, H / p, W / p]`, channel `(c p + r) p + q` of the pixel in row q and column r
/// of its square. The column is the slower index, unlike in a pixel shuffle.
pub(crate) fn patchify(x: &Tensor, p: usize) -> Result<Tensor> {
    let packed = || {
        let (c, t, h, w) = x.dims4()?;
        if p == 1 {
            return x.unsqueeze(0);
        }
        let cells = x.reshape((c, t, h / p, p, w / p, p))?.permute((0, 5, 3, 1, 2, 4))?;
        cells.reshape((1, c * p * p, t, h / p, w / p))
    };
    Ok(packed().what("patches")?)
}

/// What a decoder gives, `[1, C p p, T, H, W]`, as frames `[C, T, H p, W p]`.
pub(crate) fn unpack(x: &Tensor, unpack: Unpack) -> Result<Tensor> {
    let p = unpack.side();
    let pixels = || {
        let (_, c, t, h, w) = x.dims5()?;
        if p == 1 {
            return x.squeeze(0);
        }
        let cells = x.reshape((c / (p * p), p, p, t, h, w))?;
        let cells = match unpack {
            Unpack::Patches(_) => cells.permute((0, 3, 4, 2, 5, 1))?,
            Unpack::PixelShuffle(_) => cells.permute((0, 3, 4, 1, 5, 2))?,
        };
        cells.reshape((c / (p * p), t, h * p, w * p))
    };
    Ok(pixels().what("pixels")?)
}
