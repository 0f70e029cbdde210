//! Overlapping tiles of a clip and their seams, as diffusers has them.
//!
//! Tiles are cut on the grid that enters the last deterministic stage; one cell is a few pixels. A tile begins at every
//! multiple of the stride, and one that would be smaller than a window is part of the one before it.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::What;

use super::{config::DiffusionDecoderConfig, options::BlendedTiles};
use crate::error::Result;

/// The tiles of a clip.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Cells of the tiles along T, H and W.
    pub(super) along: [Vec<Range<usize>>; 3],
    /// Pixels per cell (T, H, W).
    scale: [usize; 3],
}

/// Cells of one tile along T, H and W.
pub(super) type Cells = [Range<usize>; 3];

impl Tiles {
    /// Tiles for latents of so many (T, H, W), or none if they are not larger than a tile.
    pub(super) fn new(
        config: &DiffusionDecoderConfig,
        tiles: BlendedTiles,
        latents: [usize; 3],
    ) -> Result<Option<Self>> {
        let scale = config.cell();
        tiles.check(scale)?;
        let BlendedTiles { tile, stride } = tiles;
        let stage = config.deterministic() - 1;
        let factor = config.upsample_strides[stage];
        let compression = config.compression();
        if (0..3).all(|axis| latents[axis] <= tile[axis] / compression[axis]) {
            return Ok(None);
        }
        let cells = config.grid(stage, latents);
        let along = std::array::from_fn(|axis| {
            let least = config.stage_kernels[stage][axis].max(config.stage5_kernel[axis].div_ceil(factor[axis]));
            intervals(cells[axis], tile[axis] / scale[axis], stride[axis] / scale[axis], least)
        });
        Ok(Some(Self { along, scale }))
    }

    pub(super) fn len(&self) -> usize {
        self.along.iter().map(Vec::len).product()
    }

    /// Tokens of the denoising stage in the largest tile.
    pub(super) fn largest(&self, config: &DiffusionDecoderConfig) -> [usize; 3] {
        let factor = config.upsample_strides[config.deterministic() - 1];
        std::array::from_fn(|axis| {
            factor[axis] * self.along[axis].iter().map(ExactSizeIterator::len).max().unwrap_or(0)
        })
    }

    /// Pixels of some cells along an axis. Cells of two frames, but for the first of a clip, which is one.
    pub(super) fn pixels(&self, axis: usize, cells: &Range<usize>) -> Range<usize> {
        let at = |cell: usize| match (axis, self.scale[axis]) {
            (0, 2) => (2 * cell).saturating_sub(1),
            (_, scale) => scale * cell,
        };
        at(cells.start)..at(cells.end)
    }

    /// The clip `[B, C, F, H, W]`, from tiles of it, which are asked for T slowest.
    pub(super) fn blend(&self, tile: &mut dyn FnMut(&Cells) -> Result<Tensor>) -> Result<Tensor> {
        let [ts, hs, ws] = &self.along;
        let mut groups: Vec<Tensor> = Vec::new();
        let mut before: Option<Tensor> = None;
        for (i, t) in ts.iter().enumerate() {
            let mut rows = Vec::new();
            let mut above: Vec<Tensor> = Vec::new();
            for (j, h) in hs.iter().enumerate() {
                let mut row: Vec<Tensor> = Vec::new();
                for (k, w) in ws.iter().enumerate() {
                    let mut piece = tile(&[t.clone(), h.clone(), w.clone()])?;
                    if let Some(above) = above.get(k) {
                        piece = fade(above, &piece, 3, self.overlap(1, j))?;
                    }
                    if let Some(left) = row.last() {
                        piece = fade(left, &piece, 4, self.overlap(2, k))?;
                    }
                    row.push(piece);
                }
                let cut = |(k, piece): (usize, &Tensor)| self.cut(piece, 1, j).and_then(|piece| self.cut(&piece, 2, k));
                let cut = row.iter().enumerate().map(cut).collect::<Result<Vec<_>>>()?;
                rows.push(Tensor::cat(&cut, 4).what("a row of tiles")?);
                above = row;
            }
            let mut group = Tensor::cat(&rows, 3).what("tiles of some frames")?;
            if let Some(before) = &before {
                group = fade(before, &group, 2, self.overlap(0, i))?;
            }
            groups.push(self.cut(&group, 0, i)?.contiguous().what("frames of a tile")?);
            before = Some(group);
        }
        Ok(Tensor::cat(&groups, 2).what("frames of all tiles")?)
    }

    /// Pixels that tile `index` shares with the one before it.
    fn overlap(&self, axis: usize, index: usize) -> usize {
        let tiles = &self.along[axis];
        match index.checked_sub(1) {
            Some(before) => {
                self.pixels(axis, &tiles[before]).end.saturating_sub(self.pixels(axis, &tiles[index]).start)
            }
            None => 0,
        }
    }

    /// The pixels of tile `index` before the next tile begins.
    fn cut(&self, piece: &Tensor, axis: usize, index: usize) -> Result<Tensor> {
        let Some(next) = self.along[axis].get(index + 1) else {
            return Ok(piece.clone());
        };
        let len = self.pixels(axis, next).start - self.pixels(axis, &self.along[axis][index]).start;
        Ok(piece.narrow(axis + 2, 0, len).what("pixels of a tile")?)
    }
}

