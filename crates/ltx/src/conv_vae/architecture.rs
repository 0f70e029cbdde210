//! What a convolutional VAE looks like: its networks as lists of blocks.

use crate::error::{Error, Result};

/// Both networks of a VAE; a checkpoint may hold one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Architecture {
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Channels of the pixels.
    pub channels: usize,
    /// Side of the squares of pixels that become channels.
    pub patch_size: usize,
    /// From pixels to latents.
    pub encoder: Option<Network>,
    /// From latents to pixels.
    pub decoder: Option<Network>,
}

/// One network, in the order of its run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Network {
    /// Channels behind the first convolution.
    pub width: usize,
    /// Blocks between the first and the last convolution.
    pub blocks: Vec<Block>,
    /// Which frames a convolution sees.
    pub causality: Causality,
    /// What surrounds pictures.
    pub padding: SpatialPadding,
    /// Whether blocks are modulated by a timestep.
    pub timestep_conditioning: bool,
}

/// A block.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Block {
    /// Residual blocks of the same width, one after the other.
    Residual {
        /// How many.
        layers: usize,
        /// Whether each adds noise behind its convolutions.
        inject_noise: bool,
    },
    /// A convolution whose channels become frames and pixels.
    Up {
        /// Factors in time, height and width.
        factor: [usize; 3],
        /// The width is divided by it.
        reduction: usize,
        /// Whether the input's own channels, moved the same way, are added.
        residual: bool,
    },
    /// A convolution whose frames and pixels become channels, plus means of its input.
    Down {
        /// Factors in time, height and width.
        factor: [usize; 3],
        /// Channels behind it.
        width: usize,
    },
}

/// Which frames a convolution over three frames sees. Frames beyond the ends of a clip are copies of its first and last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Causality {
    /// A frame and the two before it.
    Causal,
    /// The frame before, a frame, and the frame after it.
    Centred,
}

impl Causality {
    /// Copies of the first frame before a clip, and of the last one behind it.
    pub fn copies(self) -> (usize, usize) {
        match self {
            Self::Causal => (2, 0),
            Self::Centred => (1, 1),
        }
    }
}

/// What surrounds the pictures that a convolution sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpatialPadding {
    /// Zeros.
    Zeros,
    /// The second row and column from each border, so a picture needs two of each.
    Reflect,
}

/// Widths, factors and numbers of layers beyond these are not those of a network.
const MAX_WIDTH: usize = 1 << 16;
const MAX_LAYERS: usize = 256;

impl Network {
    /// Channels before every block, and behind the last one.
    ///
    /// # Errors
    /// [`Error::Config`] if a block does not fit the width before it.
    pub fn widths(&self, field: &str) -> Result<Vec<usize>> {
        let refuse = |index: usize, problem: String| Error::Config { field: format!("{field}[{index}]"), problem };
        let mut width = self.width;
        let mut widths = vec![width];
        for (index, block) in self.blocks.iter().enumerate() {
            width = match *block {
                Block::Residual { layers, .. } if (1..=MAX_LAYERS).contains(&layers) => width,
                Block::Residual { layers, .. } => {
                    return Err(refuse(index, format!("has {layers} layers, expected 1 to {MAX_LAYERS}")));
                }
                Block::Up { factor, reduction, residual } => {
                    let cells = cells(factor).ok_or_else(|| refuse(index, format!("has factors {factor:?}")))?;
                    let fits = reduction > 0 && width.is_multiple_of(reduction);
                    if !fits || residual && !(width.is_multiple_of(cells) && cells.is_multiple_of(reduction)) {
                        return Err(refuse(index, format!("reduces {width} channels by {reduction}")));
                    }
                    width / reduction
                }
                Block::Down { factor, width: output } => {
                    let cells = cells(factor).ok_or_else(|| refuse(index, format!("has factors {factor:?}")))?;
                    let fits = output > 0 && output.is_multiple_of(cells) && (width * cells).is_multiple_of(output);
                    if !fits {
                        return Err(refuse(index, format!("makes {output} channels of {width}")));
                    }
                    output
                }
            };
            widths.push(width);
        }
        match widths.iter().position(|width| !(1..=MAX_WIDTH).contains(width)) {
            Some(index) => Err(refuse(index, format!("has {} channels, expected 1 to {MAX_WIDTH}", widths[index]))),
            None => Ok(widths),
        }
    }

