//! Attention between the positions of a frame.

use candle_core::Tensor;
use candle_fork::{AttentionMask, What, attention, residual};

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
        let normed = self.norm.forward(&x)?;
        let qkv = self.qkv.forward(&normed)?;
        drop(normed);
        // [T, H W, 3 C]: positions as rows, which is how channels-last memory has them.
        let rows = qkv.permute((0, 2, 3, 4, 1)).and_then(|t| t.reshape((frames, height * width, 3 * channels)));
        let rows = rows.what(WHAT)?;
        drop(qkv);
        let part = |index: usize| rows.narrow(2, index * channels, channels).and_then(|t| t.unsqueeze(2)).what(WHAT);
        let scale = (channels as f32).powf(-0.5);
        let attended = attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::Full)?;
        drop(rows);
        let attended = attended.reshape((1, frames, height, width, channels)).and_then(|t| t.permute((0, 4, 1, 2, 3)));
        let branch = self.proj.forward(&attended.what(WHAT)?)?;
        Ok(residual(&x, &branch)?)
    }
}
