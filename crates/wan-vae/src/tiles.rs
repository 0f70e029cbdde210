//! Blended tiles: the network on overlapping squares of latents, each over the whole clip, faded into one another.
//!
//! Not what the network gives for the whole picture: the attention sees one tile, and the borders of tiles lie inside of
//! what its convolutions see. Kept for agreement with huggingface/diffusers, `autoencoder_kl_wan.py`, `tiled_decode`;
//! [`Tiling::Bands`](crate::Tiling::Bands) is the exact way.

use candle_core::Tensor;
use candle_fork::What;

use crate::{
    error::{Error, Result},
    network::Tick,
    options::BlendedTiles,
    vae::{WanVae, finished, join},
};

/// Tiles of a decode, in latents and in pixels of the network's output (before it is unpacked).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Side of a tile, in latents.
    tile: usize,
    /// Distance of tiles, in latents.
    stride: usize,
    /// Pixels of the network's output per latent.
    scale: usize,
}

impl Geometry {
    /// Checks that tiles cover everything and begin at latents.
    pub(crate) fn new(tiles: BlendedTiles, factor: usize, side: usize) -> Result<Self> {
        let BlendedTiles { tile, stride } = tiles;
        if stride == 0 || stride > tile || !stride.is_multiple_of(factor) || !tile.is_multiple_of(factor) {
            let what = format!(
                "tiles of {tile} pixels every {stride} are not possible: both must be multiples of {factor}, the distance \
                 at most the side and not 0"
            );
            return Err(Error::Tiling { what });
        }
        Ok(Self { tile: tile / factor, stride: stride / factor, scale: factor / side })
    }

    /// Whether a picture is larger than one tile.
    pub(crate) fn cuts(&self, height: usize, width: usize) -> bool {
        height > self.tile || width > self.tile
    }

    /// Begin and length of the tiles along an axis. The last ones may be short.
    pub(crate) fn along(&self, latents: usize) -> Vec<(usize, usize)> {
        (0..latents).step_by(self.stride).map(|at| (at, self.tile.min(latents - at))).collect()
    }

    /// Pixels over which neighbours fade into one another.
    fn overlap(&self) -> usize {
        (self.tile - self.stride) * self.scale
    }
}

impl WanVae {
    /// Latents `[1, z, n, h, w]` in blended tiles.
    pub(crate) fn decode_blended(
        &self,
        latents: &Tensor,
        geometry: Geometry,
        tick: Tick<'_>,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (_, _, count, height, width) = latents.dims5().what("latents")?;
        let columns = geometry.along(width);
        let mut rows: Vec<Tensor> = Vec::new();
        let mut above: Vec<Tensor> = Vec::new();
        for (top, tall) in geometry.along(height) {
            let mut row: Vec<Tensor> = Vec::new();
            for (column, &(left, wide)) in columns.iter().enumerate() {
                let square = latents.narrow(3, top, tall).and_then(|t| t.narrow(4, left, wide)?.contiguous());
                let square = square.what("latents of a tile")?;
                let mut slots = decoder.slots();
                let mut frames = Vec::new();
                for frame in 0..count {
                    slots.set_start(frame == 0);
                    let piece = square.narrow(2, frame, 1).what("latents of a tile")?;
                    let cut = decoder.first_part(&piece, &mut slots, tick)?;
                    let packed = decoder.second_part(cut, None, &mut slots, tick)?;
                    frames.push(packed.squeeze(0).what("frames of a tile")?);
                }
                let mut tile = join(frames, "frames of a tile")?;
                if let Some(above) = above.get(column) {
                    tile = blend(above, &tile, 2, geometry.overlap())?;
                }
                if let Some(left) = row.last() {
                    tile = blend(left, &tile, 3, geometry.overlap())?;
                }
                row.push(tile);
            }
            let step = geometry.stride * geometry.scale;
            rows.push(crop_and_join(&row, step, tall * geometry.scale)?);
            above = row;
        }
        drop(above);
        let packed = Tensor::cat(&rows, 2).what("tiles")?;
        drop(rows);
        let packed = packed.narrow(2, 0, height * geometry.scale).and_then(|t| t.narrow(3, 0, width * geometry.scale));
        let packed = packed.what("tiles")?;
        for latent in 0..count {
            let (first, frames) = match latent {
                0 => (0, 1),
                _ => (self.frames(latent), self.temporal_factor()),
            };
            let chunk = packed.narrow(1, first, frames).and_then(|t| t.unsqueeze(0)?.contiguous()).what("frames")?;
            sink(finished(&decoder.unpack(&chunk)?)?)?;
        }
        Ok(())
    }
}

/// The tiles of a row, each cut to `step` rows and columns, side by side.
fn crop_and_join(row: &[Tensor], step: usize, tall: usize) -> Result<Tensor> {
    let crop = |tile: &Tensor| tile.narrow(2, 0, step.min(tall))?.narrow(3, 0, step.min(tile.dim(3)?));
    let cropped = row.iter().map(crop).collect::<candle_core::Result<Vec<_>>>();
    Ok(cropped.and_then(|cropped| Tensor::cat(&cropped, 3)).what("tiles")?)
}

/// `tile` whose first rows (axis 2) or columns (axis 3) fade in from the last ones of `before`:
/// `before * (1 - i / n) + tile * (i / n)`.
fn blend(before: &Tensor, tile: &Tensor, axis: usize, overlap: usize) -> Result<Tensor> {
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
    use super::*;
    use crate::{
        DecodeOptions, DecodePlan, Error, Silent, Tiling,
        testing::{bits, elements, latents, relative_l2, tiny},
    };

    #[test]
    fn tiles_begin_where_diffusers_begins_them() {
        let geometry = Geometry::new(BlendedTiles::default(), 8, 1).unwrap();
        let lengths = |latents| geometry.along(latents).into_iter().map(|(_, len)| len).collect::<Vec<_>>();
        assert_eq!(lengths(60), [32, 32, 12]);
        assert_eq!(lengths(104), [32, 32, 32, 32, 8]);
        assert_eq!(geometry.overlap(), 64);
        let patched = Geometry::new(BlendedTiles::default(), 16, 2).unwrap();
        assert_eq!((patched.tile, patched.stride, patched.overlap()), (16, 12, 32));
        assert!(geometry.cuts(33, 1) && geometry.cuts(1, 33) && !geometry.cuts(32, 32));
        for (tile, stride) in [(256, 0), (128, 192), (250, 192), (256, 100)] {
            assert!(matches!(Geometry::new(BlendedTiles { tile, stride }, 8, 1), Err(Error::Tiling { .. })));
        }
    }

    #[test]
    fn a_seam_fades_linearly() {
        let before = Tensor::full(1f32, (1, 1, 3, 4), &candle_core::Device::Cpu).unwrap();
        let tile = Tensor::full(5f32, (1, 1, 3, 4), &candle_core::Device::Cpu).unwrap();
        let columns = blend(&before, &tile, 3, 4).unwrap();
        assert_eq!(elements(&columns)[..4], [1.0, 2.0, 3.0, 4.0]);
        let rows = blend(&before, &tile, 2, 2).unwrap();
        assert_eq!(elements(&rows), [[1.0; 4], [3.0; 4], [5.0; 4]].concat());
        assert_eq!(bits(&blend(&before, &tile, 2, 0).unwrap()), bits(&tile));
    }

    #[test]
    fn small_pictures_are_not_cut_and_large_ones_are_close() {
        for vae in tiny() {
            let run = |z: &crate::RawLatents, tiling| {
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
            assert!(matches!(plan, DecodePlan::Blended(_)));
        }
    }
}
