//! Names and shapes of a Qwen3 checkpoint.

use weights::{Expected, TensorSource};

use super::highest;
use crate::config::Qwen3Config;

/// `"model."` if the source was saved from `Qwen3ForCausalLM`, `""` if from a bare `Qwen3Model`.
pub fn prefix(source: &dyn TensorSource) -> &'static str {
    if source.tensors().iter().any(|tensor| tensor.name.starts_with("model.")) { "model." } else { "" }
}

/// The tensors that are needed for the hidden states `out_layers`: the embedding, and the layers below the highest.
pub fn expected(config: &Qwen3Config, out_layers: &[usize], prefix: &str) -> Vec<Expected> {
    let mut plan = vec![embedding(config, prefix)];
    plan.extend(layers(config, out_layers, prefix));
    plan
}

/// The embedding.
pub(super) fn embedding(config: &Qwen3Config, prefix: &str) -> Expected {
    Expected::new(format!("{prefix}embed_tokens.weight"), [config.vocab_size, config.hidden_size])
}

/// One layer, with names below its prefix; what is stacked are neighbours.
pub(crate) fn layer(config: &Qwen3Config) -> Vec<Expected> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
    let parts = [
        ("input_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![q, hidden]),
        ("self_attn.k_proj", vec![kv, hidden]),
        ("self_attn.v_proj", vec![kv, hidden]),
        ("self_attn.o_proj", vec![hidden, q]),
        ("self_attn.q_norm", vec![config.head_dim]),
        ("self_attn.k_norm", vec![config.head_dim]),
        ("post_attention_layernorm", vec![hidden]),
        ("mlp.gate_proj", vec![inner, hidden]),
        ("mlp.up_proj", vec![inner, hidden]),
        ("mlp.down_proj", vec![hidden, inner]),
    ];
    parts.into_iter().map(|(name, shape)| Expected::new(format!("{name}.weight"), shape)).collect()
}

/// The layers below the highest of `out_layers`.
pub(super) fn layers(config: &Qwen3Config, out_layers: &[usize], prefix: &str) -> Vec<Expected> {
    let layer = layer(config);
    let named = |i: usize| {
        layer.iter().map(move |part| Expected::new(format!("{prefix}layers.{i}.{}", part.name), part.shape.clone()))
    };
    (0..highest(out_layers)).flat_map(named).collect()
}

/// Whether a tensor belongs to the published model but not to what `out_layers` need: later layers, the final norm, the
/// language-model head.
pub fn ignored(config: &Qwen3Config, out_layers: &[usize], prefix: &str) -> impl Fn(&str) -> bool + use<> {
    let prefix = prefix.to_owned();
    let later = highest(out_layers)..config.num_hidden_layers;
    move |name| {
        if name == "lm_head.weight" {
            return true;
        }
        let Some(name) = name.strip_prefix(&prefix) else { return false };
        let layer = name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
        name == "norm.weight" || layer.is_some_and(|layer: usize| later.contains(&layer))
    }
}
