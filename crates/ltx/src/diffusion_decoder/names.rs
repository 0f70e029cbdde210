//! Names and shapes of the tensors, and how published files spell them.
//!
//! Everywhere else names are those of diffusers, below `decoder`. Published files fuse query, key and value into one map
//! and spell a few layers otherwise.

use weights::{Expected, TensorSource};

use super::config::DiffusionDecoderConfig;

/// Width of the sinusoid that embeds the timestep.
pub(super) const SINUSOID: usize = 256;

/// Chunks of the shared modulation: scale, shift and gate of attention and of the MLP, gate of the context.
pub(super) const CHUNKS: usize = 7;

/// Gates of attention, of the MLP and of the context in a denoising block.
pub(super) const GATES: [&str; 3] = ["gate_msa", "gate_mlp", "gate_ctx"];

/// Prefixes below which a published file keeps the decoder.
const ROOTS: [&str; 2] = ["vae.", ""];

/// How a file spells its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// `AutoencoderKL`-like folder of diffusers.
    Diffusers,
    /// A published file.
    Published {
        /// What all names begin with.
        root: &'static str,
        /// Whether the denoising blocks have gates: vectors that multiply what a branch adds.
        gated: bool,
    },
}

impl Spelling {
    /// Looks at one name that only one spelling has.
    pub(super) fn of(source: &dyn TensorSource) -> Self {
        let fused = |root: &&&str| source.info(&format!("{root}decoder.det_stages.0.0.attn.qkv.weight")).is_some();
        match ROOTS.iter().find(fused) {
            Some(root) => {
                let gated = source.info(&format!("{root}decoder.diff_blocks.0.gate_msa")).is_some();
                Self::Published { root, gated }
            }
            None => Self::Diffusers,
        }
    }

    /// Whether query, key and value are one map, `PREFIX.attn.qkv`.
    pub(super) fn is_fused(self) -> bool {
        matches!(self, Self::Published { .. })
    }

    /// Whether the denoising blocks have gates.
    pub(super) fn is_gated(self) -> bool {
        matches!(self, Self::Published { gated: true, .. })
    }

    /// How the file spells a name.
    pub(super) fn spell(self, name: &str) -> String {
        let Self::Published { root, .. } = self else {
            return name.to_owned();
        };
        let own = match name {
            "latents_mean" => "per_channel_statistics.mean-of-means".to_owned(),
            "latents_std" => "per_channel_statistics.std-of-means".to_owned(),
            name => name
                .replace("t_embedder.timestep_embedder.linear_1", "t_embedder.mlp.0")
                .replace("t_embedder.timestep_embedder.linear_2", "t_embedder.mlp.2")
                .replace("attn.to_out.0", "attn.proj")
                .replace("attn.norm_q", "attn.q_norm")
                .replace("attn.norm_k", "attn.k_norm"),
        };
        format!("{root}{own}")
    }

    /// Whether the decoder has no use for a tensor: other parts of the same file, an embedding that no implementation
    /// reads, and heads that only training used.
    pub(super) fn ignores(self, name: &str) -> bool {
        let Self::Published { root, .. } = self else {
            return false;
        };
        match name.strip_prefix(root).and_then(|name| name.strip_prefix("decoder.")) {
            Some(own) => own == "type_emb" || own.starts_with("coarse_"),
            // The other statistics belong to the encoder.
            None => true,
        }
    }
}

/// Every tensor of the decoder as `spelling` has it.
pub(super) fn expected(config: &DiffusionDecoderConfig, spelling: Spelling) -> Vec<Expected> {
    let mut plan = Plan { list: Vec::new(), spelling };
    let first = config.stage_channels.first().copied().unwrap_or(0);
    let last = config.stage_channels.last().copied().unwrap_or(0);
    plan.tensor("latents_mean", &[config.in_channels]);
    plan.tensor("latents_std", &[config.in_channels]);
    plan.linear("decoder.conv_in", first, config.in_channels);
    for stage in 0..config.deterministic() {
        let channels = config.stage_channels[stage];
        for block in 0..config.stage_depths[stage] {
            plan.block(&format!("decoder.det_stages.{stage}.{block}"), channels, config.head_dim);
        }
        let factor: usize = config.upsample_strides[stage].iter().product();
        let out = factor * channels / config.upsample_channel_reductions[stage];
        plan.linear(&format!("decoder.upsamples.{stage}.proj"), out, channels);
    }
    plan.linear("decoder.t_embedder.timestep_embedder.linear_1", config.t_emb_dim, SINUSOID);
    plan.linear("decoder.t_embedder.timestep_embedder.linear_2", config.t_emb_dim, config.t_emb_dim);
    let pixels = config.out_channels * config.patch_size * config.patch_size;
    plan.linear("decoder.conv_in_x_t", last, pixels);
    plan.linear("decoder.shared_adaln.proj", CHUNKS * last, config.t_emb_dim);
    for block in 0..config.stage_depths[config.deterministic()] {
        let prefix = format!("decoder.diff_blocks.{block}");
        plan.tensor(&format!("{prefix}.scale_shift_table"), &[CHUNKS, last]);
        plan.linear(&format!("{prefix}.context_proj"), last, last);
        plan.block(&prefix, last, config.head_dim);
        for gate in GATES.iter().filter(|_| spelling.is_gated()) {
            plan.tensor(&format!("{prefix}.{gate}"), &[last]);
        }
    }
    plan.tensor("decoder.norm_out.weight", &[last]);
    plan.linear("decoder.conv_out", pixels, last);
    plan.list
}

