//! How much memory a decode takes, from shapes alone.

use crate::{
    architecture::{Architecture, Block, Network},
    bands,
    error::{Error, Result},
    options::{DecodeOptions, Tiling},
    plan::expected,
    tiles::Geometry,
};

/// How a clip is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodePlan {
    /// Whole pictures, latent frame by latent frame.
    Whole,
    /// So many bands of rows, each over the whole clip.
    Bands(usize),
    /// Blended tiles, each over the whole clip.
    Blended(Geometry),
}

/// Bytes that a decode takes at its peak, by what they are for. An estimate from shapes: what layers hold at once, f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DecodeMemory {
    /// The decoder's weights, with the copies that are made of some.
    pub weights: u64,
    /// What the stream remembers of earlier frames.
    pub cache: u64,
    /// The tensors that the hungriest layer holds at once.
    pub activations: u64,
    /// Frames between the two parts of the decoder.
    pub cut: u64,
    /// Frames that are held until they are whole.
    pub output: u64,
}

impl DecodeMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        [self.weights, self.cache, self.activations, self.cut, self.output].iter().fold(0, |a, &b| a.saturating_add(b))
    }

    /// Of a clip of `latents` frames of `height` x `width` latents, with weights of `weight_size` bytes each. Zero for an
    /// architecture without a decoder.
    pub fn new(
        architecture: &Architecture,
        weight_size: u64,
        (latents, height, width): (usize, usize, usize),
        plan: DecodePlan,
    ) -> Self {
        let Some(decoder) = &architecture.decoder else { return Self::default() };
        if let DecodePlan::Blended(geometry) = plan {
            return Self::blended(architecture, weight_size, (latents, height, width), geometry);
        }
        let chunk = chunk(height, width).min(latents);
        let bands = match plan {
            DecodePlan::Bands(bands) => bands.clamp(1, height.max(1)),
            _ => 1,
        };
        let mut first = Walk::default();
        let mut second = Walk::default();
        first.first_part(decoder, chunk as u64, (height * width) as u64);
        let rows = |stage: usize| {
            // The tallest band lies inside, between two halos.
            let band = height.div_ceil(bands) << stage;
            let halo = bands::halos(decoder).get(stage).copied().unwrap_or(0);
            let sides = if bands == 1 { 0 } else { 2 };
            (band + sides * halo).min(height << stage)
        };
        second.second_part(decoder, architecture.residual, &|stage| (rows(stage) * (width << stage)) as u64);
        let picture = architecture.out_channels() * (height * width) * architecture.spatial_factor().pow(2);
        let (held, output) = match plan {
            DecodePlan::Bands(_) => (latents, architecture.frames(latents) + architecture.temporal_factor()),
            _ => (chunk, 3 * architecture.temporal_factor()),
        };
        let width_of_cut = decoder.stages.first().map_or(0, |stage| stage.width(decoder.base));
        let cut = width_of_cut + if architecture.residual { decoder.base } else { 0 };
        Self {
            weights: weights(architecture, weight_size),
            cache: FLOAT * (first.cache + second.cache),
            activations: FLOAT * first.peak.max(second.peak) + packed(architecture),
            cut: FLOAT * (cut * held * height * width) as u64,
            output: FLOAT * (picture * output) as u64,
        }
    }
}

impl DecodeMemory {
    /// One tile at a time, and the frames of all tiles.
    fn blended(
        architecture: &Architecture,
        weight_size: u64,
        (latents, height, width): (usize, usize, usize),
        geometry: Geometry,
    ) -> Self {
        let along = |extent| geometry.along(extent).into_iter().map(|(_, len)| len);
        let tile = (latents, along(height).max().unwrap_or(0), along(width).max().unwrap_or(0));
        let one = Self::new(architecture, weight_size, tile, DecodePlan::Whole);
        let positions = along(height).sum::<usize>() * along(width).sum::<usize>();
        let picture = architecture.out_channels() * architecture.spatial_factor().pow(2);
        // The cropped rows and two rows of tiles, then all of it once more when rows are joined.
        let frames = architecture.frames(latents);
        Self { output: FLOAT * (2 * picture * positions * frames) as u64, ..one }
    }
}

/// Bytes of an element of activations.
const FLOAT: u64 = 4;

/// Latent frames that the first part of the decoder takes at once: small pictures keep all threads busy only together.
pub(crate) fn chunk(height: usize, width: usize) -> usize {
    const POSITIONS: usize = 4096;
    (POSITIONS / (height * width).max(1)).clamp(1, 16)
}

