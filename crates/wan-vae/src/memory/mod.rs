//! How much memory clips take, from shapes alone, and the way to decode or encode them that fits a limit.

mod precision;
mod walk;

use candle_core::DType;

pub use self::precision::Precision;
use self::walk::{Extents, Walk};
use crate::{
    architecture::{Architecture, Network},
    bands,
    error::{Error, Result},
    options::{DecodeOptions, EncodeOptions, Tiling},
    plan::expected,
    tiles::Geometry,
};

/// How a clip is decoded or encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClipPlan {
    /// Whole pictures, latent frame by latent frame.
    Whole,
    /// So many bands of rows, each over the whole clip.
    Bands(usize),
    /// Blended tiles, each over the whole clip.
    Blended(Geometry),
}

/// Bytes that a clip takes at its peak, by what they are for, on the CPU or on its device. An estimate from shapes: what
/// layers hold at once, in the element type that they compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClipMemory {
    /// The weights of both networks, with the copies that are made of some.
    pub weights: u64,
    /// What the stream remembers of earlier frames.
    pub cache: u64,
    /// The tensors that the hungriest layer holds at once, with scratch memory.
    pub activations: u64,
    /// Frames between the two parts of the network.
    pub cut: u64,
    /// Frames that are held until they are whole, or until they have been encoded.
    pub frames: u64,
}

impl ClipMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        [self.weights, self.cache, self.activations, self.cut, self.frames].iter().fold(0, |a, &b| a.saturating_add(b))
    }

    /// For decoding `latents` frames of `height` x `width` latents. Zero for an architecture without a decoder.
    pub fn decode(
        architecture: &Architecture,
        precision: Precision,
        (latents, height, width): (usize, usize, usize),
        plan: ClipPlan,
    ) -> Self {
        let Some(decoder) = &architecture.decoder else { return Self::default() };
        let factor = architecture.spatial_factor() as f64;
        let picture = architecture.out_channels() as f64 * factor * factor;
        if let ClipPlan::Blended(geometry) = plan {
            let (tile, positions) = geometry.largest_and_all(height, width);
            let one = Self::decode(architecture, precision, (latents, tile.0, tile.1), ClipPlan::Whole);
            // The cropped rows and two rows of tiles, then all of it once more when rows are joined.
            let frames = precision.bytes(2.0 * picture * positions * architecture.frames(latents) as f64);
            return Self { frames, ..one };
        }
        let extents = Extents { height, width, bands: plan.bands() };
        let chunk = chunk(precision, height, width).min(latents);
        let [mut first, mut second] = [(); 2].map(|()| Walk::new(architecture, precision.group(), latents));
        first.decoder_first(decoder, chunk, extents.whole());
        second.decoder_second(decoder, architecture.residual, extents, &bands::decoder_halos(decoder));
        let step = if latents > 1 { architecture.temporal_factor() } else { 1 };
        // Frames leave with the channels that the last layer pads them with, then become f32, in at most three copies.
        let padding = decoder.out_channels.next_multiple_of(precision.group()) as f64 / decoder.out_channels as f64;
        let packed = picture * padding * extents.whole();
        let copies = if precision.activations == DType::F32 { 2.0 } else { 3.0 };
        let (held, frames) = match plan {
            ClipPlan::Bands(_) => {
                let all = architecture.frames(latents).saturating_add(step) as f64;
                (latents, precision.bytes(packed * all))
            }
            _ => {
                let wide = f32s(copies * picture * extents.whole() * step as f64);
                (chunk, precision.bytes(packed * step as f64).saturating_add(wide))
            }
        };
        let cut = decoder.stages.first().map_or(0, |stage| stage.width(decoder.base))
            + if architecture.residual { decoder.base } else { 0 };
        let (weights, kernel) = weights(architecture, precision);
        Self {
            weights,
            cache: precision.bytes(first.cache + second.cache),
            activations: with_scratch(precision, first.peak.max(second.peak), kernel),
            cut: precision.bytes(cut as f64 * held as f64 * extents.whole()),
            frames,
        }
    }

    /// For encoding `frames` frames of `height` x `width` pixels. Zero for an architecture without an encoder.
    pub fn encode(
        architecture: &Architecture,
        precision: Precision,
        (frames, height, width): (usize, usize, usize),
        plan: ClipPlan,
    ) -> Self {
        let Some(encoder) = &architecture.encoder else { return Self::default() };
        let pixels = height as f64 * width as f64;
        let clip = precision.bytes(architecture.in_channels() as f64 * pixels * frames as f64);
        let factor = architecture.encoder_spatial_factor();
        let latents = frames.div_ceil(architecture.temporal_factor());
        let step = if latents > 1 { architecture.temporal_factor() } else { 1 };
        let (height, width) = (height / factor, width / factor);
        if let ClipPlan::Blended(geometry) = plan {
            let (tile, positions) = geometry.largest_and_all(height, width);
            let tile = (frames, tile.0 * factor, tile.1 * factor);
            let one = Self::encode(architecture, precision, tile, ClipPlan::Whole);
            let cut = f32s(2.0 * architecture.z_dim as f64 * positions * latents as f64);
            return Self { cut, frames: clip.saturating_add(one.frames), ..one };
        }
        let extents = Extents { height, width, bands: plan.bands() };
        let [mut first, mut second] = [(); 2].map(|()| Walk::new(architecture, precision.group(), latents));
        first.encoder_first(encoder, architecture.residual, step, extents, &bands::encoder_halos(encoder));
        second.encoder_second(encoder, extents.whole());
        // A group as it comes, as it is packed, and what waits for it to be whole.
        let group = architecture.in_channels() as f64 * pixels * step as f64;
        let group = f32s(group).saturating_add(precision.bytes(2.0 * group));
        let (held, frames) = match plan {
            ClipPlan::Bands(_) => (latents, group.saturating_add(clip)),
            _ => (1, group),
        };
        let (weights, kernel) = weights(architecture, precision);
        Self {
            weights,
            cache: precision.bytes(first.cache + second.cache),
            activations: with_scratch(precision, first.peak.max(second.peak), kernel),
            cut: precision.bytes(last_width(encoder) as f64 * held as f64 * extents.whole()),
            frames,
        }
    }
}

