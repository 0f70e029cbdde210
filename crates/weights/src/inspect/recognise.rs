//! Which model a set of tensors is, by names and shapes only.

use std::fmt::Write as _;

use serde::Serialize;

use crate::{loader::KNOWN_PREFIXES, source::TensorInfo};

/// What a set of tensors looks like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Guess {
    /// Model, for example `FLUX.2 transformer`.
    pub model: &'static str,
    /// Size or version, for example `klein 4B`.
    pub variant: Option<String>,
    /// Whose names the tensors have: `diffusers`, `BFL`, `transformers`, `original`.
    pub layout: &'static str,
    /// Prefix of all its names.
    pub prefix: Option<&'static str>,
}

impl Guess {
    /// In a few words: `FLUX.2 transformer (klein 4B), diffusers names`.
    pub fn describe(&self) -> String {
        let mut text = self.model.to_owned();
        if let Some(variant) = &self.variant {
            let _ = write!(text, " ({variant})");
        }
        let _ = write!(text, ", {} names", self.layout);
        if let Some(prefix) = self.prefix {
            let _ = write!(text, " under `{prefix}`");
        }
        text
    }
}

/// One model in one layout: the tensors that it has, one that it lacks, and how its size is told.
struct Rule {
    model: &'static str,
    layout: &'static str,
    has: &'static [&'static str],
    lacks: &'static str,
    variant: fn(&Names) -> Option<String>,
}

