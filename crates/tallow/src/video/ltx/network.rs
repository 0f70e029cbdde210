//! The network of a run, checked before its weights are read.

use anyhow::bail;
use ltx::{
    Component, DiffusionDecoder, DiffusionDecoderConfig, LtxFiles,
    conv_vae::{Block, Checkpoint},
    diffusion_decoder::BlendedTiles,
};
use weights::TensorSource;

use super::failed;
use crate::cli::{DecoderName, TilingName};

/// What decodes.
pub(super) enum Network {
    /// A convolutional VAE that has a decoder.
    Conv(Checkpoint),
    /// The diffusion decoder.
    Diffusion(DiffusionDecoderConfig, Component),
}

impl Network {
    /// The decoder that was asked for.
    ///
    /// # Errors
    /// If there is no such one, or its configuration cannot be used.
    pub(super) fn choose(files: LtxFiles, decoder: DecoderName) -> anyhow::Result<Self> {
        let LtxFiles { vae, diffusion_decoder } = files;
        match (decoder, diffusion_decoder) {
            (DecoderName::Auto | DecoderName::Diffusion, Some(component)) => {
                let config = DiffusionDecoderConfig::of(&*component.source, component.config.as_ref());
                Ok(Self::Diffusion(config.map_err(failed)?, component))
            }
            (DecoderName::Diffusion, None) => bail!("--decoder diffusion: the vae has no diffusion decoder"),
            (DecoderName::Auto | DecoderName::Conv, _) => match vae.map(Checkpoint::new).transpose().map_err(failed)? {
                Some(mut checkpoint) if checkpoint.architecture.decoder.is_some() => {
                    // What is not needed is not read.
                    checkpoint.architecture.encoder = None;
                    Ok(Self::Conv(checkpoint))
                }
                _ if decoder == DecoderName::Conv => bail!("--decoder conv: the vae has no convolutional decoder"),
                _ => bail!("the vae has no decoder"),
            },
        }
    }

    /// Compares the tensors with what the network needs, without reading any.
    ///
    /// # Errors
    /// If some are missing, unexpected or of other shapes.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        match self {
            Self::Conv(checkpoint) => checkpoint.check(),
            Self::Diffusion(config, component) => DiffusionDecoder::check(config, component.source.clone()),
        }
        .map_err(failed)
    }

    /// What it is called.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Conv(_) => "conv VAE",
            Self::Diffusion(..) => "diffusion decoder",
        }
    }

    /// Its tensors.
    pub(super) fn source(&self) -> &dyn TensorSource {
        match self {
            Self::Conv(checkpoint) => &*checkpoint.source,
            Self::Diffusion(_, component) => &*component.source,
        }
    }

    /// Mean and standard deviation of the channels of raw latents.
    ///
    /// # Errors
    /// If the file has none.
    pub(super) fn statistics(&self) -> anyhow::Result<[Vec<f32>; 2]> {
        match self {
            Self::Conv(checkpoint) => Component { source: checkpoint.source.clone(), config: None }.statistics(),
            Self::Diffusion(_, component) => component.statistics(),
        }
        .map_err(failed)
    }

    /// Channels of the latents.
    pub(super) fn latent_channels(&self) -> usize {
        match self {
            Self::Conv(checkpoint) => checkpoint.architecture.latent_channels,
            Self::Diffusion(config, _) => config.in_channels,
        }
    }

    /// Channels of the frames.
    pub(super) fn colours(&self) -> usize {
        match self {
            Self::Conv(checkpoint) => checkpoint.architecture.channels,
            Self::Diffusion(config, _) => config.out_channels,
        }
    }

    /// Frames, rows and columns of pixels for a latent.
    pub(super) fn pixels_per_latent(&self) -> [usize; 3] {
        match self {
            Self::Conv(checkpoint) => {
                let side = checkpoint.architecture.patch_size;
                let [t, h, w] = checkpoint.architecture.decoder.as_ref().map_or([1; 3], |decoder| decoder.factors());
                [t, h * side, w * side]
            }
            Self::Diffusion(config, _) => config.compression(),
        }
    }

    /// Whether noise goes into the frames.
    pub(super) fn uses_noise(&self) -> bool {
        match self {
            Self::Conv(checkpoint) => checkpoint.architecture.decoder.as_ref().is_some_and(|decoder| {
                let injects = |block: &Block| matches!(block, Block::Residual { inject_noise: true, .. });
                decoder.timestep_conditioning || decoder.blocks.iter().any(injects)
            }),
            Self::Diffusion(..) => true,
        }
    }

    /// Holds tiles to what the network can be cut at.
    ///
    /// # Errors
    /// As [`check_tiles`].
    pub(super) fn check_tiles(&self, tiles: Option<BlendedTiles>) -> anyhow::Result<()> {
        let pixels = match self {
            Self::Conv(_) => self.pixels_per_latent(),
            Self::Diffusion(config, _) => config.cell(),
        };
        check_tiles(tiles, pixels)
    }

    /// The tiles that were asked for, if any were.
    ///
    /// # Errors
    /// For a tiling that these networks do not have.
    pub(super) fn tiles(&self, tiling: TilingName) -> anyhow::Result<Option<BlendedTiles>> {
        tiles(
            tiling,
            match self {
                Self::Conv(_) => CONV_TILES,
                Self::Diffusion(..) => BlendedTiles::default(),
            },
        )
    }
}

/// The tiles of diffusers' convolutional VAE, which cuts time in tiles only if it is told to.
pub(super) const CONV_TILES: BlendedTiles =
    BlendedTiles { tile: [ALL_FRAMES, 512, 512], stride: [ALL_FRAMES, 448, 448] };

/// More than any clip has, and whole groups of them.
const ALL_FRAMES: usize = 1 << 24;

/// The tiles that were asked for, if any were; `default` where their sides were not, and in time.
///
/// # Errors
/// For a tiling that these networks do not have.
pub(super) fn tiles(tiling: TilingName, default: BlendedTiles) -> anyhow::Result<Option<BlendedTiles>> {
    let BlendedTiles { tile: [frames, ..], stride: [every, ..] } = default;
    match tiling {
        TilingName::Auto | TilingName::Whole => Ok(None),
        TilingName::Bands(_) => {
            bail!("--tiling: bands are for the VAEs of the Wan family, expected auto, whole or blended")
        }
        TilingName::Blended(None) => Ok(Some(default)),
        TilingName::Blended(Some((tile, stride))) => {
            Ok(Some(BlendedTiles { tile: [frames, tile, tile], stride: [every, stride, stride] }))
        }
    }
}

/// Holds tiles to a network that can be cut at every so many frames, rows and columns of pixels.
///
/// # Errors
/// If the sides or the distances of the tiles are others; frames are not the command's.
pub(super) fn check_tiles(tiles: Option<BlendedTiles>, [_, rows, columns]: [usize; 3]) -> anyhow::Result<()> {
    let multiples = [1, rows, columns];
    let misfit = tiles.and_then(|tiles| Some((tiles, tiles.misfit(multiples)?)));
    let Some((BlendedTiles { tile, stride }, axis)) = misfit else { return Ok(()) };
    bail!(
        "--tiling: tiles of {} pixels every {} are not possible: both must be multiples of {}, the distance at most the \
         size and not 0",
        tile[axis],
        stride[axis],
        multiples[axis]
    )
}
