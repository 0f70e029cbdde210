//! The peers of the GPU figures: torch's convolutions, diffusers' VAE.

use anyhow::Result;
use serde_json::json;

use super::Options;
use crate::peer::Peer;

/// What torch needs to know of a layer: channels in and out, filter, input `[N, C, D, H, W]`, how many there are.
pub(super) type Layer = (usize, usize, [usize; 3], [usize; 5], usize);

/// torch's sums over `layers`: `bf16` (channels-last) and `f32` (no TF32), in ms.
pub(super) fn convs(options: &Options, layers: &[Layer]) -> Result<Option<Peer>> {
    let Some(python) = &options.python else { return Ok(None) };
    Peer::run(python, "torch_conv3d.py", &[&json!(layers).to_string()]).map(Some)
}

/// diffusers' `AutoencoderKLWan` with arguments of `wan_diffusers.py`.
pub(super) fn diffusers(options: &Options, args: &[&str]) -> Result<Option<Peer>> {
    let Some(python) = &options.python else { return Ok(None) };
    Peer::run(python, "wan_diffusers.py", args).map(Some)
}
