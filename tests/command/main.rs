//! End-to-end tests of the command `tallow`: its files, its words and its exit codes.

#![forbid(unsafe_code)]

mod bad_input;
mod bad_latents;
mod checkpoint;
mod decode;
mod encode;
mod generate;
#[cfg(unix)]
mod interrupt;
mod latents;
#[cfg(feature = "mp4")]
mod mp4;
mod report;
mod support;
#[cfg(target_os = "linux")]
mod video_resources;
