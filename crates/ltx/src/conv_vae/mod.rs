//! The convolutional VAE of LTX-2, 2.3 and 2.5.
//!
//! Pictures become latents of 32 x 32 pixels and 8 frames; the first frame of a clip has a latent of its own. The
//! reference is `Lightricks/LTX-2: packages/ltx-core, model/video_vae` and huggingface/diffusers,
//! `autoencoder_kl_ltx2.py`.
//!
//! | file | what |
//! |---|---|
//! | `architecture.rs` | networks as lists of blocks |
//! | `config.rs` | both kinds of configuration |
//! | `names.rs`, `checkpoint.rs` | what tensors are called in which file |
//! | `conv.rs`, `norm.rs`, `timestep.rs`, `blocks.rs`, `network.rs` | layers, from small to large |
//! | `layout.rs` | frames, pixels and channels moved about |
//! | `slots.rs` | what layers wait with from call to call |
//! | `noise.rs`, `statistics.rs`, `options.rs`, `vae.rs` | loading |
//! | `memory.rs` | bytes of a clip, and chunks that fit a limit |
//! | `run.rs`, `decode.rs`, `encode.rs` | running |
//! | `tiles.rs` | overlapping tiles, for comparisons |

pub mod architecture;
mod blocks;
mod builder;
pub mod checkpoint;
pub mod config;
mod conv;
mod decode;
mod encode;
#[cfg(test)]
mod goldens;
mod layout;
mod memory;
pub mod names;
mod network;
mod noise;
mod norm;
pub mod options;
mod run;
mod slots;
mod statistics;
#[cfg(test)]
mod testing;
mod tiles;
mod timestep;
mod vae;

pub use self::{
    architecture::{Architecture, Block, Causality, Network, SpatialPadding},
    checkpoint::Checkpoint,
    memory::ClipMemory,
    options::{ConvDecodeOptions, ConvEncodeOptions},
    statistics::Statistics,
    vae::ConvVae,
};
