//! The transformer in BFL's layout, which GGUF files share: query, key and value are fused, and the output layer stores its
//! shift before its scale.

use std::sync::Arc;

use weights::{
    TensorInfo, TensorSource,
    layout::{Take, View, prefix_of, translate},
};

use super::{index, is_of_another_component};
use crate::{
    config::TransformerConfig,
    error::Result,
    transformer::names::{double_block, single_block},
};

/// BFL's names outside of the blocks, and those of diffusers.
const TOP: &[(&str, &str)] = &[
    ("img_in.weight", "x_embedder.weight"),
    ("txt_in.weight", "context_embedder.weight"),
    ("time_in.in_layer.weight", "time_guidance_embed.timestep_embedder.linear_1.weight"),
    ("time_in.out_layer.weight", "time_guidance_embed.timestep_embedder.linear_2.weight"),
    ("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight"),
    ("guidance_in.out_layer.weight", "time_guidance_embed.guidance_embedder.linear_2.weight"),
    ("double_stream_modulation_img.lin.weight", "double_stream_modulation_img.linear.weight"),
    ("double_stream_modulation_txt.lin.weight", "double_stream_modulation_txt.linear.weight"),
    ("single_stream_modulation.lin.weight", "single_stream_modulation.linear.weight"),
    ("final_layer.linear.weight", "proj_out.weight"),
];

/// Names below a double block. Norms end with `.scale` or `.weight`, so their endings are left out.
const DOUBLE: &[(&str, &str)] = &[
    ("img_attn.proj.weight", "attn.to_out.0.weight"),
    ("txt_attn.proj.weight", "attn.to_add_out.weight"),
    ("img_attn.norm.query_norm", "attn.norm_q.weight"),
    ("img_attn.norm.key_norm", "attn.norm_k.weight"),
    ("txt_attn.norm.query_norm", "attn.norm_added_q.weight"),
    ("txt_attn.norm.key_norm", "attn.norm_added_k.weight"),
    ("img_mlp.0.weight", "ff.linear_in.weight"),
    ("img_mlp.2.weight", "ff.linear_out.weight"),
    ("txt_mlp.0.weight", "ff_context.linear_in.weight"),
    ("txt_mlp.2.weight", "ff_context.linear_out.weight"),
];

/// Names below a single block.
const SINGLE: &[(&str, &str)] = &[
    ("linear1.weight", "attn.to_qkv_mlp_proj.weight"),
    ("linear2.weight", "attn.to_out.weight"),
    ("norm.query_norm", "attn.norm_q.weight"),
    ("norm.key_norm", "attn.norm_k.weight"),
];

/// The transformer's tensors under diffusers names.
///
/// Some published files of models without an embedding of the guidance scale hold one, of zeros; it is passed over.
///
/// # Errors
/// [`Error::Weights`](crate::Error::Weights) if two tensors would have the same name.
pub fn transformer(source: Arc<dyn TensorSource>, config: &TransformerConfig) -> Result<Arc<dyn TensorSource>> {
    let Some(prefix) = prefix_of(&*source, &["x_embedder.weight", "img_in.weight"]) else { return Ok(source) };
    let bfl = source.info(&format!("{prefix}img_in.weight")).is_some();
    if !bfl && prefix.is_empty() {
        return Ok(source);
    }
    let inner = source.clone();
    let is_stray = |info: &TensorInfo, name: &str| {
        !config.guidance_embeds
            && name.starts_with("guidance_in.")
            && inner.bytes(&info.name).is_ok_and(|bytes| bytes.iter().all(|&b| b == 0))
    };
    Ok(translate(source, |info| match info.name.strip_prefix(prefix) {
        None => is_of_another_component(&info.name, prefix).then(Vec::new),
        Some(name) if !bfl => Some(vec![View::new(name, Take::Whole)]),
        Some(name) if is_stray(info, name) => Some(Vec::new()),
        Some(name) => views(name),
    })?)
}

/// What a tensor in BFL's layout holds.
fn views(name: &str) -> Option<Vec<View>> {
    let whole = |name: String| Some(vec![View::new(name, Take::Whole)]);
    if name == "final_layer.adaLN_modulation.1.weight" {
        return Some(vec![View::new("norm_out.linear.weight", Take::SwappedHalves)]);
    }
    if let Some(rest) = name.strip_prefix("double_blocks.") {
        let (number, name) = index(rest)?;
        let block = double_block(number);
        let fused = match name {
            "img_attn.qkv.weight" => Some(["to_q", "to_k", "to_v"]),
            "txt_attn.qkv.weight" => Some(["add_q_proj", "add_k_proj", "add_v_proj"]),
            _ => None,
        };
        return match fused {
            Some(parts) => Some(View::parts(parts.map(|part| format!("{block}.attn.{part}.weight")))),
            None => whole(format!("{block}.{}", lookup(DOUBLE, name)?)),
        };
    }
    if let Some(rest) = name.strip_prefix("single_blocks.") {
        let (number, name) = index(rest)?;
        return whole(format!("{}.{}", single_block(number), lookup(SINGLE, name)?));
    }
    whole(lookup(TOP, name)?.to_owned())
}

