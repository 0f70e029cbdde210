//! Convolutions over time and space, and pointwise ones.

use candle_core::Tensor;
use candle_fork::{Activation, ConvParams, What, conv_nd};

use super::{
    norm::Norm,
    slots::{Builder, Slot, Slots},
};
use crate::error::Result;

/// A 3 x 3 convolution over space that sees the last two frames as well.
///
/// The first frame of a stream has nothing before it, so only the last of the three taps in time counts: it takes a
/// third of the work. That is decided by the frame alone, so the bits do not depend on how a stream is cut.
#[derive(Debug)]
pub(crate) struct CausalConv3d {
    /// `[K, C, t, 3, 3]` with t 3, or 1 in networks for pictures.
    weight: Tensor,
    /// The last tap, `[K, C, 1, 3, 3]`.
    last: Tensor,
    bias: Tensor,
    slot: Slot,
}

/// Frames before its own that a kernel sees.
const REACH: usize = 2;

impl CausalConv3d {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        let weight = builder.tensor(prefix, "weight")?;
        let bias = builder.tensor(prefix, "bias")?;
        let last = weight.dim(2).and_then(|taps| weight.narrow(2, taps - 1, 1)?.contiguous());
        Ok(Self { last: last.what("last tap of a kernel")?, weight, bias, slot: builder.slot() })
    }

    /// x `[1, C, T, H, W]` to `[1, K, T, H, W]`.
    pub(crate) fn forward(&self, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        self.run(slots, move |past| match past {
            Some(past) => Ok(Tensor::cat(&[past, &x], 2).what("frames before the current ones")?),
            None => Ok(x),
        })
    }

    /// The same of `silu(norm(x))`, which is written straight behind the remembered frames.
    pub(crate) fn forward_normed(&self, norm: &Norm, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        self.run(slots, move |past| norm.forward(past, &x, Activation::Silu))
    }

    /// `input` puts what it is given before the current frames.
    fn run(&self, slots: &mut Slots, input: impl FnOnce(Option<&Tensor>) -> Result<Tensor>) -> Result<Tensor> {
        let taps = self.weight.dim(2).what("taps in time")?;
        if taps == 1 {
            return self.convolve(&input(None)?, &self.weight, 0);
        }
        let past = slots.take(&self.slot);
        let remembered = past.as_ref().map_or(Ok(0), |past| past.dim(2)).what("remembered frames")?;
        let buffer = input(past.as_ref())?;
        drop(past);
        slots.remember(&self.slot, &buffer, REACH)?;
        if slots.start() {
            return self.convolve(&buffer, &self.last, 0);
        }
        self.convolve(&buffer, &self.weight, REACH - remembered)
    }

    /// With so many frames of zeros before x.
    fn convolve(&self, x: &Tensor, weight: &Tensor, before: usize) -> Result<Tensor> {
        let params = ConvParams { padding: [(before, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        Ok(conv_nd(x, weight, Some(&self.bias), &params)?)
    }

    /// The first frame with all three taps, over frames of zeros.
    #[cfg(test)]
    pub(super) fn generic_start(&self, x: &Tensor) -> Result<Tensor> {
        self.convolve(x, &self.weight, REACH)
    }
}

/// A 1 x 1 x 1 convolution.
#[derive(Debug)]
pub(crate) struct Pointwise {
    weight: Tensor,
    bias: Tensor,
}

impl Pointwise {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        let weight = builder.tensor(prefix, "weight")?;
        let bias = builder.tensor(prefix, "bias")?;
        // Attention stores its maps as kernels of two axes.
        let weight = weight.flatten_from(1).and_then(|w| w.reshape((w.dim(0)?, w.dim(1)?, 1, 1, 1)));
        Ok(Self { weight: weight.what("pointwise kernel")?, bias })
    }

    /// Only the first `channels` of the output.
    pub(crate) fn first(self, channels: usize) -> Result<Self> {
        let cut = |t: &Tensor| t.narrow(0, 0, channels).what("first rows of a pointwise convolution");
        Ok(Self { weight: cut(&self.weight)?, bias: cut(&self.bias)? })
    }

    /// x `[1, C, T, H, W]` of any strides to `[1, K, T, H, W]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(conv_nd::<3>(x, &self.weight, Some(&self.bias), &ConvParams::default())?)
    }
}
