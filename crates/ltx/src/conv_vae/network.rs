//! Encoder and decoder: the same chain of units, up or down.

use candle_core::{DType, Device, Tensor};
use candle_fork::{What, frames::tail_frames};

use super::{
    architecture::{Block, Network},
    blocks::{Downsampler, ResidualBlock, Site, Upsampler, normed},
    builder::Builder,
    conv::Conv3d,
    names::blocks_of,
    norm::{Input, Modulation},
    slots::{Pass, Slots},
    timestep::{TimeEmbedder, modulations},
};
use crate::error::Result;

/// A network, loaded.
#[derive(Debug)]
pub(super) struct ConvNetwork {
    units: Vec<Unit>,
    embedders: Vec<TimeEmbedder>,
    slots: usize,
}

/// What is called as one, in the order of the run.
#[derive(Debug)]
struct Unit {
    layer: Layer,
    /// Its rows of shift and scale, and the embedder that they are added to.
    table: Option<(Tensor, usize)>,
    /// It makes so many frames of so many.
    rate: Rate,
}

#[derive(Debug)]
enum Layer {
    In(Conv3d),
    Residual(ResidualBlock),
    Up(Upsampler),
    Down(Downsampler),
    /// Behind a norm.
    Out(Conv3d),
}

#[derive(Debug, Clone, Copy)]
struct Rate {
    up: usize,
    down: usize,
}

impl Rate {
    const ONE: Self = Self { up: 1, down: 1 };

    /// Most frames for as many.
    fn of_part(self, frames: usize) -> usize {
        (frames * self.up).div_ceil(self.down)
    }

    /// Frames for all of a clip, whose first frame stays one.
    fn of_clip(self, frames: usize) -> usize {
        (frames.saturating_sub(1) * self.up + self.down) / self.down
    }
}

/// Where a run leads to.
pub(super) struct Outlet<'a> {
    /// Called behind every call of a unit with the number of frames that it gave; an error ends the run.
    pub(super) tick: &'a mut dyn FnMut(usize) -> Result<()>,
    /// Takes the frames of the last unit.
    pub(super) emit: &'a mut dyn FnMut(Tensor) -> Result<()>,
}

