//! What the tests of this folder share.

use crate::config::VaeConfig;

/// A configuration as `config.json` gives it.
pub(super) fn config(channels: &[usize], layers_per_block: usize, latent_channels: usize, groups: usize) -> VaeConfig {
    serde_json::from_value(serde_json::json!({
        "_class_name": "AutoencoderKLFlux2",
        "act_fn": "silu",
        "batch_norm_eps": 1e-4,
        "block_out_channels": channels,
        "in_channels": 3,
        "latent_channels": latent_channels,
        "layers_per_block": layers_per_block,
        "norm_num_groups": groups,
        "out_channels": 3,
        "patch_size": [2, 2],
    }))
    .unwrap()
}
