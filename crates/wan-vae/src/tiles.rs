//! Blended tiles: the network on overlapping squares, each over the whole clip, faded into one another.
//!
//! Not what the network gives for the whole picture: the attention sees one tile, and the borders of tiles lie inside of
//! what its convolutions see. Kept for agreement with huggingface/diffusers, `autoencoder_kl_wan.py`, `tiled_decode` and
//! `tiled_encode`; [`Tiling::Bands`](crate::Tiling::Bands) is the exact way.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::What;

use crate::{
    architecture::Architecture,
    error::{Error, Result},
    network::Tick,
    options::BlendedTiles,
    vae::{WanVae, join},
};

/// Tiles of a clip, in latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Side of a tile.
    tile: usize,
    /// Distance of tiles.
    stride: usize,
    /// Rows and columns per latent of what a tile becomes: the decoder's output before it is unpacked, or latents.
    scale: usize,
    /// Extent above which pictures are cut.
    limit: usize,
}

impl Geometry {
    /// For a decode: tiles begin at latents, and pictures larger than a tile are cut.
    pub(crate) fn of_decoder(tiles: BlendedTiles, architecture: &Architecture) -> Result<Self> {
        let factor = architecture.spatial_factor();
        let scale = factor / architecture.unpack.side();
        let geometry = Self::new(tiles, factor, scale)?;
        Ok(Self { limit: geometry.tile, ..geometry })
    }

    /// For an encode: tiles are counted in packed pixels, but that a picture is cut is decided by its size in pixels.
    pub(crate) fn of_encoder(tiles: BlendedTiles, architecture: &Architecture) -> Result<Self> {
        let factor = architecture.encoder_spatial_factor();
        let geometry = Self::new(tiles, factor / architecture.patch_size, 1)?;
        Ok(Self { limit: tiles.tile / factor, ..geometry })
    }

    /// Checks that tiles cover everything and begin at latents.
    fn new(BlendedTiles { tile, stride }: BlendedTiles, factor: usize, scale: usize) -> Result<Self> {
        if stride == 0 || stride > tile || !stride.is_multiple_of(factor) || !tile.is_multiple_of(factor) {
            let what = format!(
                "tiles of {tile} pixels every {stride} are not possible: both must be multiples of {factor}, the distance \
                 at most the side and not 0"
            );
            return Err(Error::Tiling { what });
        }
        Ok(Self { tile: tile / factor, stride: stride / factor, scale, limit: 0 })
    }

    /// Whether a picture of so many rows and columns of latents is cut.
    pub(crate) fn cuts(&self, height: usize, width: usize) -> bool {
        height > self.limit || width > self.limit
    }

    /// Number of tiles of a picture.
    pub(crate) fn count(&self, height: usize, width: usize) -> usize {
        height.div_ceil(self.stride).saturating_mul(width.div_ceil(self.stride))
    }

    /// Rows and columns of the largest tile, and the positions of all tiles together, in latents.
    pub(crate) fn largest_and_all(&self, height: usize, width: usize) -> ((usize, usize), f64) {
        let all = |extent: usize| {
            let count = extent.div_ceil(self.stride);
            // Tiles that are not short, then the others: each shorter by the distance than the one before.
            let whole = extent.checked_sub(self.tile).map_or(0, |rest| (rest / self.stride + 1).min(count));
            let (short, extent) = ((count - whole) as f64, extent as f64);
            let skipped = (whole as f64 + count as f64 - 1.0) / 2.0 * self.stride as f64;
            whole as f64 * self.tile as f64 + short * (extent - skipped)
        };
        ((self.tile.min(height), self.tile.min(width)), all(height) * all(width))
    }

    /// The tiles along an axis. The last ones may be short.
    fn along(&self, latents: usize) -> Vec<Range<usize>> {
        (0..latents).step_by(self.stride).map(|at| at..at.saturating_add(self.tile).min(latents)).collect()
    }

    /// Rows or columns over which neighbours fade into one another.
    fn overlap(&self) -> usize {
        (self.tile - self.stride) * self.scale
    }