/// The second of the pair whose first is `name`, with or without the ending of a norm.
fn lookup(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let norm = name.strip_suffix(".scale").or_else(|| name.strip_suffix(".weight"));
    let found = table.iter().find(|(bfl, _)| *bfl == name || (bfl.ends_with("_norm") && Some(*bfl) == norm));
    found.map(|(_, diffusers)| *diffusers)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use weights::write::TensorData;

    use super::*;
    use crate::{layouts::published, plan::random, transformer::small_config as config};

    /// What diffusers' converter makes of each tensor of the published single file.
    #[test]
    fn the_published_names_are_translated() {
        published::check("flux2-dev.layouts.tsv", views);
    }

    #[test]
    fn norms_have_two_endings_and_other_names_are_left() {
        for ending in ["scale", "weight"] {
            let found = views(&format!("double_blocks.7.txt_attn.norm.key_norm.{ending}")).unwrap();
            assert_eq!(found, [View::new("transformer_blocks.7.attn.norm_added_k.weight", Take::Whole)]);
        }
        for name in [
            "double_blocks.x.img_mlp.0.weight",
            "double_blocks.0.img_mlp.0.bias",
            "double_blocks.0.img_mlp.0.scale",
            "single_blocks.0",
            "vector_in.weight",
            "img_in.scale",
        ] {
            assert_eq!(views(name), None, "{name}");
        }
    }

    fn rows(source: &dyn TensorSource, name: &str) -> Vec<Vec<f32>> {
        let host = source.host(name).unwrap();
        let tensor: Tensor = host.to_tensor(DType::F32, &Device::Cpu).unwrap();
        tensor.to_vec2().unwrap()
    }

    #[test]
    fn parts_and_halves_are_those_of_the_file() {
        let ramp: Vec<f32> = (0..12).map(|v| v as f32).collect();
        for prefix in ["", "model.diffusion_model.", "diffusion_model."] {
            let file = random::file(&[
                TensorData::f32(format!("{prefix}img_in.weight"), &[2, 1], &[0.0; 2]),
                TensorData::f32(format!("{prefix}double_blocks.3.img_attn.qkv.weight"), &[6, 2], &ramp),
                TensorData::bf16(format!("{prefix}final_layer.adaLN_modulation.1.weight"), &[4, 3], &ramp),
                TensorData::f32("vae.conv.weight", &[1], &[1.0]),
            ]);
            let source = transformer(file, &config(1, 1, 1, 2, 1)).unwrap();
            assert_eq!(rows(&*source, "transformer_blocks.3.attn.to_k.weight"), [[4.0, 5.0], [6.0, 7.0]]);
            // The file has shift, then scale.
            let swapped = rows(&*source, "norm_out.linear.weight");
            assert_eq!(swapped, [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
            // Another part of a whole model is out of sight; without prefixes nothing says that it is one.
            assert_eq!(source.info("vae.conv.weight").is_none(), !prefix.is_empty(), "{prefix}");
        }
    }

    #[test]
    fn an_embedding_of_zeros_that_nothing_reads_is_passed_over() {
        for value in [0.0, 1.0] {
            let file = random::file(&[
                TensorData::f32("img_in.weight", &[1, 1], &[0.0]),
                TensorData::f32("guidance_in.in_layer.weight", &[1, 1], &[value]),
            ]);
            let name = "time_guidance_embed.guidance_embedder.linear_1.weight";
            let mut config = config(1, 1, 1, 2, 1);
            let plain = transformer(file.clone(), &config).unwrap();
            assert_eq!(plain.info(name).is_none(), value == 0.0);
            config.guidance_embeds = true;
            assert!(transformer(file, &config).unwrap().info(name).is_some());
        }
    }

    #[test]
    fn diffusers_names_stay() {
        let file = random::file(&[TensorData::f32("x_embedder.weight", &[1, 1], &[0.0])]);
        let source = transformer(file, &config(1, 1, 1, 2, 1)).unwrap();
        assert!(source.info("x_embedder.weight").is_some());
        let file = random::file(&[TensorData::f32("transformer.x_embedder.weight", &[1, 1], &[0.0])]);
        let source = transformer(file, &config(1, 1, 1, 2, 1)).unwrap();
        assert!(source.info("x_embedder.weight").is_some());
    }
}
