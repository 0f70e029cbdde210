//! Wan video VAEs: Wan 2.1 and 2.2, Qwen-Image and their relatives, encode and decode.
//!
//! A clip is streamed: [`DecoderState`] and [`EncoderState`] carry what the causal convolutions remember, so a clip of
//! any length takes the memory of one step, and the result does not depend on how it is cut into calls.
//!
//! - [`WanVae::decode`] and [`WanVae::encode`] take the next piece of a stream;
//! - [`WanVae::decode_clip`] and [`WanVae::encode_clip`] run a whole clip under a memory budget, with progress and
//!   cancellation, and hand over frames as they are done. Pictures too large for the budget are decoded in exact bands.
//!
//! Latents are typed: [`RawLatents`] are what the network works on, [`NormalizedLatents`] what a diffusion transformer
//! sees. Pixels are in -1..=1. The reference is `Wan-Video/Wan2.1: wan/modules/vae.py`, `Wan-Video/Wan2.2:
//! wan/modules/vae2_2.py` and huggingface/diffusers, `autoencoder_kl_wan.py`.

#![forbid(unsafe_code)]

pub mod architecture;
mod bands;
pub mod checkpoint;
pub mod config;
mod decode_clip;
pub mod detect;
mod encode_clip;
pub mod error;
pub mod latent_files;
pub mod latents;
mod layers;
mod load;
pub mod memory;
pub mod names;
mod network;
pub mod options;
mod plan;
mod state;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tiles;
mod vae;
pub mod variant;

pub use architecture::Architecture;
pub use candle_fork::frames::HostFrames;
pub use checkpoint::Checkpoint;
pub use config::VaeConfig;
pub use encode_clip::EncodedClip;
pub use error::{Error, Result};
pub use latents::{NormalizedLatents, RawLatents, Statistics};
pub use memory::{ClipMemory, ClipPlan, Precision};
pub use options::{BlendedTiles, DecodeOptions, EncodeOptions, LoadOptions, Remainder, Tiling};
pub use plan::expected;
pub use policy::{Cancelled, Event, Observer, Silent};
pub use state::{DecoderState, EncoderState, Leftover};
pub use vae::WanVae;
pub use variant::Variant;
pub use weights::ValueCheck;
