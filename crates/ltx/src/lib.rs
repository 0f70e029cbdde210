//! LTX-2 video decoders and encoders: the convolutional VAE of LTX-2, 2.3 and 2.5, and the diffusion decoder of 2.5.
//!
//! Latents are `(B, 128, T, H, W)`, one for 8 frames of 32x32 pixels; the first stands for one frame. Pixels are
//! `(B, 3, 8(T-1)+1, 32H, 32W)` in -1..=1.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//! use ltx::{DiffusionDecoder, LoadOptions, diffusion_decoder::DecodeOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let decoder = DiffusionDecoder::open("ltx-2.5-video-vae-bf16.safetensors", &LoadOptions::default())?;
//! let latents = Tensor::zeros((1, 128, 2, 8, 8), DType::F32, &Device::Cpu)?;
//! let pixels = decoder.decode(&latents, &DecodeOptions::default(), &policy::Silent)?;
//! assert_eq!(pixels.dims(), [1, 3, 9, 256, 256]);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod conv_vae;
pub mod diffusion_decoder;
pub mod error;
pub mod files;
pub mod options;

pub use candle_fork::frames::HostFrames;
pub use conv_vae::ConvVae;
pub use diffusion_decoder::{DiffusionDecoder, DiffusionDecoderConfig};
pub use error::{Error, Result};
pub use files::{Component, LtxFiles};
pub use options::LoadOptions;
