//! Layers that every block of the VAE uses.

use candle_core::Tensor;
use candle_fork::{
    Activation, ConvParams, group_norm, layout,
    nn::Conv2d,
    norm::{GroupStatistics, group_norm_part, group_statistics},
};
use weights::Loader;

use crate::{error::Result, plan::join};

/// Epsilon of every group norm; no configuration holds it.
const GROUP_NORM_EPS: f64 = 1e-6;

/// A group norm with its weights.
#[derive(Debug)]
pub(super) struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: usize,
}

impl GroupNorm {
    pub(super) fn load(loader: &mut Loader, prefix: &str, groups: usize) -> Result<Self> {
        Ok(Self {
            weight: loader.tensor(&join(prefix, "weight"))?,
            bias: loader.tensor(&join(prefix, "bias"))?,
            groups,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        Ok(group_norm(x, &self.weight, &self.bias, self.groups, GROUP_NORM_EPS, activation)?)
    }

    /// The statistics of x, for [`Self::part`].
    pub(super) fn statistics(&self, x: &Tensor) -> Result<GroupStatistics> {
        Ok(group_statistics(x, self.groups, GROUP_NORM_EPS)?)
    }

    /// [`Self::forward`] of a part of the tensor that has these statistics.
    pub(super) fn part(&self, x: &Tensor, statistics: &GroupStatistics, activation: Activation) -> Result<Tensor> {
        Ok(group_norm_part(x, statistics, &self.weight, &self.bias, activation)?)
    }
}

/// A convolution that keeps the extents: `padding` zeros on each side.
pub(super) fn load_conv(loader: &mut Loader, prefix: &str, padding: usize) -> Result<Conv2d> {
    load_conv_with(loader, prefix, ConvParams { padding: [(padding, padding); 2], ..ConvParams::default() })
}

/// A convolution with any parameters.
pub(super) fn load_conv_with(loader: &mut Loader, prefix: &str, params: ConvParams<2>) -> Result<Conv2d> {
    let weight = layout::native(&loader.tensor(&join(prefix, "weight"))?)?;
    let bias = loader.tensor(&join(prefix, "bias"))?;
    Ok(Conv2d::new(weight, Some(bias), params))
}
