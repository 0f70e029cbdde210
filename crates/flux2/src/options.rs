//! How weights are loaded.

use candle_core::{DType, Device};

/// Where a model runs and in which element type.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors.
    pub device: Device,
    /// Element type of the activations; `F32` on the CPU. Matrices keep their stored type where the device allows it.
    pub dtype: DType,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu, dtype: DType::F32 }
    }
}

impl LoadOptions {
    /// Options for `device` with activations of `dtype`.
    pub fn new(device: Device, dtype: DType) -> Self {
        Self { device, dtype }
    }
}
