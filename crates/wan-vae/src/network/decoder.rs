//! From latents to pixels, in two parts.
//!
//! The first part runs at the resolution of the latents and holds the only layer that joins all of a frame, the
//! attention; it takes any number of latent frames at once. The second runs on one latent frame at a time, since its
//! tensors are large, and on any band of rows, since all its layers are local. The cut lies before the first resampler.

use candle_core::Tensor;
use candle_fork::What;

use super::{Tick, middle::Middle};
use crate::{
    architecture::{Architecture, Network, Unpack},
    bands::Window,
    error::Result,
    layers::{Builder, CausalConv3d, DupUp, Norm, Pointwise, ResidualBlock, Slots, Upsample, unpack},
    plan::Names,
};

#[derive(Debug)]
struct Stage {
    blocks: Vec<ResidualBlock>,
    upsample: Option<Upsample>,
    shortcut: Option<DupUp>,
}

/// The decoder with the convolution before it.
#[derive(Debug)]
pub(crate) struct Decoder {
    post_quant: Pointwise,
    conv_in: CausalConv3d,
    middle: Middle,
    stages: Vec<Stage>,
    norm_out: Norm,
    conv_out: CausalConv3d,
    unpack: Unpack,
    slots: usize,
}

/// What the second part goes on from: frames `[1, C, n, h, w]` at the resolution of the latents.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    x: Tensor,
    /// The input of the first stage, for its shortcut.
    input: Option<Tensor>,
}

impl Cut {
    /// One frame.
    pub(crate) fn frame(&self, index: usize) -> Result<Self> {
        self.map(|t| t.narrow(2, index, 1))
    }

    /// Some rows.
    pub(crate) fn rows(&self, window: &Window<'_>) -> Result<Self> {
        self.map(|t| window.cut(t))
    }

    fn map(&self, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Self> {
        let f = |t: &Tensor| f(t).what("a part of the decoder's frames");
        Ok(Self { x: f(&self.x)?, input: self.input.as_ref().map(f).transpose()? })
    }
}

impl Decoder {
    /// `architecture` is validated.
    pub(crate) fn load(builder: &mut Builder<'_>, architecture: &Architecture, network: &Network) -> Result<Self> {
        let mut stages = Vec::new();
        let names = Names::decoder(network, architecture.residual);
        for (stage, names) in network.stages.iter().zip(&names) {
            let mut blocks = Vec::new();
            for (block, name) in stage.blocks.iter().zip(&names.blocks) {
                blocks.push(ResidualBlock::load(builder, name, block.shortcut)?);
            }
            let (upsample, shortcut) = match stage.resample {
                Some(resample) => {
                    let (ft, fs) = (stage.temporal_factor(), stage.spatial_factor());
                    let shortcut = DupUp { ft, fs };
                    let upsample = Upsample::load(builder, &names.resample, resample.temporal)?;
                    (Some(upsample), architecture.residual.then_some(shortcut))
                }
                None => (None, None),
            };
            stages.push(Stage { blocks, upsample, shortcut });
        }
        Ok(Self {
            post_quant: Pointwise::load(builder, "post_quant_conv")?,
            conv_in: CausalConv3d::load(builder, "decoder.conv_in")?,
            middle: Middle::load(builder, "decoder.mid_block")?,
            stages,
            norm_out: Norm::load(builder, "decoder.norm_out")?,
            conv_out: CausalConv3d::load(builder, "decoder.conv_out")?,
            unpack: architecture.unpack,
            slots: builder.slots(),
        })
    }

    /// A state in which nothing was seen.
    pub(crate) fn slots(&self) -> Slots {
        Slots::new(self.slots)
    }

    /// Times that [`Self::first_part`] calls its tick.
    pub(crate) fn first_units(&self) -> usize {
        1 + self.stages.first().map_or(0, |stage| stage.blocks.len())
    }

    /// Times that [`Self::second_part`] calls its tick.
    pub(crate) fn second_units(&self) -> usize {
        1 + self.stages.iter().skip(1).map(|stage| stage.blocks.len()).sum::<usize>()
    }

    /// Latents `[1, z, n, h, w]`: the first frame of the stream alone, or any number of later ones.
    pub(crate) fn first_part(&self, latents: &Tensor, slots: &mut Slots, tick: Tick<'_>) -> Result<Cut> {
        let mut x = self.post_quant.forward(latents)?;
        x = self.conv_in.forward(x, slots)?;
        x = self.middle.forward(x, slots)?;
        tick()?;
        let first = self.stages.first();
        let input = first.filter(|stage| stage.shortcut.is_some()).map(|_| x.clone());
        for block in first.iter().flat_map(|stage| &stage.blocks) {
            x = block.forward(x, slots)?;
            tick()?;
        }
        Ok(Cut { x, input })
    }

    /// One latent frame of [`Self::first_part`] to packed pixels `[1, C, m, H, W]`, not clamped. With a window, the rows
    /// of the cut that it holds become the rows of the picture of its band.
    pub(crate) fn second_part(
        &self,
        cut: Cut,
        mut window: Option<Window<'_>>,
        slots: &mut Slots,
        tick: Tick<'_>,
    ) -> Result<Tensor> {
        let Cut { mut x, mut input } = cut;
        for (s, stage) in self.stages.iter().enumerate() {
            if s > 0 {
                input = stage.shortcut.is_some().then(|| x.clone());
                for block in &stage.blocks {
                    x = block.forward(x, slots)?;
                    tick()?;
                }
            }
            if let Some(upsample) = &stage.upsample {
                x = upsample.forward(x, slots)?;
                if let (Some(shortcut), Some(input)) = (&stage.shortcut, input.take()) {
                    x = shortcut.add(&x, &input)?;
                }
                if let Some(window) = &mut window {
                    x = window.double(&x, s + 1)?;
                }
            }
        }
        x = self.conv_out.forward_normed(&self.norm_out, x, slots)?;
        if let Some(window) = &mut window {
            x = window.finish(&x)?;
        }
        tick()?;
        Ok(x)
    }

    /// What [`Self::second_part`] gives as frames `[C, m, H, W]`.
    pub(crate) fn unpack(&self, x: &Tensor) -> Result<Tensor> {
        unpack(x, self.unpack)
    }
}
