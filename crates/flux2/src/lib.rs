//! FLUX.2 text-to-image: Qwen3 text encoder, flow-match transformer, VAE, and the pipeline that joins them.
//!
//! A model is a folder in the diffusers layout ([`ModelFolder`]): the published FLUX.2 klein models (4B and 9B, distilled
//! and base) load unchanged. Everything runs on the CPU or on a CUDA device through unmodified candle tensors.
//!
//! ```no_run
//! use flux2::{Flux2Pipeline, GenerateOptions, LoadOptions, ModelFolder, Silent};
//!
//! # fn main() -> Result<(), flux2::Error> {
//! let folder = ModelFolder::Disk("FLUX.2-klein-4B".into());
//! let pipeline = Flux2Pipeline::load(&folder, &LoadOptions::default())?;
//! let options = GenerateOptions {
//!     prompt: "a red circle on a blue background".to_owned(),
//!     seed: 7,
//!     ..GenerateOptions::default()
//! };
//! let generated = pipeline.generate(&options, &Silent)?;
//! println!("{:?}", generated.image.shape()); // [3, height, width], f32 in [0, 1]
//! # Ok(())
//! # }
//! ```
//!
//! Progress and cancellation go through one [`Observer`], called between layers, steps and stages; the crate never prints
//! and holds no global state. A pipeline is `Send + Sync` and can be shared by threads.
//!
//! The parts are usable alone: [`PromptTokenizer`], [`Qwen3Encoder`], [`Flux2Transformer`],
//! [`Flux2Vae`], and between them [`Flux2Pipeline::encode_prompt`], [`Flux2Pipeline::denoise`] and
//! [`Flux2Pipeline::decode`].

#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod generation;
pub mod layouts;
pub mod memory;
pub mod options;
mod parts;
pub mod pipeline;
mod plan;
pub mod sizes;
mod streaming;
pub mod text_encoder;
pub mod tokenizer;
pub mod transformer;
pub mod vae;

#[cfg(test)]
mod testing;

pub use config::{Qwen3Config, TransformerConfig, VaeConfig};
pub use error::{Error, Result};
pub use generation::{GenerationDefaults, ModelKind};
pub use options::{Launches, LoadOptions, Residency};
pub use pipeline::{
    Components, DenoiseInput, DenoiseStep, Flux2Pipeline, GenerateOptions, Generated, GeneratedRgb8, Notice,
    PromptEmbeds, TensorSources,
};
pub use policy::{Cancelled, Event, Observer, Silent};
pub use sampling::NoiseGenerator;
pub use text_encoder::Qwen3Encoder;
pub use tokenizer::{PromptTokenizer, Tokens};
pub use transformer::Flux2Transformer;
pub use vae::Flux2Vae;
pub use weights::{ModelFolder, QuantPolicy, ValueCheck};