/// The plan for a clip that `options` lead to.
pub(crate) fn plan(
    architecture: &Architecture,
    weight_size: u64,
    extents: (usize, usize, usize),
    options: &DecodeOptions,
) -> Result<DecodePlan> {
    let limit = options.max_bytes.unwrap_or(u64::MAX);
    let needed = |plan| DecodeMemory::new(architecture, weight_size, extents, plan).total();
    let rows = extents.1;
    let candidates: Vec<DecodePlan> = match options.tiling {
        Tiling::Whole => vec![DecodePlan::Whole],
        Tiling::Bands(count) if (1..=rows).contains(&count) => vec![DecodePlan::Bands(count)],
        Tiling::Bands(count) => {
            return Err(Error::Tiling {
                what: format!("{count} bands of {rows} latent rows: 1 to {rows} are possible"),
            });
        }
        Tiling::Blended(tiles) => {
            let geometry = Geometry::new(tiles, architecture.spatial_factor(), architecture.unpack.side())?;
            let cuts = geometry.cuts(extents.1, extents.2);
            vec![if cuts { DecodePlan::Blended(geometry) } else { DecodePlan::Whole }]
        }
        Tiling::Auto => std::iter::once(DecodePlan::Whole).chain((2..=rows).map(DecodePlan::Bands)).collect(),
    };
    let mut smallest: Option<(u64, DecodePlan)> = None;
    for plan in candidates {
        let bytes = needed(plan);
        if bytes <= limit {
            tracing::debug!(?plan, bytes, "decode plan");
            return Ok(plan);
        }
        if smallest.is_none_or(|(least, _)| bytes < least) {
            smallest = Some((bytes, plan));
        }
    }
    let (needed, plan) = smallest.unwrap_or((0, DecodePlan::Whole));
    let how = match plan {
        DecodePlan::Whole => "whole pictures".to_owned(),
        DecodePlan::Bands(count) => format!("{count} bands"),
        DecodePlan::Blended(_) => "blended tiles".to_owned(),
    };
    Err(Error::Memory { needed, max_bytes: limit, how })
}

/// Weights of the decoder and of the encoder that is loaded with it, with the copies of last taps and summed taps.
fn weights(architecture: &Architecture, size: u64) -> u64 {
    let tensor = |t: &weights::Expected| {
        let elements = t.shape.iter().product::<usize>() as u64;
        match t.shape[..] {
            [_, _, 3, 3, 3] => elements * size + elements * size / 3,
            [_, _, 3, 3] if t.name.starts_with("decoder.") => elements / 9 * 16 * FLOAT,
            _ => elements * size,
        }
    };
    expected(architecture).iter().map(tensor).sum()
}

/// Bytes of the largest kernel as convolutions pack it, of which they hold at most 64 MiB.
fn packed(architecture: &Architecture) -> u64 {
    let elements = expected(architecture).iter().map(|t| t.shape.iter().product::<usize>() as u64).max();
    (FLOAT * elements.unwrap_or(0)).min(64 << 20)
}

/// Elements held on the way through the decoder.
#[derive(Default)]
struct Walk {
    cache: u64,
    peak: u64,
}

impl Walk {
    fn peak(&mut self, elements: u64) {
        self.peak = self.peak.max(elements);
    }

    /// A convolution over time that remembers two frames of `channels`.
    fn remembers(&mut self, channels: usize, positions: u64) {
        self.cache += 2 * channels as u64 * positions;
    }

    /// A residual block on `frames` frames, while `held` elements wait outside.
    fn block(&mut self, block: Block, frames: u64, positions: u64, held: u64) {
        self.remembers(block.input, positions);
        self.remembers(block.output, positions);
        let (a, b) = (block.input as u64, block.output as u64);
        let first = a * frames + a * (frames + 2) + b * frames;
        let second = a * frames + b * (frames + 2) + b * frames;
        let sum = 3 * b * frames + if block.shortcut { a * frames } else { 0 };
        self.peak(held + positions * first.max(second).max(sum));
    }

    fn first_part(&mut self, decoder: &Network, frames: u64, positions: u64) {
        let base = decoder.base;
        self.remembers(decoder.in_channels, positions);
        let middle = Block::new(base, base);
        self.block(middle, frames, positions, 0);
        // x, the projection to queries, keys and values, and the same with positions as rows.
        self.peak(7 * base as u64 * frames * positions);
        self.block(middle, frames, positions, 0);
        for &block in decoder.stages.iter().take(1).flat_map(|stage| &stage.blocks) {
            self.block(block, frames, positions, base as u64 * frames * positions);
        }
    }

