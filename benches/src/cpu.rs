//! CPU figures. Every figure's peer and baseline run in the same process or right beside it.

pub mod conv;
pub mod flux2;
pub mod gemm;
pub mod load;
pub mod wan;

use std::path::PathBuf;

/// What the figures need from outside.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// A Python with torch and diffusers; without it peers are left out.
    pub python: Option<PathBuf>,
}
