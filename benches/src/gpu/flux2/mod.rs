//! FLUX.2 klein in bf16 with random weights of the published shapes, beside diffusers with random weights of its own.
//!
//! Pictures run on im2col and the math path of attention unless somebody asks for cuDNN, so the figures without a suffix
//! are those of the default; `_cudnn` and `_fused` are what asking brings.

mod decode_ops;
pub mod kernels;
pub mod ops;
pub mod picture;
pub mod step;
mod table;
pub mod text;
pub mod vae;

use candle_core::DType;
use flux2::{LoadOptions, ValueCheck};

use super::{Gpu, peer::fastest};
use crate::{peer::Peer, record::Row};

/// Standard deviation of the matrices: near unit gain at the width of klein 4B.
const STD: f32 = 0.02;
const GIB: f64 = (1u64 << 30) as f64;

/// Options for `dtype` on the device; finite weights are known to be.
fn load_options(gpu: &Gpu, dtype: DType) -> LoadOptions {
    LoadOptions::new(gpu.device.clone(), dtype).with_values(ValueCheck::Off)
}

/// A row with the fastest of `peers`, whose figure is `figure`.
fn row(gpu: &Gpu, name: &'static str, value: f64, unit: &'static str, peers: &[Peer], figure: &str) -> Row {
    let peer = fastest(peers, figure);
    Row {
        name,
        value,
        unit,
        peer: peer.map(|(peer, _)| peer.name.clone()).unwrap_or_default(),
        peer_value: peer.map(|(_, value)| value),
        versions: gpu.versions.clone(),
        ..Row::default()
    }
}
