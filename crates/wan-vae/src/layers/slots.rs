//! What causal layers remember, and the loading of layers that do.

use candle_core::Tensor;
use candle_fork::layout;
use weights::Loader;

use crate::error::Result;

/// The entry of one layer in [`Slots`].
#[derive(Debug)]
pub(crate) struct Slot(usize);

#[cfg(test)]
impl Slot {
    pub(super) fn of(index: usize) -> Self {
        Self(index)
    }
}

/// The last frames of the input of every layer that looks back, `[1, C, frames, H, W]` each.
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    past: Vec<Option<Tensor>>,
    start: bool,
}

impl Slots {
    /// Nothing seen yet, for a network of so many slots.
    pub(crate) fn new(count: usize) -> Self {
        Self { past: vec![None; count], start: true }
    }

    /// Whether the current call brings the first frame of the stream, and nothing else.
    pub(crate) fn start(&self) -> bool {
        self.start
    }

    /// Says whether the next call brings the first frame.
    pub(crate) fn set_start(&mut self, start: bool) {
        self.start = start;
    }

    /// What a layer remembers; it forgets it.
    pub(super) fn take(&mut self, slot: &Slot) -> Option<Tensor> {
        self.past.get_mut(slot.0).and_then(Option::take)
    }

    /// Remembers frames, which should own their memory: see [`candle_fork::frames::tail_frames`].
    pub(super) fn remember(&mut self, slot: &Slot, tail: Option<Tensor>) {
        if let Some(past) = self.past.get_mut(slot.0) {
            *past = tail;
        }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.past.iter().flatten().map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as u64).sum()
    }
}

/// Takes tensors from a checkpoint and gives out slots.
pub(crate) struct Builder<'a> {
    loader: &'a mut Loader,
    slots: usize,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(loader: &'a mut Loader) -> Self {
        Self { loader, slots: 0 }
    }

    /// The tensor `PREFIX.NAME`.
    pub(super) fn tensor(&mut self, prefix: &str, name: &str) -> Result<Tensor> {
        Ok(self.loader.tensor(&format!("{prefix}.{name}"))?)
    }

    /// The tensor `PREFIX.NAME` of a convolution, in the order in which its device reads it.
    pub(super) fn kernel(&mut self, prefix: &str, name: &str) -> Result<Tensor> {
        Ok(layout::native(&self.tensor(prefix, name)?)?)
    }

    /// An entry of its own for one layer.
    pub(super) fn slot(&mut self) -> Slot {
        self.slots += 1;
        Slot(self.slots - 1)
    }

    /// Slots given out.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }
}
