//! What a network is kept and computed in.

use candle_core::{DType, DeviceLocation};

use crate::layers::GROUP;

/// Element types and place of a network, which its memory is counted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Precision {
    /// Where it is computed.
    pub place: DeviceLocation,
    /// Element type of the weights as they are kept.
    pub weights: DType,
    /// Element type of the activations: f32 on the CPU, that of the weights elsewhere.
    pub activations: DType,
}

impl Precision {
    /// Of a network at `place` whose weights are kept in `weights`.
    pub fn new(place: DeviceLocation, weights: DType) -> Self {
        let activations = if place == DeviceLocation::Cpu { DType::F32 } else { weights };
        Self { place, weights, activations }
    }

    /// Whether it is computed by the CPU, in its memory.
    pub(crate) fn on_cpu(self) -> bool {
        self.place == DeviceLocation::Cpu
    }

    /// Bytes of a weight.
    pub(super) fn weight_size(self) -> u64 {
        self.weights.size_in_bytes() as u64
    }

    /// Bytes of so many elements of activations.
    pub(super) fn bytes(self, elements: f64) -> u64 {
        // A float beyond the range becomes the largest number.
        (self.activations.size_in_bytes() as f64 * elements) as u64
    }

    /// Channels that come together: those of a convolution's ends are padded to groups where it runs channels-last.
    pub(super) fn group(self) -> usize {
        let half = matches!(self.activations, DType::F16 | DType::BF16);
        if half && matches!(self.place, DeviceLocation::Cuda { .. }) { GROUP } else { 1 }
    }
}
