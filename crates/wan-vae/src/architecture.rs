//! What a network looks like: enough to name every tensor and to build every layer.

use crate::{
    config::VaeConfig,
    error::{Error, Result},
};

/// An encoder, a decoder, or both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    /// Channels of the latents.
    pub z_dim: usize,
    /// Whether stages have parameter-free shortcuts (the Wan 2.2 family). Such networks are nested: their tensors have
    /// other names as well.
    pub residual: bool,
    /// Extent in time of the 3 x 3 kernels: 3, or 1 for networks that know only pictures.
    pub temporal_kernel: usize,
    /// Side of the squares of pixels that become channels on the way in.
    pub patch_size: usize,
    /// How the decoder's channels become pixels.
    pub unpack: Unpack,
    /// From pixels to latents.
    pub encoder: Option<Network>,
    /// From latents to pixels.
    pub decoder: Option<Network>,
}

/// How channels become squares of pixels, with the side of the square. Row and column inside of it are q and r.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unpack {
    /// The column is the slower index: channel `(c p + r) p + q`. Side 1 changes nothing. The Wan 2.2 VAE has 2.
    Patches(usize),
    /// The row is the slower index: channel `(c p + q) p + r`. Decoders that double the size have 2.
    PixelShuffle(usize),
}

impl Unpack {
    /// Side of the square.
    pub fn side(self) -> usize {
        match self {
            Self::Patches(side) | Self::PixelShuffle(side) => side,
        }
    }
}

/// Encoder or decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Channels that its first convolution takes: packed pixels, or latents.
    pub in_channels: usize,
    /// Channels that its first convolution gives.
    pub base: usize,
    /// Stages in the order in which they run.
    pub stages: Vec<Stage>,
    /// Channels that its last convolution gives: both halves of the distribution, or packed pixels.
    pub out_channels: usize,
}

/// Residual blocks at one resolution, then a change of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The residual blocks.
    pub blocks: Vec<Block>,
    /// The change of resolution; the last stage has none.
    pub resample: Option<Resample>,
}

/// A residual block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Channels in.
    pub input: usize,
    /// Channels out.
    pub output: usize,
    /// Whether the input passes a pointwise convolution before it is added.
    pub shortcut: bool,
}

/// A change of resolution by 2 in height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resample {
    /// Channels in.
    pub input: usize,
    /// Channels out.
    pub output: usize,
    /// Whether time changes by 2 as well.
    pub temporal: bool,
}

impl Block {
    /// A block with a shortcut where the widths need one.
    pub fn new(input: usize, output: usize) -> Self {
        Self { input, output, shortcut: input != output }
    }
}

impl Stage {
    /// Channels that leave the residual blocks, given those that come in.
    pub fn width(&self, input: usize) -> usize {
        self.blocks.last().map_or(input, |block| block.output)
    }

    /// Channels that leave the stage.
    pub fn output(&self, input: usize) -> usize {
        self.resample.map_or(self.width(input), |resample| resample.output)
    }

    /// Factor in time.
    pub fn temporal_factor(&self) -> usize {
        if self.resample.is_some_and(|resample| resample.temporal) { 2 } else { 1 }
    }

    /// Factor in height and width.
    pub fn spatial_factor(&self) -> usize {
        if self.resample.is_some() { 2 } else { 1 }
    }
}

impl Network {
    /// Channels that come into each stage, and those that leave the last.
    pub fn widths(&self) -> Vec<usize> {
        let mut widths = vec![self.base];
        for stage in &self.stages {
            widths.push(stage.output(widths[widths.len() - 1]));
        }
        widths
    }

    /// Frames per latent frame behind the first.
    pub fn temporal_factor(&self) -> usize {
        self.stages.iter().map(Stage::temporal_factor).product()
    }

    /// Product of the stages' factors in height and width.
    pub fn spatial_factor(&self) -> usize {
        self.stages.iter().map(Stage::spatial_factor).product()
    }
}

