//! Which published VAE a network is.

use std::fmt;

use crate::architecture::{Architecture, Network, Unpack};

/// Which published VAE a network is, told by its layers. All but [`Variant::Other`] have known latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Variant {
    /// Wan 2.1, which all Wan 2.1 and Wan 2.2 14B models use; or Qwen-Image, which has the same layers.
    Wan21,
    /// Wan 2.1 with a decoder that doubles the size.
    Wan21Upscale2x,
    /// Wan 2.1 at a quarter of the widths (LightX2V).
    LightVae,
    /// Wan 2.1 or Qwen-Image with kernels of two axes: pictures only.
    Pictures,
    /// Qwen-Image-Layered: with an alpha channel.
    QwenImageLayered,
    /// Qwen-Image-2.1: pictures only.
    QwenImage21,
    /// Wan 2.2, which the TI2V-5B model uses.
    Wan22,
    /// Wan 2.2 with a narrower decoder.
    Wan22Pruned,
    /// Layers of the same kinds in other numbers.
    Other,
}

impl Variant {
    /// The variant with these layers.
    pub fn of(architecture: &Architecture) -> Self {
        let a = architecture;
        let (encoder, decoder) = (a.encoder.as_ref(), a.decoder.as_ref());
        let narrowest = |network: &Network| network.stages.iter().flat_map(|s| &s.blocks).map(|b| b.output).min();
        // Of what is there: finest width, number of stages, residual blocks per stage, widest in units of the finest.
        let scale = |network: Option<&Network>, blocks: usize, base: usize, stages: usize, widest: usize| {
            network.is_none_or(|n| {
                n.stages.len() == stages
                    && n.stages.iter().all(|s| s.blocks.len() == blocks)
                    && narrowest(n) == Some(base)
                    && n.stages.iter().flat_map(|s| &s.blocks).map(|b| b.output).max() == Some(base * widest)
            })
        };
        let fits = |base: [usize; 2], stages, widest| {
            scale(encoder, 2, base[0], stages, widest) && scale(decoder, 3, base[1], stages, widest)
        };
        let colours =
            |n: usize| encoder.is_none_or(|_| a.in_channels() == n) && decoder.is_none_or(|_| a.out_channels() == n);
        if encoder.is_none() && decoder.is_none() {
            return Self::Other;
        }
        match (a.residual, a.z_dim, a.temporal_kernel) {
            (false, 16, 3) if fits([24, 24], 4, 4) && colours(3) => Self::LightVae,
            (false, 16, _) if !fits([96, 96], 4, 4) => Self::Other,
            (false, 16, 1) if colours(3) => Self::Pictures,
            (false, 16, 3) if colours(4) => Self::QwenImageLayered,
            (false, 16, 3) if colours(3) && a.unpack == Unpack::PixelShuffle(2) => Self::Wan21Upscale2x,
            (false, 16, 3) if colours(3) => Self::Wan21,
            (true, 48, 3) if fits([160, 256], 4, 4) && colours(3) => Self::Wan22,
            (true, 48, 3) if colours(3) && decoder.and_then(narrowest).is_some_and(|width| width < 256) => {
                let whole_encoder = scale(encoder, 2, 160, 4, 4);
                if whole_encoder { Self::Wan22Pruned } else { Self::Other }
            }
            (true, 64, 1) if colours(4) => Self::QwenImage21,
            _ => Self::Other,
        }
    }

    /// Whether each latent stands for one picture.
    pub fn pictures_only(self) -> bool {
        matches!(self, Self::Pictures | Self::QwenImage21)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Wan21 => "Wan 2.1 or Qwen-Image VAE",
            Self::Wan21Upscale2x => "Wan 2.1 VAE with a decoder that doubles the size",
            Self::LightVae => "LightVAE of Wan 2.1",
            Self::Pictures => "Wan 2.1 or Qwen-Image VAE for pictures",
            Self::QwenImageLayered => "Qwen-Image-Layered VAE",
            Self::QwenImage21 => "Qwen-Image-2.1 VAE",
            Self::Wan22 => "Wan 2.2 VAE",
            Self::Wan22Pruned => "Wan 2.2 VAE with a narrower decoder",
            Self::Other => "VAE of the Wan family",
        })
    }
}
