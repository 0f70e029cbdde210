//! What is checked while loading, and how quantised matrices are used.

use candle_core::Device;
use candle_fork::quant::{DeviceFacts, LinearShape, Memory, Preference, QuantMode, QuantWeight, choose};

/// Whether the values of weights are looked at while loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ValueCheck {
    /// Every value must be finite, in its stored type and in the type that it is converted to. A matrix that is zero
    /// throughout is reported by a `tracing` warning.
    #[default]
    Finite,
    /// Values are not read before they are used: a mapped model starts at once, a NaN goes through.
    Off,
}

/// How quantised matrices take part in products.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum QuantPolicy {
    /// On the CPU as they are stored; on a device decoded once.
    #[default]
    Auto,
    /// All in one way; those that do not have it are decoded for each product.
    Mode(QuantMode),
    /// Chosen for each matrix by [`candle_fork::quant::choose`].
    Choose {
        /// Rows of the arguments (tokens), typically.
        rows: usize,
        /// Rates of the device.
        device: DeviceFacts,
        /// Its memory.
        memory: Memory,
        /// What to prefer.
        preference: Preference,
    },
}

impl QuantPolicy {
    /// The mode of one matrix. A file that asks for products in floating point gets them.
    pub(super) fn mode(&self, weight: &QuantWeight, full_precision: bool, device: &Device) -> QuantMode {
        let mode = match *self {
            Self::Auto if device.is_cpu() => QuantMode::DequantizePerLayer,
            Self::Auto => QuantMode::DequantizeOnce,
            Self::Mode(mode) => mode,
            Self::Choose { rows, device, memory, preference } => {
                let (in_features, out_features) = (weight.in_features(), weight.out_features());
                choose(LinearShape { rows, in_features, out_features }, device, memory, preference)
            }
        };
        if full_precision && mode == QuantMode::W8A8 { QuantMode::DequantizePerLayer } else { mode }
    }
}

/// How a [`Loader`](super::Loader) works.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct LoaderOptions {
    /// Whether values are checked.
    pub values: ValueCheck,
    /// How quantised matrices take part in products.
    pub quant: QuantPolicy,
}

impl LoaderOptions {
    /// The same options with another check of values.
    pub fn with_values(self, values: ValueCheck) -> Self {
        Self { values, ..self }
    }

    /// The same options with another policy for quantised matrices.
    pub fn with_quant(self, quant: QuantPolicy) -> Self {
        Self { quant, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::DType;
    use candle_fork::HostTensor;

    use super::*;

    #[test]
    fn the_mode_follows_policy_device_and_file() {
        let codes = HostTensor::new(Arc::new(vec![1u8; 64]), 0..64, DType::U8, (4, 16)).unwrap();
        let weight = QuantWeight::int8(codes, vec![1.0], None).unwrap();
        let mode = |policy: QuantPolicy, full_precision| policy.mode(&weight, full_precision, &Device::Cpu);
        assert_eq!(mode(QuantPolicy::Auto, false), QuantMode::DequantizePerLayer);
        assert_eq!(mode(QuantPolicy::Mode(QuantMode::DequantizeOnce), true), QuantMode::DequantizeOnce);
        assert_eq!(mode(QuantPolicy::Mode(QuantMode::W8A8), false), QuantMode::W8A8);
        assert_eq!(mode(QuantPolicy::Mode(QuantMode::W8A8), true), QuantMode::DequantizePerLayer);
        let choose = QuantPolicy::Choose {
            rows: 4096,
            device: DeviceFacts::Cpu,
            memory: Memory { available: 1, widened: 2 },
            preference: Preference::Speed,
        };
        assert_eq!(mode(choose, false), QuantMode::DequantizePerLayer);
    }
}
