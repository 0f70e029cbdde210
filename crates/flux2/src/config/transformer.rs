//! Configuration of the transformer.

use serde::Deserialize;

use super::{check_counts, check_positive, invalid};
use crate::error::Result;

/// `transformer/config.json` (`Flux2Transformer2DModel`).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct TransformerConfig {
    /// Class that wrote the file.
    #[serde(rename = "_class_name")]
    pub class_name: Option<String>,
    /// Side of the square of latent cells in one token; 1, the VAE does the patching.
    #[serde(default = "one")]
    pub patch_size: usize,
    /// Channels of one latent token.
    pub in_channels: usize,
    /// Channels of the predicted velocity; `None` means [`Self::in_channels`].
    #[serde(default)]
    pub out_channels: Option<usize>,
    /// Number of double-stream blocks.
    pub num_layers: usize,
    /// Number of single-stream blocks.
    pub num_single_layers: usize,
    /// Channels of one attention head.
    pub attention_head_dim: usize,
    /// Number of attention heads.
    pub num_attention_heads: usize,
    /// Channels of one text token.
    pub joint_attention_dim: usize,
    /// Width of the sinusoid that embeds the timestep and the guidance.
    #[serde(default = "default_sinusoid")]
    pub timestep_guidance_channels: usize,
    /// Width of the MLPs over the hidden size.
    #[serde(default = "default_mlp_ratio")]
    pub mlp_ratio: f64,
    /// Channels of a head that each position axis (T, H, W, L) rotates.
    pub axes_dims_rope: Vec<usize>,
    /// Base of the rotary frequencies.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Epsilon of the layer and RMS norms.
    #[serde(default = "default_eps")]
    pub eps: f64,
    /// Whether the guidance scale is an input of the model (dev).
    #[serde(default = "super::yes")]
    pub guidance_embeds: bool,
}

fn one() -> usize {
    1
}
fn default_sinusoid() -> usize {
    256
}
fn default_mlp_ratio() -> f64 {
    3.0
}
fn default_rope_theta() -> f64 {
    2000.0
}
fn default_eps() -> f64 {
    1e-6
}

impl TransformerConfig {
    const COMPONENT: &'static str = "transformer";

    /// Width of the residual stream: heads times head dimension.
    pub fn hidden_size(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Width inside of the MLPs.
    pub fn mlp_hidden_size(&self) -> usize {
        (self.hidden_size() as f64 * self.mlp_ratio) as usize
    }

    /// Channels of the predicted velocity.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// Checks that the values describe a model of this architecture.
    ///
    /// # Errors
    /// [`crate::Error::Config`] names the first key that does not.
    pub fn validate(&self) -> Result<()> {
        let c = Self::COMPONENT;
        if let Some(class) = &self.class_name
            && class != "Flux2Transformer2DModel"
        {
            return invalid(c, "_class_name", class, "Flux2Transformer2DModel");
        }
        check_counts(
            c,
            1 << 16,
            &[
                ("in_channels", self.in_channels),
                ("out_channels", self.out_channels()),
                ("attention_head_dim", self.attention_head_dim),
                ("num_attention_heads", self.num_attention_heads),
                ("joint_attention_dim", self.joint_attention_dim),
                ("timestep_guidance_channels", self.timestep_guidance_channels),
            ],
        )?;
        check_counts(
            c,
            1024,
            &[("num_layers", self.num_layers.max(1)), ("num_single_layers", self.num_single_layers.max(1))],
        )?;
        if self.num_layers + self.num_single_layers == 0 {
            return invalid(c, "num_layers", self.num_layers, "at least one block of either kind");
        }
        if self.patch_size != 1 {
            return invalid(c, "patch_size", self.patch_size, "1");
        }
        if self.hidden_size() > 1 << 16 {
            return invalid(c, "num_attention_heads", self.num_attention_heads, "a hidden size of at most 65536");
        }
        if self.out_channels() != self.in_channels {
            return invalid(c, "out_channels", self.out_channels(), format!("in_channels ({})", self.in_channels));
        }
        if !self.timestep_guidance_channels.is_multiple_of(2) {
            return invalid(c, "timestep_guidance_channels", self.timestep_guidance_channels, "an even number");
        }
        if self.axes_dims_rope.len() != 4 {
            return invalid(c, "axes_dims_rope", &self.axes_dims_rope, "four axes (T, H, W, L)");
        }
        if self.axes_dims_rope.iter().any(|d| !d.is_multiple_of(2)) {
            return invalid(c, "axes_dims_rope", &self.axes_dims_rope, "even numbers");
        }
        let sum = self.axes_dims_rope.iter().try_fold(0_usize, |sum, &d| sum.checked_add(d));
        if sum != Some(self.attention_head_dim) {
            let expected = format!("a sum of attention_head_dim ({})", self.attention_head_dim);
            return invalid(c, "axes_dims_rope", &self.axes_dims_rope, expected);
        }
        check_positive(c, "rope_theta", self.rope_theta)?;
        check_positive(c, "eps", self.eps)?;
        check_positive(c, "mlp_ratio", self.mlp_ratio)?;
        if self.mlp_ratio > 64.0 || self.mlp_hidden_size() == 0 {
            return invalid(c, "mlp_ratio", self.mlp_ratio, "a ratio of at most 64 that leaves a channel");
        }
        Ok(())
    }
}
