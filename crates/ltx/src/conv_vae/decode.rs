//! Latents to frames.

use candle_core::{DType, Tensor};
use candle_fork::{
    What,
    frames::{Downloads, HostFrames, PatchOrder, clamped_frames, frames_to_rgb8, unpatchify},
};
use policy::{Event, Observer, Silent};

use super::{
    memory::{self, ClipMemory, Part},
    noise::{self, TIMESTEP},
    options::ConvDecodeOptions,
    run::{Conditions, check_input, clip},
    tiles::{TileObserver, Tiles},
    vae::ConvVae,
};
use crate::{
    diffusion_decoder::BlendedTiles,
    error::{Error, Result, shape},
};

/// Frames that go to the host together, while the next ones are turned into bytes.
const DOWNLOADED: usize = 16;

impl ConvVae {
    /// The frames of latents, clamped to -1..=1.
    ///
    /// **Shapes**: latents `[B, C, T, H, W]` as a diffusion transformer sees them, on the device of the VAE; result
    /// `[B, 3, F, h H, w W]` f32 with the factors of the decoder: `F = 8 (T - 1) + 1` and 32 for the published ones.
    ///
    /// # Errors
    /// As [`ConvVae::decode_clip`].
    pub fn decode(&self, latents: &Tensor, options: &ConvDecodeOptions) -> Result<Tensor> {
        let mut parts = Vec::new();
        self.decode_clip(latents, options, &Silent, &mut |frames| {
            parts.push(frames);
            Ok(())
        })?;
        Ok(Tensor::cat(&parts, 2).what("frames of a clip")?)
    }

    /// [`ConvVae::decode`] that hands over frames as they are done, in order, and reports progress by the frames
    /// that layers have made.
    ///
    /// The network is run on some latent frames at a time ([`ConvDecodeOptions`]), and no layer is given more than these
    /// become on the way to it. Every layer waits for the frames that it sees, so the result does not depend on the chunks
    /// but for the rounding of convolutions.
    ///
    /// # Errors
    /// [`Error::Missing`] without a decoder; [`Error::Shape`] for latents of other channels, or too small for a reflected
    /// border; [`Error::Argument`] for a chunk of 0; [`Error::Memory`] if nothing fits the limit;
    /// [`Error::NonFiniteInput`], [`Error::NonFinite`]; [`Error::Cancelled`]; errors of `sink`.
    pub fn decode_clip(
        &self,
        latents: &Tensor,
        options: &ConvDecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let _backends = self.backends().enter();
        match options.tiles {
            Some(tiles) => sink(clamped(&self.decode_tiles(latents, tiles, options, observer)?, 1)?),
            None => {
                let side = self.architecture().patch_size;
                self.decode_packed(latents, options, observer, &mut |packed| sink(clamped(&packed, side)?))
            }
        }
    }

    /// [`ConvVae::decode_clip`] of one clip that gives bytes: interleaved pixels on the host, a few frames at a time. On a
    /// device, frames are brought to bytes there and copied while the next ones are made.
    ///
    /// # Errors
    /// As [`ConvVae::decode_clip`]; [`Error::Shape`] for a batch of clips.
    pub fn decode_rgb8(
        &self,
        latents: &Tensor,
        options: &ConvDecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(HostFrames) -> Result<()>,
    ) -> Result<()> {
        if latents.dims().first() != Some(&1) {
            return Err(shape("latents", latents, "[1, C, T, H, W]: one clip"));
        }
        // For the last frames too, which leave when the run is over.
        let _backends = self.backends().enter();
        let mut downloads = Downloads::default();
        let mut emit = |frames: Option<HostFrames>| match frames {
            Some(frames) if !frames.all_finite => Err(Error::NonFinite { what: "frames" }),
            Some(frames) => sink(frames),
            None => Ok(()),
        };
        let mut download = |packed: &Tensor, side: usize| {
            let frames = packed.dim(2).what("frames")?;
            for start in (0..frames).step_by(DOWNLOADED) {
                let few = packed.narrow(2, start, DOWNLOADED.min(frames - start)).what("frames")?;
                emit(downloads.push(frames_to_rgb8(&few, side, PatchOrder::ColumnMajor)?)?)?;
            }
            Ok(())
        };
        match options.tiles {
            Some(tiles) => download(&self.decode_tiles(latents, tiles, options, observer)?, 1)?,
            None => {
                let side = self.architecture().patch_size;
                self.decode_packed(latents, options, observer, &mut |packed| download(&packed, side))?;
            }
        }
        emit(downloads.finish()?)
    }