/// Width between the maps of an MLP: four times that of the stage, in sixteens.
pub(super) fn hidden(channels: usize) -> usize {
    (4 * channels).next_multiple_of(16)
}

struct Plan {
    list: Vec<Expected>,
    spelling: Spelling,
}

impl Plan {
    fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.list.push(Expected::new(self.spelling.spell(name), shape));
    }

    fn linear(&mut self, name: &str, out: usize, into: usize) {
        self.tensor(&format!("{name}.weight"), &[out, into]);
        self.tensor(&format!("{name}.bias"), &[out]);
    }

    fn block(&mut self, prefix: &str, channels: usize, head_dim: usize) {
        for norm in ["norm1", "norm2"] {
            self.tensor(&format!("{prefix}.{norm}.weight"), &[channels]);
        }
        if self.spelling.is_fused() {
            self.linear(&format!("{prefix}.attn.qkv"), 3 * channels, channels);
        } else {
            for part in ["to_q", "to_k", "to_v"] {
                self.linear(&format!("{prefix}.attn.{part}"), channels, channels);
            }
        }
        self.linear(&format!("{prefix}.attn.to_out.0"), channels, channels);
        for norm in ["norm_q", "norm_k"] {
            self.tensor(&format!("{prefix}.attn.{norm}.weight"), &[head_dim]);
        }
        for part in ["w_gate", "w_up"] {
            self.tensor(&format!("{prefix}.mlp.{part}.weight"), &[hidden(channels), channels]);
        }
        self.tensor(&format!("{prefix}.mlp.w_down.weight"), &[channels, hidden(channels)]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::diffusion_decoder::testing::published;

    fn shapes(list: &[Expected]) -> BTreeMap<&str, &[usize]> {
        let shapes: BTreeMap<_, _> = list.iter().map(|e| (e.name.as_str(), e.shape.as_slice())).collect();
        assert_eq!(shapes.len(), list.len(), "a name comes twice");
        shapes
    }

    #[test]
    fn the_names_of_diffusers_are_the_recorded_table() {
        let table = include_str!("../../../../tests/models/names/ltx25-diffusion-decoder.tsv");
        let want = Expected::from_table(table).unwrap();
        let got = expected(&published(), Spelling::Diffusers);
        assert_eq!(shapes(&got), shapes(&want));
    }

    #[test]
    fn the_published_file_has_309_tensors_and_two_of_statistics() {
        for root in ROOTS {
            let got = expected(&published(), Spelling::Published { root, gated: false });
            assert_eq!(got.len(), 309 + 2);
            let elements: usize = got.iter().map(|e| e.shape.iter().product::<usize>()).sum();
            assert_eq!(elements, 417_133_616 + 2 * 128, "with the statistics, without the unused embedding");
            let shapes = shapes(&got);
            for (name, shape) in [
                ("decoder.det_stages.1.5.attn.qkv.weight", &[3072, 1024][..]),
                ("decoder.det_stages.3.1.attn.q_norm.weight", &[64]),
                ("decoder.diff_blocks.7.attn.proj.bias", &[256]),
                ("decoder.t_embedder.mlp.2.weight", &[384, 384]),
                ("per_channel_statistics.mean-of-means", &[128]),
            ] {
                assert_eq!(shapes[format!("{root}{name}").as_str()], shape);
            }
        }
    }

    #[test]
    fn other_parts_of_the_file_are_ignored_and_the_decoder_is_not() {
        let spelling = Spelling::Published { root: "vae.", gated: false };
        for name in
            ["vae.decoder.type_emb", "vae.decoder.coarse_head.weight", "vae.encoder.conv_in.conv.weight", "model.x"]
        {
            assert!(spelling.ignores(name), "{name}");
        }
        assert!(!spelling.ignores("vae.decoder.diff_blocks.0.gate_msa"));
        assert!(!Spelling::Diffusers.ignores("decoder.type_emb"));
    }
}