impl ClipPlan {
    fn bands(self) -> usize {
        if let Self::Bands(count) = self { count } else { 1 }
    }
}

/// Bytes of so many f32.
fn f32s(elements: f64) -> u64 {
    (4.0 * elements) as u64
}

/// Most bytes that layers on a device take for themselves: patches of a convolution or scores of the attention, tile by
/// tile, or cuDNN's workspace. While cuDNN's plans are compared, one may take up to its limit (1 GiB) if there is as much.
const DEVICE_SCRATCH: u64 = 256 << 20;

/// Bytes of `peak` elements and of what layers hold beside them. On the CPU that is the largest kernel as convolutions pack
/// it, of which they hold at most 64 MiB, and transformed inputs, at most 16 MiB.
fn with_scratch(precision: Precision, peak: f64, kernel: u64) -> u64 {
    let peak_bytes = precision.bytes(peak);
    let scratch = if precision.on_cpu() {
        kernel.min(64 << 20) + f32s(4.0 * peak).min(16 << 20)
    } else {
        // Tiles are never larger than the whole: 27 taps of the inputs.
        peak_bytes.saturating_mul(27).min(DEVICE_SCRATCH)
    };
    peak_bytes.saturating_add(scratch)
}

fn last_width(network: &Network) -> usize {
    network.widths().last().copied().unwrap_or(0)
}

/// Latent frames that the first part of the decoder takes at once: small pictures keep all threads busy only together, and
/// a device has thousands of them.
pub(crate) fn chunk(precision: Precision, height: usize, width: usize) -> usize {
    let positions = if precision.on_cpu() { 4096 } else { 65_536 };
    (positions / height.saturating_mul(width).max(1)).clamp(1, 16)
}

