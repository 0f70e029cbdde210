//! `config.json` in the diffusers layout.

use serde::Deserialize;

/// Classes of the diffusers library whose networks are built here.
pub const CLASSES: &[&str] = &["AutoencoderKLWan", "AutoencoderKLQwenImage"];

/// The published configuration of a VAE, parsed unchanged: `AutoencoderKLWan` (Wan 2.1 and 2.2) or
/// `AutoencoderKLQwenImage`.
///
/// Only the statistics of the latents are used beside weights ([`WanVae::load`](crate::WanVae::load)): everything else
/// is in the tensors.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Published")]
pub struct VaeConfig {
    /// Channels of the finest encoder stage.
    pub base_dim: usize,
    /// The same of the decoder, if it differs.
    pub decoder_base_dim: Option<usize>,
    /// Width of each stage in units of the finest.
    pub dim_mult: Vec<usize>,
    /// Channels of the latents.
    pub z_dim: usize,
    /// Residual blocks per encoder stage; the decoder has one more.
    pub num_res_blocks: usize,
    /// Which encoder stages halve time as well (sic).
    pub temperal_downsample: Vec<bool>,
    /// Whether stages are nested with parameter-free shortcuts (Wan 2.2).
    pub is_residual: bool,
    /// Channels that the encoder network takes.
    pub in_channels: usize,
    /// Channels that the decoder network gives.
    pub out_channels: usize,
    /// Side of the squares of pixels that become channels.
    pub patch_size: Option<usize>,
    /// Mean of each latent channel.
    pub latents_mean: Vec<f64>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f64>,
}

/// The file itself. Fields that came later than the first models have defaults.
#[derive(Deserialize)]
struct Published {
    #[serde(rename = "_class_name")]
    class_name: Option<String>,
    #[serde(default)]
    attn_scales: Vec<f64>,
    base_dim: usize,
    decoder_base_dim: Option<usize>,
    dim_mult: Vec<usize>,
    z_dim: usize,
    num_res_blocks: usize,
    temperal_downsample: Vec<bool>,
    #[serde(default)]
    is_residual: bool,
    in_channels: Option<usize>,
    out_channels: Option<usize>,
    /// Qwen-Image: channels on both sides.
    input_channels: Option<usize>,
    patch_size: Option<usize>,
    latents_mean: Vec<f64>,
    latents_std: Vec<f64>,
}

impl TryFrom<Published> for VaeConfig {
    type Error = String;

    fn try_from(file: Published) -> Result<Self, String> {
        if let Some(class) = &file.class_name
            && !CLASSES.contains(&class.as_str())
        {
            return Err(format!("_class_name is {class:?}, expected {}", CLASSES.join(" or ")));
        }
        if !file.attn_scales.is_empty() {
            return Err(format!("attn_scales is {:?}, expected [] (attention in the middle only)", file.attn_scales));
        }
        for (field, values) in [("latents_mean", &file.latents_mean), ("latents_std", &file.latents_std)] {
            if values.len() != file.z_dim {
                return Err(format!("{field} has {} values, expected {} (z_dim)", values.len(), file.z_dim));
            }
        }
        Ok(Self {
            base_dim: file.base_dim,
            decoder_base_dim: file.decoder_base_dim,
            dim_mult: file.dim_mult,
            z_dim: file.z_dim,
            num_res_blocks: file.num_res_blocks,
            temperal_downsample: file.temperal_downsample,
            is_residual: file.is_residual,
            in_channels: file.in_channels.or(file.input_channels).unwrap_or(3),
            out_channels: file.out_channels.or(file.input_channels).unwrap_or(3),
            patch_size: file.patch_size,
            latents_mean: file.latents_mean,
            latents_std: file.latents_std,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{Architecture, Statistics, architecture::Unpack};

    /// The file of the published Wan 2.1 VAE, with the fields that it was published with.
    fn wan21() -> Value {
        let statistics = Statistics::wan21();
        json!({
            "_class_name": "AutoencoderKLWan", "_diffusers_version": "0.33.0.dev0", "attn_scales": [], "base_dim": 96,
            "dim_mult": [1, 2, 4, 4], "dropout": 0.0, "latents_mean": statistics.mean(), "latents_std": statistics.std(),
            "num_res_blocks": 2, "temperal_downsample": [false, true, true], "z_dim": 16,
        })
    }

    fn with(mut config: Value, changes: Value) -> Value {
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config
    }

    fn wan22() -> Value {
        let statistics = Statistics::wan22();
        with(
            wan21(),
            json!({
                "base_dim": 160, "decoder_base_dim": 256, "clip_output": false, "in_channels": 12, "is_residual": true,
                "latents_mean": statistics.mean(), "latents_std": statistics.std(), "out_channels": 12, "patch_size": 2,
                "scale_factor_spatial": 16, "scale_factor_temporal": 4, "z_dim": 48,
            }),
        )
    }

    fn parse(config: Value) -> Result<VaeConfig, String> {
        serde_json::from_value(config).map_err(|e| e.to_string())
    }

    #[test]
    fn published_files_parse_unchanged() {
        let a = Architecture::from_config(&parse(wan21()).unwrap()).unwrap();
        assert_eq!((a.z_dim, a.in_channels(), a.out_channels(), a.spatial_factor()), (16, 3, 3, 8));
        assert!(!a.residual);
        let a = Architecture::from_config(&parse(wan22()).unwrap()).unwrap();
        assert_eq!((a.z_dim, a.in_channels(), a.out_channels(), a.spatial_factor()), (48, 3, 3, 16));
        assert!(a.residual && a.unpack == Unpack::Patches(2));
        let qwen = with(wan21(), json!({"_class_name": "AutoencoderKLQwenImage"}));
        assert_eq!(parse(qwen.clone()), parse(wan21()));
        let layered = parse(with(qwen, json!({"input_channels": 4}))).unwrap();
        assert_eq!((layered.in_channels, layered.out_channels), (4, 4));
        let demo = include_str!("../../../tests/models/wan-vae-demo/config.json");
        let demo: VaeConfig = serde_json::from_str(demo).unwrap();
        assert_eq!((demo.num_res_blocks, demo.decoder_base_dim, demo.patch_size), (1, None, None));
    }

    #[test]
    fn other_classes_and_lengths_are_refused() {
        for (change, word) in [
            (json!({"_class_name": "AutoencoderKLFlux2"}), "AutoencoderKLFlux2"),
            (json!({"attn_scales": [1.0]}), "attn_scales"),
            (json!({"latents_mean": [0.0]}), "latents_mean has 1 values, expected 16"),
            (json!({"latents_std": []}), "latents_std"),
            (json!({"dim_mult": "1,2"}), "invalid type"),
            (json!({"z_dim": -1}), "invalid value"),
        ] {
            let text = parse(with(wan21(), change)).unwrap_err();
            assert!(text.contains(word) && !text.contains('\n'), "{text}");
        }
    }
}
