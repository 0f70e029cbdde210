//! The shortcuts without parameters that the Wan 2.2 family puts around its stages.

use candle_core::Tensor;
use candle_fork::{What, residual};

use crate::error::Result;

/// Means over pixels, frames and neighbouring channels, in the shape that a stage of the encoder gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvgDown {
    /// Channels out.
    pub(crate) output: usize,
    /// Factor in time.
    pub(crate) ft: usize,
    /// Factor in height and width.
    pub(crate) fs: usize,
}

impl AvgDown {
    /// `main` plus the shortcut of x, which is the input of the stage that gave `main`.
    pub(crate) fn add(&self, main: &Tensor, x: &Tensor) -> Result<Tensor> {
        let mean = self.mean(x).what("shortcut of a stage")?;
        Ok(residual(main, &mean)?)
    }

    /// x `[1, a, T, H, W]` with zeros before it to whole groups of frames and without the last row of an odd number (of a
    /// band): channel `((c ft + t) fs + q) fs + r` of a
    /// position is the pixel (t, q, r) of its cell of channel c, and neighbouring channels are averaged.
    fn mean(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let &Self { output, ft, fs } = self;
        let (_, channels, frames, height, width) = x.dims5()?;
        let before = frames.next_multiple_of(ft) - frames;
        let x = if before > 0 { x.pad_with_zeros(2, before, 0)? } else { x.clone() };
        let (t, h, w) = ((frames + before) / ft, height / fs, width / fs);
        let x = if h * fs < height { x.narrow(3, 0, h * fs)? } else { x };
        let cells = x.reshape(vec![channels, t, ft, h, fs, w, fs])?.permute(vec![0, 2, 4, 6, 1, 3, 5])?;
        let grouped = cells.reshape(vec![output, channels * ft * fs * fs / output, t, h, w])?;
        grouped.mean(1)?.unsqueeze(0)
    }
}

/// Repetition of pixels, frames and channels, in the shape that a stage of the decoder gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DupUp {
    /// Channels out.
    pub(crate) output: usize,
    /// Factor in time.
    pub(crate) ft: usize,
    /// Factor in height and width.
    pub(crate) fs: usize,
}

impl DupUp {
    /// `main` plus the shortcut of x, which is the input of the stage that gave `main`. At the start of a stream only the
    /// last of the frames that x becomes counts.
    pub(crate) fn add(&self, main: &Tensor, x: &Tensor, start: bool) -> Result<Tensor> {
        const WHAT: &str = "shortcut of a stage";
        let (_, _, frames, height, width) = x.dims5().what(WHAT)?;
        let mut cells = self.cells(x).what(WHAT)?;
        let mut ft = self.ft;
        if start && ft > 1 {
            cells = cells.narrow(2, ft - 1, 1).what(WHAT)?;
            ft = 1;
        }
        let split = vec![self.output, frames, ft, height, self.fs, width, self.fs];
        let sum = residual(&main.reshape(split).what(WHAT)?, &cells)?;
        Ok(sum.reshape(main.dims()).what(WHAT)?)
    }

    /// x `[1, a, T, H, W]` as `[b, T, ft, H, fs, W, fs]`: what stands at (t, q, r) of the cell of channel o is channel
    /// `(((o ft + t) fs + q) fs + r) / R` of x, with `R = b ft fs fs / a`. A view where R is a product of the innermost
    /// factors, as it is in all published networks.
    fn cells(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let &Self { output, ft, fs } = self;
        let (_, channels, frames, height, width) = x.dims5()?;
        let repeats = output * ft * fs * fs / channels;
        let full = [ft, fs, fs];
        let kept = match repeats {
            1 => Some([ft, fs, fs]),
            r if r == fs => Some([ft, fs, 1]),
            r if r == fs * fs => Some([ft, 1, 1]),
            r if r == ft * fs * fs => Some([1, 1, 1]),
            _ => None,
        };
        let wide = match kept {
            Some([t, q, r]) => {
                let split = x.reshape(vec![output, t, q, r, frames, height, width])?;
                split.broadcast_as(vec![output, full[0], full[1], full[2], frames, height, width])?
            }
            None => {
                let index: Vec<u32> = (0..output * ft * fs * fs).map(|i| (i / repeats) as u32).collect();
                let index = Tensor::new(index, x.device())?;
                let gathered = x.squeeze(0)?.contiguous()?.index_select(&index, 0)?;
                gathered.reshape(vec![output, ft, fs, fs, frames, height, width])?
            }
        };
        wide.permute(vec![0, 4, 1, 5, 2, 6, 3])
    }
}