    /// Bytes that a decode of latents takes whose batch, frames, rows and columns are `extents`, with so many frames at a time, its weights
    /// included, none all of them. Nothing without a decoder.
    pub fn decode_memory(&self, extents: [usize; 4], chunk: Option<usize>) -> ClipMemory {
        memory::clip(self.architecture(), Part::Decoder, self.placement(), extents, chunk)
    }

    /// Latents to frames whose squares of pixels are still channels.
    fn decode_packed(
        &self,
        latents: &Tensor,
        options: &ConvDecodeOptions,
        observer: &dyn Observer,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let (network, spec) = self.decoder()?;
        let channels = self.architecture().latent_channels;
        let [batch, _, frames, height, width] = clip("latents", latents, channels, [1; 2], spec.padding)?;
        let memory = |chunk| self.decode_memory([batch, frames, height, width], Some(chunk));
        let chunk = memory::chunk("decoding", frames, 1, options.chunk, options.max_bytes, memory)?;
        check_input("latents", latents)?;
        let mut latents = latents.to_dtype(DType::F32).what("latents")?;
        let conditioned = if spec.timestep_conditioning { latents.elem_count() } else { 0 };
        let (blend, maps) = noise::draw(spec, [height, width], conditioned, options);
        if spec.timestep_conditioning {
            latents = noise::blend(&latents, blend)?;
        }
        let maps = noise::tensors(maps, self.dtype(), latents.device())?;
        tracing::debug!(batch, frames, height, width, chunk, "decode");
        let raw = self.statistics().denormalize(&latents)?;
        let conditions = Conditions { timestep: spec.timestep_conditioning.then_some(TIMESTEP), noise: &maps };
        observer.notify(Event::Stage { name: "vae decode" })?;
        self.run(network, &raw, chunk, conditions, observer, emit)
    }

    /// The frames of tiles, f32, not clamped.
    fn decode_tiles(
        &self,
        latents: &Tensor,
        tiles: BlendedTiles,
        options: &ConvDecodeOptions,
        observer: &dyn Observer,
    ) -> Result<Tensor> {
        let (network, spec) = self.decoder()?;
        let channels = self.architecture().latent_channels;
        let [batch, _, frames, height, width] = clip("latents", latents, channels, [1; 2], spec.padding)?;
        let tiles = Tiles::of_latents(tiles, spec, self.architecture().patch_size)?;
        tiles.check(spec, 1, [height, width])?;
        let [most, rows, columns] = tiles.tile;
        let largest = [batch, frames.min(most + 1), height.min(rows), width.min(columns)];
        let all = self.decode_memory([batch, frames, height, width], None).frames;
        let memory = |chunk| {
            let tile = self.decode_memory(largest, Some(chunk));
            ClipMemory { frames: tile.frames.saturating_add(all), ..tile }
        };
        let chunk = memory::chunk("decoding", largest[1], 1, options.chunk, options.max_bytes, memory)?;
        check_input("latents", latents)?;
        let raw = self.statistics().denormalize(latents)?;
        let [pt, ph, pw] = spec.factors();
        let side = self.architecture().patch_size;
        let extents = [(frames - 1) * pt + 1, height * ph * side, width * pw * side];
        observer.notify(Event::Stage { name: "vae decode" })?;
        let mut observer = TileObserver { inner: observer, tile: 0, tiles: tiles.count([frames, height, width]) };
        let conditions = Conditions { timestep: None, noise: &[] };
        tiles.run(&raw, extents, &mut |tile| {
            let mut parts = Vec::new();
            self.run(network, tile, chunk, conditions, &observer, &mut |packed| {
                parts.push(self.unpacked(&packed)?);
                Ok(())
            })?;
            observer.tile += 1;
            Ok(Tensor::cat(&parts, 2).what("frames of a tile")?)
        })
    }

    /// What the network gives as frames, f32.
    fn unpacked(&self, packed: &Tensor) -> Result<Tensor> {
        let frames = unpatchify(packed, self.architecture().patch_size, PatchOrder::ColumnMajor)?;
        Ok(frames.to_dtype(DType::F32).what("frames")?)
    }
}

/// What a network gives as frames in their range.
fn clamped(packed: &Tensor, side: usize) -> Result<Tensor> {
    let batch = packed.dim(0).what("frames")?;
    let item = |index: usize| {
        let item = packed.narrow(0, index, 1).what("frames of a batch")?;
        let clamped = clamped_frames(&item, side, PatchOrder::ColumnMajor)?;
        if !clamped.all_finite()? {
            return Err(Error::NonFinite { what: "frames" });
        }
        Ok(clamped.frames().clone())
    };
    let items = (0..batch).map(item).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&items, 0).what("frames of a batch")?)
}
