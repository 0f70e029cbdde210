//! The norm over channels.

use candle_core::Tensor;
use candle_fork::{Activation, channel_rms_norm_after};

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

    /// The frames of `past`, then the normalised ones of x.
    pub(super) fn forward(&self, past: Option<&Tensor>, x: &Tensor, activation: Activation) -> Result<Tensor> {
        Ok(channel_rms_norm_after(past, x, &self.gamma, activation)?)
    }
}
