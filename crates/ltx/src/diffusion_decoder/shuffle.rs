//! Moving channels into space and back.

use candle_core::Tensor;
use candle_fork::{
    What,
    layout::{contiguous, copy_into},
};

use super::parts::Linear;
use crate::error::Result;

/// What happens to the first frame behind an upsample that doubles time: it is a duplicate where a clip begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FirstFrame {
    /// The clip begins here.
    Drop,
    /// The frames are from the middle of a clip.
    Keep,
}

/// A linear map to more channels, which then become positions.
#[derive(Debug)]
pub(super) struct Upsample {
    /// To channels (t, h, w, c): the published map with its rows in another order ([`super::parts::Parts::upsample`]).
    pub(super) proj: Linear,
    pub(super) stride: [usize; 3],
}

impl Upsample {
    /// x `[B, T H W, C]` of a grid; tokens and grid behind it. `scratch_bytes` are for what is not in its place yet.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        [t, h, w]: [usize; 3],
        first: FirstFrame,
        scratch_bytes: u64,
    ) -> Result<(Tensor, [usize; 3])> {
        let [st, sh, sw] = self.stride;
        let (batch, _, _) = x.dims3().what("upsample")?;
        let channels = self.proj.weight.out_features() / (st * sh * sw);
        let dropped = usize::from(first == FirstFrame::Drop && st == 2);
        let grid = [t * st - dropped, h * sh, w * sw];
        let (plane, spread) = (h * w, grid[1] * grid[2]);
        let out = Tensor::zeros((batch, grid[0] * spread, channels), x.dtype(), x.device()).what("upsample")?;
        let frame_bytes = plane * self.proj.weight.out_features() * x.dtype().size_in_bytes();
        let most = usize::try_from(scratch_bytes / frame_bytes.max(1) as u64).unwrap_or(usize::MAX).max(1);
        for item in 0..batch {
            let (x, out) = (x.get(item).what("upsample")?, out.get(item).what("upsample")?);
            let mut begin = 0;
            while begin < t {
                // The frame of which a part is dropped is one of its own.
                let end = if begin == 0 && dropped > 0 { 1 } else { begin.saturating_add(most).min(t) };
                let skipped = if begin == 0 { dropped } else { 0 };
                let part = x.narrow(0, begin * plane, (end - begin) * plane).what("upsample")?;
                let wide = self.proj.forward(&part)?;
                let place = || {
                    let wide =
                        wide.reshape(&[end - begin, h, w, st, sh, sw, channels])?.narrow(3, skipped, st - skipped)?;
                    let at = begin * st - (dropped - skipped);
                    let out = out.narrow(0, at * spread, (end - begin) * (st - skipped) * spread)?;
                    let out = out.reshape(&[end - begin, st - skipped, h, sh, w, sw, channels])?;
                    Ok((wide.permute([0, 3, 1, 4, 2, 5, 6])?, out))
                };
                let (from, to) = place().what("upsample")?;
                copy_into(&from, &to)?;
                begin = end;
            }
        }
        Ok((out, grid))
    }
}

/// Pixels `[B, C, F, p H, p W]` to tokens `[B, F H W, C p p]`; channels (c, row, column), the column in a patch fastest.
pub(super) fn patchify(pixels: &Tensor, p: usize) -> Result<Tensor> {
    let (batch, c, frames, height, width) = pixels.dims5().what("patches of pixels")?;
    let split = pixels.reshape(&[batch, c, frames, height / p, p, width / p, p]);
    let patches = split.and_then(|x| x.permute([0, 2, 3, 5, 1, 4, 6])).what("patches of pixels")?;
    let tokens = contiguous(&patches)?.reshape((batch, frames * (height / p) * (width / p), c * p * p));
    Ok(tokens.what("patches of pixels")?)
}

