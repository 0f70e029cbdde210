//! How models are loaded and run.

use candle_core::Device;

/// Where a VAE runs and what is checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors. Activations are f32; weights keep their stored type.
    pub device: Device,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: Device::Cpu }
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

/// How pictures are cut to save memory. Time is never cut: the network remembers further back than any piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tiling {
    /// [`Tiling::Whole`] if it fits the limit, else the fewest [`Tiling::Bands`] that do.
    #[default]
    Auto,
    /// Not at all: frames leave as they are done.
    Whole,
    /// So many bands of rows, with the same bits as [`Tiling::Whole`]. Bands are decoded one after another over the whole
    /// clip, so all frames are held until the last band is done.
    Bands(usize),
    /// Overlapping tiles faded into one another, as diffusers does it: not what the network gives for the whole picture.
    /// Pictures that fit in one tile are not cut. All frames are held until the last tile is done.
    Blended(BlendedTiles),
}

/// Squares of a blended decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlendedTiles {
    /// Side of a tile, in pixels.
    pub tile: usize,
    /// Distance of the beginnings of neighbouring tiles, in pixels; the rest of the side is faded.
    pub stride: usize,
}

impl Default for BlendedTiles {
    /// Those of diffusers: 256 pixels every 192.
    fn default() -> Self {
        Self { tile: 256, stride: 192 }
    }
}

/// How [`WanVae::encode_clip`](crate::WanVae::encode_clip) treats its clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EncodeOptions {
    /// What happens to frames behind the last whole group.
    pub remainder: Remainder,
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
        Self { remainder }
    }
}
