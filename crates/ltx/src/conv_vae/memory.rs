//! How much memory clips take, from shapes alone, and the chunks that fit a limit.

use candle_core::{DType, DeviceLocation};

use super::{
    architecture::{Architecture, Block, Causality, Network, SpatialPadding},
    names::expected,
};
use crate::error::{Error, Result};

/// Bytes that a clip takes at its peak, by what they are for. An estimate from shapes: what layers hold at once, in the
/// element type that they compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClipMemory {
    /// The weights of both networks.
    pub weights: u64,
    /// What layers remember from chunk to chunk.
    pub cache: u64,
    /// The tensors that the hungriest layer holds at once, with scratch memory.
    pub activations: u64,
    /// The clip outside of the network: frames to be encoded, or decoded ones of a chunk.
    pub frames: u64,
    /// Elements of the largest tensor.
    pub largest: u64,
}

impl ClipMemory {
    /// All bytes of it.
    pub fn total(&self) -> u64 {
        [self.weights, self.cache, self.activations, self.frames].iter().fold(0, |a, &b| a.saturating_add(b))
    }
}

/// Most bytes for what layers remember and hold if no limit is given: enough for 121 frames of 768x512 at once, a matter of
/// speed.
const DEFAULT_ACTIVATIONS: u64 = 5 << 30;

/// Most elements of a tensor in one call: kernels of libraries count with 31 bits.
const MAX_ELEMENTS: u64 = 1 << 31;

/// Most bytes that a layer takes for itself: patches of a convolution, tile by tile, or cuDNN's workspace.
const SCRATCH: u64 = 256 << 20;

/// Frames that a call of the network takes: `asked`, else the most that keep within `max_bytes`, in nearly equal parts of
/// whole groups.
///
/// # Errors
/// [`Error::Argument`] for 0 frames; [`Error::Memory`] if what is asked for, or one group, does not fit.
pub(super) fn chunk(
    what: &'static str,
    frames: usize,
    group: usize,
    asked: Option<usize>,
    max_bytes: Option<u64>,
    memory: impl Fn(usize) -> ClipMemory,
) -> Result<usize> {
    let limit = max_bytes.unwrap_or(u64::MAX);
    let refuse = |chunk: usize| Error::Memory { what, needed: memory(chunk).total(), max_bytes: limit };
    match asked {
        Some(0) => return Err(Error::Argument { what: "a chunk of 0 frames is not possible".to_owned() }),
        Some(chunk) if memory(chunk).total() <= limit => return Ok(chunk),
        Some(chunk) => return Err(refuse(chunk)),
        None => {}
    }
    let parts = (1..=frames.div_ceil(group)).map(|parts| frames.div_ceil(parts).next_multiple_of(group));
    let fits = |&chunk: &usize| {
        let memory = memory(chunk);
        let within = max_bytes.is_some() || memory.cache.saturating_add(memory.activations) <= DEFAULT_ACTIVATIONS;
        within && memory.total() <= limit && memory.largest < MAX_ELEMENTS
    };
    let smallest = group.min(frames);
    match parts.clone().find(fits) {
        Some(chunk) => Ok(chunk),
        // Less than a group is not worth its overhead, whatever the default says.
        None if memory(smallest).total() <= limit => Ok(smallest),
        None => Err(refuse(smallest)),
    }
}

/// One of the networks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Encoder,
    Decoder,
}

/// Memory of a clip, nothing without the network. Extents are those of the network's input: batch, frames, rows and columns.
pub(super) fn clip(
    architecture: &Architecture,
    part: Part,
    (place, dtype): (DeviceLocation, DType),
    [batch, frames, height, width]: [usize; 4],
    chunk: Option<usize>,
) -> ClipMemory {
    let decodes = part == Part::Decoder;
    let network = if decodes { &architecture.decoder } else { &architecture.encoder };
    let Some(network) = network else { return ClipMemory::default() };
    let chunk = chunk.unwrap_or(frames).min(frames);
    let packed = architecture.packed_channels();
    let (input, filters) =
        if decodes { (architecture.latent_channels, packed) } else { (packed, architecture.latent_channels) };
    let mut walk = Walk::new(network, chunk < frames, [chunk, height, width].map(|n| n as f64));
    walk.network(network, input, filters);
    let bytes = |elements: f64| (elements * batch as f64 * dtype.size_in_bytes() as f64) as u64;
    let activations = bytes(walk.peak);
    // Taps of the largest input are more than any scratch memory but for tiny pictures.
    let scratch = if place == DeviceLocation::Cpu { SCRATCH / 2 } else { SCRATCH }.min(activations.saturating_mul(27));
    // Pixels are f32 outside. Those of an encode are there from the start, and once more with squares as channels.
    let outside = if decodes { walk.result } else { (packed * frames * height * width) as f64 };
    let f32s = (outside * batch as f64 * 4.0) as u64;
    ClipMemory {
        weights: weights(architecture, dtype),
        cache: bytes(walk.cache),
        activations: activations.saturating_add(scratch),
        frames: if decodes { f32s } else { f32s.saturating_mul(2) },
        largest: (walk.largest * batch as f64) as u64,
    }
}