impl Architecture {
    /// The network that a diffusers configuration describes.
    ///
    /// # Errors
    /// [`Error::Architecture`] as [`Architecture::validate`].
    pub fn from_config(config: &VaeConfig) -> Result<Self> {
        let stages = config.dim_mult.len();
        if stages == 0 || stages > MAX_STAGES || config.temperal_downsample.len() + 1 != stages {
            return Err(refuse(format!(
                "dim_mult has {stages} entries and temperal_downsample {}, expected 1 to {MAX_STAGES} and one less",
                config.temperal_downsample.len()
            )));
        }
        let side = config.patch_size.unwrap_or(1);
        let widths = |base: usize| -> Result<Vec<usize>> {
            let width = |m: &usize| base.checked_mul(*m).filter(|w| (1..=MAX_CHANNELS).contains(w));
            let widths: Option<Vec<_>> = config.dim_mult.iter().map(width).collect();
            widths.ok_or_else(|| refuse(format!("width {base} times {:?}", config.dim_mult)))
        };
        let encoder_widths = widths(config.base_dim)?;
        let mut decoder_widths = widths(config.decoder_base_dim.unwrap_or(config.base_dim))?;
        decoder_widths.reverse();
        if config.num_res_blocks > MAX_BLOCKS {
            return Err(refuse(format!("{} residual blocks per stage", config.num_res_blocks)));
        }
        let blocks = |count: usize, input: usize, output: usize| -> Vec<Block> {
            (0..count).map(|j| Block::new(if j == 0 { input } else { output }, output)).collect()
        };
        let mut encoder = Vec::new();
        let mut input = config.base_dim;
        for (i, &width) in encoder_widths.iter().enumerate() {
            let resample =
                config.temperal_downsample.get(i).map(|&temporal| Resample { input: width, output: width, temporal });
            encoder.push(Stage { blocks: blocks(config.num_res_blocks, input, width), resample });
            input = width;
        }
        let mut decoder = Vec::new();
        let mut input = decoder_widths[0];
        for (i, &width) in decoder_widths.iter().enumerate() {
            let output = if config.is_residual { width } else { width / 2 };
            let temporal = config.temperal_downsample.iter().rev().nth(i);
            let resample = temporal.map(|&temporal| Resample { input: width, output, temporal });
            decoder.push(Stage { blocks: blocks(config.num_res_blocks + 1, input, width), resample });
            input = output;
        }
        let latents = 2 * config.z_dim.min(MAX_CHANNELS);
        let architecture = Self {
            z_dim: config.z_dim,
            residual: config.is_residual,
            temporal_kernel: 3,
            patch_size: side,
            unpack: Unpack::Patches(side),
            encoder: Some(Network {
                in_channels: config.in_channels,
                base: config.base_dim,
                stages: encoder,
                out_channels: latents,
            }),
            decoder: Some(Network {
                in_channels: config.z_dim,
                base: decoder_widths[0],
                stages: decoder,
                out_channels: config.out_channels,
            }),
        };
        architecture.validate()?;
        Ok(architecture)
    }

    /// Checks that layers fit one another and that sizes are sane: whatever passes can be built.
    ///
    /// # Errors
    /// [`Error::Architecture`].
    pub fn validate(&self) -> Result<()> {
        if !matches!(self.temporal_kernel, 1 | 3) {
            return Err(refuse(format!("a temporal kernel of {}, expected 1 or 3", self.temporal_kernel)));
        }
        for (what, side) in [("patch size", self.patch_size), ("patch size", self.unpack.side())] {
            if !(1..=MAX_SIDE).contains(&side) {
                return Err(refuse(format!("a {what} of {side}, expected 1 to {MAX_SIDE}")));
            }
        }
        for (part, network) in [("encoder", &self.encoder), ("decoder", &self.decoder)] {
            if let Some(network) = network {
                self.check(part, network)?;
            }
        }
        if let Some(encoder) = &self.encoder {
            fits("the encoder's latents", encoder.out_channels, 2 * self.z_dim)?;
            divides("packed pixels", encoder.in_channels, self.patch_size.pow(2))?;
        }
        if let Some(decoder) = &self.decoder {
            fits("the decoder's latents", decoder.in_channels, self.z_dim)?;
            divides("packed pixels", decoder.out_channels, self.unpack.side().pow(2))?;
        }
        match (&self.encoder, &self.decoder) {
            (Some(encoder), Some(decoder)) if encoder.temporal_factor() != decoder.temporal_factor() => {
                let (down, up) = (encoder.temporal_factor(), decoder.temporal_factor());
                Err(refuse(format!("an encoder that makes {down} frames one and a decoder that makes {up} of one")))
            }
            _ => Ok(()),
        }
    }

    fn check(&self, part: &'static str, network: &Network) -> Result<()> {
        if network.stages.is_empty() || network.stages.len() > MAX_STAGES {
            return Err(refuse(format!("{} stages in the {part}", network.stages.len())));
        }
        // At once, so that no product of them overflows.
        let sane = |channels: usize| match channels {
            1..=MAX_CHANNELS => Ok(channels),
            _ => Err(refuse(format!("{channels} channels in the {part}"))),
        };
        for channels in [self.z_dim, network.in_channels, network.out_channels] {
            sane(channels)?;
        }
        let mut width = sane(network.base)?;
        for (s, stage) in network.stages.iter().enumerate() {
            let input = width;
            if stage.blocks.len() > MAX_BLOCKS {
                return Err(refuse(format!("{} residual blocks in stage {s} of the {part}", stage.blocks.len())));
            }
            for block in &stage.blocks {
                fits("a residual block", block.input, width)?;
                width = sane(block.output)?;
                if block.input != block.output && !block.shortcut {
                    return Err(refuse(format!("a block from {} to {width} without a shortcut", block.input)));
                }
            }
            if let Some(resample) = stage.resample {
                fits("a resampler", resample.input, width)?;
                width = sane(resample.output)?;
                if resample.temporal && self.temporal_kernel == 1 {
                    return Err(refuse("a change of time in a network for pictures".to_owned()));
                }
            }
            if self.residual {
                let (ft, fs) = (stage.temporal_factor(), stage.spatial_factor());
                if part == "encoder" {
                    divides("a mean over channels", input * ft * fs * fs, width)?;
                } else if stage.resample.is_some() {
                    divides("a repetition of channels", width * ft * fs * fs, input)?;
                }
            }
        }
        Ok(())
    }

