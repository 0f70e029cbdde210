//! Moving frames and channels, in the memory order that convolutions of the device read.

use candle_core::Tensor;
use candle_fork::{
    What,
    layout::{MemoryOrder, channels_last, contiguous, from_stored, native_order},
};

use crate::error::Result;

const WHAT: &str = "moving frames and channels";

/// `[B, C, T, H, W]` as its memory is to be: `[B, T, H, W, C]` in channels-last, contiguous.
pub(super) fn to_stored(x: &Tensor) -> Result<Tensor> {
    let stored = channels_last(x)?.permute(vec![0, 2, 3, 4, 1]).what(WHAT)?;
    Ok(contiguous(&stored)?)
}

fn is_last(x: &Tensor) -> bool {
    native_order(x.device(), x.dtype()) == MemoryOrder::ChannelsLast
}

/// Tensors one after the other along an axis; axes are those of `[B, C, T, H, W]`.
pub(super) fn join(parts: &[Tensor], axis: usize) -> Result<Tensor> {
    match parts {
        [one] => return Ok(one.clone()),
        [first, ..] if is_last(first) && axis >= 2 => {
            let stored = parts.iter().map(to_stored).collect::<Result<Vec<_>>>()?;
            return Ok(from_stored(&Tensor::cat(&stored, axis - 1).what(WHAT)?)?);
        }
        _ => {}
    }
    let parts = parts.iter().map(contiguous).collect::<candle_fork::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&parts, axis).what(WHAT)?)
}

/// Frames and pixels become channels: frame u and pixel (q, r) of a cell is channel `((c pt + u) ph + q) pw + r`.
///
/// x `[B, C, T pt, H ph, W pw]` to `[B, C pt ph pw, T, H, W]`.
pub(super) fn cells_to_channels(x: &Tensor, [pt, ph, pw]: [usize; 3]) -> Result<Tensor> {
    let (b, c, frames, height, width) = x.dims5().what(WHAT)?;
    let (t, h, w, channels) = (frames / pt, height / ph, width / pw, c * pt * ph * pw);
    const AXES: [usize; 8] = [0, 1, 3, 5, 7, 2, 4, 6];
    if is_last(x) {
        let cells = to_stored(x)?.reshape(vec![b, t, pt, h, ph, w, pw, c]).and_then(|x| x.permute(AXES.to_vec()));
        let moved = contiguous(&cells.what(WHAT)?)?.reshape((b, t, h, w, channels)).what(WHAT)?;
        return Ok(from_stored(&moved)?);
    }
    let cells = contiguous(x)?.reshape(vec![b, c, t, pt, h, ph, w, pw]).and_then(|x| x.permute(AXES.to_vec()));
    Ok(contiguous(&cells.what(WHAT)?)?.reshape((b, channels, t, h, w)).what(WHAT)?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn range(dims: (usize, usize, usize, usize, usize)) -> Tensor {
        let count = dims.0 * dims.1 * dims.2 * dims.3 * dims.4;
        Tensor::arange(0f32, count as f32, &Device::Cpu).unwrap().reshape(dims).unwrap()
    }

    fn values(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn the_width_of_a_cell_is_the_fastest_among_its_channels() {
        let x = range((1, 2, 2, 2, 2));
        let y = cells_to_channels(&x, [2, 2, 2]).unwrap();
        assert_eq!((y.dims(), values(&y)), (&[1, 16, 1, 1, 1][..], values(&x)));
        let y = cells_to_channels(&range((1, 1, 2, 1, 3)), [2, 1, 1]).unwrap();
        assert_eq!((y.dims(), values(&y)), (&[1, 2, 1, 1, 3][..], vec![0., 1., 2., 3., 4., 5.]));
        let y = cells_to_channels(&range((1, 1, 1, 2, 4)), [1, 2, 2]).unwrap();
        assert_eq!(values(&y), [0., 2., 1., 3., 4., 6., 5., 7.]);
    }

    #[test]
    fn frames_are_joined_in_order() {
        let (a, b) = (range((1, 2, 1, 1, 2)), range((1, 2, 2, 1, 2)));
        let y = join(&[a, b], 2).unwrap();
        assert_eq!(
            (y.dims(), values(&y)),
            (&[1, 2, 3, 1, 2][..], vec![0., 1., 0., 1., 2., 3., 2., 3., 4., 5., 6., 7.])
        );
    }
}