fn weights(architecture: &Architecture, dtype: DType) -> u64 {
    let tensors = expected(architecture).unwrap_or_default();
    let elements: u64 = tensors.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum();
    elements * dtype.size_in_bytes() as u64
}

/// Elements of one clip, layer by layer.
struct Walk {
    /// Whether other chunks follow, for which frames are remembered.
    chunked: bool,
    /// Lines on each side of a picture.
    mirrored: f64,
    /// Frames that a residual block's input waits for its convolutions.
    lag: f64,
    /// Extents at the resolution that has been reached.
    frames: f64,
    height: f64,
    width: f64,
    cache: f64,
    peak: f64,
    largest: f64,
    result: f64,
}

impl Walk {
    fn new(network: &Network, chunked: bool, [frames, height, width]: [f64; 3]) -> Self {
        let mirrored = if network.padding == SpatialPadding::Reflect { 1.0 } else { 0.0 };
        let lag = if chunked && network.causality == Causality::Centred { 1.0 } else { 0.0 };
        Self { chunked, mirrored, lag, frames, height, width, cache: 0.0, peak: 0.0, largest: 0.0, result: 0.0 }
    }

    /// Elements of so many frames.
    fn clip(&self, channels: usize, frames: f64) -> f64 {
        channels as f64 * frames * self.height * self.width
    }

    /// A convolution's input with what surrounds it.
    fn seen(&mut self, channels: usize) -> f64 {
        let picture = channels as f64 * (self.height + 2.0 * self.mirrored) * (self.width + 2.0 * self.mirrored);
        if self.chunked {
            self.cache += 2.0 * picture;
        }
        (self.frames + 2.0) * picture
    }

    fn hold<const N: usize>(&mut self, tensors: [f64; N]) {
        self.peak = self.peak.max(tensors.iter().sum());
        self.largest = tensors.iter().fold(self.largest, |a, &b| a.max(b));
    }

    fn network(&mut self, network: &Network, input: usize, filters: usize) {
        self.conv(input, network.width);
        let mut width = network.width;
        for block in &network.blocks {
            match *block {
                Block::Residual { layers, .. } => {
                    for _ in 0..layers {
                        self.residual(width);
                    }
                }
                Block::Up { factor, reduction, residual } => {
                    self.up(width, width / reduction.max(1), factor, residual);
                    width /= reduction.max(1);
                }
                Block::Down { factor, width: output } => {
                    self.down(width, output, factor);
                    width = output;
                }
            }
        }
        self.conv(width, filters);
        self.result = self.clip(filters, self.frames);
    }

    fn conv(&mut self, input: usize, output: usize) {
        let seen = self.seen(input);
        self.hold([seen, self.clip(input, self.frames).max(self.clip(output, self.frames))]);
    }

    /// The input, what a convolution sees, its result.
    fn residual(&mut self, width: usize) {
        let waiting = 2.0 * self.lag;
        // The input that waits for the convolutions; at the end of a clip, the result that waits for a turn.
        self.cache += 2.0 * self.clip(width, waiting);
        let (seen, input) = (self.seen(width), self.clip(width, self.frames + waiting));
        self.seen(width);
        self.hold([input, seen, self.clip(width, self.frames).max(if self.chunked { input } else { 0.0 })]);
    }

