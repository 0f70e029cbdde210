//! Latents by kind, and the statistics between the kinds.

use candle_core::{DType, Device, Tensor};
use candle_fork::What;

use crate::error::{Error, Result, shape};

/// Latents as the VAE's network makes and takes them: `[z, n, h, w]`.
#[derive(Debug, Clone)]
pub struct RawLatents(Tensor);

/// Latents as a diffusion transformer sees them, `(raw - mean) / std` per channel: `[z, n, h, w]`.
#[derive(Debug, Clone)]
pub struct NormalizedLatents(Tensor);

macro_rules! latents {
    ($Kind:ident) => {
        impl $Kind {
            /// From `[z, n, h, w]`, or `[1, z, n, h, w]`, of any float type; a picture may be `[z, h, w]`.
            ///
            /// # Errors
            /// [`Error::Shape`] for another rank, a batch, or an extent of 0.
            pub fn new(latents: Tensor) -> Result<Self> {
                four_axes(latents).map(Self)
            }

            /// The tensor `[z, n, h, w]`.
            pub fn tensor(&self) -> &Tensor {
                &self.0
            }

            /// The tensor `[z, n, h, w]`.
            pub fn into_tensor(self) -> Tensor {
                self.0
            }

            /// Channels, latent frames, height and width in latents.
            pub fn extents(&self) -> (usize, usize, usize, usize) {
                match *self.0.dims() {
                    [z, n, h, w] => (z, n, h, w),
                    _ => (0, 0, 0, 0),
                }
            }

            /// Latent frames `first..first + count`.
            ///
            /// # Errors
            /// [`Error::Op`] if there are not as many.
            pub fn frames(&self, first: usize, count: usize) -> Result<Self> {
                Ok(Self(self.0.narrow(1, first, count).what("frames of the latents")?))
            }
        }
    };
}
latents!(RawLatents);
latents!(NormalizedLatents);

fn four_axes(latents: Tensor) -> Result<Tensor> {
    let expected = "[z, n, h, w] or [1, z, n, h, w], no extent 0";
    if latents.dims().contains(&0) {
        return Err(shape("latents", &latents, expected));
    }
    match *latents.dims() {
        [_, _, _] => Ok(latents.unsqueeze(1).what("latents")?),
        [_, _, _, _] => Ok(latents),
        [1, _, _, _, _] => Ok(latents.squeeze(0).what("latents")?),
        _ => Err(shape("latents", &latents, expected)),
    }
}

/// Mean and standard deviation of each latent channel.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    mean: Vec<f32>,
    std: Vec<f32>,
}

impl Statistics {
    /// From one mean and one standard deviation per channel.
    ///
    /// # Errors
    /// [`Error::Statistics`] if they are not as many, a mean is not finite or a deviation not positive.
    pub fn new(mean: &[f64], std: &[f64]) -> Result<Self> {
        if mean.len() != std.len() {
            let got = format!("{} values", std.len());
            return Err(Error::Statistics { field: "latents_std", got, expected: format!("{}", mean.len()) });
        }
        let narrow = |field, values: &[f64], legal: fn(f32) -> bool, expected: &str| {
            let value = |&v: &f64| {
                let narrow = v as f32;
                let error = || Error::Statistics { field, got: format!("{v}"), expected: expected.to_owned() };
                if narrow.is_finite() && legal(narrow) { Ok(narrow) } else { Err(error()) }
            };
            values.iter().map(value).collect::<Result<Vec<f32>>>()
        };
        Ok(Self {
            mean: narrow("latents_mean", mean, |_| true, "finite numbers")?,
            std: narrow("latents_std", std, |v| v > 0.0, "finite positive numbers")?,
        })
    }

    /// Those of the Wan 2.1 VAE, which the Qwen-Image VAE shares: 16 channels.
    pub fn wan21() -> Self {
        Self { mean: WAN21_MEAN.to_vec(), std: WAN21_STD.to_vec() }
    }

    /// Those of the Wan 2.2 VAE: 48 channels.
    pub fn wan22() -> Self {
        Self { mean: WAN22_MEAN.to_vec(), std: WAN22_STD.to_vec() }
    }

    /// Mean of each channel.
    pub fn mean(&self) -> &[f32] {
        &self.mean
    }

    /// Standard deviation of each channel.
    pub fn std(&self) -> &[f32] {
        &self.std
    }

    /// `normalized * std + mean`, f32.
    ///
    /// # Errors
    /// [`Error::Channels`].
    pub fn denormalize(&self, latents: &NormalizedLatents) -> Result<RawLatents> {
        let (mean, std) = self.tensors(&latents.0)?;
        let wide = latents.0.to_dtype(DType::F32);
        let raw = wide.and_then(|x| x.broadcast_mul(&std)?.broadcast_add(&mean)).what("latents")?;
        Ok(RawLatents(raw))
    }

    /// `(raw - mean) / std`, f32.
    ///
    /// # Errors
    /// [`Error::Channels`].
    pub fn normalize(&self, latents: &RawLatents) -> Result<NormalizedLatents> {
        let (mean, std) = self.tensors(&latents.0)?;
        let wide = latents.0.to_dtype(DType::F32);
        let normalized = wide.and_then(|x| x.broadcast_sub(&mean)?.broadcast_div(&std)).what("latents")?;
        Ok(NormalizedLatents(normalized))
    }

    fn tensors(&self, latents: &Tensor) -> Result<(Tensor, Tensor)> {
        let channels = latents.dims()[0];
        if channels != self.mean.len() {
            return Err(Error::Channels { got: channels, expected: self.mean.len() });
        }
        let tensor = |values: &[f32], device: &Device| {
            Tensor::from_slice(values, (channels, 1, 1, 1), device).what("statistics of the latents")
        };
        Ok((tensor(&self.mean, latents.device())?, tensor(&self.std, latents.device())?))
    }
}

const WAN21_MEAN: [f32; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
];

const WAN21_STD: [f32; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.9160,
];

const WAN22_MEAN: [f32; 48] = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
];

const WAN22_STD: [f32; 48] = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
];
