//! Launchers of the CUDA kernels. All arguments have been checked by the ops.

mod channels;
mod groups;
mod rows;

pub(super) use self::{
    channels::channel_rms_norm,
    groups::{group_norm, group_norm_part, group_statistics},
    rows::{gate_residual_modulate, layer_norm, layer_norm_modulate, residual_rms_norm, rms_norm},
};

/// Threads of a block, as in the kernels.
const THREADS: u32 = 256;

/// Bytes of the widest access.
const WIDE: usize = 16;

/// Most blocks of a launch along x: a dozen for each place that the largest devices have, so that the last ones to finish
/// do not leave the others idle for long, while each still has several rows to go on with.
const MAX_BLOCKS: usize = 8192;

/// Most blocks along y.
const MAX_BLOCKS_Y: usize = 65535;

/// Whether all addresses allow the widest access.
fn aligned(addresses: &[crate::cuda::tensor::Address]) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(WIDE as u64))
}