    fn up(&mut self, width: usize, output: usize, [ft, fh, fw]: [usize; 3], residual: bool) {
        let input = if residual { self.clip(width, self.frames + self.lag) } else { 0.0 };
        if residual {
            self.cache += self.clip(width, self.lag);
        }
        let seen = self.seen(width);
        let main = self.clip(output * ft * fh * fw, self.frames + self.lag);
        self.hold([seen, self.clip(width, self.frames).max(input), main]);
        self.hold([main, main, input]);
        self.frames *= ft as f64;
        self.height *= fh as f64;
        self.width *= fw as f64;
        self.cache += self.clip(output, self.lag * ft as f64);
    }

    fn down(&mut self, width: usize, output: usize, [ft, fh, fw]: [usize; 3]) {
        // With a copy of the first frame, or what waits for the frames that make a group.
        let input = self.clip(width, self.frames + 1.0 + self.lag);
        if self.chunked {
            self.cache += self.clip(width, 1.0 + self.lag);
        }
        let seen = self.seen(width);
        let main = self.clip(output / (ft * fh * fw), self.frames + 1.0);
        self.hold([input, seen, main.max(input)]);
        self.hold([input, main, main, main]);
        self.frames = (self.frames / ft as f64).ceil();
        self.height /= fh as f64;
        self.width /= fw as f64;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{
        super::{config::from_original, testing::LTX20},
        *,
    };

    const GPU: (DeviceLocation, DType) = (DeviceLocation::Cuda { gpu_id: 0 }, DType::BF16);
    const GIB: u64 = 1 << 30;

    fn ltx20() -> Architecture {
        from_original(&serde_json::from_str::<Value>(LTX20).unwrap()).unwrap()
    }

    fn decode([frames, height, width]: [usize; 3], chunk: usize) -> ClipMemory {
        clip(&ltx20(), Part::Decoder, GPU, [1, frames, height, width], Some(chunk))
    }

    fn chosen(extents: [usize; 3], max_bytes: Option<u64>) -> Result<usize> {
        chunk("decoding", extents[0], 1, None, max_bytes, |chunk| decode(extents, chunk))
    }

    #[test]
    fn a_clip_of_the_record_is_decoded_at_once() {
        let extents = [16, 16, 24];
        // 121 or 128 frames of 128 channels at a quarter of the resolution, three times.
        let memory = decode(extents, 16);
        assert!(memory.activations > 3 * 121 * 128 * 192 * 128 * 2 && memory.activations < 3 * GIB, "{memory:?}");
        assert_eq!((memory.cache, memory.weights), (0, 2 * (528_380_720 + 694_098_881 + 256)), "{memory:?}");
        assert_eq!(chosen(extents, None).unwrap(), 16);
    }

    #[test]
    fn less_memory_means_smaller_chunks_until_none_fits() {
        let extents = [33, 34, 60];
        let mut last = usize::MAX;
        for limit in [40, 16, 10, 7] {
            let chunk = chosen(extents, Some(limit * GIB)).unwrap();
            let bytes = decode(extents, chunk).total();
            assert!(chunk <= last && bytes <= limit * GIB, "{limit} GiB: {chunk}, {bytes}");
            last = chunk;
        }
        assert!(last < 33);
        // What a chunk takes does not depend on the clip.
        assert_eq!(decode([17, 34, 60], 1), decode([1000, 34, 60], 1));
        let error = chosen(extents, Some(3 * GIB)).unwrap_err();
        assert!(
            matches!(error, Error::Memory { max_bytes, needed, .. } if needed == decode(extents, 1).total() && needed > max_bytes),
            "{error}"
        );
        // Without a limit tensors stay below 2^31 elements all the same.
        let default = chosen(extents, None).unwrap();
        assert!(decode(extents, default).largest < MAX_ELEMENTS && default < 33, "{default}");
    }

    #[test]
    fn what_is_asked_for_is_taken_or_refused() {
        let memory = |chunk| decode([16, 16, 24], chunk);
        assert_eq!(chunk("decoding", 16, 1, Some(5), None, memory).unwrap(), 5);
        assert!(matches!(chunk("decoding", 16, 1, Some(0), None, memory), Err(Error::Argument { .. })));
        let needed = memory(16).total();
        assert_eq!(chunk("decoding", 16, 1, Some(16), Some(needed), memory).unwrap(), 16);
        assert!(matches!(chunk("decoding", 16, 1, Some(16), Some(needed - 1), memory), Err(Error::Memory { .. })));
        // An encoder's chunks are whole groups.
        assert_eq!(chunk("encoding", 17, 8, None, None, |_| ClipMemory::default()).unwrap(), 24);
    }
}