    /// The clip `[C, T, rows, columns]` that `tile` gives, piece by piece, for `height` x `width` latents.
    fn blend(
        &self,
        (height, width): (usize, usize),
        tile: &mut dyn FnMut(Range<usize>, Range<usize>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let step = self.stride * self.scale;
        let mut rows: Vec<Tensor> = Vec::new();
        let mut above: Vec<Tensor> = Vec::new();
        for tall in self.along(height) {
            let mut row: Vec<Tensor> = Vec::new();
            for (column, wide) in self.along(width).into_iter().enumerate() {
                let mut piece = tile(tall.clone(), wide)?;
                if let Some(above) = above.get(column) {
                    piece = fade(above, &piece, 2, self.overlap())?;
                }
                if let Some(left) = row.last() {
                    piece = fade(left, &piece, 3, self.overlap())?;
                }
                row.push(piece);
            }
            rows.push(crop_and_join(&row, step)?);
            above = row;
        }
        drop(above);
        Ok(Tensor::cat(&rows, 2).what("tiles")?)
    }
}

impl WanVae {
    /// Latents `[1, z, n, h, w]` in blended tiles.
    pub(crate) fn decode_blended(
        &self,
        latents: &Tensor,
        geometry: Geometry,
        tick: Tick<'_>,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (_, _, count, height, width) = latents.dims5().what("latents")?;
        let packed = geometry.blend((height, width), &mut |tall, wide| {
            let square = latents.narrow(3, tall.start, tall.len()).and_then(|t| t.narrow(4, wide.start, wide.len()));
            let square = square.and_then(|t| t.contiguous()).what("latents of a tile")?;
            let mut slots = decoder.slots();
            let mut frames = Vec::new();
            for frame in 0..count {
                slots.set_start(frame == 0);
                let piece = square.narrow(2, frame, 1).what("latents of a tile")?;
                let cut = decoder.first_part(&piece, &mut slots, tick)?;
                let packed = decoder.second_part(cut, None, &mut slots, tick)?;
                frames.push(packed.squeeze(0).what("frames of a tile")?);
            }
            join(frames, "frames of a tile")
        })?;
        for latent in 0..count {
            let (first, frames) = match latent {
                0 => (0, 1),
                _ => (self.frames(latent), self.temporal_factor()),
            };
            emit(packed.narrow(1, first, frames).and_then(|t| t.unsqueeze(0)?.contiguous()).what("frames")?)?;
        }
        Ok(())
    }

