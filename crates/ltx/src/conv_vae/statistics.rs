//! The statistics between the latents of a VAE and those that a diffusion transformer sees.

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use weights::TensorSource;

use super::names::{Layout, MEAN, STD};
use crate::error::{Error, Result};

/// Mean and standard deviation of each latent channel, `[1, C, 1, 1, 1]` f32.
#[derive(Debug, Clone)]
pub struct Statistics {
    mean: Tensor,
    std: Tensor,
}

impl Statistics {
    /// Those of a checkpoint, in full precision.
    pub(super) fn load(source: &dyn TensorSource, layout: &Layout, device: &Device) -> Result<Self> {
        let read = |name: &str, positive: bool| -> Result<Tensor> {
            let name = layout.name_in_file(name);
            let values = source.host(&name)?.to_tensor(DType::F32, &Device::Cpu)?;
            let list = values.to_vec1::<f32>().what("statistics of the latents")?;
            if let Some(bad) = list.iter().find(|v| !v.is_finite() || positive && **v <= 0.0) {
                let problem =
                    format!("holds {bad}, expected finite{} numbers", if positive { " positive" } else { "" });
                return Err(Error::Config { field: name, problem });
            }
            let shaped = values.reshape((1, list.len(), 1, 1, 1)).and_then(|v| v.to_device(device));
            Ok(shaped.what("statistics of the latents")?)
        };
        Ok(Self { mean: read(MEAN, false)?, std: read(STD, true)? })
    }

    /// `normalized * std + mean`, f32.
    ///
    /// # Errors
    /// [`Error::Op`] for another number of channels, or another device.
    pub fn denormalize(&self, latents: &Tensor) -> Result<Tensor> {
        let wide = latents.to_dtype(DType::F32);
        let raw = wide.and_then(|x| x.broadcast_mul(&self.std)?.broadcast_add(&self.mean));
        Ok(raw.what("latents of a vae")?)
    }

    /// `(raw - mean) / std`, f32.
    ///
    /// # Errors
    /// As [`Statistics::denormalize`].
    pub fn normalize(&self, latents: &Tensor) -> Result<Tensor> {
        let wide = latents.to_dtype(DType::F32);
        let normalized = wide.and_then(|x| x.broadcast_sub(&self.mean)?.broadcast_div(&self.std));
        Ok(normalized.what("latents of a transformer")?)
    }
}
