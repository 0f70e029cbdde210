//! Blocks of the networks.

use candle_core::{DType, Device, Tensor};
use candle_fork::{
    What,
    frames::{avg_down_add, depth_to_space},
};

use super::{
    architecture::Network,
    builder::Builder,
    conv::{Conv3d, output_frames},
    layout::{cells_to_channels, join},
    norm::{Input, Modulation},
    slots::{Pass, Slot},
    timestep::TimeEmbedder,
};
use crate::error::Result;

/// What layers are loaded for.
pub(super) struct Site<'a> {
    pub(super) network: &'a Network,
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    /// Of a network that is conditioned on a timestep.
    pub(super) timestep_scale: f64,
}

impl Site<'_> {
    pub(super) fn conv(&self, builder: &mut Builder<'_>, prefix: &str) -> Result<Conv3d> {
        Conv3d::load(builder, prefix, self.network.causality, self.network.padding)
    }

    pub(super) fn embedder(&self, builder: &mut Builder<'_>, prefix: &str) -> Result<Option<TimeEmbedder>> {
        let load = || TimeEmbedder::load(builder, prefix, self.timestep_scale, (self.dtype, self.device));
        self.network.timestep_conditioning.then(load).transpose()
    }
}

/// Noise behind a convolution: one map for all frames and channels, times a factor of each channel.
#[derive(Debug)]
struct Noise {
    scale: Tensor,
    index: usize,
}

impl Noise {
    fn load(builder: &mut Builder<'_>, prefix: &str, name: &str) -> Result<Self> {
        Ok(Self { scale: builder.tensor(prefix, name)?, index: builder.noise() })
    }

    /// x `[B, C, T, H, W]`, with the noise if there is a map of it.
    fn add(&self, x: Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let Some(map) = pass.noise.get(self.index) else { return Ok(x) };
        let noise = map.unsqueeze(0).and_then(|map| map.broadcast_mul(&self.scale)?.unsqueeze(1)?.unsqueeze(0));
        Ok(noise.and_then(|noise| x.broadcast_add(&noise)).what("noise behind a convolution")?)
    }
}

/// Norm and convolution, twice, plus the input.
#[derive(Debug)]
pub(super) struct ResidualBlock {
    convs: [Conv3d; 2],
    noise: Option<[Noise; 2]>,
    /// The input waits here for the convolutions.
    input: Slot,
}

impl ResidualBlock {
    pub(super) fn load(builder: &mut Builder<'_>, prefix: &str, inject_noise: bool, site: &Site<'_>) -> Result<Self> {
        let convs = [site.conv(builder, &format!("{prefix}.conv1"))?, site.conv(builder, &format!("{prefix}.conv2"))?];
        let noise = match inject_noise {
            true => Some([
                Noise::load(builder, prefix, "per_channel_scale1")?,
                Noise::load(builder, prefix, "per_channel_scale2")?,
            ]),
            false => None,
        };
        Ok(Self { convs, noise, input: builder.slot() })
    }

    /// With the modulations of both norms, if the network is conditioned.
    pub(super) fn forward(
        &self,
        x: Option<Tensor>,
        modulations: &[Modulation],
        pass: &mut Pass<'_>,
    ) -> Result<Option<Tensor>> {
        pass.slots.push(&self.input, x.clone())?;
        let [first, second] = &self.convs;
        let Some(y) = first.forward(normed(x, modulations.first())?, pass)? else {
            return self.finish(None, modulations.get(1), second, pass);
        };
        let y = match &self.noise {
            Some([noise, _]) => noise.add(y, pass)?,
            None => y,
        };
        self.finish(Some(y), modulations.get(1), second, pass)
    }

