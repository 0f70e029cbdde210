//! Which files of a repository a model needs. Repositories hold more: the same weights in other types, other programs'
//! formats, pictures.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// File that makes a repository a model in the diffusers layout.
pub const MODEL_INDEX: &str = "model_index.json";

/// Small files that belong to the model as a whole.
const ROOT: &[&str] = &[MODEL_INDEX, "generation.json"];

/// Names that the weights of a component usually have, without their ending.
const STANDARD: &[&str] = &["diffusion_pytorch_model", "model"];

/// The components that a `model_index.json` names: those with a library and a class.
pub fn components(index: &Map<String, Value>) -> BTreeSet<String> {
    let named =
        index.iter().filter(|(_, value)| matches!(value, Value::Array(pair) if pair.iter().all(Value::is_string)));
    named.map(|(name, _)| name.clone()).collect()
}

/// The files that a model with these components needs, in the order of `paths`.
pub fn needed<'a>(paths: &[&'a str], components: &BTreeSet<String>) -> Vec<&'a str> {
    let mut chosen: BTreeSet<&str> = paths.iter().copied().filter(|path| ROOT.contains(path)).collect();
    for component in components {
        let inside = |path: &&'a str| {
            path.strip_prefix(component.as_str())?.strip_prefix('/').filter(|name| !name.contains('/'))
        };
        let names: Vec<&str> = paths.iter().filter_map(inside).collect();
        let mut wanted: BTreeSet<&str> = weights(&names).into_iter().collect();
        wanted.extend(names.iter().filter(|name| is_small_file(name)));
        chosen.extend(paths.iter().filter(|path| inside(path).is_some_and(|name| wanted.contains(name))));
    }
    paths.iter().copied().filter(|path| chosen.contains(path)).collect()
}

/// Configuration and tokenizer files, but no index of shards.
fn is_small_file(name: &str) -> bool {
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    matches!(ending, Some("json" | "txt" | "jinja")) && !name.ends_with(".index.json")
}

/// The weights among the names of a folder: one file or the shards with a standard name, else all that there are.
fn weights<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let find = |name: String| names.iter().copied().find(|&n| n == name);
    for stem in STANDARD {
        if let Some(file) = find(format!("{stem}.safetensors")) {
            return vec![file];
        }
        if let Some(index) = find(format!("{stem}.safetensors.index.json")) {
            let shards = names.iter().copied().filter(|name| is_shard(name, stem));
            return shards.chain([index]).collect();
        }
    }
    let endings = [".safetensors", ".gguf", ".safetensors.index.json"];
    names.iter().copied().filter(|name| endings.iter().any(|ending| name.ends_with(ending))).collect()
}

/// Whether the name is `STEM-00001-of-00002.safetensors`, with any numbers.
fn is_shard(name: &str, stem: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let numbers = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".safetensors"));
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_index_names_components() {
        let index = r#"{"_class_name": "P", "_diffusers_version": "1", "is_distilled": true, "vae": ["diffusers", "V"],
            "image_encoder": [null, null], "transformer": ["diffusers", "T"]}"#;
        assert_eq!(components(&serde_json::from_str(index).unwrap()), set(&["transformer", "vae"]));
    }

    #[test]
    fn a_published_repository_is_cut_to_what_is_needed() {
        // The listing of FLUX.2 klein 4B, and what other repositories have besides.
        let paths = [
            ".gitattributes",
            "LICENSE.md",
            "README.md",
            "ae.safetensors",
            "flux-2-klein-4b.safetensors",
            "model_index.json",
            "scheduler/scheduler_config.json",
            "teaser.png",
            "text_encoder/config.json",
            "text_encoder/generation_config.json",
            "text_encoder/model-00001-of-00002.safetensors",
            "text_encoder/model-00002-of-00002.safetensors",
            "text_encoder/model.safetensors.index.json",
            "text_encoder/model.fp16-00001-of-00002.safetensors",
            "text_encoder/pytorch_model.bin",
            "tokenizer/added_tokens.json",
            "tokenizer/chat_template.jinja",
            "tokenizer/merges.txt",
            "tokenizer/tokenizer.json",
            "tokenizer/vocab.json",
            "transformer/config.json",
            "transformer/diffusion_pytorch_model.safetensors",
            "transformer/diffusion_pytorch_model.fp16.safetensors",
            "transformer/old/diffusion_pytorch_model.safetensors",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
        ];
        let all = set(&["scheduler", "text_encoder", "tokenizer", "transformer", "vae"]);
        let dropped = [
            ".gitattributes",
            "LICENSE.md",
            "README.md",
            "ae.safetensors",
            "flux-2-klein-4b.safetensors",
            "teaser.png",
            "text_encoder/model.fp16-00001-of-00002.safetensors",
            "text_encoder/pytorch_model.bin",
            "transformer/diffusion_pytorch_model.fp16.safetensors",
            "transformer/old/diffusion_pytorch_model.safetensors",
        ];
        let kept: Vec<&str> = paths.iter().copied().filter(|path| !dropped.contains(path)).collect();
        assert_eq!(needed(&paths, &all), kept);
        let without = needed(&paths, &set(&["vae"]));
        assert_eq!(without, ["model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.safetensors"]);
    }

    #[test]
    fn weights_without_a_standard_name_are_all_taken() {
        assert_eq!(weights(&["q8_0.gguf", "x.json"]), ["q8_0.gguf"]);
        assert_eq!(weights(&["a.safetensors", "b.safetensors"]), ["a.safetensors", "b.safetensors"]);
        assert!(
            is_shard("model-00001-of-00002.safetensors", "model") && !is_shard("model-x-of-2.safetensors", "model")
        );
    }
}
