//! How much memory a decode takes.

use candle_core::DType;

use super::{config::DiffusionDecoderConfig, passes::least_bytes};
use crate::error::{Error, Result};

/// What ops keep for themselves: sums of products, workspaces, the small tensors of a run.
const OPS: u64 = 128 << 20;

/// Bytes that a decode holds at a time, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecodeMemory {
    /// The network.
    pub weights: u64,
    /// Tokens and context of the denoising stage; or noise or pixels, where these are more.
    pub clip: u64,
    /// The least for what a block computes of some frames, and for ops.
    pub least_scratch: u64,
}

impl DecodeMemory {
    /// With the least scratch.
    pub fn least(&self) -> u64 {
        self.weights.saturating_add(self.clip).saturating_add(self.least_scratch)
    }

    /// What `max_bytes` leave for scratch.
    ///
    /// # Errors
    /// [`Error::Memory`] if that is less than the least.
    pub(super) fn scratch(&self, max_bytes: u64) -> Result<u64> {
        let needed = self.least();
        match max_bytes.checked_sub(needed) {
            Some(more) => Ok(self.least_scratch - OPS + more),
            None => Err(Error::Memory { what: "decoding", needed, max_bytes }),
        }
    }
}

/// The memory of `batch` clips whose denoising stage works on `grid` tokens at a time, of `pixels` values in all.
pub(super) fn of(
    config: &DiffusionDecoderConfig,
    dtype: DType,
    weights: u64,
    batch: usize,
    grid: [usize; 3],
    pixels: usize,
    in_place: bool,
) -> DecodeMemory {
    let size = dtype.size_in_bytes() as u64;
    let channels = config.stage_channels[config.deterministic()] as u64;
    let tokens = grid.iter().fold(batch as u64, |product, &n| product.saturating_mul(n as u64));
    let volume = tokens.saturating_mul(channels * size);
    let plane = grid[1] * grid[2];
    let window = config.stage5_kernel[0].min(grid[0]);
    // Tokens and context; op by op also what is added to the tokens and their sum, and angles in f32.
    let volumes =
        if in_place { volume.saturating_mul(2) } else { volume.saturating_mul(4).saturating_add(tokens * 256) };
    let least_scratch =
        if in_place { least_bytes(window, plane) } else { (batch * plane * window) as u64 * 6 * channels * size };
    // At the end context and tokens make room for patches, pixels and a check of these.
    let last = volume.saturating_add(3 * pixels as u64 * size);
    DecodeMemory { weights, clip: volumes.max(last), least_scratch: least_scratch.saturating_add(OPS) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diffusion_decoder::testing::published;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_published_network_fits_its_limits() {
        let config = published();
        let weights = 834_267_232;
        let small = of(&config, DType::BF16, weights, 1, [121, 128, 192], 121 * 3 * 512 * 768, true);
        assert!(small.least() < 5 * GIB && small.scratch(8 * GIB).unwrap() > 4 * GIB, "{small:?}");
        let large = of(&config, DType::BF16, weights, 1, [257, 272, 480], 257 * 3 * 1088 * 1920, true);
        // More than one frame at a time.
        assert!(large.scratch(40 * GIB).unwrap() > 6 * GIB, "{large:?}");
        assert!(matches!(large.scratch(36 * GIB), Err(Error::Memory { .. })), "{large:?}");
    }
}
