//! The residual block.

use candle_core::Tensor;

use super::{
    conv::{CausalConv3d, Pointwise},
    norm::Norm,
    slots::{Builder, Slots},
};
use crate::error::Result;

/// `conv2(silu(norm2(conv1(silu(norm1(x)))))) + s(x)`, s a pointwise convolution where widths differ.
#[derive(Debug)]
pub(crate) struct ResidualBlock {
    norm1: Norm,
    conv1: CausalConv3d,
    norm2: Norm,
    conv2: CausalConv3d,
    shortcut: Option<Pointwise>,
}

impl ResidualBlock {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str, shortcut: bool) -> Result<Self> {
        let at = |name: &str| format!("{prefix}.{name}");
        Ok(Self {
            norm1: Norm::load(builder, &at("norm1"))?,
            conv1: CausalConv3d::load(builder, &at("conv1"))?,
            norm2: Norm::load(builder, &at("norm2"))?,
            conv2: CausalConv3d::load(builder, &at("conv2"))?,
            shortcut: if shortcut { Some(Pointwise::load(builder, &at("conv_shortcut"))?) } else { None },
        })
    }

    /// x `[1, a, T, H, W]` to `[1, b, T, H, W]`.
    pub(crate) fn forward(&self, mut x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        let h = self.conv1.forward_normed(&self.norm1, x.clone(), slots)?;
        if let Some(shortcut) = &self.shortcut {
            x = shortcut.forward(&x)?;
        }
        self.conv2.forward_normed_add(&self.norm2, h, &x, slots)
    }
}
