//! How weights are loaded.

use std::sync::Arc;

use candle_core::{DType, Device};
use weights::{Expected, Loader, LoaderOptions, TensorSource, ValueCheck};

use crate::error::Result;

/// Where a model runs, in which element type, and what is checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors.
    pub device: Device,
    /// Element type of the activations; `F32` on the CPU. Matrices keep their stored type where the device allows it.
    pub dtype: DType,
    /// Whether the values of weights are looked at.
    pub values: ValueCheck,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: DType::F32, values: ValueCheck::default() }
    }
}

impl LoadOptions {
    /// Options for `device` with activations of `dtype`.
    pub fn new(device: Device, dtype: DType) -> Self {
        Self { device, dtype, ..Self::default() }
    }

    /// Options with a check of values.
    pub fn with_values(self, values: ValueCheck) -> Self {
        Self { values, ..self }
    }

    /// A loader for these options.
    pub(crate) fn loader(
        &self,
        source: Arc<dyn TensorSource>,
        expected: &[Expected],
        ignored: impl Fn(&str) -> bool,
    ) -> Result<Loader> {
        let checks = LoaderOptions::default().with_values(self.values);
        Ok(Loader::with_options(source, expected, ignored, self.dtype, &self.device, checks)?)
    }
}
