//! Decoding in bands of rows: the same picture in less memory.
//!
//! Whole are a residual block's input, the tensor in its middle and its result, which takes the input's place where the
//! channels stay. All that lies between exists for a band of rows at a time. The first block behind a doubling has no whole
//! input beside the others: its bands are doubled and convolved from the smaller tensor, once for the norm's statistics and
//! once more for the block.
//!
//! Norms see the statistics of the whole and convolutions the rows next to a band, so on this crate's own kernels the bits
//! are those of the decoding in one piece. It does the doublings' convolutions twice, and the rows between bands.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use candle_fork::{
    Activation, ConvParams, What, conv_nd, conv_nd_add,
    layout::{MemoryOrder, from_stored, native, native_order},
    nn::Conv2d,
    norm::GroupStatistics,
    upsample_nearest2d,
};

use super::{layers::GroupNorm, resample::Upsample, resnet::Resnet};
use crate::error::Result;

/// How much of a picture is decoded at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Bands {
    /// All of it.
    #[default]
    Whole,
    /// Bands of rows whose tensors take about so many bytes each.
    OfBytes(usize),
}

impl Bands {
    /// Bytes of a band's tensor that keep a device busy.
    pub const BYTES: usize = 32 << 20;

    /// Tensors of a band that exist at a time.
    pub(crate) const TENSORS: usize = 6;
}

/// Rows of a band.
#[derive(Debug, Clone, Copy)]
pub(super) struct Height {
    bytes: usize,
}

/// Fewest rows of a band: of fewer most would be neighbours.
const MIN_ROWS: usize = 4;

impl Height {
    /// `None` for the whole.
    pub(super) fn of(bands: Bands) -> Option<Self> {
        match bands {
            Bands::Whole => None,
            Bands::OfBytes(bytes) => Some(Self { bytes }),
        }
    }

    /// Bands of `[1, channels, height, width]`.
    fn bands(self, [channels, height, width]: [usize; 3], dtype: DType) -> impl Iterator<Item = Range<usize>> {
        let row = (channels * width * dtype.size_in_bytes()).max(1);
        let rows = (self.bytes / row).max(MIN_ROWS);
        (0..height).step_by(rows).map(move |first| first..(first + rows).min(height))
    }
}

/// Rows that a 3x3 convolution which keeps the extents reads for `rows` of `height`, and its zeros above and below.
fn reach(rows: &Range<usize>, height: usize) -> (Range<usize>, (usize, usize)) {
    let input = rows.start.saturating_sub(1)..(rows.end + 1).min(height);
    let zeros = (1 - (rows.start - input.start), 1 - (input.end - rows.end));
    (input, zeros)
}

fn rows_of(x: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    Ok(x.narrow(2, rows.start, rows.len()).what("rows of a picture")?)
}

/// The parameters of a convolution with other zeros above and below.
fn with_zeros(conv: &Conv2d, zeros: (usize, usize)) -> ConvParams<2> {
    let [_, sides] = conv.params().padding;
    ConvParams { padding: [zeros, sides], ..*conv.params() }
}

fn convolve(conv: &Conv2d, x: &Tensor, zeros: (usize, usize)) -> Result<Tensor> {
    Ok(conv_nd(x, conv.weight(), conv.bias(), &with_zeros(conv, zeros))?)
}

/// A tensor `[1, C, H, W]` that is written band by band.
struct Canvas {
    /// In the order of its memory.
    stored: Tensor,
    order: MemoryOrder,
}

impl Canvas {
    fn new([channels, height, width]: [usize; 3], dtype: DType, device: &Device) -> Result<Self> {
        let order = native_order(device, dtype);
        let dims = match order {
            MemoryOrder::ChannelsLast => [1, height, width, channels],
            _ => [1, channels, height, width],
        };
        Ok(Self { stored: Tensor::zeros(&dims, dtype, device).what("picture of bands")?, order })
    }

    /// Over the memory of x, which nobody else reads any more.
    fn over(x: &Tensor) -> Result<Self> {
        let (x, order) = (native(x)?, native_order(x.device(), x.dtype()));
        let stored = if order == MemoryOrder::ChannelsLast { x.permute((0, 2, 3, 1)) } else { Ok(x) };
        Ok(Self { stored: stored.what("picture of bands")?, order })
    }

    fn put(&self, band: &Tensor, first: usize) -> Result<()> {
        let band = native(band)?;
        let put = match self.order {
            MemoryOrder::ChannelsLast => {
                band.permute((0, 2, 3, 1)).and_then(|band| self.stored.slice_set(&band, 1, first))
            }
            _ => self.stored.slice_set(&band, 2, first),
        };
        Ok(put.what("band of a picture")?)
    }

    /// The tensor as it is now.
    fn tensor(&self) -> Result<Tensor> {
        match self.order {
            MemoryOrder::ChannelsLast => Ok(from_stored(&self.stored)?),
            _ => Ok(self.stored.clone()),
        }
    }
}

/// What a residual block reads.
pub(super) enum Input<'a> {
    /// `[1, C, H, W]`.
    Whole(Tensor),
    /// `[1, C, H / 2, W / 2]`, which is doubled first.
    Doubled(Tensor, &'a Upsample),
}

