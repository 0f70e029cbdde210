//! What the suites share: goldens, the demonstration model, name tables of published models, and the measures by which
//! results are compared.
//!
//! Goldens and name tables are read and written here by a few lines of their own, not by the crate `weights`: a suite must
//! not pass because a reader and a writer share a mistake.

#![forbid(unsafe_code)]

mod container;
pub mod convrot;
mod demo;
mod gguf;
mod golden;
pub mod gpu;
pub mod klein;
mod layouts;
mod measure;
mod names;
mod skeleton;

pub use container::{Container, Stored};
pub use demo::{DemoCopy, demo, request};
pub use gguf::gguf;
pub use golden::Golden;
pub use layouts::{prefixed, relayout};
pub use measure::{assert_close, assert_same_bits, max_abs, psnr, rel_l2};
pub use names::{NameTable, published_config};
pub use skeleton::PthSkeleton;

use std::path::{Path, PathBuf};

/// A file or folder of this package: where it was built, or in the repository that a program built elsewhere runs in.
pub fn data(path: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    if built.exists() { built } else { Path::new("tests") }.join(path)
}

/// The library example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
mod readme {}
