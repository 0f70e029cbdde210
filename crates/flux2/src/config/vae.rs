//! Configuration of the VAE.

use serde::Deserialize;

use super::{check_counts, check_positive, invalid};
use crate::error::Result;

/// `vae/config.json` (`AutoencoderKLFlux2`).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct VaeConfig {
    /// Class that wrote the file.
    #[serde(rename = "_class_name")]
    pub class_name: Option<String>,
    /// Colour channels in.
    #[serde(default = "three")]
    pub in_channels: usize,
    /// Colour channels out.
    #[serde(default = "three")]
    pub out_channels: usize,
    /// Channels of each level, from the full resolution down.
    pub block_out_channels: Vec<usize>,
    /// Channels of the decoder's levels where they differ from the encoder's.
    #[serde(default)]
    pub decoder_block_out_channels: Option<Vec<usize>>,
    /// Residual blocks per encoder level; a decoder level has one more.
    pub layers_per_block: usize,
    /// Channels of the latents before patching.
    pub latent_channels: usize,
    /// Groups of the group norms.
    #[serde(default = "default_groups")]
    pub norm_num_groups: usize,
    /// Activation.
    #[serde(default = "super::silu")]
    pub act_fn: String,
    /// Epsilon under the square root of the latents' variance.
    #[serde(default = "default_batch_norm_eps")]
    pub batch_norm_eps: f64,
    /// Whether the middle blocks hold an attention.
    #[serde(default = "super::yes")]
    pub mid_block_add_attention: bool,
    /// Whether the encoder ends in a 1x1 convolution.
    #[serde(default = "super::yes")]
    pub use_quant_conv: bool,
    /// Whether the decoder begins with a 1x1 convolution.
    #[serde(default = "super::yes")]
    pub use_post_quant_conv: bool,
    /// Latent cells in one token.
    #[serde(default = "default_patch")]
    pub patch_size: [usize; 2],
}

fn three() -> usize {
    3
}
fn default_groups() -> usize {
    32
}
fn default_batch_norm_eps() -> f64 {
    1e-4
}
fn default_patch() -> [usize; 2] {
    [2, 2]
}

impl VaeConfig {
    const COMPONENT: &'static str = "vae";

    /// Channels of the decoder's levels, from the full resolution down.
    pub fn decoder_block_out_channels(&self) -> &[usize] {
        self.decoder_block_out_channels.as_deref().unwrap_or(&self.block_out_channels)
    }

    /// Channels of one packed latent token: the latent channels of a 2x2 patch.
    pub fn packed_channels(&self) -> usize {
        self.latent_channels * self.patch_size[0] * self.patch_size[1]
    }

    /// Side, in pixels, of the square that one packed latent token stands for (16 in the published models).
    pub fn packed_factor(&self) -> usize {
        self.patch_size[0] << (self.block_out_channels.len() - 1)
    }

    /// Checks that the values describe a model of this architecture.
    ///
    /// # Errors
    /// [`crate::Error::Config`] names the first key that does not.
    pub fn validate(&self) -> Result<()> {
        let c = Self::COMPONENT;
        if let Some(class) = &self.class_name
            && class != "AutoencoderKLFlux2"
        {
            return invalid(c, "_class_name", class, "AutoencoderKLFlux2");
        }
        check_counts(
            c,
            1 << 12,
            &[
                ("latent_channels", self.latent_channels),
                ("norm_num_groups", self.norm_num_groups),
                ("layers_per_block", self.layers_per_block),
            ],
        )?;
        for (field, value) in [("in_channels", self.in_channels), ("out_channels", self.out_channels)] {
            if value != 3 {
                return invalid(c, field, value, "3 (red, green, blue)");
            }
        }
        for (field, widths) in [
            ("block_out_channels", &self.block_out_channels[..]),
            ("decoder_block_out_channels", self.decoder_block_out_channels()),
        ] {
            if widths.is_empty() || widths.len() > 6 {
                return invalid(c, field, widths, "1 to 6 levels");
            }
            if widths.iter().any(|&w| w == 0 || w > 1 << 14 || !w.is_multiple_of(self.norm_num_groups)) {
                return invalid(c, field, widths, format!("multiples of norm_num_groups ({})", self.norm_num_groups));
            }
        }
        if self.decoder_block_out_channels().len() != self.block_out_channels.len() {
            let expected = format!("{} levels, as block_out_channels", self.block_out_channels.len());
            return invalid(c, "decoder_block_out_channels", self.decoder_block_out_channels(), expected);
        }
        if self.patch_size != [2, 2] {
            return invalid(c, "patch_size", self.patch_size, "[2, 2]");
        }
        if self.act_fn != "silu" {
            return invalid(c, "act_fn", &self.act_fn, "silu");
        }
        check_positive(c, "batch_norm_eps", self.batch_norm_eps)
    }
}
