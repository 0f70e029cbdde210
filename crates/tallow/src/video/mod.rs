//! `tallow decode` and `tallow encode`: videos and pictures of latents, and back.
//!
//! Everything that can be wrong with a request is found before the weights are loaded, as far as files can be read twice:
//! first what does not depend on the machine (exit code 2), then the files (exit code 1).
//!
//! | file | what |
//! |---|---|
//! | `decode.rs`, `encode.rs` | the course of a run, whatever the family |
//! | `wan/`, `ltx/` | what a family does at each step |
//! | `latents.rs`, `picture.rs`, `frames.rs` | files of latents, files of frames, and tensors between them |

pub(crate) mod decode;
pub(crate) mod encode;
mod frames;
mod latents;
mod ltx;
mod picture;
mod wan;

use std::time::Instant;

use candle_core::{DType, Device};
use weights::{TensorSource, sample_hash};

use crate::{cli::VaeArgs, machine, terminal};

/// Key of a latent file's metadata that names the VAE that made it.
const VAE_KEY: &str = "vae";
/// Key of a latent file's metadata that says whether its values are raw or normalized.
const KIND_KEY: &str = "latents";

/// How long a run took and how much memory it held.
fn summary(start: Instant) -> String {
    let took = format!("done in {:.1} s", start.elapsed().as_secs_f64());
    match machine::peak_memory() {
        Some(bytes) => format!("{took}, at most {} of memory", terminal::bytes(bytes)),
        None => took,
    }
}

/// `1 frame`, `9 frames`.
pub(crate) fn count(number: usize, of: &str) -> String {
    if number == 1 { format!("1 {of}") } else { format!("{number} {of}s") }
}

/// Most bytes that a run may take.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// None is no limit.
    bytes: Option<u64>,
    /// Whether somebody asked for it.
    asked: bool,
}

impl Limit {
    /// The one that was asked for, else what is available on the device, if that is known.
    fn of(args: &VaeArgs, device: &Device) -> Self {
        let available = || match device {
            Device::Cpu => machine::memory().1,
            // If the driver does not say, the run will.
            device => candle_fork::memory::available(device).ok().flatten(),
        };
        Self { bytes: args.max_memory.or_else(available), asked: args.max_memory.is_some() }
    }

    /// Says where a limit that was too small comes from.
    fn explain(self, error: anyhow::Error) -> anyhow::Error {
        if self.asked {
            return error;
        }
        anyhow::anyhow!("{error}, which is what is available now; --max-memory overrides it")
    }
}

/// A hash of weights that are kept in `dtype`.
///
/// # Errors
/// If they cannot be read.
fn weights_hash(source: &dyn TensorSource, stored: DType, dtype: DType) -> anyhow::Result<String> {
    let hash = sample_hash(&[("vae", source)])?;
    // Weights that were rounded are other weights.
    Ok(if dtype != DType::F32 && dtype != stored { format!("{hash} as {}", dtype.as_str()) } else { hash })
}
