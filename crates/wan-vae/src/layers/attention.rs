//! Attention between the positions of a frame.

use candle_core::Tensor;
use candle_fork::{Activation, AttentionMask, What, attention, residual};

use super::{conv::Pointwise, norm::Norm, slots::Builder};
use crate::error::Result;

/// One head of all channels over each frame by itself, added to its input.
#[derive(Debug)]
pub(crate) struct Attention {
    norm: Norm,
    qkv: Pointwise,
    proj: Pointwise,
}

impl Attention {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        Ok(Self {
            norm: Norm::load(builder, &format!("{prefix}.norm"))?,
            qkv: Pointwise::load(builder, &format!("{prefix}.to_qkv"))?,
            proj: Pointwise::load(builder, &format!("{prefix}.proj"))?,
        })
    }

    /// x `[1, C, T, H, W]` plus what its positions attend to.
    pub(crate) fn forward(&self, x: Tensor) -> Result<Tensor> {
        const WHAT: &str = "positions of frames";
        let (_, channels, frames, height, width) = x.dims5().what(WHAT)?;
        let normed = self.norm.forward(None, &x, Activation::None)?;
        let qkv = self.qkv.forward(&normed)?;
        drop(normed);
        // [T, H W, 3 C]: positions as rows.
        let rows = qkv.reshape((3 * channels, frames, height * width)).and_then(|t| t.permute((1, 2, 0))?.contiguous());
        let rows = rows.what(WHAT)?;
        drop(qkv);
        let part = |index: usize| rows.narrow(2, index * channels, channels).and_then(|t| t.unsqueeze(2)).what(WHAT);
        let scale = (channels as f32).powf(-0.5);
        let attended = attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::Full)?;
        drop(rows);
        let attended = attended.reshape((frames, height, width, channels)).and_then(|t| t.permute((3, 0, 1, 2)));
        let branch = self.proj.forward(&attended.and_then(|t| t.unsqueeze(0)).what(WHAT)?)?;
        Ok(residual(&x, &branch)?)
    }
}