/// Tokens of a grid to pixels: the inverse of [`patchify`].
pub(super) fn unpatchify(tokens: &Tensor, [t, h, w]: [usize; 3], p: usize) -> Result<Tensor> {
    let (batch, _, channels) = tokens.dims3().what("pixels of patches")?;
    let c = channels / (p * p);
    let split = tokens.reshape(&[batch, t, h, w, c, p, p]);
    let pixels = split.and_then(|x| x.permute([0, 4, 1, 2, 5, 3, 6])).what("pixels of patches")?;
    Ok(contiguous(&pixels)?.reshape((batch, c, t, h * p, w * p)).what("pixels of patches")?)
}

/// Latents `[B, C, T, H, W]` to tokens `[B, T H W, C]`.
pub(super) fn tokens(latents: &Tensor) -> Result<Tensor> {
    let flat = latents.flatten_from(2).and_then(|flat| flat.transpose(1, 2)?.contiguous());
    Ok(flat.what("tokens of latents")?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_fork::LinearWeight;

    use super::*;
    use crate::diffusion_decoder::testing::{bits, elements, noise};

    #[test]
    fn a_patch_keeps_the_order_of_its_pixels() {
        let pixels = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((1, 1, 1, 2, 4)).unwrap();
        assert_eq!(elements(&patchify(&pixels, 2).unwrap()), [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
    }

    #[test]
    fn unpatchify_undoes_patchify() {
        let pixels = noise(1, 1.0, &[2, 3, 2, 8, 12]);
        let tokens = patchify(&pixels, 4).unwrap();
        assert_eq!(tokens.dims(), [2, 2 * 2 * 3, 48]);
        assert_eq!(bits(&unpatchify(&tokens, [2, 2, 3], 4).unwrap()), bits(&pixels));
    }

    /// The identity, from and to channels (t, h, w, c).
    fn upsample(channels: usize, stride: [usize; 3]) -> Upsample {
        let weight = LinearWeight::from_tensor(Tensor::eye(channels, DType::F32, &Device::Cpu).unwrap()).unwrap();
        let bias = Tensor::zeros(channels, DType::F32, &Device::Cpu).unwrap();
        Upsample { proj: Linear { weight, bias }, stride }
    }

    #[test]
    fn channels_become_positions() {
        // One position, channels (t, h, w, c) counted through: 2 x 1 x 2 positions of 2 channels.
        let x = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((1, 1, 8)).unwrap();
        let run = |stride, first| upsample(8, stride).forward(&x, [1, 1, 1], first, 0).unwrap();
        let (kept, grid) = run([2, 1, 2], FirstFrame::Keep);
        assert_eq!((elements(&kept), grid), ((0..8).map(|i| i as f32).collect(), [2, 1, 2]));
        let (dropped, grid) = run([2, 1, 2], FirstFrame::Drop);
        assert_eq!((elements(&dropped), grid), (vec![4.0, 5.0, 6.0, 7.0], [1, 1, 2]));
        let (same, grid) = run([1, 2, 2], FirstFrame::Drop);
        assert_eq!((same.dims(), grid), (&[1, 4, 2][..], [1, 2, 2]));
    }

    #[test]
    fn parts_of_a_clip_come_to_their_places() {
        let x = noise(5, 1.0, &[2, 5 * 2 * 3, 16]);
        for stride in [[2, 2, 2], [2, 1, 2], [1, 2, 2]] {
            for first in [FirstFrame::Drop, FirstFrame::Keep] {
                let upsample = upsample(16, stride);
                let (got, [t, h, w]) = upsample.forward(&x, [5, 2, 3], first, 0).unwrap();
                let (whole, _) = upsample.forward(&x, [5, 2, 3], first, u64::MAX).unwrap();
                assert_eq!(bits(&got), bits(&whole));
                // Frame by frame from the definition.
                let [st, sh, sw] = stride;
                let c = 16 / (st * sh * sw);
                let all = x.reshape(&[2, 5, 2, 3, st, sh, sw, c]).unwrap().permute([0, 1, 4, 2, 5, 3, 6, 7]).unwrap();
                let all = all.reshape((2, 5 * st, h * w * c)).unwrap();
                let want = all.narrow(1, 5 * st - t, t).unwrap().contiguous().unwrap();
                assert_eq!(elements(&got), elements(&want), "{stride:?} {first:?}");
            }
        }
    }
}
