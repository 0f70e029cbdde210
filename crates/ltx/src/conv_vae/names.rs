//! Names of tensors: one set inside of this crate, that of the published files; diffusers' as a translation.

use weights::Expected;

use super::architecture::{Architecture, Block, Network, cells};
use crate::error::Result;

/// How a checkpoint names its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// As published, behind a prefix: `vae.` in files that hold a whole model, none in files of a VAE.
    Original {
        /// The prefix, with its full stop.
        prefix: &'static str,
    },
    /// As diffusers stores it.
    Diffusers {
        /// Index of the encoder's last block, which has a name of its own.
        encoder_end: usize,
    },
}

/// Mean of each latent channel.
pub(super) const MEAN: &str = "per_channel_statistics.mean-of-means";
/// Standard deviation of each latent channel.
pub(super) const STD: &str = "per_channel_statistics.std-of-means";

impl Layout {
    /// The name in the file of a tensor of [`expected`].
    pub fn name_in_file(&self, name: &str) -> String {
        match self {
            Self::Original { prefix } => format!("{prefix}{name}"),
            Self::Diffusers { encoder_end } => diffusers(name, *encoder_end),
        }
    }
}

fn diffusers(name: &str, encoder_end: usize) -> String {
    match name {
        MEAN => return "latents_mean".to_owned(),
        STD => return "latents_std".to_owned(),
        _ => {}
    }
    let place = match name.splitn(4, '.').collect::<Vec<_>>()[..] {
        ["encoder", "down_blocks", index, rest] => index.parse().ok().map(|index: usize| match index {
            _ if index == encoder_end => format!("encoder.mid_block.{rest}"),
            _ if index.is_multiple_of(2) => format!("encoder.down_blocks.{}.{rest}", index / 2),
            _ => format!("encoder.down_blocks.{}.downsamplers.0.{rest}", index / 2),
        }),
        ["decoder", "up_blocks", index, rest] => index.parse().ok().map(|index: usize| match index {
            0 => format!("decoder.mid_block.{rest}"),
            _ if index.is_multiple_of(2) => format!("decoder.up_blocks.{}.{rest}", index / 2 - 1),
            _ => format!("decoder.up_blocks.{}.upsamplers.0.{rest}", index / 2),
        }),
        _ => None,
    };
    let place = place.unwrap_or_else(|| name.to_owned());
    place
        .replace(".res_blocks.", ".resnets.")
        .replace("last_time_embedder", "time_embedder")
        .replace("last_scale_shift_table", "scale_shift_table")
}

/// Whether a tensor of a file belongs to no network of the architecture and may be left unread. Names are those of the
/// file without its prefix.
pub(super) fn is_ignored(name: &str, architecture: &Architecture) -> bool {
    name.starts_with("per_channel_statistics.")
        || name.starts_with("encoder.") && architecture.encoder.is_none()
        || name.starts_with("decoder.") && architecture.decoder.is_none()
}

/// Every tensor of an architecture with its shape, under the names of the published files.
///
/// # Errors
/// [`Error::Config`](crate::Error::Config) for an architecture that cannot be built.
pub fn expected(architecture: &Architecture) -> Result<Vec<Expected>> {
    architecture.validate()?;
    let z = architecture.latent_channels;
    let packed = architecture.packed_channels();
    let mut list = vec![Expected::new(MEAN, [z]), Expected::new(STD, [z])];
    if let Some(network) = &architecture.encoder {
        list_network(&mut list, "encoder", network, [packed, z + 1])?;
    }
    if let Some(network) = &architecture.decoder {
        list_network(&mut list, "decoder", network, [z, packed])?;
    }
    Ok(list)
}

/// Where the blocks of a network are, `encoder` or `decoder`.
pub(super) fn blocks_of(part: &str) -> &'static str {
    if part == "encoder" { "encoder.down_blocks" } else { "decoder.up_blocks" }
}

