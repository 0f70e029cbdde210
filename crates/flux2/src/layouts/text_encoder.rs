//! Qwen3 in llama.cpp's layout, or below the prefix of a whole model.

use std::sync::Arc;

use weights::{
    TensorSource,
    gguf::ARCHITECTURE,
    layout::{Take, View, translate},
};

use super::{index, is_of_another_component};
use crate::error::{Error, Result};

/// llama.cpp's names outside of the layers, and those of transformers.
const TOP: &[(&str, &str)] = &[
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Names below a layer.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// The architecture that GGUF files of the text encoder name.
const QWEN3: &str = "qwen3";

const EMBEDDING: &str = "embed_tokens.weight";

/// The text encoder's tensors under transformers names, with or without `model.`.
///
/// # Errors
/// [`Error::Architecture`] for a GGUF file of another language model; [`Error::Weights`] if two tensors would have the same
/// name.
pub fn text_encoder(source: Arc<dyn TensorSource>) -> Result<Arc<dyn TensorSource>> {
    if source.info("token_embd.weight").is_some() {
        if let Some(found) = source.metadata().get(ARCHITECTURE)
            && found != QWEN3
        {
            let (file, found) = (source.describe().to_owned(), found.escape_debug().take(40).collect());
            return Err(Error::Architecture { file, found, expected: QWEN3 });
        }
        return Ok(translate(source, |info| views(&info.name))?);
    }
    // The only embedding names the prefix.
    let mut prefixes = source.tensors().iter().filter_map(|t| t.name.strip_suffix(EMBEDDING));
    let (Some(prefix), None) = (prefixes.next().map(str::to_owned), prefixes.next()) else { return Ok(source) };
    let prefix = prefix.strip_suffix("model.").unwrap_or(&prefix);
    if prefix.is_empty() || !prefix.ends_with('.') {
        return Ok(source);
    }
    Ok(translate(source, |info| match info.name.strip_prefix(prefix) {
        Some(name) => Some(vec![View::new(name, Take::Whole)]),
        None => is_of_another_component(&info.name, prefix).then(Vec::new),
    })?)
}

/// What a tensor in llama.cpp's layout holds.
fn views(name: &str) -> Option<Vec<View>> {
    let name = match name.strip_prefix("blk.") {
        Some(rest) => {
            let (number, name) = index(rest)?;
            let name = name.strip_suffix(".weight")?;
            let (_, ours) = LAYER.iter().find(|(theirs, _)| *theirs == name)?;
            format!("model.layers.{number}.{ours}.weight")
        }
        None => TOP.iter().find(|(theirs, _)| *theirs == name)?.1.to_owned(),
    };
    Some(vec![View::new(name, Take::Whole)])
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use weights::{Gguf, write::TensorData};

    use super::*;
    use crate::{layouts::published, plan::random};

    /// The names that the `gguf` package gives to the published model.
    #[test]
    fn the_published_names_are_translated() {
        published::check("qwen3-8b.layouts.tsv", views);
        for name in ["blk.0.attn_q", "blk.x.attn_q.weight", "blk.0.ssm.weight", "rope_freqs.weight"] {
            assert_eq!(views(name), None, "{name}");
        }
    }

    /// A GGUF file of another language model is told by its architecture, whatever its tensors are called.
    #[test]
    fn other_architectures_are_refused() {
        use candle_core::quantized::{GgmlDType, QTensor, gguf_file};

        let weight = Tensor::zeros((1, 32), DType::F32, &Device::Cpu).unwrap();
        let weight = QTensor::quantize(&weight, GgmlDType::Q8_0).unwrap();
        let open = |architecture: Option<&str>| {
            let value = gguf_file::Value::String(architecture.unwrap_or_default().to_owned());
            let keys: Vec<_> = architecture.iter().map(|_| (ARCHITECTURE, &value)).collect();
            let mut file = std::io::Cursor::new(Vec::new());
            gguf_file::write(&mut file, &keys, &[("token_embd.weight", &weight)]).unwrap();
            text_encoder(Arc::new(Gguf::from_bytes(Arc::new(file.into_inner()), "x.gguf").unwrap()))
        };
        for architecture in [Some("qwen3"), None] {
            assert!(open(architecture).unwrap().info("model.embed_tokens.weight").is_some());
        }
        let text = open(Some("gemma3")).map(|_| ()).unwrap_err().to_string();
        assert_eq!(text, "x.gguf holds a model of architecture `gemma3`, `qwen3` is needed");
    }

    #[test]
    fn prefixes_of_whole_models_are_removed() {
        let tensor = |name: &str| TensorData::f32(name, &[1, 1], &[0.0]);
        for (embedding, norm, ours) in [
            (
                "text_encoders.qwen3_4b.transformer.model.embed_tokens.weight",
                "text_encoders.qwen3_4b.transformer.model.norm.weight",
                "model.norm.weight",
            ),
            ("text_encoder.embed_tokens.weight", "text_encoder.norm.weight", "norm.weight"),
            ("model.embed_tokens.weight", "model.norm.weight", "model.norm.weight"),
            ("embed_tokens.weight", "norm.weight", "norm.weight"),
        ] {
            let file = random::file(&[tensor(embedding), tensor(norm), tensor("vae.x.weight")]);
            let source = text_encoder(file).unwrap();
            assert!(source.info(ours).is_some(), "{ours}");
            assert_eq!(source.info("vae.x.weight").is_none(), embedding.starts_with("text_encoder"), "{ours}");
        }
    }
}
