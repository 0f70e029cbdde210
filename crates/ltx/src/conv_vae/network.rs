//! Encoder and decoder: the same chain of blocks, up or down.

use candle_core::{DType, Device, Tensor};
use candle_fork::What;

use super::{
    architecture::{Block, Network},
    blocks::{Downsampler, ResidualGroup, Site, Upsampler, normed},
    builder::Builder,
    conv::Conv3d,
    names::blocks_of,
    norm::Input,
    slots::{Pass, Slots},
    timestep::{TimeEmbedder, modulations},
};
use crate::error::Result;

/// Called between blocks; an error ends the run.
pub(super) type Tick<'a> = &'a mut dyn FnMut() -> Result<()>;

/// A network, loaded.
#[derive(Debug)]
pub(super) struct ConvNetwork {
    conv_in: Conv3d,
    blocks: Vec<Layer>,
    end: Option<(TimeEmbedder, Tensor)>,
    conv_out: Conv3d,
    slots: usize,
}

#[derive(Debug)]
enum Layer {
    Residual(ResidualGroup),
    Up(Upsampler),
    Down(Downsampler),
}

impl ConvNetwork {
    /// The network under `part`, of which only the first `filters` results are computed.
    pub(super) fn load(
        builder: &mut Builder<'_>,
        part: &str,
        network: &Network,
        filters: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let timestep_scale = match network.timestep_conditioning {
            true => scalar(&builder.tensor(part, "timestep_scale_multiplier")?)?,
            false => 1.0,
        };
        let site = Site { network, dtype, device, timestep_scale };
        let conv_in = site.conv(builder, &format!("{part}.conv_in"))?;
        let mut blocks = Vec::new();
        for (index, block) in network.blocks.iter().enumerate() {
            let prefix = format!("{}.{index}", blocks_of(part));
            blocks.push(match *block {
                Block::Residual { layers, inject_noise } => {
                    Layer::Residual(ResidualGroup::load(builder, &prefix, layers, inject_noise, &site)?)
                }
                Block::Up { factor, residual, .. } => {
                    Layer::Up(Upsampler::load(builder, &prefix, factor, residual, &site)?)
                }
                Block::Down { factor, .. } => Layer::Down(Downsampler::load(builder, &prefix, factor, &site)?),
            });
        }
        let end = match site.embedder(builder, &format!("{part}.last_time_embedder"))? {
            Some(embedder) => Some((embedder, builder.tensor(part, "last_scale_shift_table")?)),
            None => None,
        };
        let conv_out = site.conv(builder, &format!("{part}.conv_out"))?.first(filters)?;
        Ok(Self { conv_in, blocks, end, conv_out, slots: builder.slots() })
    }

    /// For a new clip.
    pub(super) fn slots(&self) -> Slots {
        Slots::new(self.slots)
    }

    /// Times that [`Self::forward`] calls its tick.
    pub(super) fn units(&self) -> usize {
        self.blocks.len() + 1
    }

    /// The next frames to those that follow from them: all, over all calls of a clip.
    pub(super) fn forward(&self, x: Option<Tensor>, pass: &mut Pass<'_>, tick: Tick<'_>) -> Result<Option<Tensor>> {
        let mut x = self.conv_in.forward(x.map(Input::plain), pass)?;
        for layer in &self.blocks {
            x = match layer {
                Layer::Residual(group) => group.forward(x, pass)?,
                Layer::Up(up) => up.forward(x, pass)?,
                Layer::Down(down) => down.forward(x, pass)?,
            };
            tick()?;
        }
        let modulation = match (&self.end, pass.timestep) {
            (Some((embedder, table)), Some(timestep)) => modulations(table, &embedder.forward(timestep, 2)?)?.pop(),
            _ => None,
        };
        let x = self.conv_out.forward(normed(x, modulation.as_ref())?, pass)?;
        tick()?;
        Ok(x)
    }
}

fn scalar(x: &Tensor) -> Result<f64> {
    let value = x.to_dtype(DType::F64).and_then(|x| x.to_scalar::<f64>());
    Ok(value.what("scale of the timestep")?)
}
