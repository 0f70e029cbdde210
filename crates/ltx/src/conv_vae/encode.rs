//! Frames to latents.

use candle_core::{DType, Tensor};
use candle_fork::{
    What,
    frames::{PatchOrder, patchify},
};
use policy::{Event, Observer};

use super::{
    memory::{self, ClipMemory, Part},
    options::ConvEncodeOptions,
    run::{Conditions, all_finite, check_input, clip},
    tiles::{TileObserver, Tiles},
    vae::ConvVae,
};
use crate::error::{Error, Result};

impl ConvVae {
    /// The latents of frames, as a diffusion transformer sees them.
    ///
    /// **Shapes**: frames `[B, 3, F, H, W]` in -1..=1, `F = 8 k + 1`, H and W multiples of 32 for the published VAEs, on
    /// the device of the VAE; result `[B, C, k + 1, H / 32, W / 32]` f32: the mean of the posterior, normalised.
    ///
    /// # Errors
    /// [`Error::Missing`] without an encoder; [`Error::Shape`], [`Error::Size`], [`Error::Frames`] for frames that no
    /// latents stand for; [`Error::Argument`] for a chunk of 0; [`Error::Memory`] if nothing fits the limit;
    /// [`Error::NonFiniteInput`], [`Error::NonFinite`]; [`Error::Cancelled`].
    pub fn encode(&self, frames: &Tensor, options: &ConvEncodeOptions, observer: &dyn Observer) -> Result<Tensor> {
        let _backends = self.backends().enter();
        let (network, spec) = self.encoder()?;
        let [group, vertical, horizontal] = spec.factors();
        let side = self.architecture().patch_size;
        let multiples = [vertical * side, horizontal * side];
        let [batch, _, count, height, width] =
            clip("frames", frames, self.architecture().channels, multiples, spec.padding)?;
        if count % group != 1 % group {
            let below = (count - 1) / group * group + 1;
            let nearest = format!("{below} or {}", below + group);
            return Err(Error::Frames { got: count, group, nearest });
        }
        let extents = [batch, count, height, width];
        let tiles = options.tiles.map(|tiles| Tiles::of_frames(tiles, spec, side)).transpose()?;
        let mut largest = extents;
        if let Some(tiles) = &tiles {
            tiles.check(spec, multiples[0], [height, width])?;
            let [frames, rows, columns] = tiles.tile;
            largest = [batch, count.min(frames + 1), height.min(rows), width.min(columns)];
        }
        let all = self.encode_memory(extents, None).frames;
        let memory = |chunk| ClipMemory { frames: all, ..self.encode_memory(largest, Some(chunk)) };
        let chunk = memory::chunk("encoding", largest[1], group, options.chunk, options.max_bytes, memory)?;
        check_input("frames", frames)?;
        tracing::debug!(batch, count, height, width, chunk, "encode");
        observer.notify(Event::Stage { name: "vae encode" })?;
        let mut observer = TileObserver { inner: observer, tile: 0, tiles: 1 };
        let conditions = Conditions { timestep: None, noise: &[] };
        let encode = |frames: &Tensor, observer: &dyn Observer| -> Result<Tensor> {
            let mut parts = Vec::new();
            let packed = patchify(frames, side, PatchOrder::ColumnMajor)?;
            self.run(network, &packed, chunk, conditions, observer, &mut |y| {
                parts.push(y.to_dtype(DType::F32).what("latents")?);
                Ok(())
            })?;
            Ok(Tensor::cat(&parts, 2).what("latents of a clip")?)
        };
        let raw = match &tiles {
            None => encode(frames, &observer)?,
            Some(tiles) => {
                observer.tiles = tiles.count([count, height, width]);
                let latents = [(count - 1) / group + 1, height / multiples[0], width / multiples[1]];
                tiles.run(frames, latents, &mut |tile| {
                    let latents = encode(tile, &observer);
                    observer.tile += 1;
                    latents
                })?
            }
        };
        if !all_finite(&raw)? {
            return Err(Error::NonFinite { what: "latents" });
        }
        self.statistics().normalize(&raw)
    }

    /// Bytes that an encode of frames `[batch, 3, frames, height, width]` takes with so many frames at a time, its weights
    /// included, none all of them. Nothing without an encoder.
    pub fn encode_memory(&self, [batch, frames, height, width]: [usize; 4], chunk: Option<usize>) -> ClipMemory {
        let side = self.architecture().patch_size.max(1);
        let extents = [batch, frames, height / side, width / side];
        memory::clip(self.architecture(), Part::Encoder, self.placement(), extents, chunk)
    }
}
