//! The tensors of a VAE checkpoint in the diffusers layout.

use weights::Expected;

use super::{decoder::Decoder, encoder::Encoder};
use crate::{config::VaeConfig, plan::Below};

/// Every tensor that encoding and decoding need.
pub(super) fn expected(config: &VaeConfig) -> Vec<Expected> {
    let mut list = Vec::new();
    Encoder::expected(config, "encoder", &mut list);
    Decoder::expected(config, "decoder", &mut list);
    let c = config.latent_channels;
    let mut top = Below::new(&mut list, "");
    if config.use_quant_conv {
        top.with_bias("quant_conv", &[2 * c, 2 * c, 1, 1]);
    }
    if config.use_post_quant_conv {
        top.with_bias("post_quant_conv", &[c, c, 1, 1]);
    }
    top.tensor("bn.running_mean", &[config.packed_channels()]);
    top.tensor("bn.running_var", &[config.packed_channels()]);
    list
}

/// Tensors that a checkpoint may hold and that inference does not use.
pub fn ignored(name: &str) -> bool {
    name == "bn.num_batches_tracked"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{transformer::published_names, vae::test_support::config};

    fn shapes(config: &VaeConfig) -> BTreeMap<String, Vec<usize>> {
        let mut map = BTreeMap::new();
        for tensor in expected(config) {
            assert!(map.insert(tensor.name.clone(), tensor.shape).is_none(), "{} twice", tensor.name);
        }
        map
    }

    #[test]
    fn published_vae_is_the_table_less_the_ignored_counter() {
        let mut table = published_names("flux2-vae.tsv");
        let before = table.len();
        table.retain(|name, _| !ignored(name));
        assert_eq!(table.len() + 1, before);
        assert_eq!(shapes(&config(&[128, 256, 512, 512], 2, 32, 32)), table);
    }

    #[test]
    fn options_remove_or_change_what_they_name() {
        let full = config(&[128, 256, 512, 512], 2, 32, 32);
        let mut bare = full.clone();
        bare.use_quant_conv = false;
        bare.use_post_quant_conv = false;
        bare.mid_block_add_attention = false;
        let (full_shapes, bare_shapes) = (shapes(&full), shapes(&bare));
        let gone: Vec<_> = full_shapes.keys().filter(|name| !bare_shapes.contains_key(*name)).collect();
        assert_eq!(gone.len(), 4 + 2 * 10);
        assert!(gone.iter().all(|name| name.contains("quant_conv") || name.contains("attentions.0")), "{gone:?}");

        let mut small = full.clone();
        small.decoder_block_out_channels = Some(vec![96, 192, 384, 384]);
        let small_shapes = shapes(&small);
        assert_eq!(small_shapes["decoder.conv_in.weight"], [384, 32, 3, 3]);
        assert_eq!(small_shapes["decoder.up_blocks.3.resnets.0.conv_shortcut.weight"], [96, 192, 1, 1]);
        let decoder: usize = small_shapes
            .iter()
            .filter(|(n, _)| n.starts_with("decoder."))
            .map(|(_, s)| s.iter().product::<usize>())
            .sum();
        // The published size of the small decoder, less its quant conv.
        assert_eq!(decoder + 32 * 32 + 32, 27_947_235);
    }
}
