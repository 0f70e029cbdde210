//! From pixels to latents, in two parts.
//!
//! The first part comes down to the resolution of the latents; its tensors are large, and all its layers are local, so it
//! can be run on bands of rows. The second holds the only layer that joins all of a frame, the attention.

use candle_core::Tensor;

use super::{Tick, middle::Middle};
use crate::{
    architecture::{Architecture, Network, Unpack},
    bands::Window,
    error::Result,
    layers::{AvgDown, Builder, CausalConv3d, Downsample, Norm, Pointwise, ResidualBlock, Slots, patchify, unpack},
    plan::Names,
};

#[derive(Debug)]
struct Stage {
    blocks: Vec<ResidualBlock>,
    downsample: Option<Downsample>,
    shortcut: Option<AvgDown>,
}

/// The encoder with the half of the convolution behind it that gives the mean.
#[derive(Debug)]
pub(crate) struct Encoder {
    conv_in: CausalConv3d,
    stages: Vec<Stage>,
    middle: Middle,
    norm_out: Norm,
    conv_out: CausalConv3d,
    quant: Pointwise,
    patch_size: usize,
    slots: usize,
}

impl Encoder {
    /// `architecture` is validated.
    pub(crate) fn load(builder: &mut Builder<'_>, architecture: &Architecture, network: &Network) -> Result<Self> {
        let mut stages = Vec::new();
        let mut input = network.base;
        for (stage, names) in network.stages.iter().zip(&Names::encoder(network, architecture.residual)) {
            let mut blocks = Vec::new();
            for (block, name) in stage.blocks.iter().zip(&names.blocks) {
                blocks.push(ResidualBlock::load(builder, name, block.shortcut)?);
            }
            let downsample = match stage.resample {
                Some(resample) => Some(Downsample::load(builder, &names.resample, resample.temporal)?),
                None => None,
            };
            input = stage.output(input);
            let (ft, fs) = (stage.temporal_factor(), stage.spatial_factor());
            let shortcut = architecture.residual.then_some(AvgDown { ft, fs });
            stages.push(Stage { blocks, downsample, shortcut });
        }
        Ok(Self {
            conv_in: CausalConv3d::load(builder, "encoder.conv_in")?,
            stages,
            middle: Middle::load(builder, "encoder.mid_block")?,
            norm_out: Norm::load(builder, "encoder.norm_out")?,
            conv_out: CausalConv3d::load(builder, "encoder.conv_out")?,
            quant: Pointwise::load(builder, "quant_conv")?.first(architecture.z_dim)?,
            patch_size: architecture.patch_size,
            slots: builder.slots(),
        })
    }

    /// A state in which nothing was seen.
    pub(crate) fn slots(&self) -> Slots {
        Slots::new(self.slots)
    }

    /// Times that [`Self::first_part`] calls its tick.
    pub(crate) fn first_units(&self) -> usize {
        self.stages.iter().map(|stage| stage.blocks.len()).sum()
    }

    /// Times that [`Self::second_part`] calls its tick.
    pub(crate) fn second_units(&self) -> usize {
        2
    }

    /// Frames `[C, T, H, W]` to the mean of the latents `[z, t, h, w]`: the first frame of the stream alone, or whole
    /// groups of later ones.
    pub(crate) fn forward(&self, frames: &Tensor, slots: &mut Slots, tick: Tick<'_>) -> Result<Tensor> {
        let x = self.first_part(self.pack(frames)?, None, slots, tick)?;
        self.second_part(x, slots, tick)
    }

    /// Frames `[C, T, H, W]` as [`Self::first_part`] takes them.
    pub(crate) fn pack(&self, frames: &Tensor) -> Result<Tensor> {
        patchify(frames, self.patch_size)
    }

    /// Packed frames to the resolution of the latents, `[1, C, t, h, w]`. With a window, the rows of the packed picture
    /// that it holds become the latent rows of its band.
    pub(crate) fn first_part(
        &self,
        packed: Tensor,
        mut window: Option<Window<'_>>,
        slots: &mut Slots,
        tick: Tick<'_>,
    ) -> Result<Tensor> {
        let mut x = self.conv_in.forward(packed, slots)?;
        if let Some(window) = &mut window {
            x = window.pass(&x, 1)?;
        }
        for (s, stage) in self.stages.iter().enumerate() {
            let input = stage.shortcut.map(|shortcut| (shortcut, x.clone()));
            for block in &stage.blocks {
                x = block.forward(x, slots)?;
                tick()?;
            }
            if let Some(downsample) = &stage.downsample {
                x = downsample.forward(x, slots)?;
            }
            if let Some((shortcut, input)) = input {
                x = shortcut.add(&x, &input)?;
            }
            if let (Some(window), Some(_)) = (&mut window, &stage.downsample) {
                x = window.halve(&x, s + 2)?;
            }
        }
        match &mut window {
            Some(window) => window.finish(&x),
            None => Ok(x),
        }
    }

    /// What [`Self::first_part`] gives, with all its rows, to the mean of the latents `[z, t, h, w]`.
    pub(crate) fn second_part(&self, x: Tensor, slots: &mut Slots, tick: Tick<'_>) -> Result<Tensor> {
        let x = self.middle.forward(x, slots)?;
        tick()?;
        let x = self.conv_out.forward_normed(&self.norm_out, x, slots)?;
        let x = self.quant.forward(&x)?;
        tick()?;
        unpack(&x, Unpack::Patches(1))
    }
}
