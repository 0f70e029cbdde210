//! Bands of rows that the local part of either network can be run on, one by one, with the same result.
//!
//! A band is computed from its own rows and some more on each inner side, the halo. Rows at the cut are wrong, since
//! zeros stand where the neighbouring band is, and every convolution spreads that by one row; the halo is what is
//! lost until the end. It is cut off step by step, at every change of resolution, to what is still needed. At the true
//! borders of the picture there is no halo: the network's own zeros belong there.
//!
//! The bits are the same too, unless a convolution rounds in another way: it may take another algorithm for a band of
//! very few positions.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::What;

use crate::{architecture::Network, error::Result};

/// Rows that are needed beyond a band.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Halo {
    /// Above it.
    pub(crate) before: usize,
    /// Below it.
    pub(crate) behind: usize,
}

impl Halo {
    fn even(rows: usize) -> Self {
        Self { before: rows, behind: rows }
    }

    /// For `count` more convolutions of 3 rows.
    fn convolved(self, count: usize) -> Self {
        Self { before: self.before + count, behind: self.behind + count }
    }
}

/// What the decoder needs at the input of each stage, in rows of that stage; of the first stage, whose blocks lie before
/// the cut, at its resampler.
pub(crate) fn decoder_halos(decoder: &Network) -> Vec<Halo> {
    let mut halos = vec![Halo::default(); decoder.stages.len()];
    // The last convolution.
    let mut need = 1;
    for (s, stage) in decoder.stages.iter().enumerate().rev() {
        if stage.resample.is_some() {
            // A 3 x 3 convolution of the doubled rows.
            need = (need + 1usize).div_ceil(2);
        }
        if s > 0 {
            // Two convolutions per block.
            need += 2 * stage.blocks.len();
        }
        halos[s] = Halo::even(need);
    }
    halos
}

/// What the encoder needs at its input, then at the input of each stage, in rows of each; its bands end before the
/// middle.
pub(crate) fn encoder_halos(encoder: &Network) -> Vec<Halo> {
    let mut halos = vec![Halo::default(); encoder.stages.len() + 1];
    let mut need = Halo::default();
    for (s, stage) in encoder.stages.iter().enumerate().rev() {
        if stage.resample.is_some() {
            // Row y is made of rows 2 y to 2 y + 2.
            need = Halo { before: 2 * need.before, behind: 2 * need.behind + 1 };
        }
        need = need.convolved(2 * stage.blocks.len());
        halos[s + 1] = need;
    }
    halos[0] = need.convolved(1);
    halos
}

/// `count` bands of nearly equal height that cover `rows` rows. Their number is at most that of the rows.
pub(crate) fn split(rows: usize, count: usize) -> Vec<Range<usize>> {
    let count = count.clamp(1, rows.max(1));
    (0..count).map(|i| rows * i / count..rows * (i + 1) / count).collect()
}

/// The rows of a band and its halo, at the resolution that a network has reached.
#[derive(Debug, Clone)]
pub(crate) struct Window<'a> {
    /// Rows wanted, in latents.
    band: Range<usize>,
    /// Latent rows of the picture.
    rows: usize,
    halos: &'a [Halo],
    /// Rows held, at the current resolution.
    held: Range<usize>,
    /// Rows per latent row at the current resolution.
    scale: usize,
}

impl<'a> Window<'a> {
    /// For latent rows `band` of `rows`, where a network begins that has `scale` rows per latent row there.
    pub(crate) fn new(band: Range<usize>, rows: usize, scale: usize, halos: &'a [Halo]) -> Self {
        let mut window = Self { held: 0..rows * scale, band, rows, halos, scale };
        window.held = window.wanted(0);
        window
    }

    /// Rows held, halo included.
    #[cfg(test)]
    pub(crate) fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Rows wanted at a place that has a halo, of those of the picture. They begin with an even one, as convolutions may
    /// compute pairs of rows in one go, and round otherwise if other rows are paired.
    fn wanted(&self, place: usize) -> Range<usize> {
        let Halo { before, behind } = self.halos.get(place).copied().unwrap_or_default();
        let end = (self.band.end * self.scale + behind).min(self.rows * self.scale);
        (self.band.start * self.scale).saturating_sub(before) / 2 * 2..end
    }

