//! Overlapping tiles whose seams fade into one another, as diffusers has them (`tiled_decode`, `_temporal_tiled_decode` and
//! their encoding kin): for results that are compared with it. Chunks need as little memory and give the clip itself.

use std::ops::ControlFlow;

use candle_core::Tensor;
use candle_fork::What;
use policy::{Event, Observer};

use super::architecture::{Network, SpatialPadding};
use crate::{
    diffusion_decoder::BlendedTiles,
    error::{Error, Result},
};

const WHAT: &str = "tiles of a clip";

/// Tiles of a network's input, and what becomes of their results. A tile begins at every multiple of the stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Extents of a tile in frames, rows and columns of the input; in time it takes one frame more.
    pub(super) tile: [usize; 3],
    stride: [usize; 3],
    /// What is kept of a tile's result, and over how much of its beginning it fades in.
    kept: [usize; 3],
    fade: [usize; 3],
    /// Which frame is left out of the results of later tiles.
    left_out: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    First,
    Last,
}

impl Tiles {
    /// Of latents, for a decoder.
    pub(super) fn of_latents(tiles: BlendedTiles, decoder: &Network, patch: usize) -> Result<Self> {
        let scale = scale(decoder, patch);
        let BlendedTiles { tile, stride } = checked(tiles, scale, decoder)?;
        let smaller = |extents: [usize; 3]| std::array::from_fn(|axis| extents[axis] / scale[axis]);
        Ok(Self {
            tile: smaller(tile),
            stride: smaller(stride),
            kept: stride,
            fade: overlap(tile, stride),
            left_out: End::Last,
        })
    }

    /// Of frames, for an encoder.
    pub(super) fn of_frames(tiles: BlendedTiles, encoder: &Network, patch: usize) -> Result<Self> {
        let scale = scale(encoder, patch);
        let BlendedTiles { tile, stride } = checked(tiles, scale, encoder)?;
        let smaller = |extents: [usize; 3]| std::array::from_fn(|axis| extents[axis] / scale[axis]);
        Ok(Self { tile, stride, kept: smaller(stride), fade: smaller(overlap(tile, stride)), left_out: End::First })
    }

    /// Tiles of an input of so many frames, rows and columns.
    pub(super) fn count(&self, [frames, height, width]: [usize; 3]) -> usize {
        let along = |axis: usize, extent: usize| extent.div_ceil(self.stride[axis]);
        let times = if frames > self.tile[0] { along(0, frames) } else { 1 };
        if self.cuts([height, width]) { times * along(1, height) * along(2, width) } else { times }
    }

    fn cuts(&self, [height, width]: [usize; 2]) -> bool {
        height > self.tile[1] || width > self.tile[2]
    }

    /// Checks that no tile of a picture is too small for its borders.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub(super) fn check(&self, network: &Network, pixels: usize, [height, width]: [usize; 2]) -> Result<()> {
        let least = if network.padding == SpatialPadding::Reflect { 2 * pixels } else { pixels };
        for (axis, what, extent) in [(1, "rows", height), (2, "columns", width)] {
            let rest = extent - (extent - 1) / self.stride[axis] * self.stride[axis];
            if self.cuts([height, width]) && rest < least {
                let what = format!("the last tile would have {rest} of {extent} {what}, it needs {least}");
                return Err(Error::Argument { what });
            }
        }
        Ok(())
    }

    /// The results `[B, C, extents..]` of `run` on the tiles of x `[B, C', T, H, W]`, joined.
    pub(super) fn run(
        &self,
        x: &Tensor,
        extents: [usize; 3],
        run: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let frames = x.dim(2).what(WHAT)?;
        if frames <= self.tile[0] {
            return crop(&self.pictures(x, run)?, extents);
        }
        let (mut parts, mut before) = (Vec::new(), None);
        for start in (0..frames).step_by(self.stride[0]) {
            let piece = x.narrow(2, start, (self.tile[0] + 1).min(frames - start)).what(WHAT)?;
            let mut y = self.pictures(&piece, run)?;
            let count = y.dim(2).what(WHAT)?;
            let mut kept = self.kept[0] + 1;
            if let Some(before) = &before {
                let first = if self.left_out == End::First { 1 } else { 0 };
                y = faded(before, &y.narrow(2, first, count - 1).what(WHAT)?, 2, self.fade[0])?;
                kept = self.kept[0];
            }
            parts.push(y.narrow(2, 0, kept.min(y.dim(2).what(WHAT)?)).what(WHAT)?);
            before = Some(y);
        }
        crop(&joined(parts, 2)?, extents)
    }

    /// All frames of x, in tiles of rows and columns.
    fn pictures(&self, x: &Tensor, run: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let (_, _, _, height, width) = x.dims5().what(WHAT)?;
        if !self.cuts([height, width]) {
            return run(x);
        }
        let mut rows = Vec::new();
        let mut above: Vec<Tensor> = Vec::new();
        for top in (0..height).step_by(self.stride[1]) {
            let (mut row, mut kept) = (Vec::<Tensor>::new(), Vec::new());
            let lines = x.narrow(3, top, self.tile[1].min(height - top)).what(WHAT)?;
            for (column, left) in (0..width).step_by(self.stride[2]).enumerate() {
                let mut y = run(&lines.narrow(4, left, self.tile[2].min(width - left)).what(WHAT)?)?;
                if let Some(above) = above.get(column) {
                    y = faded(above, &y, 3, self.fade[1])?;
                }
                if let Some(before) = row.last() {
                    y = faded(before, &y, 4, self.fade[2])?;
                }
                kept.push(crop(&y, [usize::MAX, self.kept[1], self.kept[2]])?);
                row.push(y);
            }
            rows.push(joined(kept, 4)?);
            above = row;
        }
        joined(rows, 3)
    }
}

