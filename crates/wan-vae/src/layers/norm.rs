//! The norm over channels.

use candle_core::Tensor;
use candle_fork::{Activation, channel_rms_norm, channel_rms_norm_after, norm::channel_rms_norm_with_tail};

use super::slots::Builder;
use crate::error::Result;

/// [`candle_fork::channel_rms_norm`] with its gamma.
#[derive(Debug)]
pub(crate) struct Norm {
    gamma: Tensor,
}

impl Norm {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        Ok(Self { gamma: builder.tensor(prefix, "gamma")? })
    }

    /// The norm alone.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(channel_rms_norm(x, &self.gamma, Activation::None)?)
    }

    /// The frames of `past`, then the normalised ones of x, with SiLU; and a copy of the last `keep` of them all.
    pub(super) fn after(
        &self,
        past: Option<&Tensor>,
        x: &Tensor,
        keep: Option<usize>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        const SILU: Activation = Activation::Silu;
        let Some(keep) = keep else { return Ok((channel_rms_norm_after(past, x, &self.gamma, SILU)?, None)) };
        let (y, tail) = channel_rms_norm_with_tail(past, x, &self.gamma, SILU, keep)?;
        Ok((y, Some(tail)))
    }
}