    /// The latents `[z, n, h, w]` of a clip, given as the frames of each latent frame `[C, m, H, W]`, in blended tiles.
    pub(crate) fn encode_blended(&self, groups: &[Tensor], geometry: Geometry, tick: Tick<'_>) -> Result<Tensor> {
        const WHAT: &str = "frames of a tile";
        let encoder = self.require_encoder()?;
        let factor = self.architecture().encoder_spatial_factor();
        let (_, _, height, width) = match groups.first() {
            Some(group) => group.dims4().what(WHAT)?,
            None => (0, 0, 0, 0),
        };
        geometry.blend((height / factor, width / factor), &mut |tall, wide| {
            let mut slots = encoder.slots();
            let mut latents = Vec::new();
            for (i, group) in groups.iter().enumerate() {
                slots.set_start(i == 0);
                let square = group.narrow(2, tall.start * factor, tall.len() * factor);
                let square = square.and_then(|t| t.narrow(3, wide.start * factor, wide.len() * factor)?.contiguous());
                latents.push(encoder.forward(&square.what(WHAT)?, &mut slots, tick)?);
            }
            join(latents, "latents of a tile")
        })
    }
}

/// The tiles of a row, each cut to `step` rows and columns, side by side.
fn crop_and_join(row: &[Tensor], step: usize) -> Result<Tensor> {
    let crop = |tile: &Tensor| tile.narrow(2, 0, step.min(tile.dim(2)?))?.narrow(3, 0, step.min(tile.dim(3)?));
    let cropped = row.iter().map(crop).collect::<candle_core::Result<Vec<_>>>();
    Ok(cropped.and_then(|cropped| Tensor::cat(&cropped, 3)).what("tiles")?)
}

/// `tile` whose first rows (axis 2) or columns (axis 3) fade in from the last ones of `before`:
/// `before * (1 - i / n) + tile * (i / n)`.
fn fade(before: &Tensor, tile: &Tensor, axis: usize, overlap: usize) -> Result<Tensor> {
    let faded = || {
        let (end, len) = (before.dim(axis)?, tile.dim(axis)?);
        let n = overlap.min(end).min(len);
        if n == 0 {
            return Ok(tile.clone());
        }
        let ramp: Vec<f32> = (0..n).map(|i| (i as f64 / n as f64) as f32).collect();
        let back: Vec<f32> = (0..n).map(|i| (1.0 - i as f64 / n as f64) as f32).collect();
        let shape = if axis == 2 { (1, 1, n, 1) } else { (1, 1, 1, n) };
        let weights = |values: Vec<f32>| Tensor::from_vec(values, shape, tile.device());
        let old = before.narrow(axis, end - n, n)?.broadcast_mul(&weights(back)?)?;
        let new = tile.narrow(axis, 0, n)?.broadcast_mul(&weights(ramp)?)?;
        let head = (old + new)?;
        if n == len { Ok(head) } else { Tensor::cat(&[&head, &tile.narrow(axis, n, len - n)?], axis) }
    };
    Ok(faded().what("seam of two tiles")?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        ClipPlan, DecodeOptions, EncodeOptions, RawLatents, Silent, Tiling,
        testing::{bits, elements, latents, noise, relative_l2, tiny, wan21, wan22},
    };

    #[test]
    fn tiles_begin_where_diffusers_begins_them() {
        let tiles = BlendedTiles::default();
        let geometry = Geometry::of_decoder(tiles, &wan21()).unwrap();
        let lengths = |latents| geometry.along(latents).into_iter().map(|tile| tile.len()).collect::<Vec<_>>();
        assert_eq!(lengths(60), [32, 32, 12]);
        assert_eq!(lengths(104), [32, 32, 32, 32, 8]);
        assert_eq!(geometry.overlap(), 64);
        assert!(geometry.cuts(33, 1) && geometry.cuts(1, 33) && !geometry.cuts(32, 32));
        let patched = Geometry::of_decoder(tiles, &wan22()).unwrap();
        assert_eq!((patched.tile, patched.stride, patched.overlap(), patched.limit), (16, 12, 32, 16));
        let encoder = Geometry::of_encoder(tiles, &wan21()).unwrap();
        assert_eq!((encoder.tile, encoder.stride, encoder.overlap(), encoder.limit), (32, 24, 8, 32));
        // Tiles of 512 pixels every 384, from 257 pixels on.
        let patched = Geometry::of_encoder(tiles, &wan22()).unwrap();
        assert_eq!((patched.tile, patched.stride, patched.overlap(), patched.limit), (32, 24, 8, 16));
        for (tile, stride) in [(256, 0), (128, 192), (250, 192), (256, 100), (0, 0)] {
            let tiles = BlendedTiles { tile, stride };
            for refused in [Geometry::of_decoder(tiles, &wan21()), Geometry::of_encoder(tiles, &wan22())] {
                assert!(matches!(refused, Err(Error::Tiling { .. })));
            }
        }
    }

    proptest! {
        #[test]
        fn positions_of_all_tiles_are_counted(
            tile in 1usize..40, stride in 1usize..40, height in 0usize..90, width in 0usize..90,
        ) {
            prop_assume!(stride <= tile);
            let geometry = Geometry { tile, stride, scale: 1, limit: 0 };
            let (tall, wide) = (geometry.along(height), geometry.along(width));
            let sum = |tiles: &[Range<usize>]| tiles.iter().map(ExactSizeIterator::len).sum::<usize>();
            let longest = |tiles: &[Range<usize>]| tiles.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
            let (largest, all) = geometry.largest_and_all(height, width);
            prop_assert_eq!(largest, (longest(&tall), longest(&wide)));
            prop_assert_eq!(all, (sum(&tall) * sum(&wide)) as f64);
            prop_assert_eq!(geometry.count(height, width), tall.len() * wide.len());
        }
    }

    #[test]
    fn a_seam_fades_linearly() {
        let before = Tensor::full(1f32, (1, 1, 3, 4), &candle_core::Device::Cpu).unwrap();
        let tile = Tensor::full(5f32, (1, 1, 3, 4), &candle_core::Device::Cpu).unwrap();
        let columns = fade(&before, &tile, 3, 4).unwrap();
        assert_eq!(elements(&columns)[..4], [1.0, 2.0, 3.0, 4.0]);
        let rows = fade(&before, &tile, 2, 2).unwrap();
        assert_eq!(elements(&rows), [[1.0; 4], [3.0; 4], [5.0; 4]].concat());
        assert_eq!(bits(&fade(&before, &tile, 2, 0).unwrap()), bits(&tile));
    }

    #[test]
    fn small_pictures_are_not_cut_and_large_ones_are_close() {
        for vae in tiny() {
            let run = |z: &RawLatents, tiling| {
                let mut parts = Vec::new();
                let options = DecodeOptions::default().with_tiling(tiling);
                vae.decode_clip(z, &options, &Silent, &mut |frames| {
                    parts.push(frames);
                    Ok(())
                })
                .unwrap();
                Tensor::cat(&parts, 1).unwrap()
            };
            let tile = 8 * vae.spatial_factor();
            let tiling = Tiling::Blended(BlendedTiles { tile, stride: tile / 2 });
            let small = latents(1, [4, 2, 8, 5]);
            assert_eq!(bits(&run(&small, tiling)), bits(&run(&small, Tiling::Whole)));
            let large = latents(1, [4, 2, 13, 10]);
            let (whole, blended) = (run(&large, Tiling::Whole), run(&large, tiling));
            let error = relative_l2(&blended, &whole);
            assert!(error > 1e-4 && error < 0.5, "{error}");
            let plan = vae.decode_plan((2, 13, 10), &DecodeOptions::default().with_tiling(tiling)).unwrap();
            assert!(matches!(plan, ClipPlan::Blended(_)));
        }
    }

    #[test]
    fn the_same_holds_for_encoding() {
        for vae in tiny() {
            let factor = vae.spatial_factor();
            let tiling = Tiling::Blended(BlendedTiles { tile: 64, stride: 32 });
            let run = |x: &Tensor, tiling| {
                let mut parts = Vec::new();
                let options = EncodeOptions::default().with_tiling(tiling);
                let frames = &mut std::iter::once(Ok(x.clone()));
                let done = vae.encode_clip(frames, &options, &Silent, &mut |z| {
                    parts.push(z.into_tensor());
                    Ok(())
                });
                assert_eq!(done.unwrap().latents, 2);
                Tensor::cat(&parts, 1).unwrap()
            };
            let plan = |rows| {
                let options = EncodeOptions::default().with_tiling(tiling);
                vae.encode_plan((5, rows, factor), &options).unwrap()
            };
            assert_eq!(plan(64), ClipPlan::Whole);
            assert!(matches!(plan(64 + factor), ClipPlan::Blended(_)));
            let small = noise(1, 0.5, &[3, 5, 64, factor]);
            assert_eq!(bits(&run(&small, tiling)), bits(&run(&small, Tiling::Whole)));
            let large = noise(1, 0.5, &[3, 5, 12 * factor, factor]);
            let (whole, blended) = (run(&large, Tiling::Whole), run(&large, tiling));
            assert_eq!(blended.dims(), [4, 2, 12, 1]);
            let error = relative_l2(&blended, &whole);
            assert!(error > 1e-4 && error < 0.5, "{error}");
        }
    }
}
