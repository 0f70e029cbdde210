//! Convolutions over time and space, and pointwise ones.

use candle_core::Tensor;
use candle_fork::{
    ConvParams, What,
    conv::FEW_FILTERS,
    conv_nd, conv_nd_add,
    frames::{cat_frames, tail_frames},
    layout::{self, MemoryOrder, native_order},
};

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
    /// K of the network; the kernel may have filters of zeros behind them.
    filters: usize,
    slot: Slot,
}

/// Channels-last kernels of the devices move groups of so many channels; other numbers are several times slower.
pub(crate) const GROUP: usize = 8;

/// Frames before its own that a kernel sees.
const REACH: usize = 2;

impl CausalConv3d {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        let (mut weight, mut bias) = (builder.tensor(prefix, "weight")?, builder.tensor(prefix, "bias")?);
        let filters = weight.dim(0).what("filters")?;
        if native_order(weight.device(), weight.dtype()) == MemoryOrder::ChannelsLast {
            weight = grouped(&weight, 1)?;
            if filters > FEW_FILTERS {
                weight = grouped(&weight, 0)?;
                bias = grouped(&bias, 0)?;
            }
        }
        let weight = layout::native(&weight)?;
        let last = weight.dim(2).and_then(|taps| weight.narrow(2, taps - 1, 1)).what("last tap of a kernel")?;
        Ok(Self { last: layout::native(&last)?, weight, bias, filters, slot: builder.slot() })
    }

    /// x `[1, C, T, H, W]` to `[1, K, T, H, W]`.
    pub(crate) fn forward(&self, mut x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        if x.dims().get(1) != self.weight.dims().get(1) {
            x = grouped(&x, 1)?;
        }
        self.run(slots, None, move |past, keep| {
            let buffer = past.map_or_else(|| Ok(x.clone()), |past| cat_frames(past, &x))?;
            let tail = keep.map(|keep| tail_frames(&buffer, keep)).transpose()?;
            Ok((buffer, tail))
        })
    }

    /// The same of `silu(norm(x))`, which is written straight behind the remembered frames.
    pub(crate) fn forward_normed(&self, norm: &Norm, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        self.run(slots, None, move |past, keep| norm.after(past, &x, keep))
    }

    /// [`Self::forward_normed`] plus a residual `[1, K, T, H, W]`.
    pub(crate) fn forward_normed_add(
        &self,
        norm: &Norm,
        x: Tensor,
        residual: &Tensor,
        slots: &mut Slots,
    ) -> Result<Tensor> {
        self.run(slots, Some(residual), move |past, keep| norm.after(past, &x, keep))
    }

    /// `input` puts what it is given before the current frames, and copies so many of the last if it shall.
    fn run(
        &self,
        slots: &mut Slots,
        residual: Option<&Tensor>,
        input: impl FnOnce(Option<&Tensor>, Option<usize>) -> Result<(Tensor, Option<Tensor>)>,
    ) -> Result<Tensor> {
        let taps = self.weight.dim(2).what("taps in time")?;
        if taps == 1 {
            return self.convolve(&input(None, None)?.0, &self.weight, 0, residual);
        }
        let past = slots.take(&self.slot);
        let remembered = past.as_ref().map_or(Ok(0), |past| past.dim(2)).what("remembered frames")?;
        let (buffer, tail) = input(past.as_ref(), Some(REACH))?;
        drop(past);
        slots.remember(&self.slot, tail);
        if slots.start() {
            return self.convolve(&buffer, &self.last, 0, residual);
        }
        self.convolve(&buffer, &self.weight, REACH - remembered, residual)
    }

    /// With so many frames of zeros before x.
    fn convolve(&self, x: &Tensor, weight: &Tensor, before: usize, residual: Option<&Tensor>) -> Result<Tensor> {
        let params = ConvParams { padding: [(before, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        let y = match residual {
            Some(residual) => conv_nd_add(x, weight, Some(&self.bias), residual, &params)?,
            None => conv_nd(x, weight, Some(&self.bias), &params)?,
        };
        Ok(y.narrow(1, 0, self.filters).what("channels of a convolution")?)
    }

    /// The first frame with all three taps, over frames of zeros.
    #[cfg(test)]
    pub(super) fn generic_start(&self, x: &Tensor) -> Result<Tensor> {
        self.convolve(x, &self.weight, REACH, None)
    }
}

/// Zeros behind an axis, up to whole groups of channels.
fn grouped(x: &Tensor, axis: usize) -> Result<Tensor> {
    let padded = x.dim(axis).and_then(|n| x.pad_with_zeros(axis, 0, n.next_multiple_of(GROUP) - n));
    Ok(padded.what("whole groups of channels")?)
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
