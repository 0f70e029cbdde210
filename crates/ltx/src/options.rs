//! How models are loaded.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device};
use candle_fork::cudnn_policy::PlanChoice;
use policy::{AttentionPolicy, Backends, ConvPolicy, ModelFamily};
use weights::{StoredDType, TensorSource, ValueCheck};

use crate::error::{Error, Result};

/// Where a model runs, in which element type, and what is checked.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors.
    pub device: Device,
    /// Float type of the activations: f32, f16 or bf16. None is f32 on the CPU, and elsewhere the type in which the file
    /// stores most. These networks may leave the range of f16.
    pub dtype: Option<DType>,
    /// Whether the values of weights are looked at.
    pub values: ValueCheck,
    /// Convolution backend of every call; by default that of [`ModelFamily::Ltx`].
    pub conv: ConvPolicy,
    /// Attention backend of every call; by default that of [`ModelFamily::Ltx`].
    pub attention: AttentionPolicy,
    /// How cuDNN's plans are chosen. By default they are timed, once for each shape.
    pub plans: PlanChoice,
    /// Folder that keeps chosen plans for later processes; none keeps them in memory only.
    pub plan_cache: Option<Arc<Path>>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let Backends { conv, attention, plans, plan_cache } = Backends::for_family(ModelFamily::Ltx);
        Self { device: Device::Cpu, dtype: None, values: ValueCheck::default(), conv, attention, plans, plan_cache }
    }
}

impl LoadOptions {
    /// Options for `device` with activations of `dtype`.
    pub fn new(device: Device, dtype: DType) -> Self {
        Self { device, dtype: Some(dtype), ..Self::default() }
    }

    /// Options with a device.
    pub fn with_device(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Options with a type of activations.
    pub fn with_dtype(self, dtype: Option<DType>) -> Self {
        Self { dtype, ..self }
    }

    /// Options with a check of values.
    pub fn with_values(self, values: ValueCheck) -> Self {
        Self { values, ..self }
    }

    /// Options with backends.
    pub fn with_backends(self, conv: ConvPolicy, attention: AttentionPolicy) -> Self {
        Self { conv, attention, ..self }
    }

    /// The backends that they name.
    pub(crate) fn backends(&self) -> Backends {
        let Self { conv, attention, plans, plan_cache, .. } = self.clone();
        Backends { conv, attention, plans, plan_cache }
    }

    /// The type that a model of `source` computes in under these options.
    ///
    /// # Errors
    /// [`Error::Argument`] if the options name another than f32, f16 or bf16.
    pub fn activations(&self, source: &dyn TensorSource) -> Result<DType> {
        match self.dtype {
            None if self.device.is_cpu() => Ok(DType::F32),
            None => Ok(stored_dtype(source)),
            Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(dtype),
            Some(other) => {
                Err(Error::Argument { what: format!("a vae computes in f32, f16 or bf16, not in {}", other.as_str()) })
            }
        }
    }
}

/// The float type in which a file stores most; quantised tensors do not count.
pub fn stored_dtype(source: &dyn TensorSource) -> DType {
    let bytes = |stored: StoredDType| -> usize {
        source.tensors().iter().filter(|t| t.dtype == stored).map(|t| t.bytes.len()).sum()
    };
    let (f32, f16, bf16) = (bytes(StoredDType::F32), bytes(StoredDType::F16), bytes(StoredDType::BF16));
    if bf16 >= f32.max(f16) {
        DType::BF16
    } else if f16 > f32 {
        DType::F16
    } else {
        DType::F32
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weights::{
        Safetensors,
        write::{TensorData, to_bytes},
    };

    use super::*;

    /// A file with so many elements in f32, f16 and bf16.
    fn file(elements: [usize; 3]) -> Safetensors {
        let types = [(StoredDType::F32, 4), (StoredDType::F16, 2), (StoredDType::BF16, 2)];
        let tensors = elements
            .into_iter()
            .zip(types)
            .map(|(count, (dtype, size))| TensorData::new(dtype.to_string(), dtype, &[count], vec![0; count * size]));
        let bytes = to_bytes(&tensors.collect::<Vec<_>>(), &Default::default()).unwrap();
        Safetensors::from_bytes(Arc::new(bytes), "a file").unwrap()
    }

    #[test]
    fn the_type_of_most_bytes_counts() {
        for (elements, want) in
            [([1, 1, 5], DType::BF16), ([4, 1, 5], DType::F32), ([1, 9, 5], DType::F16), ([1, 2, 2], DType::BF16)]
        {
            assert_eq!(stored_dtype(&file(elements)), want, "{elements:?}");
        }
    }

    #[test]
    fn the_cpu_computes_in_f32_unless_told_otherwise() {
        let source = file([1, 1, 9]);
        assert_eq!(LoadOptions::default().activations(&source).unwrap(), DType::F32);
        assert_eq!(LoadOptions::new(Device::Cpu, DType::F16).activations(&source).unwrap(), DType::F16);
        let error = LoadOptions::new(Device::Cpu, DType::U8).activations(&source).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("u8"), "{error}");
    }
}
