//! Large host tensors on their way to a device.

use candle_core::{DType, Device, Tensor};

#[cfg(feature = "cuda")]
use crate::error::What;
use crate::{error::Result, host::HostTensor};

/// Takes host tensors to a device, as a model does that is loaded from a mapped file.
///
/// For CUDA, large ones go through two blocks of page-locked memory: all threads fill one while the device copies the other.
/// The driver's own way for memory that is not page-locked is a thread of its own and several times as slow. The blocks are
/// made when they are first needed and live as long as the value.
#[derive(Debug)]
pub struct Staging {
    device: Device,
    /// Once they have been asked for: the blocks, if the system gave them.
    #[cfg(feature = "cuda")]
    blocks: Option<Option<super::cuda::Blocks>>,
    staged: u64,
}

impl Staging {
    /// For tensors on `device`.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            blocks: None,
            staged: 0,
        }
    }

    /// Like [`HostTensor::to_tensor`] to the device of this value, with the same result.
    ///
    /// # Errors
    /// As [`HostTensor::to_tensor`].
    pub fn upload(&mut self, host: &HostTensor, dtype: DType) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = &self.device
            && super::cuda::Blocks::serve(host)
        {
            let blocks = self.blocks.get_or_insert_with(|| super::cuda::Blocks::new(cuda));
            if let Some(blocks) = blocks {
                let raw = blocks.upload(host)?;
                self.staged += host.bytes().len() as u64;
                return if host.dtype() == dtype {
                    Ok(raw)
                } else {
                    raw.to_dtype(dtype).what("conversion of a host tensor")
                };
            }
        }
        host.to_tensor(dtype, &self.device)
    }

    /// Bytes that went through page-locked memory so far.
    pub fn staged(&self) -> u64 {
        self.staged
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn on_the_cpu_it_is_a_plain_copy() {
        let bytes: Vec<u8> = (0..12u8).flat_map(|v| f32::from(v).to_le_bytes()).collect();
        let host = HostTensor::new(Arc::new(bytes), 0..48, DType::F32, (4, 3)).unwrap();
        let mut staging = Staging::new(&Device::Cpu);
        let there = staging.upload(&host, DType::F64).unwrap();
        assert_eq!(there.to_vec2::<f64>().unwrap()[3], [9.0, 10.0, 11.0]);
        assert_eq!(staging.staged(), 0);
    }
}
