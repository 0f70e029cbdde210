//! Taking tensors from a checkpoint, and giving out what layers own during a run.

use candle_core::Tensor;
use candle_fork::{layout, nn::Linear};
use weights::Loader;

use super::{names::Layout, slots::Slot};
use crate::error::Result;

/// Takes tensors under the names of [`super::names::expected`]; counts slots and maps of noise.
pub(super) struct Builder<'a> {
    loader: &'a mut Loader,
    layout: &'a Layout,
    slots: usize,
    noise: usize,
}

impl<'a> Builder<'a> {
    pub(super) fn new(loader: &'a mut Loader, layout: &'a Layout) -> Self {
        Self { loader, layout, slots: 0, noise: 0 }
    }

    /// The tensor `PREFIX.NAME`.
    pub(super) fn tensor(&mut self, prefix: &str, name: &str) -> Result<Tensor> {
        Ok(self.loader.tensor(&self.layout.name_in_file(&format!("{prefix}.{name}")))?)
    }

    /// The kernel `PREFIX.weight`, in the order in which its device reads it.
    pub(super) fn kernel(&mut self, prefix: &str) -> Result<Tensor> {
        Ok(layout::native(&self.tensor(prefix, "weight")?)?)
    }

    /// The linear map at `PREFIX`.
    pub(super) fn linear(&mut self, prefix: &str) -> Result<Linear> {
        let weight = self.loader.linear(&self.layout.name_in_file(&format!("{prefix}.weight")))?;
        Ok(Linear::new(weight, Some(self.tensor(prefix, "bias")?)))
    }

    /// An entry for one layer.
    pub(super) fn slot(&mut self) -> Slot {
        self.slots += 1;
        Slot(self.slots - 1)
    }

    /// Index of a map of noise for one convolution.
    pub(super) fn noise(&mut self) -> usize {
        self.noise += 1;
        self.noise - 1
    }

    /// Slots given out.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }
}
