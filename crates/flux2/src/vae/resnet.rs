//! The residual block.

use candle_core::Tensor;
use candle_fork::{Activation, conv_nd_add, nn::Conv2d};
use weights::{Expected, Loader};

use super::layers::{GroupNorm, load_conv};
use crate::{
    error::Result,
    plan::{Below, join},
};

/// `x + conv(silu(norm(conv(silu(norm(x))))))`; where the channels change, x passes a 1x1 convolution.
#[derive(Debug)]
pub struct Resnet {
    pub(super) norm1: GroupNorm,
    pub(super) conv1: Conv2d,
    pub(super) norm2: GroupNorm,
    pub(super) conv2: Conv2d,
    pub(super) shortcut: Option<Conv2d>,
}

/// Channels in and out of a residual block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channels {
    /// Of the input.
    pub input: usize,
    /// Of the output.
    pub output: usize,
}

impl Channels {
    /// As many out as in.
    pub fn same(channels: usize) -> Self {
        Self { input: channels, output: channels }
    }
}

impl Resnet {
    /// Adds the block's tensors below `prefix` to `list` (`PREFIX.norm1.weight`, `PREFIX.conv_shortcut.weight` ...).
    pub fn expected(Channels { input, output }: Channels, prefix: &str, list: &mut Vec<Expected>) {
        let mut block = Below::new(list, prefix);
        block.with_bias("norm1", &[input]);
        block.with_bias("conv1", &[output, input, 3, 3]);
        block.with_bias("norm2", &[output]);
        block.with_bias("conv2", &[output, output, 3, 3]);
        if input != output {
            block.with_bias("conv_shortcut", &[output, input, 1, 1]);
        }
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) if a tensor cannot be read.
    pub fn load(loader: &mut Loader, channels: Channels, groups: usize, prefix: &str) -> Result<Self> {
        let shortcut = if channels.input == channels.output {
            None
        } else {
            Some(load_conv(loader, &join(prefix, "conv_shortcut"), 0)?)
        };
        Ok(Self {
            norm1: GroupNorm::load(loader, &join(prefix, "norm1"), groups)?,
            conv1: load_conv(loader, &join(prefix, "conv1"), 1)?,
            norm2: GroupNorm::load(loader, &join(prefix, "norm2"), groups)?,
            conv2: load_conv(loader, &join(prefix, "conv2"), 1)?,
            shortcut,
        })
    }

    /// `[B, Cin, H, W]` to `[B, Cout, H, W]`. Takes x, so that a wide input is freed as soon as it was read.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if the shape does not fit the weights.
    pub fn forward(&self, mut x: Tensor) -> Result<Tensor> {
        let mut branch = self.norm1.forward(&x, Activation::Silu)?;
        branch = self.conv1.forward(&branch)?;
        if let Some(shortcut) = &self.shortcut {
            x = shortcut.forward(&x)?;
        }
        branch = self.norm2.forward(&branch, Activation::Silu)?;
        let conv = &self.conv2;
        Ok(conv_nd_add(&branch, conv.weight(), conv.bias(), &x, conv.params())?)
    }
}
