//! `tallow decode` and `tallow encode`: videos and pictures of latents, and back.
//!
//! Everything that can be wrong with a request is found before the weights are loaded, as far as files can be read twice:
//! first what does not depend on the machine (exit code 2), then the files (exit code 1).

pub(crate) mod decode;
pub(crate) mod encode;
mod frames;
mod latents;
mod picture;
mod vae;

use std::time::Instant;

use wan_vae::{ClipPlan, Error};

use crate::{machine, terminal};

/// Key of a latent file's metadata that names the VAE that made it.
const VAE_KEY: &str = "vae";

/// What the library reports, or what a caller's own part of the work did, without a frame around it.
fn failed(error: Error) -> anyhow::Error {
    match error {
        Error::Caller { source, .. } => anyhow::Error::from_boxed(source),
        other => other.into(),
    }
}

/// An error of the caller's part of the work, on its way through the library.
fn caller(what: &'static str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Caller { what, source: error.into() }
}

/// How long a run took and how much memory it held.
fn summary(start: Instant) -> String {
    let took = format!("done in {:.1} s", start.elapsed().as_secs_f64());
    match machine::peak_memory() {
        Some(bytes) => format!("{took}, at most {} of memory", terminal::bytes(bytes)),
        None => took,
    }
}

/// `1 frame`, `9 frames`.
fn count(number: usize, of: &str) -> String {
    if number == 1 { format!("1 {of}") } else { format!("{number} {of}s") }
}

/// A plan in words.
fn plan(plan: ClipPlan) -> String {
    match plan {
        ClipPlan::Whole => "whole pictures".to_owned(),
        ClipPlan::Bands(bands) => count(bands, "band"),
        ClipPlan::Blended(_) => "blended tiles, which differ from the whole picture".to_owned(),
        other => format!("{other:?}"),
    }
}
