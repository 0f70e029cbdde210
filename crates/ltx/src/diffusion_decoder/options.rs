//! How a clip is decoded.

use candle_core::{DType, Device, Tensor};
use candle_fork::{What, noise::philox_normal};
use sampling::NoiseGenerator;

use super::short_clips::ShortClips;
use crate::error::{Error, Result};

/// Noise that pixels are made from. Two seeds give two fine textures.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Noise {
    /// One canvas for the whole clip: item i of a batch draws `(channels, frames, height, width)` from
    /// the stream of `seed + i`.
    Seed {
        /// Seed.
        seed: u64,
        /// Generator.
        generator: NoiseGenerator,
    },
    /// Standard normal values of the pixels' shape, `(B, 3, F, H, W)`; with [`ShortClips::PadLatent`] that of the grown
    /// clip.
    Given(Tensor),
}

impl Noise {
    /// Fails if the noise is given and has another shape.
    pub(super) fn check(&self, dims: [usize; 5]) -> Result<()> {
        match self {
            Self::Given(noise) if noise.dims() != dims => Err(crate::error::shape("noise", noise, format!("{dims:?}"))),
            _ => Ok(()),
        }
    }

    /// The canvas, in `dtype` on `device`.
    pub(super) fn canvas(&self, dims: [usize; 5], dtype: DType, device: &Device) -> Result<Tensor> {
        let canvas = match self {
            Self::Given(noise) => {
                self.check(dims)?;
                noise.clone()
            }
            &Self::Seed { seed, generator } => {
                let items =
                    (0..dims[0] as u64).map(|item| draw(generator, seed.wrapping_add(item), dims, dtype, device));
                Tensor::stack(&items.collect::<Result<Vec<_>>>()?, 0).what("noise")?
            }
        };
        Ok(canvas.to_dtype(dtype).and_then(|canvas| canvas.to_device(device)).what("noise")?)
    }
}

/// The canvas of one clip: drawn on the device where it has a generator, which gives the same values.
fn draw(generator: NoiseGenerator, seed: u64, dims: [usize; 5], dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = &dims[1..];
    if device.is_cuda() && generator == NoiseGenerator::Philox {
        return Ok(philox_normal(seed, shape, dtype, device)?);
    }
    let values = generator.normal(seed, shape.iter().product());
    Ok(Tensor::from_vec(values, shape, &Device::Cpu).what("noise")?)
}

/// Whether latents are those that a sampler gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LatentScale {
    /// They are: each channel has about mean 0 and variance 1. The file's statistics are applied.
    #[default]
    Normalised,
    /// The statistics have been applied already.
    Raw,
}

/// Overlapping tiles whose seams fade into one another, as diffusers cuts a clip: less memory, other pixels near seams.
/// Only the last deterministic stage and the denoising stage work on tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlendedTiles {
    /// Size of a tile: frames, rows and columns of pixels.
    pub tile: [usize; 3],
    /// Distance of tiles.
    pub stride: [usize; 3],
}

impl BlendedTiles {
    /// The first axis along which a network cannot be cut like this, if it can be cut at every so many frames, rows and
    /// columns of pixels: sizes and distances are multiples of these, and no tile is farther than its size from the next.
    pub fn misfit(&self, multiples: [usize; 3]) -> Option<usize> {
        let fits = |n: usize, multiple: usize| n > 0 && n.is_multiple_of(multiple);
        (0..3).find(|&axis| {
            let (tile, stride, multiple) = (self.tile[axis], self.stride[axis], multiples[axis]);
            !(fits(tile, multiple) && fits(stride, multiple) && stride <= tile)
        })
    }

    /// # Errors
    /// [`Error::Argument`] if they are a [`BlendedTiles::misfit`].
    pub(crate) fn check(&self, multiples: [usize; 3]) -> Result<()> {
        let Some(axis) = self.misfit(multiples) else { return Ok(()) };
        let (tile, stride, multiple) = (self.tile[axis], self.stride[axis], multiples[axis]);
        let axis = ["frames", "rows", "columns"][axis];
        let what = format!(
            "tiles of {tile} {axis} every {stride} are not possible: both must be multiples of {multiple}, the distance at \
             most the size and not 0"
        );
        Err(Error::Argument { what })
    }
}

impl Default for BlendedTiles {
    fn default() -> Self {
        Self { tile: [80, 768, 768], stride: [56, 704, 704] }
    }
}

/// How a clip is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tiling {
    /// Not at all. Blocks still work in slabs of frames and runs of tokens ([`DecodeOptions::scratch_bytes`]), which give
    /// the same pixels.
    #[default]
    Whole,
    /// In overlapping tiles.
    Blended(BlendedTiles),
}

/// How a clip is decoded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DecodeOptions {
    /// Noise that pixels are made from.
    pub noise: Noise,
    /// Denoising steps; none is what the weights are made for.
    pub num_inference_steps: Option<usize>,
    /// What happens to latents that are smaller than a window of the network.
    pub short_clips: ShortClips,
    /// Whether latents are those that a sampler gives.
    pub latents: LatentScale,
    /// How the clip is cut.
    pub tiling: Tiling,
    /// Bytes for the intermediate tensors of a block, beside a few of the size of its tokens. Less means more slabs; an
    /// 11-wide window needs those of 11 frames at least.
    pub scratch_bytes: u64,
    /// Most bytes of a decode, weights included; then `scratch_bytes` are what the rest leaves of them. None is no limit.
    pub max_bytes: Option<u64>,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self {
            noise: Noise::Seed { seed: 0, generator: NoiseGenerator::default() },
            num_inference_steps: None,
            short_clips: ShortClips::default(),
            latents: LatentScale::default(),
            tiling: Tiling::default(),
            scratch_bytes: 3 << 30,
            max_bytes: None,
        }
    }
}

impl DecodeOptions {
    /// Options with noise.
    pub fn with_noise(self, noise: Noise) -> Self {
        Self { noise, ..self }
    }

    /// Options with a number of steps.
    pub fn with_steps(self, num_inference_steps: Option<usize>) -> Self {
        Self { num_inference_steps, ..self }
    }

    /// Options with a policy for short clips.
    pub fn with_short_clips(self, short_clips: ShortClips) -> Self {
        Self { short_clips, ..self }
    }

    /// Options with a scale of the latents.
    pub fn with_latents(self, latents: LatentScale) -> Self {
        Self { latents, ..self }
    }

    /// Options with a tiling.
    pub fn with_tiling(self, tiling: Tiling) -> Self {
        Self { tiling, ..self }
    }

    /// Options with bytes for intermediate tensors.
    pub fn with_scratch_bytes(self, scratch_bytes: u64) -> Self {
        Self { scratch_bytes, ..self }
    }

    /// Options with a limit of memory.
    pub fn with_max_bytes(self, max_bytes: Option<u64>) -> Self {
        Self { max_bytes, ..self }
    }

    /// The steps of a run; more than 1000 are a mistake.
    pub(super) fn steps(&self, default: usize) -> Result<usize> {
        match self.num_inference_steps.unwrap_or(default) {
            steps @ 1..=1000 => Ok(steps),
            steps => Err(Error::Argument { what: format!("{steps} steps are not possible: 1 to 1000 are") }),
        }
    }
}