/// The first rule that fits counts, so the more particular ones stand first.
const RULES: &[Rule] = &[
    Rule {
        model: "FLUX.2 transformer",
        layout: "diffusers",
        has: &["x_embedder.weight", "double_stream_modulation_img.linear.weight"],
        lacks: "",
        variant: |n| flux2(n, "x_embedder.weight"),
    },
    Rule {
        model: "FLUX.2 transformer",
        layout: "BFL",
        has: &["img_in.weight", "double_stream_modulation_img.lin.weight"],
        lacks: "",
        variant: |n| flux2(n, "img_in.weight"),
    },
    Rule {
        model: "FLUX.2 VAE",
        layout: "diffusers",
        has: &["bn.running_mean", "decoder.mid_block.resnets.0.norm1.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "FLUX.2 VAE",
        layout: "BFL",
        has: &["bn.running_mean", "decoder.mid.block_1.norm1.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "Wan video VAE",
        layout: "diffusers",
        has: &["decoder.mid_block.resnets.0.norm1.gamma"],
        lacks: "",
        variant: |n| wan_vae(n, "post_quant_conv.weight", "decoder.norm_out.gamma"),
    },
    Rule {
        model: "Wan video VAE",
        layout: "original",
        has: &["decoder.middle.0.residual.0.gamma"],
        lacks: "",
        variant: |n| wan_vae(n, "conv2.weight", "decoder.head.0.gamma"),
    },
    Rule {
        model: "LTX-2 diffusion decoder",
        layout: "diffusers",
        has: &["decoder.conv_in_x_t.weight", "latents_mean"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "LTX-2 diffusion decoder",
        layout: "original",
        has: &["decoder.conv_in_x_t.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "LTX video VAE",
        layout: "diffusers",
        has: &["decoder.conv_in.conv.weight", "latents_mean"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "LTX video VAE",
        layout: "original",
        has: &["decoder.conv_in.conv.weight", "per_channel_statistics.mean-of-means"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "LTX-2 transformer",
        layout: "diffusers",
        has: &["proj_in.weight", "audio_proj_in.weight", "transformer_blocks.0.audio_attn1.to_q.weight"],
        lacks: "",
        variant: |n| width(n, "proj_in.weight"),
    },
    Rule {
        model: "LTX-2 transformer",
        layout: "original",
        has: &["patchify_proj.weight", "audio_patchify_proj.weight"],
        lacks: "",
        variant: |n| width(n, "patchify_proj.weight"),
    },
    Rule {
        model: "LTX-Video transformer",
        layout: "original",
        has: &["patchify_proj.weight", "adaln_single.linear.weight"],
        lacks: "audio_patchify_proj.weight",
        variant: |n| width(n, "patchify_proj.weight"),
    },
    Rule {
        model: "Qwen3 language model",
        layout: "transformers",
        has: &["embed_tokens.weight", "layers.0.self_attn.q_norm.weight", "layers.0.post_attention_layernorm.weight"],
        // Gemma 3 has it, Qwen3 has not.
        lacks: "layers.0.pre_feedforward_layernorm.weight",
        variant: |n| qwen3(n, "embed_tokens.weight", "layers.63.input_layernorm.weight"),
    },
    Rule {
        model: "Qwen3 language model",
        layout: "llama.cpp",
        has: &["token_embd.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate.weight"],
        // Gemma 3 has it, Qwen3 has not.
        lacks: "blk.0.post_ffw_norm.weight",
        variant: |n| qwen3(n, "token_embd.weight", "blk.63.attn_norm.weight"),
    },
    Rule {
        model: "language model",
        layout: "llama.cpp",
        has: &["token_embd.weight", "blk.0.attn_q.weight"],
        lacks: "",
        variant: |n| n.extent("token_embd.weight", 1).map(|h| format!("hidden size {h}")),
    },
    Rule {
        model: "language model",
        layout: "transformers",
        has: &["embed_tokens.weight", "layers.0.self_attn.q_proj.weight"],
        lacks: "",
        variant: |n| n.extent("embed_tokens.weight", 1).map(|h| format!("hidden size {h}")),
    },
    Rule {
        model: "Wan video transformer",
        layout: "original",
        has: &["patch_embedding.weight", "blocks.0.cross_attn.norm_q.weight"],
        lacks: "",
        variant: |n| width(n, "patch_embedding.weight"),
    },
    Rule {
        model: "Wan video transformer",
        layout: "diffusers",
        has: &["patch_embedding.weight", "condition_embedder.time_embedder.linear_1.weight"],
        lacks: "",
        variant: |n| width(n, "patch_embedding.weight"),
    },
    Rule {
        model: "FLUX.1 transformer",
        layout: "BFL",
        has: &["img_in.weight", "double_blocks.0.img_mod.lin.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "FLUX.1 transformer",
        layout: "diffusers",
        has: &["x_embedder.weight", "single_transformer_blocks.0.proj_mlp.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "T5 text encoder",
        layout: "transformers",
        has: &["encoder.block.0.layer.0.SelfAttention.q.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "CLIP text encoder",
        layout: "transformers",
        has: &["text_model.encoder.layers.0.self_attn.q_proj.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "image VAE of the Stable Diffusion family",
        layout: "diffusers",
        has: &["decoder.conv_in.weight", "decoder.mid_block.resnets.0.norm1.weight"],
        lacks: "bn.running_mean",
        variant: latent_channels,
    },
    Rule {
        model: "image VAE of the Stable Diffusion family",
        layout: "original",
        has: &["decoder.conv_in.weight", "decoder.mid.block_1.norm1.weight"],
        lacks: "bn.running_mean",
        variant: latent_channels,
    },
    Rule {
        model: "Stable Diffusion U-Net",
        layout: "diffusers",
        has: &["conv_in.weight", "down_blocks.0.resnets.0.time_emb_proj.weight"],
        lacks: "",
        variant: none,
    },
    Rule {
        model: "Stable Diffusion U-Net",
        layout: "original",
        has: &["input_blocks.0.0.weight", "time_embed.0.weight"],
        lacks: "",
        variant: none,
    },
];

/// Ends of tensor names that only adapters have, and the style they belong to.
const ADAPTERS: &[(&str, &str)] = &[
    (".lora_A.weight", "PEFT"),
    (".lora_A.default.weight", "PEFT"),
    (".lora_down.weight", "kohya"),
    (".lokr_w1", "LoKr"),
    (".lokr_w1_a", "LoKr"),
    (".hada_w1_a", "LoHa"),
];

/// What the tensors look like, if it is something known. `tensors` are sorted by name.
pub fn recognise(tensors: &[TensorInfo]) -> Option<Guess> {
    for &(end, layout) in ADAPTERS {
        if let Some(t) = tensors.iter().find(|t| t.name.ends_with(end)) {
            // A (or `down`) has one row per rank.
            let rank = t.shape.first().filter(|_| end.contains("lora"));
            let variant = rank.map(|r| format!("rank {r}"));
            return Some(Guess { model: "LoRA or similar adapter", variant, layout, prefix: None });
        }
    }
    // Without a prefix first; `model.` before the longer ones would not hurt, since the names behind it differ.
    for prefix in std::iter::once("").chain(KNOWN_PREFIXES.iter().copied()) {
        let names = Names { tensors, prefix };
        let rule =
            RULES.iter().find(|r| r.has.iter().all(|n| names.shape(n).is_some()) && names.shape(r.lacks).is_none());
        if let Some(rule) = rule {
            let prefix = (!prefix.is_empty()).then_some(prefix);
            return Some(Guess { model: rule.model, variant: (rule.variant)(&names), layout: rule.layout, prefix });
        }
    }
    None
}

/// Tensors by name, with a prefix taken off.
struct Names<'a> {
    tensors: &'a [TensorInfo],
    prefix: &'static str,
}

impl Names<'_> {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        let full = format!("{}{name}", self.prefix);
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(&full)).ok()?;
        Some(&self.tensors[found].shape)
    }

    fn extent(&self, name: &str, axis: usize) -> Option<usize> {
        self.shape(name)?.get(axis).copied()
    }
}

fn none(_: &Names) -> Option<String> {
    None
}

/// FLUX.2 sizes by hidden size.
fn flux2(names: &Names, embedder: &str) -> Option<String> {
    Some(match names.extent(embedder, 0)? {
        3072 => "klein 4B".to_owned(),
        4096 => "klein 9B".to_owned(),
        6144 => "dev".to_owned(),
        hidden => format!("hidden size {hidden}"),
    })
}

/// The width is that of `embedding`; `deep` is a tensor that only the deepest has.
fn qwen3(names: &Names, embedding: &str, deep: &str) -> Option<String> {
    let hidden = names.extent(embedding, 1)?;
    let deep = names.shape(deep).is_some();
    Some(match (hidden, deep) {
        (1024, _) => "0.6B".to_owned(),
        (2048, _) => "1.7B".to_owned(),
        (2560, _) => "4B".to_owned(),
        (4096, _) => "8B".to_owned(),
        (5120, false) => "14B".to_owned(),
        (5120, true) => "32B".to_owned(),
        _ => format!("hidden size {hidden}"),
    })
}

/// Wan 2.1 and Qwen-Image share every name and shape, so they cannot be told apart.
fn wan_vae(names: &Names, post_quant: &str, head: &str) -> Option<String> {
    let channels = names.extent(post_quant, 0)?;
    Some(match (channels, names.extent(head, 0)) {
        (16, Some(96)) => "2.1, or Qwen-Image's, which has the same shapes".to_owned(),
        (48, Some(256)) => "2.2".to_owned(),
        (_, Some(base)) => format!("{channels} latent channels, decoder width {base}"),
        (_, None) => format!("{channels} latent channels"),
    })
}

fn latent_channels(names: &Names) -> Option<String> {
    names.extent("decoder.conv_in.weight", 1).map(|c| format!("{c} latent channels"))
}

fn width(names: &Names, projection: &str) -> Option<String> {
    names.extent(projection, 0).map(|w| format!("width {w}"))
}
