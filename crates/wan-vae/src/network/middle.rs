//! The middle of both networks.

use candle_core::Tensor;

use crate::{
    error::Result,
    layers::{Attention, Builder, ResidualBlock, Slots},
};

/// Residual block, attention, residual block.
#[derive(Debug)]
pub(super) struct Middle {
    first: ResidualBlock,
    attention: Attention,
    second: ResidualBlock,
}

impl Middle {
    pub(super) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        Ok(Self {
            first: ResidualBlock::load(builder, &format!("{prefix}.resnets.0"), false)?,
            attention: Attention::load(builder, &format!("{prefix}.attentions.0"))?,
            second: ResidualBlock::load(builder, &format!("{prefix}.resnets.1"), false)?,
        })
    }

    pub(super) fn forward(&self, mut x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        x = self.first.forward(x, slots)?;
        x = self.attention.forward(x)?;
        self.second.forward(x, slots)
    }
}