/// Tiles of `size` cells every `stride` along `length`. The last one takes in what would be shorter than `least`.
fn intervals(length: usize, size: usize, stride: usize, least: usize) -> Vec<Range<usize>> {
    if length <= size {
        return std::iter::once(0..length).collect();
    }
    let mut starts: Vec<usize> = (0..length).step_by(stride).collect();
    while starts.len() > 1 && starts.last().is_some_and(|start| length - start < least) {
        starts.pop();
    }
    let last = starts.len() - 1;
    let end = |i: usize, start: usize| if i == last { length } else { (start + size).min(length) };
    starts.into_iter().enumerate().map(|(i, start)| start..end(i, start)).collect()
}

/// `tile` whose first n pixels along `axis` fade in from the last n of `before`:
/// `before (1 - i / n) + tile i / n`, in f32.
fn fade(before: &Tensor, tile: &Tensor, axis: usize, n: usize) -> Result<Tensor> {
    if n == 0 {
        return Ok(tile.clone());
    }
    let faded = || {
        let mut shape = [1; 5];
        shape[axis] = n;
        let weights = |weight: &dyn Fn(f64) -> f64| {
            let values: Vec<f32> = (0..n).map(|i| weight(i as f64 / n as f64) as f32).collect();
            Tensor::from_vec(values, &shape, tile.device())
        };
        let wide = |t: &Tensor, start: usize| t.narrow(axis, start, n)?.to_dtype(candle_core::DType::F32);
        let old = wide(before, before.dim(axis)? - n)?.broadcast_mul(&weights(&|x| 1.0 - x)?)?;
        let new = wide(tile, 0)?.broadcast_mul(&weights(&|x| x)?)?;
        let head = (old + new)?.to_dtype(tile.dtype())?;
        match tile.dim(axis)? - n {
            0 => Ok(head),
            rest => Tensor::cat(&[&head, &tile.narrow(axis, n, rest)?], axis),
        }
    };
    Ok(faded().what("seam of two tiles")?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::{
        diffusion_decoder::testing::{elements, noise, published},
        error::Error,
    };

    #[test]
    fn tiles_begin_at_every_stride_and_short_ones_join_the_last() {
        assert_eq!(intervals(10, 6, 4, 5), [0..6, 4..10]);
        assert_eq!(intervals(9, 5, 3, 3), [0..5, 3..8, 6..9]);
        // Also where the one before has reached the end.
        assert_eq!(intervals(8, 5, 2, 2), [0..5, 2..7, 4..8, 6..8]);
        for (length, least) in [(6, 5), (7, 9)] {
            assert!(intervals(length, 6, 4, least).into_iter().eq(std::iter::once(0..length)));
        }
    }

    #[test]
    fn the_published_tiles_of_a_clip() {
        let tiles = Tiles::new(&published(), BlendedTiles::default(), [16, 34, 60]).unwrap().unwrap();
        // 121 frames of 1088 x 1920.
        assert_eq!(tiles.along[0], [0..40, 28..61]);
        assert_eq!((tiles.pixels(0, &(0..40)), tiles.pixels(0, &(28..61))), (0..79, 55..121));
        assert_eq!(tiles.along[1], [0..96, 88..136]);
        assert_eq!(tiles.pixels(1, &(88..136)), 704..1088);
        assert_eq!((tiles.overlap(0, 1), tiles.overlap(1, 1), tiles.len()), (24, 64, 2 * 2 * 3));
        assert_eq!(Tiles::new(&published(), BlendedTiles::default(), [10, 24, 24]).unwrap(), None);
        for (tile, stride) in
            [([80, 768, 768], [57, 704, 704]), ([80, 768, 0], [56, 704, 0]), ([80, 8, 8], [56, 16, 8])]
        {
            let refused = Tiles::new(&published(), BlendedTiles { tile, stride }, [16, 34, 60]);
            assert!(matches!(refused, Err(Error::Argument { .. })));
        }
    }

    #[test]
    fn tiles_of_one_clip_are_the_clip() {
        let tiles = Tiles { along: [vec![0..5, 3..8, 6..9], vec![0..6, 4..10], vec![0..5, 3..8]], scale: [2, 4, 4] };
        let clip = noise(3, 1.0, &[2, 3, 17, 40, 32]);
        let blended = tiles.blend(&mut |cells| {
            let cut = (0..3).try_fold(clip.clone(), |x, axis| {
                let pixels = tiles.pixels(axis, &cells[axis]);
                x.narrow(axis + 2, pixels.start, pixels.len())
            });
            Ok(cut.unwrap())
        });
        let worst = (elements(&blended.unwrap()).into_iter().zip(elements(&clip))).map(|(a, b)| (a - b).abs());
        assert!(worst.fold(0f32, f32::max) < 1e-6);
    }

    #[test]
    fn a_seam_fades_linearly() {
        let clip = |value: f32| Tensor::full(value, (1, 1, 1, 1, 4), &Device::Cpu).unwrap();
        assert_eq!(elements(&fade(&clip(1.0), &clip(5.0), 4, 4).unwrap()), [1.0, 2.0, 3.0, 4.0]);
        let half = fade(&clip(1.0), &clip(5.0).to_dtype(DType::BF16).unwrap(), 4, 2).unwrap();
        assert_eq!(elements(&half.to_dtype(DType::F32).unwrap()), [1.0, 3.0, 5.0, 5.0]);
    }
}