    /// `positions` says how many rows times columns the input of a stage has.
    fn second_part(&mut self, decoder: &Network, residual: bool, positions: &dyn Fn(usize) -> u64) {
        let mut frames = 1;
        let widths = decoder.widths();
        for (s, stage) in decoder.stages.iter().enumerate() {
            let here = positions(s);
            let nested = residual && stage.resample.is_some();
            let input = if nested { widths[s] as u64 * frames * here } else { 0 };
            for &block in stage.blocks.iter().filter(|_| s > 0) {
                self.block(block, frames, here, input);
            }
            let Some(resample) = stage.resample else { continue };
            let (a, b) = (resample.input as u64, resample.output as u64);
            if resample.temporal {
                self.remembers(resample.input, here);
                self.peak(input + a * here * ((frames + 2) + 4 * frames));
                frames *= 2;
            }
            // The four parities and the picture that they become; main, shortcut and their sum.
            let large = b * frames * 4 * here;
            self.peak(input + a * frames * here + 2 * large);
            if nested {
                self.peak(input + 3 * large);
            }
        }
        let (last, here) = (widths[widths.len() - 1], positions(decoder.stages.len() - 1));
        self.remembers(last, here);
        self.peak(here * (last as u64 * (2 * frames + 2) + decoder.out_channels as u64 * frames));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{wan21, wan22};

    fn gigabytes(bytes: u64) -> f64 {
        bytes as f64 / 1e9
    }

    #[test]
    fn caches_are_those_of_the_published_shapes() {
        // Enumerated from the layers, in bf16: 1.89, 4.36 and 3.22 GB.
        for (architecture, h, w, want) in [(wan21(), 60, 104, 1.89), (wan21(), 90, 160, 4.36), (wan22(), 44, 80, 3.22)]
        {
            let memory = DecodeMemory::new(&architecture, 4, (21, h, w), DecodePlan::Whole);
            let got = gigabytes(memory.cache) / 2.0;
            assert!((got / want - 1.0).abs() < 5e-3, "{got} instead of {want}");
        }
    }

    #[test]
    fn a_decode_of_832x480_stays_below_eight_gigabytes() {
        let memory = DecodeMemory::new(&wan21(), 4, (3, 60, 104), DecodePlan::Whole);
        let total = gigabytes(memory.total());
        assert!((5.9..8.0).contains(&total), "{total}: {memory:?}");
    }

    #[test]
    fn whole_pictures_take_as_much_for_any_length_and_bands_less() {
        let of = |latents, plan| DecodeMemory::new(&wan21(), 4, (latents, 90, 160), plan).total();
        assert_eq!(of(9, DecodePlan::Whole), of(81_000, DecodePlan::Whole));
        let bands: Vec<u64> = [1, 2, 4, 8].map(|n| of(21, DecodePlan::Bands(n))).to_vec();
        assert!(bands.is_sorted_by(|a, b| a > b), "{bands:?}");
        assert!(of(21, DecodePlan::Bands(2)) < of(21, DecodePlan::Whole));
    }

    #[test]
    fn the_fewest_bands_that_fit_are_taken_or_the_figure_is_given() {
        let extents = (21, 90, 160);
        let with = |max_bytes, tiling| {
            let options = DecodeOptions { max_bytes, tiling };
            plan(&wan21(), 4, extents, &options)
        };
        let needs = |plan| DecodeMemory::new(&wan21(), 4, extents, plan).total();
        assert_eq!(with(None, Tiling::Auto).unwrap(), DecodePlan::Whole);
        let whole = needs(DecodePlan::Whole);
        assert_eq!(with(Some(whole), Tiling::Auto).unwrap(), DecodePlan::Whole);
        let DecodePlan::Bands(count) = with(Some(whole - 1), Tiling::Auto).unwrap() else { panic!("whole") };
        assert!(needs(DecodePlan::Bands(count)) < whole);
        assert!(count == 2 || needs(DecodePlan::Bands(count - 1)) >= whole);
        let Error::Memory { needed, .. } = with(Some(1 << 20), Tiling::Auto).unwrap_err() else {
            panic!("other error")
        };
        assert!(with(Some(needed), Tiling::Auto).is_ok() && with(Some(needed - 1), Tiling::Auto).is_err());
        assert!(matches!(with(Some(whole - 1), Tiling::Whole), Err(Error::Memory { needed, .. }) if needed == whole));
        assert!(matches!(with(None, Tiling::Bands(0)), Err(Error::Tiling { .. })));
        assert!(matches!(with(None, Tiling::Bands(91)), Err(Error::Tiling { .. })));
    }
}
