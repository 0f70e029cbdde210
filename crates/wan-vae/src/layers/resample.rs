//! Changes of resolution by two, in space and in time.

use candle_core::Tensor;
use candle_fork::{
    ConvParams, What,
    conv::ParityFilters,
    conv_nd,
    frames::{cat_frames, split_pairs, tail_frames},
    interleave2d, layout,
};

use super::slots::{Builder, Slot, Slots};
use crate::error::Result;

/// Doubles height and width, and before that, with a convolution over time, the number of frames.
#[derive(Debug)]
pub(crate) struct Upsample {
    time: Option<TimeConv>,
    /// Nearest doubling and a 3 x 3 convolution as four 2 x 2 convolutions, one for each parity of row and column: taps
    /// that fall on the same pixel are added once and for all. 4/9 of the work, nothing else.
    parities: [Tensor; 4],
    bias: Tensor,
}

/// Zeros before and after an axis for the outputs of even and of odd index: rows `y - 1, y` and `y, y + 1`.
const PADDING: [(usize, usize); 2] = [(1, 0), (0, 1)];

impl Upsample {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str, temporal: bool) -> Result<Self> {
        let conv = format!("{prefix}.resample.1");
        let weight = builder.tensor(&conv, "weight")?;
        Ok(Self {
            time: if temporal { Some(TimeConv::load(builder, prefix)?) } else { None },
            parities: parities(&weight)?,
            bias: builder.tensor(&conv, "bias")?,
        })
    }

    /// x `[1, C, T, H, W]` to `[1, K, T or 2 T, 2 H, 2 W]`. The first frame of a stream stays one.
    pub(crate) fn forward(&self, mut x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        if let Some(time) = &self.time
            && !slots.start()
        {
            x = time.double(x, slots)?;
        }
        self.spatial(&x)
    }

    pub(super) fn spatial(&self, x: &Tensor) -> Result<Tensor> {
        let [p0, p1, p2, p3] = &self.parities;
        let part = |weight: &Tensor, parity: usize| {
            let padding = [(0, 0), PADDING[parity / 2], PADDING[parity % 2]];
            conv_nd(x, weight, Some(&self.bias), &ConvParams { padding, ..ConvParams::default() })
        };
        Ok(interleave2d(&[part(p0, 0)?, part(p1, 1)?, part(p2, 2)?, part(p3, 3)?])?)
    }
}

/// The filters of the four parities, `[K, C, 1, 2, 2]` of a frame.
fn parities(weight: &Tensor) -> Result<[Tensor; 4]> {
    let planar = |filter: &Tensor| -> Result<Tensor> {
        Ok(layout::native(&filter.unsqueeze(2).what("filters of an upsampling convolution")?)?)
    };
    let filters = ParityFilters::new(weight)?;
    let [even_even, even_odd, odd_even, odd_odd] = filters.filters();
    Ok([planar(even_even)?, planar(even_odd)?, planar(odd_even)?, planar(odd_odd)?])
}

/// Halves height and width, and after that, with a convolution over time, the number of frames.
#[derive(Debug)]
pub(crate) struct Downsample {
    time: Option<TimeConv>,
    weight: Tensor,
    bias: Tensor,
}

impl Downsample {
    pub(crate) fn load(builder: &mut Builder<'_>, prefix: &str, temporal: bool) -> Result<Self> {
        let conv = format!("{prefix}.resample.1");
        let weight = builder.tensor(&conv, "weight")?.unsqueeze(2).what("downsampling convolution")?;
        let weight = layout::native(&weight)?;
        Ok(Self {
            time: if temporal { Some(TimeConv::load(builder, prefix)?) } else { None },
            weight,
            bias: builder.tensor(&conv, "bias")?,
        })
    }

    /// x `[1, C, T, H, W]` to `[1, K, T or T / 2, H / 2, W / 2]`. The first frame of a stream stays one.
    pub(crate) fn forward(&self, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        // A row of zeros below and a column to the right, none above or to the left.
        let params = ConvParams { stride: [1, 2, 2], padding: [(0, 0), (0, 1), (0, 1)], ..ConvParams::default() };
        let y = conv_nd(&x, &self.weight, Some(&self.bias), &params)?;
        drop(x);
        match &self.time {
            Some(time) => time.halve(y, slots),
            None => Ok(y),
        }
    }
}

/// A convolution over three frames.
#[derive(Debug)]
struct TimeConv {
    weight: Tensor,
    bias: Tensor,
    slot: Slot,
}

impl TimeConv {
    fn load(builder: &mut Builder<'_>, prefix: &str) -> Result<Self> {
        let prefix = format!("{prefix}.time_conv");
        let (weight, bias) = (builder.kernel(&prefix, "weight")?, builder.tensor(&prefix, "bias")?);
        Ok(Self { weight, bias, slot: builder.slot() })
    }

    /// What was remembered, then x.
    fn input(&self, x: Tensor, slots: &mut Slots) -> Result<(Tensor, usize)> {
        match slots.take(&self.slot) {
            Some(past) => {
                let remembered = past.dim(2).what("remembered frames")?;
                Ok((cat_frames(&past, &x)?, remembered))
            }
            None => Ok((x, 0)),
        }
    }

    /// Every frame becomes two. The stream that this layer sees begins, over zeros, with the second frame: the first has
    /// passed by and is not remembered.
    fn double(&self, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        let (buffer, remembered) = self.input(x, slots)?;
        slots.remember(&self.slot, Some(tail_frames(&buffer, 2)?));
        let params = ConvParams { padding: [(2 - remembered, 0), (0, 0), (0, 0)], ..ConvParams::default() };
        // All channels of the earlier frame of a pair, then all of the later one.
        Ok(split_pairs(&conv_nd(&buffer, &self.weight, Some(&self.bias), &params)?)?)
    }

    /// Two frames become one, which has seen the frame before them as well. The first frame of the stream passes by and
    /// is remembered.
    fn halve(&self, x: Tensor, slots: &mut Slots) -> Result<Tensor> {
        if slots.start() {
            slots.remember(&self.slot, Some(tail_frames(&x, 1)?));
            return Ok(x);
        }
        let (buffer, _) = self.input(x, slots)?;
        slots.remember(&self.slot, Some(tail_frames(&buffer, 1)?));
        let params = ConvParams { stride: [2, 1, 1], ..ConvParams::default() };
        Ok(conv_nd(&buffer, &self.weight, Some(&self.bias), &params)?)
    }
}
