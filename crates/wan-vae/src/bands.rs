//! Bands of rows that the second part of the decoder can be run on, one by one, with the same bits.
//!
//! A band is decoded from its own latent rows and some more on each inner side, the halo. Rows at the cut are wrong, since
//! zeros stand where the neighbouring band is, and every convolution spreads that by one row; the halo is what is
//! lost until the end. It is cut off step by step, at every change of resolution, to what is still needed. At the true
//! borders of the picture there is no halo: the network's own zeros belong there.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::What;

use crate::{architecture::Network, error::Result};

/// Rows needed beyond a band at the input of each stage, in rows of that stage; of the first stage, whose blocks lie
/// before the cut, at its resampler.
pub(crate) fn halos(decoder: &Network) -> Vec<usize> {
    let mut halos = vec![0; decoder.stages.len()];
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
        halos[s] = need;
    }
    halos
}

/// `count` bands of nearly equal height that cover `rows` rows. Their number is at most that of the rows.
pub(crate) fn split(rows: usize, count: usize) -> Vec<Range<usize>> {
    let count = count.clamp(1, rows.max(1));
    (0..count).map(|i| rows * i / count..rows * (i + 1) / count).collect()
}

/// The rows of a band and its halo, at the resolution that a decode has reached.
#[derive(Debug, Clone)]
pub(crate) struct Window<'a> {
    /// Rows wanted, in latents.
    band: Range<usize>,
    /// Latent rows of the picture.
    rows: usize,
    halos: &'a [usize],
    /// Rows held, at the current resolution.
    held: Range<usize>,
    /// Rows per latent row at the current resolution.
    scale: usize,
}

impl<'a> Window<'a> {
    /// For latent rows `band` of `rows`, before the cut.
    pub(crate) fn new(band: Range<usize>, rows: usize, halos: &'a [usize]) -> Self {
        let mut window = Self { held: 0..rows, band, rows, halos, scale: 1 };
        window.held = window.wanted(0);
        window
    }

    /// Latent rows at the cut, halo included.
    #[cfg(test)]
    fn held(&self) -> Range<usize> {
        self.held.clone()
    }

    /// Rows wanted at the input of a stage, of those of the picture.
    fn wanted(&self, stage: usize) -> Range<usize> {
        let halo = self.halos.get(stage).copied().unwrap_or(0);
        let end = (self.band.end * self.scale + halo).min(self.rows * self.scale);
        (self.band.start * self.scale).saturating_sub(halo)..end
    }

    /// The rows held, of a whole tensor `[1, C, n, h, w]` at the resolution of the latents.
    pub(crate) fn cut(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.narrow(3, self.held.start, self.held.len())
    }

    /// x was doubled: keeps what `stage` wants of it.
    pub(crate) fn double(&mut self, x: &Tensor, stage: usize) -> Result<Tensor> {
        self.scale *= 2;
        self.held = 2 * self.held.start..2 * self.held.end;
        let wanted = self.wanted(stage);
        self.keep(x, wanted)
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
            assert_eq!(halos(architecture.decoder.as_ref().unwrap()), [7, 12, 10, 7]);
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
        let halos = [7, 12];
        assert_eq!(Window::new(0..5, 20, &halos).held(), 0..12);
        assert_eq!(Window::new(5..10, 20, &halos).held(), 0..17);
        assert_eq!(Window::new(15..20, 20, &halos).held(), 8..20);
    }
}