    /// The rows held, of a whole tensor `[1, C, n, h, w]` at the current resolution.
    pub(crate) fn cut(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.narrow(3, self.held.start, self.held.len())
    }

    /// Keeps what is wanted of x at a place of the same resolution.
    pub(crate) fn pass(&mut self, x: &Tensor, place: usize) -> Result<Tensor> {
        let wanted = self.wanted(place);
        self.keep(x, wanted)
    }

    /// x was doubled: keeps what is wanted of it.
    pub(crate) fn double(&mut self, x: &Tensor, place: usize) -> Result<Tensor> {
        self.scale *= 2;
        self.held = 2 * self.held.start..2 * self.held.end;
        self.pass(x, place)
    }

    /// x was halved: keeps what is wanted of it. The first row held before was even ([`encoder_halos`]); a single last
    /// one has become nothing.
    pub(crate) fn halve(&mut self, x: &Tensor, place: usize) -> Result<Tensor> {
        self.scale /= 2;
        self.held = self.held.start / 2..self.held.end / 2;
        self.pass(x, place)
    }

    /// Keeps the rows of the band.
    pub(crate) fn finish(&mut self, x: &Tensor) -> Result<Tensor> {
        let wanted = self.band.start * self.scale..self.band.end * self.scale;
        self.keep(x, wanted)
    }

    fn keep(&mut self, x: &Tensor, wanted: Range<usize>) -> Result<Tensor> {
        // A halo that was made too small cannot be kept in full.
        let wanted = wanted.start.max(self.held.start)..wanted.end.min(self.held.end);
        if wanted == self.held {
            return Ok(x.clone());
        }
        let kept = x.narrow(3, wanted.start - self.held.start, wanted.len()).and_then(|x| x.contiguous());
        self.held = wanted;
        Ok(kept.what("rows of a band")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{wan21, wan22};

    #[test]
    fn the_published_decoders_need_seven_latents() {
        for architecture in [wan21(), wan22()] {
            let halos = decoder_halos(architecture.decoder.as_ref().unwrap());
            assert_eq!(halos, [7, 12, 10, 7].map(Halo::even));
        }
    }

    /// 61 and 68 rows of what the first convolution takes, found by enumeration of the layers.
    #[test]
    fn the_published_encoders_look_further_down_than_up() {
        for architecture in [wan21(), wan22()] {
            let halos = encoder_halos(architecture.encoder.as_ref().unwrap());
            let found: Vec<_> = halos.iter().map(|h| (h.before, h.behind)).collect();
            assert_eq!(found, [(61, 68), (60, 67), (28, 31), (12, 13), (4, 4)]);
        }
    }

    #[test]
    fn bands_cover_all_rows_once() {
        for rows in [1, 2, 7, 60] {
            for count in [1, 2, 3, 7, 100] {
                let bands = split(rows, count);
                assert!(bands.len() <= count && bands.iter().all(|band| !band.is_empty()));
                let all: Vec<usize> = bands.into_iter().flatten().collect();
                assert_eq!(all, (0..rows).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn there_is_no_halo_beyond_the_picture() {
        let halos = [7, 12].map(Halo::even);
        assert_eq!(Window::new(0..5, 20, 1, &halos).held(), 0..12);
        assert_eq!(Window::new(5..10, 20, 1, &halos).held(), 0..17);
        assert_eq!(Window::new(15..20, 20, 1, &halos).held(), 8..20);
        assert_eq!(Window::new(16..20, 20, 1, &halos).held(), 8..20);
        let halos = [Halo { before: 61, behind: 68 }];
        assert_eq!(Window::new(10..20, 30, 8, &halos).held(), 18..228);
        assert_eq!(Window::new(0..10, 30, 8, &halos).held(), 0..148);
        assert_eq!(Window::new(20..30, 30, 8, &halos).held(), 98..240);
    }
}
