//! The peers of the GPU figures: torch's convolutions, diffusers' models, comfy-kitchen's int8 layers and attention,
//! safetensors' loading.

use std::path::Path;

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

/// comfy-kitchen's int8 linear layers of `[rows, in_features, out_features]` as `MxKxN`, and `decode` of 16384 x 4096, in
/// ms. A Python without that package is no peer.
pub(super) fn kitchen(options: &Options, shapes: &[[usize; 3]]) -> Result<Option<Peer>> {
    let Some(python) = &options.python else { return Ok(None) };
    match Peer::run(python, "kitchen_int8.py", &[&json!(shapes).to_string()]) {
        Err(error) if format!("{error:#}").contains("ModuleNotFoundError") => {
            println!("no peer: {error:#}");
            Ok(None)
        }
        peer => peer.map(Some),
    }
}

/// safetensors' own loading of a file onto the device: `load`, in ms. Why there is no peer is said on stderr.
pub(super) fn load(options: &Options, file: &Path) -> Option<Peer> {
    let python = options.python.as_ref()?;
    let peer = Peer::run(python, "load_safetensors.py", &[&file.display().to_string()]);
    peer.inspect_err(|error| eprintln!("no peer: {error:#}")).ok()
}

/// Neighborhood attention by comfy-kitchen or torch, in `ms`. Figures of ours do not wait for a peer that does not run; it is
/// said on stderr.
pub(super) fn na3d(
    options: &Options,
    grid: [usize; 3],
    window: [usize; 3],
    heads: usize,
    width: usize,
) -> Option<Peer> {
    let problem = json!({ "grid": grid, "window": window, "heads": heads, "width": width });
    let peer = Peer::run(options.python.as_ref()?, "na3d.py", &[&problem.to_string()]);
    peer.inspect_err(|error| eprintln!("no peer: {error:#}")).ok()
}

/// diffusers' `AutoencoderKLLTX2Video` with arguments of `ltx_conv_diffusers.py`, as [`na3d`].
pub(super) fn ltx_conv(options: &Options, args: &[&str]) -> Option<Peer> {
    let peer = Peer::run(options.python.as_ref()?, "ltx_conv_diffusers.py", args);
    peer.inspect_err(|error| eprintln!("no peer: {error:#}")).ok()
}

/// diffusers' `LTX2VideoDiffusionDecoderModel` with arguments of `ltx_diffusion_diffusers.py`, as [`na3d`].
pub(super) fn ltx_diffusion(options: &Options, args: &[&str]) -> Option<Peer> {
    let peer = Peer::run(options.python.as_ref()?, "ltx_diffusion_diffusers.py", args);
    peer.inspect_err(|error| eprintln!("no peer: {error:#}")).ok()
}

/// diffusers' FLUX.2 with arguments of `flux2_diffusers.py`: eager, and compiled if that is asked for. Figures of ours do
/// not wait for a peer that does not run; it is said on stderr.
pub(super) fn flux2(options: &Options, args: &[&str]) -> Vec<Peer> {
    let Some(python) = &options.python else { return Vec::new() };
    let run = |how: &[&str]| match Peer::run(python, "flux2_diffusers.py", &[args, how].concat()) {
        Ok(peer) => Some(peer),
        Err(error) => {
            eprintln!("no peer: {error:#}");
            None
        }
    };
    let compiled = options.compiled_peer.then(|| run(&["--compile"])).flatten();
    run(&[]).into_iter().chain(compiled).collect()
}

/// The peer with the smallest value of a figure. All values are printed.
pub(super) fn fastest<'a>(peers: &'a [Peer], figure: &str) -> Option<(&'a Peer, f64)> {
    let values = peers.iter().filter_map(|peer| Some((peer, peer.get(figure).ok()?)));
    values.inspect(|(peer, value)| println!("{}: {figure} {value:.2}", peer.name)).min_by(|a, b| a.1.total_cmp(&b.1))
}
