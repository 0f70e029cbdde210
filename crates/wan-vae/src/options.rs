//! How models are loaded and run.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device};
use candle_fork::cudnn_policy::PlanChoice;
use policy::{AttentionPolicy, Backends, ConvPolicy, ModelFamily};
use weights::ValueCheck;

/// Where a VAE runs and what is checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors. Activations are f32 on the CPU, and elsewhere of the weights' type.
    pub device: Device,
    /// Float type that weights are kept in: f32, f16 or bf16; none is the narrowest that holds them as they are stored
    /// ([`Checkpoint::dtype`](crate::Checkpoint::dtype)). Sums are f32 in any case.
    pub dtype: Option<DType>,
    /// Whether the values of weights are looked at.
    pub values: ValueCheck,
    /// Convolution backend of every call; by default that of [`ModelFamily::WanVae`].
    pub conv: ConvPolicy,
    /// Attention backend of every call; by default that of [`ModelFamily::WanVae`].
    pub attention: AttentionPolicy,
    /// How cuDNN's plans are chosen. By default they are timed, once for each shape: about a second for the first clip of
    /// a process, and a fifth less for every clip. [`PlanChoice::Heuristic`] chooses alike in every process.
    pub plans: PlanChoice,
    /// Folder that keeps chosen plans for later processes; none keeps them in memory only.
    pub plan_cache: Option<Arc<Path>>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let Backends { conv, attention, plans, plan_cache } = Backends::for_family(ModelFamily::WanVae);
        Self { device: Device::Cpu, dtype: None, values: ValueCheck::default(), conv, attention, plans, plan_cache }
    }
}

impl LoadOptions {
    /// The backends that they name.
    pub(crate) fn backends(&self) -> Backends {
        let Self { conv, attention, plans, plan_cache, .. } = self.clone();
        Backends { conv, attention, plans, plan_cache }
    }

    /// Options with a device.
    pub fn with_device(self, device: Device) -> Self {
        Self { device, ..self }
    }

    /// Options with a type of weights.
    pub fn with_dtype(self, dtype: Option<DType>) -> Self {
        Self { dtype, ..self }
    }

    /// Options with a check of values.
    pub fn with_values(self, values: ValueCheck) -> Self {
        Self { values, ..self }
    }
}

/// How [`WanVae::decode_clip`](crate::WanVae::decode_clip) keeps within memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DecodeOptions {
    /// Most bytes that the decode may take, the weights included; none is no limit. Held against an estimate
    /// ([`memory`](crate::memory)), before anything is computed.
    pub max_bytes: Option<u64>,
    /// How pictures are cut.
    pub tiling: Tiling,
}

/// How [`WanVae::encode_clip`](crate::WanVae::encode_clip) treats its clip, and how it keeps within memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EncodeOptions {
    /// What happens to frames behind the last whole group.
    pub remainder: Remainder,
    /// Most bytes that the encode may take, the weights included; none is no limit. Held against an estimate
    /// ([`memory`](crate::memory)), before anything is computed.
    pub max_bytes: Option<u64>,
    /// How pictures are cut.
    pub tiling: Tiling,
}

/// How pictures are cut to save memory. Time is never cut: the networks remember further back than any piece.
///
/// Pieces run one after another over the whole clip. A decode then holds all frames until the last piece is done, and an
/// encode all frames from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tiling {
    /// [`Tiling::Whole`] if it fits the limit, else the fewest [`Tiling::Bands`] that do.
    #[default]
    Auto,
    /// Not at all: results leave as they are done, and memory does not grow with the clip.
    Whole,
    /// So many bands of rows, with the same result as [`Tiling::Whole`]: no seams, and the same bits but for pictures
    /// of a few latents, where convolutions of bands may round in another way (relative 1e-6).
    Bands(usize),
    /// Overlapping tiles faded into one another, as diffusers does it: not what the network gives for the whole picture.
    /// Pictures that fit in one tile are not cut.
    Blended(BlendedTiles),
}

/// Squares of blended tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlendedTiles {
    /// Side of a tile, in pixels; where pixels are packed before they are encoded (Wan 2.2), in those squares of pixels.
    pub tile: usize,
    /// Distance of the beginnings of neighbouring tiles, in the same unit; the rest of the side is faded.
    pub stride: usize,
}

impl Default for BlendedTiles {
    /// Those of diffusers: 256 every 192.
    fn default() -> Self {
        Self { tile: 256, stride: 192 }
    }
}

/// What happens to a clip whose length is not 1 more than a multiple of the temporal factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Remainder {
    /// It is an error.
    #[default]
    Refuse,
    /// The frames behind the last whole group are left out.
    Trim,
    /// The last frame is repeated until the group is whole.
    Repeat,
}

impl DecodeOptions {
    /// Options with a limit in bytes.
    pub fn with_max_bytes(self, max_bytes: Option<u64>) -> Self {
        Self { max_bytes, ..self }
    }

    /// Options with a tiling.
    pub fn with_tiling(self, tiling: Tiling) -> Self {
        Self { tiling, ..self }
    }
}

impl EncodeOptions {
    /// Options with a treatment of frames left over.
    pub fn with_remainder(self, remainder: Remainder) -> Self {
        Self { remainder, ..self }
    }

    /// Options with a limit in bytes.
    pub fn with_max_bytes(self, max_bytes: Option<u64>) -> Self {
        Self { max_bytes, ..self }
    }

    /// Options with a tiling.
    pub fn with_tiling(self, tiling: Tiling) -> Self {
        Self { tiling, ..self }
    }
}
