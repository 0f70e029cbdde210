//! From latents to pixels.

use candle_core::Tensor;
use candle_fork::{Activation, nn::Conv2d};
use weights::{Expected, Loader};

use super::{
    attention::MidBlock,
    bands::{Height, Input, norm_and_convolve},
    layers::{GroupNorm, load_conv},
    resample::Upsample,
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
    upsample: Option<Upsample>,
}

/// The decoder, without the post-quant convolution.
#[derive(Debug)]
pub(super) struct Decoder {
    conv_in: Conv2d,
    mid: MidBlock,
    levels: Vec<Level>,
    norm_out: GroupNorm,
    conv_out: Conv2d,
}

/// Channels of every residual block, coarsest level first; one more per level than in the encoder.
fn levels(config: &VaeConfig) -> Vec<Vec<Channels>> {
    let widths = config.decoder_block_out_channels();
    let mut input = widths[widths.len() - 1];
    let mut levels = Vec::new();
    for &output in widths.iter().rev() {
        levels.push(
            (0..=config.layers_per_block)
                .map(|_| Channels { input: std::mem::replace(&mut input, output), output })
                .collect(),
        );
    }
    levels
}

impl Decoder {
    pub(super) fn expected(config: &VaeConfig, prefix: &str, list: &mut Vec<Expected>) {
        let widths = config.decoder_block_out_channels();
        let Some((&finest, &coarsest)) = widths.first().zip(widths.last()) else { return };
        Below::new(list, prefix).with_bias("conv_in", &[coarsest, config.latent_channels, 3, 3]);
        MidBlock::expected(coarsest, config.mid_block_add_attention, &join(prefix, "mid_block"), list);
        let levels = levels(config);
        for (i, level) in levels.iter().enumerate() {
            let prefix = format!("{prefix}.up_blocks.{i}");
            for (j, &channels) in level.iter().enumerate() {
                Resnet::expected(channels, &format!("{prefix}.resnets.{j}"), list);
            }
            if i + 1 < levels.len() {
                Upsample::expected(widths[widths.len() - 1 - i], &join(&prefix, "upsamplers.0"), list);
            }
        }
        let mut top = Below::new(list, prefix);
        top.with_bias("conv_norm_out", &[finest]);
        top.with_bias("conv_out", &[config.out_channels, finest, 3, 3]);
    }

    /// `config` is validated: it has levels.
    pub(super) fn load(loader: &mut Loader, config: &VaeConfig, prefix: &str) -> Result<Self> {
        let groups = config.norm_num_groups;
        let widths = config.decoder_block_out_channels();
        let mut loaded = Vec::new();
        for (i, level) in levels(config).into_iter().enumerate() {
            let prefix = format!("{prefix}.up_blocks.{i}");
            let mut resnets = Vec::new();
            for (j, channels) in level.into_iter().enumerate() {
                resnets.push(Resnet::load(loader, channels, groups, &format!("{prefix}.resnets.{j}"))?);
            }
            let upsample =
                if i + 1 < widths.len() { Some(Upsample::load(loader, &join(&prefix, "upsamplers.0"))?) } else { None };
            loaded.push(Level { resnets, upsample });
        }
        let channels = widths[widths.len() - 1];
        let attention = config.mid_block_add_attention;
        Ok(Self {
            conv_in: load_conv(loader, &join(prefix, "conv_in"), 1)?,
            mid: MidBlock::load(loader, channels, groups, attention, &join(prefix, "mid_block"))?,
            levels: loaded,
            norm_out: GroupNorm::load(loader, &join(prefix, "conv_norm_out"), groups)?,
            conv_out: load_conv(loader, &join(prefix, "conv_out"), 1)?,
        })
    }

    /// Number of times that [`Self::forward`] calls `done`.
    pub(super) fn units(&self) -> usize {
        1 + self.levels.iter().map(|level| level.resnets.len()).sum::<usize>()
    }

    /// Latents `[B, c, H / 8, W / 8]` (with four levels) to a picture `[B, 3, H, W]`; B is 1 in bands. Calls `done` after the
    /// middle and after every residual block.
    pub(super) fn forward(
        &self,
        latents: Tensor,
        height: Option<Height>,
        done: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Tensor> {
        let mut x = self.conv_in.forward(&latents)?;
        drop(latents);
        x = self.mid.forward(x)?;
        done()?;
        if let Some(height) = height {
            return self.finish_in_bands(x, height, done);
        }
        for level in &self.levels {
            for resnet in &level.resnets {
                x = resnet.forward(x)?;
                done()?;
            }
            if let Some(upsample) = &level.upsample {
                x = upsample.forward(x)?;
            }
        }
        x = self.norm_out.forward(&x, Activation::Silu)?;
        self.conv_out.forward(&x).map_err(Into::into)
    }

    /// What comes after the middle.
    fn finish_in_bands(&self, mut x: Tensor, height: Height, done: &mut dyn FnMut() -> Result<()>) -> Result<Tensor> {
        let mut upsample: Option<&Upsample> = None;
        for level in &self.levels {
            for resnet in &level.resnets {
                let input = match upsample.take() {
                    Some(upsample) => Input::Doubled(x, upsample),
                    None => Input::Whole(x),
                };
                x = resnet.forward_in_bands(input, height)?;
                done()?;
            }
            upsample = level.upsample.as_ref();
        }
        norm_and_convolve(&self.norm_out, &self.conv_out, &x, height)
    }
}
