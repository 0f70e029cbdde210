//! The noise of decoders that use any, made on the host.

use candle_core::{DType, Device, Tensor};
use candle_fork::What;

use super::{
    architecture::{Block, Network},
    options::ConvDecodeOptions,
};
use crate::error::Result;

/// Where a conditioned decoder stands between latents and noise.
pub(super) const TIMESTEP: f64 = 0.05;
/// Share of noise in its latents.
const SHARE: f64 = 0.025;

/// A map of noise: height, width, values.
pub(super) type Map = ([usize; 2], Vec<f32>);

/// `conditioned` values for latents, and the maps of a network's layers in the order of its run.
pub(super) fn draw(
    network: &Network,
    extents: [usize; 2],
    conditioned: usize,
    options: &ConvDecodeOptions,
) -> (Vec<f32>, Vec<Map>) {
    let sizes = map_sizes(network, extents);
    let total = conditioned + sizes.iter().map(|[h, w]| h * w).sum::<usize>();
    if total == 0 {
        return (Vec::new(), Vec::new());
    }
    let mut values = options.rng.normal(options.seed, total).into_iter();
    let latents = values.by_ref().take(conditioned).collect();
    let map = |size: [usize; 2]| (size, values.by_ref().take(size[0] * size[1]).collect());
    (latents, sizes.into_iter().map(map).collect())
}

/// Two maps for each layer that injects noise, at its resolution.
fn map_sizes(network: &Network, [mut height, mut width]: [usize; 2]) -> Vec<[usize; 2]> {
    let mut sizes = Vec::new();
    for block in &network.blocks {
        match *block {
            Block::Residual { layers, inject_noise: true } => {
                sizes.resize(sizes.len() + 2 * layers, [height, width]);
            }
            Block::Up { factor: [_, fh, fw], .. } => (height, width) = (height * fh, width * fw),
            Block::Residual { .. } | Block::Down { .. } => {}
        }
    }
    sizes
}

/// Latents f32 with their share of noise.
pub(super) fn blend(latents: &Tensor, noise: Vec<f32>) -> Result<Tensor> {
    let noise = Tensor::from_vec(noise, latents.dims(), latents.device());
    let blend = noise.and_then(|noise| (latents * (1.0 - SHARE))? + (noise * SHARE)?);
    Ok(blend.what("noise of the latents")?)
}

/// The maps `[H, W]` on a device.
pub(super) fn tensors(maps: Vec<Map>, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let tensor = |([h, w], values): Map| Tensor::from_vec(values, (h, w), device).and_then(|map| map.to_dtype(dtype));
    Ok(maps.into_iter().map(tensor).collect::<candle_core::Result<_>>().what("noise of the layers")?)
}
