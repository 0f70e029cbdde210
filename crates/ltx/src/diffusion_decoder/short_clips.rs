//! Clips and pictures that are smaller than the windows.

use candle_core::Tensor;
use candle_fork::What;

use super::config::DiffusionDecoderConfig;
use crate::error::Result;

/// What happens to latents that are smaller than a window of the network.
///
/// The two give different pixels. Both are in use: the first in Comfy, the second in the reference of Lightricks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShortClips {
    /// Windows shrink to the grid.
    #[default]
    Clamp,
    /// Latents grow to the windows: the last frame is repeated behind, rows and columns at the border are repeated on both
    /// sides, the odd one behind; pixels are cut to size. Noise is that of the grown clip.
    PadLatent,
}

/// Where the latents lie in the grown ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Growth {
    /// Extents of the latents (T, H, W).
    latents: [usize; 3],
    /// Latents before the first (T, H, W).
    before: [usize; 3],
    /// Latents behind the last (T, H, W).
    behind: [usize; 3],
}

impl Growth {
    pub(super) fn new(policy: ShortClips, config: &DiffusionDecoderConfig, latents: [usize; 3]) -> Self {
        let floor = match policy {
            ShortClips::Clamp => [0; 3],
            ShortClips::PadLatent => config.window_floor(),
        };
        let missing: [usize; 3] = std::array::from_fn(|axis| floor[axis].saturating_sub(latents[axis]));
        let before = [0, missing[1] / 2, missing[2] / 2];
        Self { latents, before, behind: std::array::from_fn(|axis| missing[axis] - before[axis]) }
    }

    /// Extents of the grown latents.
    pub(super) fn grown(&self) -> [usize; 3] {
        std::array::from_fn(|axis| self.before[axis] + self.latents[axis] + self.behind[axis])
    }

    /// Latents `[B, C, T, H, W]` with their borders repeated.
    pub(super) fn grow(&self, latents: &Tensor) -> Result<Tensor> {
        let grow = || {
            (0..3).try_fold(latents.clone(), |x, axis| {
                if self.before[axis] + self.behind[axis] == 0 {
                    return Ok(x);
                }
                x.pad_with_same(axis + 2, self.before[axis], self.behind[axis])
            })
        };
        Ok(grow().what("latents that grow to the windows")?)
    }

    /// The clip `[B, C, F, H, W]` out of that of the grown latents; `compression` is pixels per latent.
    pub(super) fn cut(&self, pixels: &Tensor, compression: [usize; 3]) -> Result<Tensor> {
        let cut = || {
            (0..3).try_fold(pixels.clone(), |x, axis| {
                let factor = compression[axis];
                let (start, len) = match axis {
                    // The first latent frame stands for one frame, and nothing is before it.
                    0 => (0, (self.latents[0] - 1) * factor + 1),
                    _ => (self.before[axis] * factor, self.latents[axis] * factor),
                };
                x.narrow(axis + 2, start, len)
            })
        };
        Ok(cut().and_then(|x| x.contiguous()).what("pixels of the clip")?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::diffusion_decoder::testing::{elements, published};

    #[test]
    fn latents_grow_to_the_windows_and_pixels_are_cut_back() {
        let growth = Growth::new(ShortClips::PadLatent, &published(), [2, 8, 4]);
        assert_eq!((growth.grown(), growth.before, growth.behind), ([3, 8, 7], [0, 0, 1], [1, 0, 2]));
        let pixels = Tensor::zeros((1, 3, 17, 256, 224), candle_core::DType::F32, &Device::Cpu).unwrap();
        assert_eq!(growth.cut(&pixels, [8, 32, 32]).unwrap().dims(), [1, 3, 9, 256, 128]);
        let clamped = Growth::new(ShortClips::Clamp, &published(), [1, 1, 1]);
        assert_eq!(clamped.grown(), [1, 1, 1]);
    }

    #[test]
    fn borders_are_repeated() {
        let mut config = published();
        config.stage_kernels.fill([1, 1, 1]);
        config.stage_kernels[0] = [3, 1, 5];
        config.stage5_kernel = [1, 1, 1];
        let growth = Growth::new(ShortClips::PadLatent, &config, [2, 1, 2]);
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap().reshape((1, 1, 2, 1, 2)).unwrap();
        let rows = [[1.0, 1.0, 2.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0, 4.0], [3.0, 3.0, 4.0, 4.0, 4.0]];
        assert_eq!(elements(&growth.grow(&x).unwrap()), rows.concat());
    }
}