    /// The second half.
    fn finish(
        &self,
        y: Option<Tensor>,
        modulation: Option<&Modulation>,
        conv: &Conv3d,
        pass: &mut Pass<'_>,
    ) -> Result<Option<Tensor>> {
        let Some(seen) = conv.gather(normed(y, modulation)?, pass)? else { return Ok(None) };
        let input = pass.slots.pull(&self.input, output_frames(&seen)?)?;
        let y = conv.apply(seen, input.as_ref())?;
        Ok(Some(match &self.noise {
            Some([_, noise]) => noise.add(y, pass)?,
            None => y,
        }))
    }
}

/// Frames, as far as there are any, with the norm before a convolution.
pub(super) fn normed(x: Option<Tensor>, modulation: Option<&Modulation>) -> Result<Option<Input>> {
    x.map(|x| Input::normed(x, modulation)).transpose()
}

/// Channels of a convolution become frames and pixels. The first frame of a clip stays one.
#[derive(Debug)]
pub(super) struct Upsampler {
    conv: Conv3d,
    factor: [usize; 3],
    /// Whether the input is added, and where it waits.
    input: Option<Slot>,
    start: Slot,
}

impl Upsampler {
    pub(super) fn load(
        builder: &mut Builder<'_>,
        prefix: &str,
        factor: [usize; 3],
        residual: bool,
        site: &Site<'_>,
    ) -> Result<Self> {
        let conv = site.conv(builder, &format!("{prefix}.conv"))?.cells_first(factor.iter().product())?;
        let input = residual.then(|| builder.slot());
        Ok(Self { conv, factor, input, start: builder.slot() })
    }

    pub(super) fn forward(&self, x: Option<Tensor>, pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        if let Some(slot) = &self.input {
            pass.slots.push(slot, x.clone())?;
        }
        let Some(seen) = self.conv.gather(x.map(Input::plain), pass)? else { return Ok(None) };
        let shortcut = match &self.input {
            Some(slot) => pass.slots.pull(slot, output_frames(&seen)?)?,
            None => None,
        };
        let y = self.conv.apply(seen, None)?;
        let dropped = if pass.slots.begin(&self.start) { self.factor[0] - 1 } else { 0 };
        Ok(Some(depth_to_space(&y, self.factor, shortcut.as_ref(), dropped)?))
    }
}

/// Frames and pixels of a convolution become channels, plus means of the input. The first frame of a clip counts twice.
#[derive(Debug)]
pub(super) struct Downsampler {
    conv: Conv3d,
    factor: [usize; 3],
    start: Slot,
    /// The input waits here for the convolution, and its result for the frame that makes a pair.
    input: Slot,
    output: Slot,
}

impl Downsampler {
    pub(super) fn load(builder: &mut Builder<'_>, prefix: &str, factor: [usize; 3], site: &Site<'_>) -> Result<Self> {
        let conv = site.conv(builder, &format!("{prefix}.conv"))?;
        Ok(Self { conv, factor, start: builder.slot(), input: builder.slot(), output: builder.slot() })
    }

    pub(super) fn forward(&self, x: Option<Tensor>, pass: &mut Pass<'_>) -> Result<Option<Tensor>> {
        let [ft, fs, _] = self.factor;
        let x = match x {
            Some(x) if ft > 1 && pass.slots.begin(&self.start) => {
                let mut parts = vec![x.narrow(2, 0, 1).what("first frame of a clip")?; ft - 1];
                parts.push(x);
                Some(join(&parts, 2)?)
            }
            x => x,
        };
        pass.slots.push(&self.input, x.clone())?;
        let y = self.conv.forward(x.map(Input::plain), pass)?;
        let whole = pass.slots.push(&self.output, y)? / ft * ft;
        if whole == 0 {
            return Ok(None);
        }
        let (Some(y), Some(input)) = (pass.slots.pull(&self.output, whole)?, pass.slots.pull(&self.input, whole)?)
        else {
            return Ok(None);
        };
        Ok(Some(avg_down_add(&cells_to_channels(&y, self.factor)?, &input, ft, fs)?))
    }
}
