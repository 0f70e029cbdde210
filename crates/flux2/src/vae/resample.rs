//! Halving and doubling of the resolution between levels.

use candle_core::Tensor;
use candle_fork::{ConvParams, nn::Conv2d, upsample_nearest2d};
use weights::{Expected, Loader};

use super::layers::{load_conv, load_conv_with};
use crate::{
    error::Result,
    plan::{Below, join},
};

/// A 3x3 convolution of stride 2; one row of zeros below and one column to the right, none above or to the left.
#[derive(Debug)]
pub struct Downsample {
    conv: Conv2d,
}

impl Downsample {
    /// Adds the block's tensors below `prefix` to `list` (`PREFIX.conv.weight`, `PREFIX.conv.bias`).
    pub fn expected(channels: usize, prefix: &str, list: &mut Vec<Expected>) {
        Below::new(list, prefix).with_bias("conv", &[channels, channels, 3, 3]);
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) if a tensor cannot be read.
    pub fn load(loader: &mut Loader, prefix: &str) -> Result<Self> {
        let params = ConvParams { stride: [2; 2], padding: [(0, 1); 2], ..ConvParams::default() };
        Ok(Self { conv: load_conv_with(loader, &join(prefix, "conv"), params)? })
    }

    /// `[B, C, H, W]` to `[B, C, H / 2, W / 2]`.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if the shape does not fit the weights.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.conv.forward(x)?)
    }
}

/// Nearest doubling, then a 3x3 convolution.
#[derive(Debug)]
pub struct Upsample {
    pub(super) conv: Conv2d,
}

impl Upsample {
    /// Adds the block's tensors below `prefix` to `list` (`PREFIX.conv.weight`, `PREFIX.conv.bias`).
    pub fn expected(channels: usize, prefix: &str, list: &mut Vec<Expected>) {
        Below::new(list, prefix).with_bias("conv", &[channels, channels, 3, 3]);
    }

    /// Takes the block's tensors from `loader`.
    ///
    /// # Errors
    /// [`Error::Weights`](crate::Error::Weights) if a tensor cannot be read.
    pub fn load(loader: &mut Loader, prefix: &str) -> Result<Self> {
        Ok(Self { conv: load_conv(loader, &join(prefix, "conv"), 1)? })
    }

    /// `[B, C, H, W]` to `[B, C, 2 H, 2 W]`. Takes x, so that it is freed before the convolution.
    ///
    /// # Errors
    /// [`Error::Op`](crate::Error::Op) if the shape does not fit the weights.
    pub fn forward(&self, mut x: Tensor) -> Result<Tensor> {
        x = upsample_nearest2d(&x, 2)?;
        Ok(self.conv.forward(&x)?)
    }
}