impl Input<'_> {
    fn of(&self) -> &Tensor {
        match self {
            Self::Whole(x) | Self::Doubled(x, _) => x,
        }
    }

    /// Channels, height and width after a doubling.
    fn dims(&self) -> Result<[usize; 3]> {
        let (_, channels, height, width) = self.of().dims4().what("input of a block")?;
        let factor = if matches!(self, Self::Doubled(..)) { 2 } else { 1 };
        Ok([channels, factor * height, factor * width])
    }

    fn rows(&self, rows: &Range<usize>) -> Result<Tensor> {
        match self {
            Self::Whole(x) => rows_of(x, rows),
            Self::Doubled(x, upsample) => {
                let (input, zeros) = reach(rows, 2 * x.dim(2).what("input of a block")?);
                // Every row becomes two, of which the first or the last may be out of reach.
                let halves = input.start / 2..input.end.div_ceil(2);
                let doubled = upsample_nearest2d(&rows_of(x, &halves)?, 2)?;
                let first = input.start - 2 * halves.start;
                convolve(&upsample.conv, &rows_of(&doubled, &(first..first + input.len()))?, zeros)
            }
        }
    }

    /// Statistics of the whole for a norm.
    fn statistics(&self, norm: &GroupNorm, height: Height) -> Result<GroupStatistics> {
        if let Self::Whole(x) = self {
            return norm.statistics(x);
        }
        let (dims, x) = (self.dims()?, self.of());
        let whole = Canvas::new(dims, x.dtype(), x.device())?;
        for rows in height.bands(dims, x.dtype()) {
            whole.put(&self.rows(&rows)?, rows.start)?;
        }
        norm.statistics(&whole.tensor()?)
    }
}

impl Resnet {
    /// [`Self::forward`] of one item in bands.
    pub(super) fn forward_in_bands(&self, input: Input<'_>, height: Height) -> Result<Tensor> {
        let ([channels, rows_in_all, width], dtype) = (input.dims()?, input.of().dtype());
        let device = input.of().device().clone();
        let bands = |channels: usize| height.bands([channels, rows_in_all, width], dtype);
        let outputs = self.conv1.weight().dim(0).what("filters of a block")?;
        let statistics = input.statistics(&self.norm1, height)?;
        let canvas = || Canvas::new([outputs, rows_in_all, width], dtype, &device);
        let branch = canvas()?;
        // The other way, to which the branch is added: the input itself, where it is there and as wide.
        let other = match &input {
            Input::Whole(x) if self.shortcut.is_none() => Canvas::over(x)?,
            _ => canvas()?,
        };
        for rows in bands(channels) {
            let (reached, zeros) = reach(&rows, rows_in_all);
            let x = input.rows(&reached)?;
            let normed = self.norm1.part(&x, &statistics, Activation::Silu)?;
            branch.put(&convolve(&self.conv1, &normed, zeros)?, rows.start)?;
            let own = || rows_of(&x, &(rows.start - reached.start..rows.end - reached.start));
            match (&self.shortcut, &input) {
                (Some(shortcut), _) => other.put(&shortcut.forward(&own()?)?, rows.start)?,
                (None, Input::Doubled(..)) => other.put(&own()?, rows.start)?,
                (None, Input::Whole(_)) => {}
            }
        }
        drop(input);
        let (branch, residual) = (branch.tensor()?, other.tensor()?);
        let statistics = self.norm2.statistics(&branch)?;
        let conv = &self.conv2;
        for rows in bands(outputs) {
            let (reached, zeros) = reach(&rows, rows_in_all);
            let normed = self.norm2.part(&rows_of(&branch, &reached)?, &statistics, Activation::Silu)?;
            let residual = rows_of(&residual, &rows)?;
            let sum = conv_nd_add(&normed, conv.weight(), conv.bias(), &residual, &with_zeros(conv, zeros))?;
            other.put(&sum, rows.start)?;
        }
        Ok(residual)
    }
}

/// A norm with SiLU and a convolution of one item in bands.
pub(super) fn norm_and_convolve(norm: &GroupNorm, conv: &Conv2d, x: &Tensor, height: Height) -> Result<Tensor> {
    let (_, channels, rows_in_all, width) = x.dims4().what("picture of bands")?;
    let outputs = conv.weight().dim(0).what("filters of a convolution")?;
    let statistics = norm.statistics(x)?;
    let canvas = Canvas::new([outputs, rows_in_all, width], x.dtype(), x.device())?;
    for rows in height.bands([channels, rows_in_all, width], x.dtype()) {
        let (reached, zeros) = reach(&rows, rows_in_all);
        let normed = norm.part(&rows_of(x, &reached)?, &statistics, Activation::Silu)?;
        canvas.put(&convolve(conv, &normed, zeros)?, rows.start)?;
    }
    canvas.tensor()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_cover_every_row_once_and_reach_their_neighbours() {
        for (bytes, height, rows) in [(0, 9, MIN_ROWS), (1 << 20, 9, 9), (2 * 3 * 5 * 7, 30, 7), (1, 1, 1)] {
            let bands: Vec<_> = Height { bytes }.bands([3, height, 5], DType::F16).collect();
            assert_eq!(bands[0], 0..rows.min(height), "{bytes} {height}");
            assert!(bands.windows(2).all(|pair| pair[0].end == pair[1].start), "{bands:?}");
            assert_eq!(bands.last().map(|band| band.end), Some(height));
        }
        assert_eq!(reach(&(0..3), 9), (0..4, (1, 0)));
        assert_eq!(reach(&(3..6), 9), (2..7, (0, 0)));
        assert_eq!(reach(&(6..9), 9), (5..9, (0, 1)));
        assert_eq!(reach(&(0..9), 9), (0..9, (1, 1)));
    }
}
