//! The published Wan VAEs, for benches with random weights.

use wan_vae::VaeConfig;

/// A published network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// 16 latent channels, 8 pixels per latent.
    Wan21,
    /// 48 latent channels, 16 pixels per latent.
    Wan22,
}

impl Model {
    /// As the peers' scripts call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wan21 => "wan21",
            Self::Wan22 => "wan22",
        }
    }

    /// What its published configuration says, with statistics of 0 and 1.
    pub fn config(self) -> VaeConfig {
        let wan22 = self == Self::Wan22;
        let (z_dim, channels) = if wan22 { (48, 12) } else { (16, 3) };
        VaeConfig {
            base_dim: if wan22 { 160 } else { 96 },
            decoder_base_dim: wan22.then_some(256),
            dim_mult: vec![1, 2, 4, 4],
            z_dim,
            num_res_blocks: 2,
            temperal_downsample: vec![false, true, true],
            is_residual: wan22,
            in_channels: channels,
            out_channels: channels,
            patch_size: wan22.then_some(2),
            latents_mean: vec![0.0; z_dim],
            latents_std: vec![1.0; z_dim],
        }
    }
}
