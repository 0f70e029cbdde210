//! The shortcuts without parameters that the Wan 2.2 family puts around its stages.

use candle_core::Tensor;
use candle_fork::{
    What,
    frames::{avg_down_add, dup_up_add},
};

use crate::error::Result;

/// Means over pixels, frames and neighbouring channels, in the shape that a stage of the encoder gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvgDown {
    /// Factor in time.
    pub(crate) ft: usize,
    /// Factor in height and width.
    pub(crate) fs: usize,
}

impl AvgDown {
    /// `main` plus the shortcut of x, which is the input of the stage that gave `main`. The last row of an odd number, in
    /// a band, has no cell.
    pub(crate) fn add(&self, main: &Tensor, x: &Tensor) -> Result<Tensor> {
        let &Self { ft, fs } = self;
        let rows = x.dim(3).map(|height| height / fs * fs);
        let x = rows.and_then(|rows| x.narrow(3, 0, rows)).what("shortcut of a stage")?;
        Ok(avg_down_add(main, &x, ft, fs)?)
    }
}

/// Repetition of pixels, frames and channels, in the shape that a stage of the decoder gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DupUp {
    /// Factor in time.
    pub(crate) ft: usize,
    /// Factor in height and width.
    pub(crate) fs: usize,
}

impl DupUp {
    /// `main` plus the shortcut of x, which is the input of the stage that gave `main`. At the start of a stream only the
    /// last of the frames that x becomes counts: `main` has no others.
    pub(crate) fn add(&self, main: &Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(dup_up_add(main, x, self.ft, self.fs)?)
    }
}
