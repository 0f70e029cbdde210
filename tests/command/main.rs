//! End-to-end tests of the command `tallow`: its files, its words and its exit codes.

#![forbid(unsafe_code)]

mod bad_input;
mod bad_latents;
mod checkpoint;
mod decode;
mod encode;
mod generate;
#[cfg(feature = "hub")]
mod hub;
#[cfg(feature = "hub")]
#[allow(dead_code, reason = "the hub's own tests use all of it")]
#[path = "../../crates/hub/tests/server/mod.rs"]
mod hub_server;
#[cfg(unix)]
mod interrupt;
mod latents;
mod ltx;
#[cfg(target_os = "linux")]
mod ltx_resources;
#[cfg(feature = "mp4")]
mod mp4;
mod quantize;
mod report;
mod support;
mod verify;
#[cfg(target_os = "linux")]
mod video_resources;