/// Frames, rows and columns of pixels that a latent stands for.
fn scale(network: &Network, patch: usize) -> [usize; 3] {
    let [t, h, w] = network.factors();
    [t, h * patch, w * patch]
}

fn overlap(tile: [usize; 3], stride: [usize; 3]) -> [usize; 3] {
    std::array::from_fn(|axis| tile[axis] - stride[axis])
}

/// The tiles, if whole latents make them up and the network can be run on them.
fn checked(tiles: BlendedTiles, scale: [usize; 3], network: &Network) -> Result<BlendedTiles> {
    tiles.check(scale)?;
    if network.draws_noise() {
        return Err(Error::Argument { what: "a network that adds noise cannot be run on tiles".to_owned() });
    }
    Ok(tiles)
}

/// y whose first `over` places along an axis fade in from the last ones of `before`.
fn faded(before: &Tensor, y: &Tensor, axis: usize, over: usize) -> Result<Tensor> {
    let (extent, past) = (y.dim(axis).what(WHAT)?, before.dim(axis).what(WHAT)?);
    let over = over.min(extent).min(past);
    if over == 0 {
        return Ok(y.clone());
    }
    let mut dims = [1; 5];
    dims[axis] = over;
    let ramp: Vec<f32> = (0..over).map(|place| place as f32 / over as f32).collect();
    let fade = || {
        let ramp = Tensor::from_vec(ramp, &dims, y.device())?.to_dtype(y.dtype())?;
        let old = before.narrow(axis, past - over, over)?.broadcast_mul(&ramp.affine(-1.0, 1.0)?)?;
        let new = (y.narrow(axis, 0, over)?.broadcast_mul(&ramp)? + old)?;
        Tensor::cat(&[new, y.narrow(axis, over, extent - over)?], axis)
    };
    Ok(fade().what("seams of tiles")?)
}

fn joined(mut parts: Vec<Tensor>, axis: usize) -> Result<Tensor> {
    // Candle does not join nothing to something.
    parts.retain(|part| part.elem_count() > 0);
    Ok(Tensor::cat(&parts, axis).what(WHAT)?)
}

/// At most so many frames, rows and columns.
fn crop(x: &Tensor, extents: [usize; 3]) -> Result<Tensor> {
    let cut = |x: Tensor, axis: usize| x.narrow(axis + 2, 0, extents[axis].min(x.dim(axis + 2)?));
    Ok((0..3).try_fold(x.clone(), cut).what(WHAT)?)
}

/// Parts of a tile that progress counts.
const PARTS: usize = 100;

/// Progress of tiles that take one run each.
pub(super) struct TileObserver<'a> {
    pub(super) inner: &'a dyn Observer,
    pub(super) tile: usize,
    pub(super) tiles: usize,
}

impl Observer for TileObserver<'_> {
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()> {
        match *event {
            Event::Progress { done, total } => {
                let done = self.tile * PARTS + done * PARTS / total.max(1);
                self.inner.on_event(&Event::Progress { done, total: self.tiles * PARTS })
            }
            ref other => self.inner.on_event(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::{
        super::{Block, architecture::Causality},
        *,
    };

    fn decoder(padding: SpatialPadding) -> Network {
        let up = Block::Up { factor: [2, 2, 2], reduction: 1, residual: false };
        Network { width: 8, blocks: vec![up], causality: Causality::Centred, padding, timestep_conditioning: false }
    }

    #[test]
    fn tiles_of_a_constant_are_that_constant() {
        let tiles = BlendedTiles { tile: [4, 4, 8], stride: [2, 2, 4] };
        let tiles = Tiles::of_latents(tiles, &decoder(SpatialPadding::Zeros), 1).unwrap();
        let x = Tensor::ones((1, 1, 5, 4, 9), DType::F32, &Device::Cpu).unwrap();
        let mut runs = 0;
        let y = tiles
            .run(&x, [9, 8, 18], &mut |tile| {
                runs += 1;
                let (b, c, t, h, w) = tile.dims5().unwrap();
                Ok(Tensor::full(3f32, (b, c, 2 * t - 1, 2 * h, 2 * w), &Device::Cpu).unwrap())
            })
            .unwrap();
        assert_eq!((y.dims(), runs), (&[1, 1, 9, 8, 18][..], tiles.count([5, 4, 9])));
        assert!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|&v| (v - 3.0).abs() < 1e-6));
    }

    #[test]
    fn tiles_that_do_not_fit_are_refused() {
        for (tile, stride) in [([4, 4, 4], [2, 2, 0]), ([4, 3, 4], [2, 2, 2]), ([4, 4, 4], [2, 6, 2])] {
            let refused = Tiles::of_latents(BlendedTiles { tile, stride }, &decoder(SpatialPadding::Zeros), 1);
            assert!(matches!(refused, Err(Error::Argument { .. })), "{tile:?} {stride:?}");
        }
        // A last tile of one latent has no border to be reflected.
        let network = decoder(SpatialPadding::Reflect);
        let tiles = Tiles::of_latents(BlendedTiles { tile: [4; 3], stride: [4; 3] }, &network, 1).unwrap();
        assert!(tiles.check(&network, 1, [4, 6]).is_ok());
        assert!(matches!(tiles.check(&network, 1, [4, 5]), Err(Error::Argument { .. })));
    }
}
