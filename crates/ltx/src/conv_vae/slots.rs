//! What a run remembers from call to call.

use candle_core::Tensor;
use candle_fork::{What, frames::tail_frames};

use super::layout::join;
use crate::error::Result;

/// One entry of [`Slots`], owned by one layer.
#[derive(Debug)]
pub(super) struct Slot(pub(super) usize);

/// Frames that layers wait with, `[B, C, n, H, W]` each.
///
/// A layer takes any number of frames, even none, and gives those that it can: a convolution that sees the frame after
/// its own lags by one. Ends of the clip are the first frames that a layer sees, and the call of which [`Pass::last`]
/// says so. So the result does not depend on how a clip is cut into calls.
#[derive(Debug, Default)]
pub(super) struct Slots {
    past: Vec<Option<Tensor>>,
    begun: Vec<bool>,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self { past: vec![None; count], begun: vec![false; count] }
    }

    /// Whether this is the first time that the layer asks.
    pub(super) fn begin(&mut self, slot: &Slot) -> bool {
        self.begun.get_mut(slot.0).is_some_and(|begun| !std::mem::replace(begun, true))
    }

    /// What is kept; it is kept no longer.
    pub(super) fn take(&mut self, slot: &Slot) -> Option<Tensor> {
        self.past.get_mut(slot.0).and_then(Option::take)
    }

    /// Keeps frames, which should own their memory.
    pub(super) fn keep(&mut self, slot: &Slot, frames: Option<Tensor>) {
        if let Some(past) = self.past.get_mut(slot.0) {
            *past = frames;
        }
    }

    /// Frames behind those that wait already. Gives the number of all.
    pub(super) fn push(&mut self, slot: &Slot, frames: Option<Tensor>) -> Result<usize> {
        let waiting: Vec<Tensor> = self.take(slot).into_iter().chain(frames).collect();
        if waiting.is_empty() {
            return Ok(0);
        }
        let all = join(&waiting, 2)?;
        let count = all.dim(2).what("frames that wait")?;
        self.keep(slot, Some(all));
        Ok(count)
    }

    /// The first `count` of the frames that wait.
    pub(super) fn pull(&mut self, slot: &Slot, count: usize) -> Result<Option<Tensor>> {
        let Some(all) = self.take(slot) else { return Ok(None) };
        let frames = all.dim(2).what("frames that wait")?;
        if frames <= count {
            return Ok(Some(all));
        }
        self.keep(slot, Some(tail_frames(&all, frames - count)?));
        Ok(Some(all.narrow(2, 0, count).what("frames that wait")?))
    }
}

/// One call of a layer.
pub(super) struct Pass<'a> {
    /// What earlier calls left.
    pub(super) slots: &'a mut Slots,
    /// Whether no frames follow.
    pub(super) last: bool,
    /// `[H, W]` each, by the index that a layer was given.
    pub(super) noise: &'a [Tensor],
}
