//! Schedules, samplers and seeded noise.
//!
//! Everything here is host arithmetic on `f32` slices: no device, no tensor library, no state between calls.
//!
//! ```
//! use sampling::{FlowMatchEuler, NoiseGenerator};
//!
//! # fn main() -> sampling::Result<()> {
//! // 64 x 64 pixels are 4 x 4 tokens of 128 channels.
//! let mut latents = NoiseGenerator::Philox.normal(42, 128 * 4 * 4);
//! let sampler = FlowMatchEuler::new(4 * 4, 4)?;
//! for (index, _timestep) in sampler.timesteps().iter().enumerate() {
//!     let velocity = latents.clone(); // the model's answer for these latents at this timestep
//!     sampler.step(index, &mut latents, &velocity)?;
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod error;
pub mod flow_match;
pub mod noise;

pub use error::{Error, Result};
pub use flow_match::{FlowMatchEuler, MAX_STEPS, empirical_mu};
pub use noise::{NoiseGenerator, UnknownGenerator};