/// Shifts and scales of each unit; none of a network that is not conditioned.
pub(super) type Modulations = Vec<Vec<Modulation>>;

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
        let mut units = Vec::new();
        let mut embedders = Vec::new();
        let mut unit = |layer, table, rate| units.push(Unit { layer, table, rate });
        unit(Layer::In(site.conv(builder, &format!("{part}.conv_in"))?), None, Rate::ONE);
        for (index, block) in network.blocks.iter().enumerate() {
            let prefix = format!("{}.{index}", blocks_of(part));
            match *block {
                Block::Residual { layers, inject_noise } => {
                    let embedder = site.embedder(builder, &format!("{prefix}.time_embedder"))?;
                    let conditioned = embedder.is_some();
                    embedders.extend(embedder);
                    for layer in 0..layers {
                        let prefix = format!("{prefix}.res_blocks.{layer}");
                        let table = match conditioned {
                            true => Some((builder.tensor(&prefix, "scale_shift_table")?, embedders.len() - 1)),
                            false => None,
                        };
                        let block = ResidualBlock::load(builder, &prefix, inject_noise, &site)?;
                        unit(Layer::Residual(block), table, Rate::ONE);
                    }
                }
                Block::Up { factor, residual, .. } => {
                    let up = Upsampler::load(builder, &prefix, factor, residual, &site)?;
                    unit(Layer::Up(up), None, Rate { up: factor[0], down: 1 });
                }
                Block::Down { factor, .. } => {
                    let down = Downsampler::load(builder, &prefix, factor, &site)?;
                    unit(Layer::Down(down), None, Rate { up: 1, down: factor[0] });
                }
            }
        }
        let table = match site.embedder(builder, &format!("{part}.last_time_embedder"))? {
            Some(embedder) => {
                embedders.push(embedder);
                Some((builder.tensor(part, "last_scale_shift_table")?, embedders.len() - 1))
            }
            None => None,
        };
        let conv_out = site.conv(builder, &format!("{part}.conv_out"))?.first(filters)?;
        unit(Layer::Out(conv_out), table, Rate::ONE);
        Ok(Self { units, embedders, slots: builder.slots() })
    }

    /// For a new clip.
    pub(super) fn slots(&self) -> Slots {
        Slots::new(self.slots)
    }

    /// Frames that all units give together for a clip of so many.
    pub(super) fn work(&self, mut frames: usize) -> usize {
        let units = self.units.iter().map(|unit| {
            frames = unit.rate.of_clip(frames);
            frames
        });
        units.sum()
    }

    /// What a timestep, of a network that is conditioned on it, gives to the units.
    pub(super) fn modulations(&self, timestep: Option<f64>) -> Result<Modulations> {
        let of = |unit: &Unit| match (&unit.table, timestep) {
            (Some((table, embedder)), Some(timestep)) => {
                let rows = table.dim(0).what("modulation by the timestep")?;
                modulations(table, &self.embedders[*embedder].forward(timestep, rows)?)
            }
            _ => Ok(Vec::new()),
        };
        self.units.iter().map(of).collect()
    }

    /// The next frames of a clip, at most `limit`, to those that follow from them: all, over all calls. A unit is given no
    /// more frames at a time than these become on the way to it; more come where frames waited, at the end of a clip above
    /// all, and go on in parts. So what a run holds depends on `limit` and not on the clip.
    pub(super) fn forward(
        &self,
        x: Tensor,
        limit: usize,
        modulations: &Modulations,
        pass: &mut Pass<'_>,
        outlet: &mut Outlet<'_>,
    ) -> Result<()> {
        self.descend(0, Some(x), limit, modulations, pass, outlet)
    }

    /// [`Self::forward`] from a unit on.
    fn descend(
        &self,
        index: usize,
        x: Option<Tensor>,
        limit: usize,
        modulations: &Modulations,
        pass: &mut Pass<'_>,
        outlet: &mut Outlet<'_>,
    ) -> Result<()> {
        let Some(unit) = self.units.get(index) else { return x.map_or(Ok(()), |x| (outlet.emit)(x)) };
        let mut rest = unit.forward(x, modulations.get(index).map_or(&[], Vec::as_slice), pass)?;
        let frames = rest.as_ref().map_or(Ok(0), |y| y.dim(2)).what("frames of a unit")?;
        (outlet.tick)(frames)?;
        let limit = unit.rate.of_part(limit);
        let last = pass.last;
        loop {
            let piece = split(&mut rest, limit)?;
            pass.last = last && rest.is_none();
            // At the end units give what has waited in them.
            if piece.is_some() || pass.last {
                self.descend(index + 1, piece, limit, modulations, pass, outlet)?;
            }
            if rest.is_none() {
                pass.last = last;
                return Ok(());
            }
        }
    }
}

impl Unit {
    fn forward(&self, x: Option<Tensor>, modulations: &[Modulation], pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        match &self.layer {
            Layer::In(conv) => conv.forward(x.map(Input::plain), pass),
            Layer::Residual(block) => block.forward(x, modulations, pass),
            Layer::Up(up) => up.forward(x, pass),
            Layer::Down(down) => down.forward(x, pass),
            Layer::Out(conv) => conv.forward(normed(x, modulations.first())?, pass),
        }
    }
}

/// Takes the first `limit` frames, at least one; the rest has memory of its own.
fn split(frames: &mut Option<Tensor>, limit: usize) -> Result<Option<Tensor>> {
    const WHAT: &str = "parts of a clip";
    let Some(all) = frames.take() else { return Ok(None) };
    let (count, limit) = (all.dim(2).what(WHAT)?, limit.max(1));
    if count <= limit {
        return Ok(Some(all));
    }
    *frames = Some(tail_frames(&all, count - limit)?);
    Ok(Some(all.narrow(2, 0, limit).what(WHAT)?))
}

fn scalar(x: &Tensor) -> Result<f64> {
    let value = x.to_dtype(DType::F64).and_then(|x| x.to_scalar::<f64>());
    Ok(value.what("scale of the timestep")?)
}
