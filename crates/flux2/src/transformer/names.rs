//! The tensors of a transformer checkpoint in the diffusers layout.

use weights::Expected;

use crate::{config::TransformerConfig, plan::Below};

/// Widths that recur in the shapes of a transformer, all derived from its configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Widths {
    /// Channels of a token, `num_attention_heads * attention_head_dim`.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of one head.
    pub head_dim: usize,
    /// Channels between the two maps of a feed-forward part.
    pub mlp: usize,
    /// Added to the variance in every norm.
    pub eps: f64,
}

impl Widths {
    /// Widths of `config`; saturating, so that an absurd configuration fails its check and not here.
    pub fn new(config: &TransformerConfig) -> Self {
        let hidden = config.num_attention_heads.saturating_mul(config.attention_head_dim);
        Self {
            hidden,
            heads: config.num_attention_heads,
            head_dim: config.attention_head_dim,
            // The reference truncates the product.
            mlp: (hidden as f64 * config.mlp_ratio) as usize,
            eps: config.eps,
        }
    }

    /// Factor of the scores of attention.
    pub(super) fn scale(&self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }
}

/// Prefix of double block `index`.
pub fn double_block(index: usize) -> String {
    format!("transformer_blocks.{index}")
}

/// Prefix of single block `index`.
pub fn single_block(index: usize) -> String {
    format!("single_transformer_blocks.{index}")
}

/// Every tensor of the transformer.
pub(super) fn expected(config: &TransformerConfig) -> Vec<Expected> {
    let widths = Widths::new(config);
    let h = widths.hidden;
    let mut list = Vec::new();
    let mut top = Below::new(&mut list, "");
    top.tensor("x_embedder.weight", &[h, config.in_channels]);
    top.tensor("context_embedder.weight", &[h, config.joint_attention_dim]);
    let mut embedders = vec!["timestep_embedder"];
    if config.guidance_embeds {
        embedders.push("guidance_embedder");
    }
    for embedder in embedders {
        let prefix = format!("time_guidance_embed.{embedder}");
        top.tensor(&format!("{prefix}.linear_1.weight"), &[h, config.timestep_guidance_channels]);
        top.tensor(&format!("{prefix}.linear_2.weight"), &[h, h]);
    }
    top.tensor("double_stream_modulation_img.linear.weight", &[h.saturating_mul(6), h]);
    top.tensor("double_stream_modulation_txt.linear.weight", &[h.saturating_mul(6), h]);
    top.tensor("single_stream_modulation.linear.weight", &[h.saturating_mul(3), h]);
    top.tensor("norm_out.linear.weight", &[h.saturating_mul(2), h]);
    top.tensor("proj_out.weight", &[config.out_channels.unwrap_or(config.in_channels), h]);
    for index in 0..config.num_layers {
        super::DoubleBlock::expected(&widths, &double_block(index), &mut list);
    }
    for index in 0..config.num_single_layers {
        super::SingleBlock::expected(&widths, &single_block(index), &mut list);
    }
    list
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::transformer::test_support::{config, published_names};

    fn check(table: &str, config: &TransformerConfig) {
        let mut ours = BTreeMap::new();
        for tensor in expected(config) {
            assert!(ours.insert(tensor.name.clone(), tensor.shape).is_none(), "{} twice", tensor.name);
        }
        assert_eq!(ours, published_names(table));
    }

    #[test]
    fn klein_4b_is_the_published_table() {
        check("flux2-klein-4b.tsv", &config(5, 20, 24, 128, 7680));
    }

    #[test]
    fn klein_9b_is_the_published_table() {
        check("flux2-klein-9b.tsv", &config(8, 24, 32, 128, 12288));
    }

    #[test]
    fn dev_is_the_published_table() {
        let mut dev = config(8, 48, 48, 128, 15360);
        dev.guidance_embeds = true;
        check("flux2-dev.tsv", &dev);
    }

    #[test]
    fn widths_follow_the_configuration() {
        let mut small = config(1, 1, 3, 20, 16);
        small.mlp_ratio = 2.51;
        let widths = Widths::new(&small);
        assert_eq!((widths.hidden, widths.mlp), (60, 150));
        small.num_attention_heads = usize::MAX;
        assert_eq!(Widths::new(&small).hidden, usize::MAX);
    }
}