    /// Pixels of the decoder's output per latent, in height and width; that of the encoder if there is no decoder.
    pub fn spatial_factor(&self) -> usize {
        match (&self.decoder, &self.encoder) {
            (Some(decoder), _) => decoder.spatial_factor() * self.unpack.side(),
            (None, Some(encoder)) => encoder.spatial_factor() * self.patch_size,
            (None, None) => 1,
        }
    }

    /// Pixels per latent that the encoder takes, in height and width.
    pub fn encoder_spatial_factor(&self) -> usize {
        self.encoder.as_ref().map_or_else(|| self.spatial_factor(), |e| e.spatial_factor() * self.patch_size)
    }

    /// Frames per latent frame behind the first.
    pub fn temporal_factor(&self) -> usize {
        self.decoder.as_ref().or(self.encoder.as_ref()).map_or(1, Network::temporal_factor)
    }

    /// Channels of a frame that the decoder gives.
    pub fn out_channels(&self) -> usize {
        self.decoder.as_ref().map_or(0, |decoder| decoder.out_channels / self.unpack.side().pow(2))
    }

    /// Channels of a frame that the encoder takes.
    pub fn in_channels(&self) -> usize {
        self.encoder.as_ref().map_or(0, |encoder| encoder.in_channels / self.patch_size.pow(2))
    }

    /// Frames that `latents` latent frames stand for.
    pub fn frames(&self, latents: usize) -> usize {
        latents.saturating_sub(1).saturating_mul(self.temporal_factor()).saturating_add(latents.min(1))
    }
}

/// Bounds that no published network comes near and that keep sizes computable.
pub(crate) const MAX_STAGES: usize = 8;
pub(crate) const MAX_BLOCKS: usize = 16;
const MAX_CHANNELS: usize = 1 << 14;
const MAX_SIDE: usize = 8;

fn refuse(what: String) -> Error {
    Error::Architecture { what }
}

fn fits(what: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(refuse(format!("{what} of {got} channels where {expected} come"))) }
}

fn divides(what: &str, whole: usize, part: usize) -> Result<()> {
    if part > 0 && whole.is_multiple_of(part) {
        Ok(())
    } else {
        Err(refuse(format!("{what}: {whole} is not a multiple of {part}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{wan21, wan22};

    /// What is wrong with a network that was sound before this change.
    fn problem(mut architecture: Architecture, change: impl Fn(&mut Architecture)) -> String {
        architecture.validate().unwrap();
        change(&mut architecture);
        architecture.validate().unwrap_err().to_string()
    }

    fn decoder(architecture: &mut Architecture) -> &mut Network {
        architecture.decoder.as_mut().unwrap()
    }

    #[test]
    fn layers_that_do_not_fit_are_refused() {
        for (text, word) in [
            (problem(wan21(), |a| a.temporal_kernel = 5), "a temporal kernel of 5"),
            (problem(wan21(), |a| a.temporal_kernel = 1), "a change of time in a network for pictures"),
            (problem(wan21(), |a| a.z_dim = 8), "the encoder's latents of 32 channels where 16 come"),
            (problem(wan21(), |a| a.z_dim = 0), "0 channels"),
            (problem(wan21(), |a| a.z_dim = usize::MAX), "channels in the encoder"),
            (problem(wan21(), |a| a.patch_size = 0), "a patch size of 0"),
            (problem(wan21(), |a| a.unpack = Unpack::PixelShuffle(9)), "a patch size of 9"),
            (problem(wan22(), |a| a.unpack = Unpack::Patches(8)), "12 is not a multiple of 64"),
            (
                problem(wan22(), |a| {
                    // Of one width throughout, so that the layers fit one another.
                    let encoder = a.encoder.as_mut().unwrap();
                    encoder.base = usize::MAX;
                    for stage in &mut encoder.stages {
                        stage.blocks.fill(Block::new(usize::MAX, usize::MAX));
                        stage.resample = None;
                    }
                }),
                "18446744073709551615 channels in the encoder",
            ),
            (problem(wan21(), |a| decoder(a).stages.clear()), "0 stages in the decoder"),
            (problem(wan21(), |a| decoder(a).base = 64), "a residual block of 384 channels where 64 come"),
            (problem(wan21(), |a| decoder(a).stages[1].blocks[0].shortcut = false), "without a shortcut"),
            (problem(wan21(), |a| decoder(a).stages[0].resample = None), "where 384 come"),
            (problem(wan21(), |a| decoder(a).stages[0].blocks = vec![Block::new(384, 384); 17]), "17 residual blocks"),
            (problem(wan22(), |a| decoder(a).stages[2].resample.as_mut().unwrap().output = 500), "repetition"),
            // The frames of a latent frame are as many on either side.
            (
                problem(wan21(), |a| decoder(a).stages[1].resample.as_mut().unwrap().temporal = false),
                "makes 4 frames one and a decoder that makes 2",
            ),
        ] {
            assert!(text.contains(word) && !text.contains('\n'), "{word}: {text}");
        }
    }
}
