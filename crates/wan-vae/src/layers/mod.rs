//! Blocks of the networks, on tensors `[1, C, T, H, W]`.
//!
//! Whatever remembers earlier frames takes [`Slots`]: every such layer owns one entry of it, given out when the network is
//! built, so what a layer remembers does not depend on the order in which layers run. A call brings the first frame of a
//! stream alone or any number of later ones; [`Slots::start`] says which.

mod attention;
mod conv;
#[cfg(test)]
mod goldens;
mod norm;
mod patches;
mod resample;
mod residual;
mod shortcut;
mod slots;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    attention::Attention,
    conv::{CausalConv3d, GROUP, Pointwise},
    norm::Norm,
    patches::{patchify, pixel_order, unpack},
    resample::{Downsample, Upsample},
    residual::ResidualBlock,
    shortcut::{AvgDown, DupUp},
    slots::{Builder, Slots},
};
