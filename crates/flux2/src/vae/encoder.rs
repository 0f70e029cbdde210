//! From pixels to the moments of the latents.

use candle_core::Tensor;
use candle_fork::{Activation, nn::Conv2d};
use weights::{Expected, Loader};

use super::{
    attention::MidBlock,
    layers::{GroupNorm, load_conv},
    resample::Downsample,
    resnet::{Channels, Resnet},
};
use crate::{
    config::VaeConfig,
    error::Result,
    plan::{Below, join},
};

#[derive(Debug)]
struct Level {
    resnets: Vec<Resnet>,
    downsample: Option<Downsample>,
}

/// The encoder, without the quant convolution.
#[derive(Debug)]
pub(super) struct Encoder {
    conv_in: Conv2d,
    levels: Vec<Level>,
    mid: MidBlock,
    norm_out: GroupNorm,
    conv_out: Conv2d,
}

/// Channels of every residual block, level by level.
fn levels(config: &VaeConfig) -> Vec<Vec<Channels>> {
    let mut input = config.block_out_channels[0];
    let mut levels = Vec::new();
    for &output in &config.block_out_channels {
        levels.push(
            (0..config.layers_per_block)
                .map(|_| Channels { input: std::mem::replace(&mut input, output), output })
                .collect(),
        );
    }
    levels
}

impl Encoder {
    pub(super) fn expected(config: &VaeConfig, prefix: &str, list: &mut Vec<Expected>) {
        let Some((&first, &last)) = config.block_out_channels.first().zip(config.block_out_channels.last()) else {
            return;
        };
        Below::new(list, prefix).with_bias("conv_in", &[first, config.in_channels, 3, 3]);
        let levels = levels(config);
        for (i, level) in levels.iter().enumerate() {
            let prefix = format!("{prefix}.down_blocks.{i}");
            for (j, &channels) in level.iter().enumerate() {
                Resnet::expected(channels, &format!("{prefix}.resnets.{j}"), list);
            }
            if i + 1 < levels.len() {
                Downsample::expected(config.block_out_channels[i], &join(&prefix, "downsamplers.0"), list);
            }
        }
        MidBlock::expected(last, config.mid_block_add_attention, &join(prefix, "mid_block"), list);
        let mut top = Below::new(list, prefix);
        top.with_bias("conv_norm_out", &[last]);
        top.with_bias("conv_out", &[2 * config.latent_channels, last, 3, 3]);
    }

    /// `config` is validated: it has levels.
    pub(super) fn load(loader: &mut Loader, config: &VaeConfig, prefix: &str) -> Result<Self> {
        let groups = config.norm_num_groups;
        let count = config.block_out_channels.len();
        let mut loaded = Vec::new();
        for (i, level) in levels(config).into_iter().enumerate() {
            let prefix = format!("{prefix}.down_blocks.{i}");
            let mut resnets = Vec::new();
            for (j, channels) in level.into_iter().enumerate() {
                resnets.push(Resnet::load(loader, channels, groups, &format!("{prefix}.resnets.{j}"))?);
            }
            let downsample =
                if i + 1 < count { Some(Downsample::load(loader, &join(&prefix, "downsamplers.0"))?) } else { None };
            loaded.push(Level { resnets, downsample });
        }
        let channels = config.block_out_channels[count - 1];
        let attention = config.mid_block_add_attention;
        Ok(Self {
            conv_in: load_conv(loader, &join(prefix, "conv_in"), 1)?,
            levels: loaded,
            mid: MidBlock::load(loader, channels, groups, attention, &join(prefix, "mid_block"))?,
            norm_out: GroupNorm::load(loader, &join(prefix, "conv_norm_out"), groups)?,
            conv_out: load_conv(loader, &join(prefix, "conv_out"), 1)?,
        })
    }

    /// Picture `[B, 3, H, W]` to moments `[B, 2 c, H / 8, W / 8]` (with four levels).
    pub(super) fn forward(&self, image: &Tensor) -> Result<Tensor> {
        let mut x = self.conv_in.forward(image)?;
        for level in &self.levels {
            for resnet in &level.resnets {
                x = resnet.forward(x)?;
            }
            if let Some(downsample) = &level.downsample {
                x = downsample.forward(&x)?;
            }
        }
        x = self.mid.forward(x)?;
        x = self.norm_out.forward(&x, Activation::Silu)?;
        Ok(self.conv_out.forward(&x)?)
    }
}
