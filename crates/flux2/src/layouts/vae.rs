//! The VAE in BFL's layout: levels of the decoder are counted from the outside, the maps of the attention are kernels of
//! 1x1.

use std::sync::Arc;

use weights::{
    TensorSource,
    layout::{Take, View, prefix_of, translate},
};

use super::{index, is_of_another_component};
use crate::error::Result;

/// The VAE's tensors under diffusers names.
///
/// # Errors
/// [`Error::Weights`](crate::Error::Weights) if two tensors would have the same name.
pub fn vae(source: Arc<dyn TensorSource>) -> Result<Arc<dyn TensorSource>> {
    let Some(prefix) = prefix_of(&*source, &["decoder.conv_in.weight", "encoder.conv_in.weight"]) else {
        return Ok(source);
    };
    let names = || source.tensors().iter().filter_map(|t| t.name.strip_prefix(prefix));
    let bfl = names().any(|name| name.starts_with("decoder.mid.") || name.starts_with("encoder.mid."));
    if !bfl && prefix.is_empty() {
        return Ok(source);
    }
    let level = |name: &str| Some(index(name.strip_prefix("decoder.up.")?)?.0);
    let levels = names().filter_map(level).max().map_or(0, |last| last.saturating_add(1));
    Ok(translate(source.clone(), |info| match info.name.strip_prefix(prefix) {
        None => is_of_another_component(&info.name, prefix).then(Vec::new),
        Some(name) if !bfl => Some(vec![View::new(name, Take::Whole)]),
        Some(name) => view(name, levels).map(|view| vec![view]),
    })?)
}

/// The tensor that `name` is, in a VAE of so many levels.
fn view(name: &str, levels: usize) -> Option<View> {
    let whole = |name: String| Some(View::new(name, Take::Whole));
    // The maps around the latents stand inside of the networks, or beside them.
    for (conv, network) in [("quant_conv.", "encoder."), ("post_quant_conv.", "decoder.")] {
        let bare = name.strip_prefix(network).unwrap_or(name);
        if bare.starts_with(conv) {
            return whole(bare.to_owned());
        }
    }
    if name.starts_with("bn.") {
        return whole(name.to_owned());
    }
    let (network, rest) = name.split_once('.').filter(|(network, _)| matches!(*network, "encoder" | "decoder"))?;
    if rest.starts_with("conv_in.") || rest.starts_with("conv_out.") {
        return whole(name.to_owned());
    }
    if let Some(part) = rest.strip_prefix("norm_out.") {
        return whole(format!("{network}.conv_norm_out.{part}"));
    }
    if let Some(part) = rest.strip_prefix("mid.attn_1.") {
        let (layer, part) = part.split_once('.')?;
        let (layer, take) = match layer {
            "norm" => ("group_norm", Take::Whole),
            "q" => ("to_q", Take::Matrix),
            "k" => ("to_k", Take::Matrix),
            "v" => ("to_v", Take::Matrix),
            "proj_out" => ("to_out.0", Take::Matrix),
            _ => return None,
        };
        // A bias is no kernel.
        let take = if part == "weight" { take } else { Take::Whole };
        return Some(View::new(format!("{network}.mid_block.attentions.0.{layer}.{part}"), take));
    }
    if let Some(part) = rest.strip_prefix("mid.block_") {
        let (number, part) = index(part)?;
        return whole(format!("{network}.mid_block.resnets.{}.{}", number.checked_sub(1)?, resnet(part)));
    }
    let (side, part) = rest.split_once('.').filter(|(side, _)| matches!(*side, "down" | "up"))?;
    let (level, part) = index(part)?;
    let (level, sampler) = match side {
        "down" => (level, "downsample"),
        _ => (levels.checked_sub(level.checked_add(1)?)?, "upsample"),
    };
    if let Some(part) = part.strip_prefix("block.") {
        let (number, part) = index(part)?;
        return whole(format!("{network}.{side}_blocks.{level}.resnets.{number}.{}", resnet(part)));
    }
    let part = part.strip_prefix(sampler)?.strip_prefix('.')?;
    whole(format!("{network}.{side}_blocks.{level}.{sampler}rs.0.{part}"))
}

/// A part of a residual block.
fn resnet(part: &str) -> String {
    match part.strip_prefix("nin_shortcut.") {
        Some(rest) => format!("conv_shortcut.{rest}"),
        None => part.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use weights::write::TensorData;

    use super::*;
    use crate::{layouts::published, plan::random};

    /// What diffusers' converter makes of each tensor of the published file.
    #[test]
    fn the_published_names_are_translated() {
        published::check("flux2-vae.layouts.tsv", |name| view(name, 4).map(|view| vec![view]));
    }

    #[test]
    fn other_names_are_left() {
        for name in [
            "decoder.up.4.block.0.conv1.weight",
            "decoder.up.18446744073709551615.block.0.conv1.weight",
            "decoder.up.x.block.0.conv1.weight",
            "decoder.up.0.upsampler.weight",
            "decoder.up.0.block.0",
            "decoder.mid.block_0.conv1.weight",
            "decoder.mid.attn_1.w.weight",
            "loss.weight",
            "decoder.side.0.x",
        ] {
            assert_eq!(view(name, 4), None, "{name}");
        }
        // Beside the networks or inside of them.
        for name in ["quant_conv.bias", "encoder.quant_conv.bias"] {
            assert_eq!(view(name, 4), Some(View::new("quant_conv.bias", Take::Whole)));
        }
    }

    #[test]
    fn levels_are_counted_and_prefixes_removed() {
        let tensor = |name: &str| TensorData::f32(name, &[1, 1, 1, 1], &[0.0]);
        for prefix in ["", "vae.", "first_stage_model."] {
            let names = [
                "decoder.conv_in.weight",
                "decoder.mid.attn_1.q.weight",
                "decoder.up.1.block.0.conv1.weight",
                "decoder.up.0.block.2.conv1.weight",
            ];
            let source = vae(random::file(&names.map(|name| tensor(&format!("{prefix}{name}"))))).unwrap();
            assert_eq!(source.info("decoder.mid_block.attentions.0.to_q.weight").unwrap().shape, [1, 1]);
            assert!(source.info("decoder.up_blocks.0.resnets.0.conv1.weight").is_some());
            assert!(source.info("decoder.up_blocks.1.resnets.2.conv1.weight").is_some());
        }
    }
}
