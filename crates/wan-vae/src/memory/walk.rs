//! What the layers of both networks hold at once, counted on the way through them.

use crate::{
    architecture::{Architecture, Block, Network, Resample},
    bands::Halo,
};

/// Elements held on the way through a network; floats, so that no extents are too large to be counted.
pub(super) struct Walk {
    /// By the layers that remember earlier frames.
    pub(super) cache: f64,
    /// By the hungriest layer.
    pub(super) peak: f64,
    /// Frames that a layer remembers.
    past: usize,
    /// Channels that come together at the ends of the network.
    group: usize,
    /// Whether there are later frames than the first.
    moving: bool,
}

/// Positions of a frame, in latents, and the bands that its rows are cut into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extents {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) bands: usize,
}

impl Extents {
    /// Of a whole frame.
    pub(super) fn whole(self) -> f64 {
        self.height as f64 * self.width as f64
    }

    /// Of the largest band with its halo, at a resolution of `scale` rows and columns per latent.
    fn band(self, scale: usize, halo: Halo) -> f64 {
        let (scale, whole) = (scale as f64, self.height as f64 * scale as f64);
        if self.bands <= 1 {
            return whole * self.width as f64 * scale;
        }
        let rows = self.height.div_ceil(self.bands) as f64 * scale + halo.before as f64 + halo.behind as f64;
        rows.min(whole) * self.width as f64 * scale
    }
}

impl Walk {
    /// For a clip of so many latent frames: of a picture, layers remember the one frame that they see, and those of
    /// networks for pictures remember nothing.
    pub(super) fn new(architecture: &Architecture, group: usize, latents: usize) -> Self {
        let moving = latents > 1 && architecture.temporal_kernel > 1;
        let past = if moving { 2 } else { usize::from(architecture.temporal_kernel > 1) };
        Self { cache: 0.0, peak: 0.0, past, group, moving }
    }

    /// Frames of the past that a layer sees before its own.
    fn joined(&self) -> usize {
        if self.moving { 2 } else { 0 }
    }

    fn peak(&mut self, elements: f64) {
        self.peak = self.peak.max(elements);
    }

    /// A convolution over time with `channels` channels of input.
    fn remembers(&mut self, channels: usize, positions: f64) {
        self.cache += (channels * self.past) as f64 * positions;
    }

    /// A convolution over space and time on `frames` frames, its input joined to the remembered ones.
    fn conv(&mut self, (input, output): (usize, usize), frames: usize, positions: f64) {
        let [input, output] = [input, output].map(|channels| channels.next_multiple_of(self.group));
        self.remembers(input, positions);
        self.peak((input * (2 * frames + self.joined()) + output * frames) as f64 * positions);
    }

    /// A residual block on `frames` frames, while `held` elements wait outside.
    fn block(&mut self, block: Block, frames: usize, positions: f64, held: f64) {
        let (a, b) = (block.input, block.output);
        self.remembers(a, positions);
        self.remembers(b, positions);
        let first = a * frames + a * (frames + self.joined()) + b * frames;
        let second = a * frames + b * (frames + self.joined()) + b * frames;
        let sum = 3 * b * frames + if block.shortcut { a * frames } else { 0 };
        self.peak(held + positions * first.max(second).max(sum) as f64);
    }

    fn middle(&mut self, width: usize, frames: usize, positions: f64) {
        let block = Block::new(width, width);
        self.block(block, frames, positions, 0.0);
        // x, the projection to queries, keys and values, and the same with positions as rows.
        self.peak((7 * width * frames) as f64 * positions);
        self.block(block, frames, positions, 0.0);
    }

    /// The decoder up to its first resampler.
    pub(super) fn decoder_first(&mut self, decoder: &Network, frames: usize, positions: f64) {
        let base = decoder.base;
        self.remembers(decoder.in_channels, positions);
        self.middle(base, frames, positions);
        for &block in decoder.stages.iter().take(1).flat_map(|stage| &stage.blocks) {
            self.block(block, frames, positions, (base * frames) as f64 * positions);
        }
    }

    /// The rest of the decoder, for one latent frame.
    pub(super) fn decoder_second(&mut self, decoder: &Network, residual: bool, extents: Extents, halos: &[Halo]) {
        let mut frames = 1;
        let widths = decoder.widths();
        let positions = |s: usize| extents.band(1 << s, halos.get(s).copied().unwrap_or_default());
        for (s, stage) in decoder.stages.iter().enumerate() {
            let here = positions(s);
            let nested = residual && stage.resample.is_some();
            let input = if nested { (widths[s] * frames) as f64 * here } else { 0.0 };
            for &block in stage.blocks.iter().filter(|_| s > 0) {
                self.block(block, frames, here, input);
            }
            let Some(Resample { input: a, output: b, temporal }) = stage.resample else { continue };
            if temporal && self.moving {
                self.remembers(a, here);
                self.peak(input + (a * (5 * frames + 2)) as f64 * here);
                frames *= 2;
            }
            // The four parities and the picture that they become; main, shortcut and their sum.
            let large = (b * frames * 4) as f64 * here;
            self.peak(input + (a * frames) as f64 * here + 2.0 * large);
            if nested {
                self.peak(input + 3.0 * large);
            }
        }
        let last = (widths[widths.len() - 1], decoder.out_channels);
        self.conv(last, frames, positions(decoder.stages.len().saturating_sub(1)));
    }

    /// The encoder up to its middle, for `frames` frames that become one latent frame.
    pub(super) fn encoder_first(
        &mut self,
        encoder: &Network,
        residual: bool,
        mut frames: usize,
        extents: Extents,
        halos: &[Halo],
    ) {
        let mut scale = encoder.spatial_factor();
        let positions = |place: usize, scale| extents.band(scale, halos.get(place).copied().unwrap_or_default());
        self.conv((encoder.in_channels, encoder.base), frames, positions(0, scale));
        let widths = encoder.widths();
        for (s, stage) in encoder.stages.iter().enumerate() {
            let here = positions(s + 1, scale);
            let input = if residual { (widths[s] * frames) as f64 * here } else { 0.0 };
            for &block in &stage.blocks {
                self.block(block, frames, here, input);
            }
            let Some(Resample { input: a, output: b, temporal }) = stage.resample else { continue };
            scale /= 2;
            let small = b as f64 * here / 4.0;
            self.peak(input + (a * frames) as f64 * here + frames as f64 * small);
            if temporal && self.moving {
                // The frame before joins them.
                self.cache += small;
                self.peak(input + (2 * frames + 1 + frames / 2) as f64 * small);
                frames /= 2;
            }
            // The shortcut copies its input cell by cell; then main, shortcut and their sum.
            self.peak(2.0 * input + 3.0 * frames as f64 * small);
        }
    }

    /// The middle of the encoder and what follows it, for one latent frame.
    pub(super) fn encoder_second(&mut self, encoder: &Network, positions: f64) {
        let widths = encoder.widths();
        let last = widths[widths.len() - 1];
        self.middle(last, 1, positions);
        self.conv((last, encoder.out_channels), 1, positions);
    }
}