/// The plan that `options` lead to, for decoding so many latent frames of so many rows and columns of latents.
///
/// # Errors
/// [`Error::Memory`] if nothing fits the limit; [`Error::Tiling`] for bands or tiles that are not possible.
pub fn decode_plan(
    architecture: &Architecture,
    precision: Precision,
    extents: (usize, usize, usize),
    options: &DecodeOptions,
) -> Result<ClipPlan> {
    let geometry = |tiles| Geometry::of_decoder(tiles, architecture);
    let candidates = candidates(options.tiling, (extents.1, extents.2), geometry)?;
    let needed = |plan| ClipMemory::decode(architecture, precision, extents, plan).total();
    choose("decoding", candidates, options.max_bytes, needed)
}

/// The plan that `options` lead to, for encoding so many frames of so many rows and columns of pixels.
///
/// # Errors
/// As [`decode_plan`].
pub fn encode_plan(
    architecture: &Architecture,
    precision: Precision,
    extents: (usize, usize, usize),
    options: &EncodeOptions,
) -> Result<ClipPlan> {
    let factor = architecture.encoder_spatial_factor();
    let geometry = |tiles| Geometry::of_encoder(tiles, architecture);
    let candidates = candidates(options.tiling, (extents.1 / factor, extents.2 / factor), geometry)?;
    let needed = |plan| ClipMemory::encode(architecture, precision, extents, plan).total();
    choose("encoding", candidates, options.max_bytes, needed)
}

/// What a tiling allows for pictures of so many rows and columns of latents, the best first.
fn candidates(
    tiling: Tiling,
    (rows, columns): (usize, usize),
    geometry: impl Fn(crate::BlendedTiles) -> Result<Geometry>,
) -> Result<Vec<ClipPlan>> {
    Ok(match tiling {
        Tiling::Whole => vec![ClipPlan::Whole],
        Tiling::Bands(count) if (1..=rows).contains(&count) => vec![ClipPlan::Bands(count)],
        Tiling::Bands(count) => {
            let what = format!("{count} bands of {rows} latent rows: 1 to {rows} are possible");
            return Err(Error::Tiling { what });
        }
        Tiling::Blended(tiles) => {
            let geometry = geometry(tiles)?;
            vec![if geometry.cuts(rows, columns) { ClipPlan::Blended(geometry) } else { ClipPlan::Whole }]
        }
        // More bands than this hold hardly more than their halos.
        Tiling::Auto => std::iter::once(ClipPlan::Whole).chain((2..=rows.min(256)).map(ClipPlan::Bands)).collect(),
    })
}

/// The first plan that fits the limit.
fn choose(
    what: &'static str,
    candidates: Vec<ClipPlan>,
    max_bytes: Option<u64>,
    needed: impl Fn(ClipPlan) -> u64,
) -> Result<ClipPlan> {
    let limit = max_bytes.unwrap_or(u64::MAX);
    let mut smallest = (u64::MAX, ClipPlan::Whole);
    for plan in candidates {
        let bytes = needed(plan);
        if bytes <= limit {
            tracing::debug!(what, ?plan, bytes, "plan of a clip");
            return Ok(plan);
        }
        if bytes < smallest.0 {
            smallest = (bytes, plan);
        }
    }
    let (needed, plan) = smallest;
    let how = match plan {
        ClipPlan::Whole => "whole pictures".to_owned(),
        ClipPlan::Bands(count) => format!("{count} bands"),
        ClipPlan::Blended(_) => "blended tiles".to_owned(),
    };
    Err(Error::Memory { what, needed, max_bytes: limit, how })
}

/// Bytes of all weights, with the copies of last taps and summed taps; and bytes of the largest kernel as convolutions
/// pack it: 16 values for 9 taps.
fn weights(architecture: &Architecture, precision: Precision) -> (u64, u64) {
    let size = precision.weight_size();
    // Sums of taps are kept wide where they are computed with.
    let summed = precision.activations.size_in_bytes() as u64;
    let (mut all, mut largest) = (0, 0);
    for tensor in expected(architecture) {
        let elements = tensor.shape.iter().product::<usize>() as u64;
        all += match tensor.shape[..] {
            [_, _, 3, 3, 3] => elements * size + elements * size / 3,
            [_, _, 3, 3] if tensor.name.starts_with("decoder.") => elements / 9 * 16 * summed,
            _ => elements * size,
        };
        largest = elements.max(largest);
    }
    (all, 4 * largest / 9 * 16)
}

#[cfg(test)]
mod tests;