    /// Whether a run needs noise.
    pub(super) fn draws_noise(&self) -> bool {
        let injects = |block: &Block| matches!(block, Block::Residual { inject_noise: true, .. });
        self.timestep_conditioning || self.blocks.iter().any(injects)
    }

    /// Factors in time, height and width of the whole network, either way.
    pub fn factors(&self) -> [usize; 3] {
        let factors = self.blocks.iter().filter_map(|block| match *block {
            Block::Up { factor, .. } | Block::Down { factor, .. } => Some(factor),
            Block::Residual { .. } => None,
        });
        factors.fold([1; 3], |all, one| std::array::from_fn(|axis| all[axis] * one[axis]))
    }
}

/// Positions that a change of resolution turns into one: each factor is 1 or 2, that of height is that of width.
pub(super) fn cells(factor: [usize; 3]) -> Option<usize> {
    let legal = factor.iter().all(|f| matches!(f, 1 | 2)) && factor[1] == factor[2];
    legal.then(|| factor.iter().product())
}

impl Architecture {
    /// Channels of a square of pixels.
    pub(super) fn packed_channels(&self) -> usize {
        self.channels * self.patch_size * self.patch_size
    }

    /// Checks that the networks can be built.
    ///
    /// # Errors
    /// [`Error::Config`].
    pub fn validate(&self) -> Result<()> {
        for (field, value, max) in [
            ("latent_channels", self.latent_channels, MAX_WIDTH),
            ("in_channels", self.channels, 64),
            ("patch_size", self.patch_size, 16),
        ] {
            if !(1..=max).contains(&value) {
                let problem = format!("is {value}, expected 1 to {max}");
                return Err(Error::Config { field: field.to_owned(), problem });
            }
        }
        for (field, network) in [("encoder_blocks", &self.encoder), ("decoder_blocks", &self.decoder)] {
            let Some(network) = network else { continue };
            network.widths(field)?;
            // 2^10 is beyond any clip; more would overflow products of extents.
            if network.factors().iter().any(|&factor| factor > 1 << 10) {
                return Err(Error::Config {
                    field: field.to_owned(),
                    problem: "changes the resolution too often".into(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(width: usize, blocks: Vec<Block>) -> Network {
        Network {
            width,
            blocks,
            causality: Causality::Centred,
            padding: SpatialPadding::Zeros,
            timestep_conditioning: false,
        }
    }

    #[test]
    fn widths_follow_the_blocks() {
        let up = Block::Up { factor: [2, 2, 2], reduction: 2, residual: true };
        let space = Block::Up { factor: [1, 2, 2], reduction: 1, residual: false };
        let net = network(64, vec![up, Block::Residual { layers: 2, inject_noise: false }, space]);
        assert_eq!(net.widths("blocks").unwrap(), [64, 32, 32, 32]);
        assert_eq!(net.factors(), [2, 4, 4]);
        let down = network(8, vec![Block::Down { factor: [2, 1, 1], width: 16 }]);
        assert_eq!(down.widths("blocks").unwrap(), [8, 16]);
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let up = |factor, reduction, residual| Block::Up { factor, reduction, residual };
        for block in [
            up([2, 2, 2], 3, false),
            up([2, 2, 2], 0, false),
            up([2, 2, 1], 2, false),
            up([3, 1, 1], 2, false),
            up([2, 2, 2], 16, true),
            Block::Down { factor: [2, 2, 2], width: 12 },
            Block::Down { factor: [1, 2, 2], width: 0 },
            Block::Residual { layers: 0, inject_noise: false },
            Block::Residual { layers: 100_000, inject_noise: false },
        ] {
            let error = network(16, vec![block.clone()]).widths("blocks");
            assert!(matches!(error, Err(Error::Config { .. })), "{block:?}");
        }
        // A residual upsampler moves the input's own channels: it needs 8 of them.
        assert!(network(4, vec![up([2, 2, 2], 2, true)]).widths("blocks").is_err());
        assert!(network(0, vec![]).widths("blocks").is_err());
    }
}
