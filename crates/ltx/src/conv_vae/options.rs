//! How a convolutional VAE is run.

use sampling::NoiseGenerator;

use crate::diffusion_decoder::BlendedTiles;

/// How latents are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConvDecodeOptions {
    /// Latent frames that a call of the network takes; none takes as many as the limit of memory allows. Fewer need less
    /// memory and give the same frames.
    pub chunk: Option<usize>,
    /// Most bytes that the decode may take, the weights included; held against an estimate
    /// ([`decode_memory`](super::ConvVae::decode_memory)) before anything is computed. None lets layers hold 5 GiB.
    pub max_bytes: Option<u64>,
    /// Tiles of pixels to be decoded one by one, as diffusers does it; frames near their seams are others than those of the
    /// clip. Frames that leave late are held, all of them.
    pub tiles: Option<BlendedTiles>,
    /// Seed of the noise of networks that use any.
    pub seed: u64,
    /// Generator of that noise. One stream holds, for each item of the batch that the timestep conditions, the noise of
    /// its latents, and then the maps of the layers in the order of the run.
    pub rng: NoiseGenerator,
}

impl ConvDecodeOptions {
    /// Options with a number of latent frames per call.
    pub fn with_chunk(self, chunk: Option<usize>) -> Self {
        Self { chunk, ..self }
    }

    /// Options with a limit in bytes.
    pub fn with_max_bytes(self, max_bytes: Option<u64>) -> Self {
        Self { max_bytes, ..self }
    }

    /// Options with tiles.
    pub fn with_tiles(self, tiles: Option<BlendedTiles>) -> Self {
        Self { tiles, ..self }
    }

    /// Options with a seed.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Options with a generator of noise.
    pub fn with_rng(self, rng: NoiseGenerator) -> Self {
        Self { rng, ..self }
    }
}

/// How frames are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConvEncodeOptions {
    /// Frames that a call of the network takes; none takes as many as the limit of memory allows. Fewer need less memory
    /// and give the same latents.
    pub chunk: Option<usize>,
    /// Most bytes that the encode may take, the weights included; held against an estimate
    /// ([`encode_memory`](super::ConvVae::encode_memory)) before anything is computed. None lets layers hold 5 GiB.
    pub max_bytes: Option<u64>,
    /// Tiles of pixels to be encoded one by one, as diffusers does it; latents near their seams are others than those of the
    /// clip.
    pub tiles: Option<BlendedTiles>,
}

impl ConvEncodeOptions {
    /// Options with a number of frames per call.
    pub fn with_chunk(self, chunk: Option<usize>) -> Self {
        Self { chunk, ..self }
    }

    /// Options with a limit in bytes.
    pub fn with_max_bytes(self, max_bytes: Option<u64>) -> Self {
        Self { max_bytes, ..self }
    }

    /// Options with tiles.
    pub fn with_tiles(self, tiles: Option<BlendedTiles>) -> Self {
        Self { tiles, ..self }
    }
}
