//! What the tests of this folder share.

use std::collections::BTreeMap;

use crate::config::TransformerConfig;

/// A configuration as `config.json` gives it.
pub(crate) fn config(
    num_layers: usize,
    num_single_layers: usize,
    heads: usize,
    head_dim: usize,
    joint_attention_dim: usize,
) -> TransformerConfig {
    let axis = head_dim / 4;
    serde_json::from_value(serde_json::json!({
        "_class_name": "Flux2Transformer2DModel",
        "attention_head_dim": head_dim,
        "axes_dims_rope": [axis, axis, axis, axis],
        "eps": 1e-6,
        "guidance_embeds": false,
        "in_channels": 128,
        "joint_attention_dim": joint_attention_dim,
        "mlp_ratio": 3.0,
        "num_attention_heads": heads,
        "num_layers": num_layers,
        "num_single_layers": num_single_layers,
        "out_channels": null,
        "patch_size": 1,
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
    }))
    .unwrap()
}

/// Names and shapes of a published model.
pub(crate) fn published_names(table: &str) -> BTreeMap<String, Vec<usize>> {
    let path = format!("{}/../../tests/models/names/{table}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| {
            let (name, shape) = line.split_once('\t').unwrap();
            let shape = shape.split(',').filter(|d| !d.is_empty()).map(|d| d.parse().unwrap()).collect();
            (name.to_owned(), shape)
        })
        .collect()
}