fn list_network(list: &mut Vec<Expected>, part: &str, network: &Network, [input, output]: [usize; 2]) -> Result<()> {
    let widths = network.widths(part)?;
    let conditioned = network.timestep_conditioning;
    conv(list, &format!("{part}.conv_in"), input, network.width);
    for (index, (block, &width)) in network.blocks.iter().zip(&widths).enumerate() {
        let prefix = format!("{}.{index}", blocks_of(part));
        match *block {
            Block::Residual { layers, inject_noise } => {
                if conditioned {
                    embedder(list, &format!("{prefix}.time_embedder"), 4 * width);
                }
                for layer in 0..layers {
                    let prefix = format!("{prefix}.res_blocks.{layer}");
                    for half in ["1", "2"] {
                        conv(list, &format!("{prefix}.conv{half}"), width, width);
                        if inject_noise {
                            list.push(Expected::new(format!("{prefix}.per_channel_scale{half}"), [width, 1, 1]));
                        }
                    }
                    if conditioned {
                        list.push(Expected::new(format!("{prefix}.scale_shift_table"), [4, width]));
                    }
                }
            }
            Block::Up { factor, reduction, .. } => {
                conv(list, &format!("{prefix}.conv"), width, width / reduction * cells(factor).unwrap_or(1));
            }
            Block::Down { factor, width: wide } => {
                conv(list, &format!("{prefix}.conv"), width, wide / cells(factor).unwrap_or(1));
            }
        }
    }
    let width = widths.last().copied().unwrap_or(network.width);
    if conditioned {
        list.push(Expected::new(format!("{part}.timestep_scale_multiplier"), Vec::new()));
        embedder(list, &format!("{part}.last_time_embedder"), 2 * width);
        list.push(Expected::new(format!("{part}.last_scale_shift_table"), [2, width]));
    }
    conv(list, &format!("{part}.conv_out"), width, output);
    Ok(())
}

fn conv(list: &mut Vec<Expected>, prefix: &str, input: usize, output: usize) {
    list.push(Expected::new(format!("{prefix}.conv.weight"), [output, input, 3, 3, 3]));
    list.push(Expected::new(format!("{prefix}.conv.bias"), [output]));
}

fn embedder(list: &mut Vec<Expected>, prefix: &str, width: usize) {
    for (layer, input) in [("linear_1", super::timestep::FREQUENCIES), ("linear_2", width)] {
        let prefix = format!("{prefix}.timestep_embedder.{layer}");
        list.push(Expected::new(format!("{prefix}.weight"), [width, input]));
        list.push(Expected::new(format!("{prefix}.bias"), [width]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv_vae::{config::from_diffusers, testing};

    fn sorted(mut list: Vec<Expected>) -> Vec<(String, Vec<usize>)> {
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list.into_iter().map(|e| (e.name, e.shape)).collect()
    }

    #[test]
    fn names_and_shapes_are_those_of_diffusers() {
        let table = include_str!("../../../../tests/models/names/ltx2-conv-vae.tsv");
        let architecture = from_diffusers(&serde_json::from_str(testing::LTX20_DIFFUSERS).unwrap()).unwrap();
        let layout = Layout::Diffusers { encoder_end: 8 };
        let mut list = expected(&architecture).unwrap();
        list.iter_mut().for_each(|tensor| tensor.name = layout.name_in_file(&tensor.name));
        assert_eq!(sorted(list), sorted(Expected::from_table(table).unwrap()));
    }

    #[test]
    fn names_of_conditioned_decoders_are_translated() {
        let layout = Layout::Diffusers { encoder_end: 8 };
        for (ours, theirs) in [
            (
                "decoder.last_time_embedder.timestep_embedder.linear_1.bias",
                "decoder.time_embedder.timestep_embedder.linear_1.bias",
            ),
            ("decoder.last_scale_shift_table", "decoder.scale_shift_table"),
            ("decoder.up_blocks.0.res_blocks.1.scale_shift_table", "decoder.mid_block.resnets.1.scale_shift_table"),
            (
                "decoder.up_blocks.4.time_embedder.timestep_embedder.linear_2.bias",
                "decoder.up_blocks.1.time_embedder.timestep_embedder.linear_2.bias",
            ),
            ("encoder.down_blocks.8.res_blocks.0.conv1.conv.bias", "encoder.mid_block.resnets.0.conv1.conv.bias"),
            ("encoder.down_blocks.7.conv.conv.bias", "encoder.down_blocks.3.downsamplers.0.conv.conv.bias"),
            ("decoder.timestep_scale_multiplier", "decoder.timestep_scale_multiplier"),
        ] {
            assert_eq!(layout.name_in_file(ours), theirs);
        }
        assert_eq!(Layout::Original { prefix: "vae." }.name_in_file(MEAN), format!("vae.{MEAN}"));
    }
}
