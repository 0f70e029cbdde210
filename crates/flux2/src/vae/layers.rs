//! Layers that every block of the VAE uses.

use candle_core::Tensor;
use candle_fork::{Activation, ConvParams, group_norm, layout, nn::Conv2d};
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
