//! Whole clips decoded, with progress, cancellation and a memory budget.

use std::ops::Range;

use candle_core::Tensor;
use candle_fork::{
    What,
    frames::{Downloads, HostFrames, frames_to_rgb8},
};
use policy::{Event, Observer};

use crate::{
    bands::{self, Halo, Window},
    error::{Error, Result, shape},
    latents::RawLatents,
    layers::pixel_order,
    memory::{self, ClipPlan},
    network::Tick,
    options::DecodeOptions,
    state::DecoderState,
    vae::WanVae,
};

impl WanVae {
    /// How [`WanVae::decode_clip`] goes about latents of so many frames, rows and columns.
    ///
    /// # Errors
    /// [`Error::Memory`] if nothing fits the limit; [`Error::Tiling`] for a number of bands that is not possible.
    pub fn decode_plan(&self, extents: (usize, usize, usize), options: &DecodeOptions) -> Result<ClipPlan> {
        memory::decode_plan(self.architecture(), self.0.precision, extents, options)
    }

    /// Decodes a clip: `sink` gets the frames of each latent frame in order, `[C, m, H, W]` f32 in -1..=1, with m 1 and
    /// then the temporal factor.
    ///
    /// With [`ClipPlan::Whole`] frames leave as they are done and memory does not grow with the clip; with bands they
    /// leave when the last band is done, with the same result ([`Tiling::Bands`](crate::Tiling::Bands)). The observer
    /// hears of one stage, `vae decode`, and of progress between layers, and can stop the run there.
    ///
    /// # Errors
    /// As [`WanVae::decode`] and [`WanVae::decode_plan`]; [`Error::Cancelled`]; whatever `sink` returns.
    pub fn decode_clip(
        &self,
        latents: &RawLatents,
        options: &DecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let _policy = self.enter();
        self.decode_whole(latents, options, observer, &mut |packed| sink(self.frames_of(&packed)?))
    }

    /// [`WanVae::decode_clip`] for latents that do not lie in memory: `fetch` gives the latent frames of a range, in order
    /// and each once. `extents` are the number of latent frames, rows and columns.
    ///
    /// With [`ClipPlan::Whole`] a few frames are asked for at a time, so neither latents nor frames pile up. Latents
    /// that are not finite are found when they are fetched.
    ///
    /// # Errors
    /// As [`WanVae::decode_clip`]; [`Error::Shape`] for latents of other extents; whatever `fetch` returns.
    pub fn decode_stream(
        &self,
        extents: (usize, usize, usize),
        fetch: &mut dyn FnMut(Range<usize>) -> Result<RawLatents>,
        options: &DecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let _policy = self.enter();
        self.decode_fetched(extents, fetch, options, observer, &mut |packed| sink(self.frames_of(&packed)?))
    }

    /// [`WanVae::decode_clip`] that gives bytes: interleaved pixels of each latent frame, on the host. On a device, frames
    /// are brought to bytes there and copied while the next ones are made.
    ///
    /// # Errors
    /// As [`WanVae::decode_clip`].
    pub fn decode_clip_rgb8(
        &self,
        latents: &RawLatents,
        options: &DecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(HostFrames) -> Result<()>,
    ) -> Result<()> {
        let _policy = self.enter();
        self.as_rgb8(sink, |emit| self.decode_whole(latents, options, observer, emit))
    }

    /// [`WanVae::decode_stream`] that gives bytes, as [`WanVae::decode_clip_rgb8`] does.
    ///
    /// # Errors
    /// As [`WanVae::decode_stream`].
    pub fn decode_stream_rgb8(
        &self,
        extents: (usize, usize, usize),
        fetch: &mut dyn FnMut(Range<usize>) -> Result<RawLatents>,
        options: &DecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(HostFrames) -> Result<()>,
    ) -> Result<()> {
        let _policy = self.enter();
        self.as_rgb8(sink, |emit| self.decode_fetched(extents, fetch, options, observer, emit))
    }

    /// Runs a decode whose latent frames, as the decoder leaves them, become bytes for `sink`.
    fn as_rgb8(
        &self,
        sink: &mut dyn FnMut(HostFrames) -> Result<()>,
        decode: impl FnOnce(&mut dyn FnMut(Tensor) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let unpack = self.architecture().unpack;
        let mut downloads = Downloads::default();
        let mut emit = |frames: Option<HostFrames>| match frames {
            Some(frames) if !frames.all_finite => Err(Error::NonFinite { what: "frames" }),
            Some(frames) => sink(frames),
            None => Ok(()),
        };
        decode(&mut |packed| emit(downloads.push(frames_to_rgb8(&packed, unpack.side(), pixel_order(unpack))?)?))?;
        emit(downloads.finish()?)
    }

    /// Latents in memory, which are all checked before anything is computed, and none again.
    fn decode_whole(
        &self,
        latents: &RawLatents,
        options: &DecodeOptions,
        observer: &dyn Observer,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let (_, count, height, width) = latents.extents();
        let latents = self.input(latents)?;
        let fetch = &mut |frames: Range<usize>| {
            Ok(latents.narrow(2, frames.start, frames.len()).what("frames of the latents")?)
        };
        self.decode_packed((count, height, width), fetch, options, observer, emit)
    }

    /// Latents that are checked as they are fetched.
    fn decode_fetched(
        &self,
        extents: (usize, usize, usize),
        fetch: &mut dyn FnMut(Range<usize>) -> Result<RawLatents>,
        options: &DecodeOptions,
        observer: &dyn Observer,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let (_, height, width) = extents;
        let fetch = &mut |frames: Range<usize>| {
            let wanted = (self.z_dim(), frames.len(), height, width);
            let latents = fetch(frames)?;
            let (channels, ..) = latents.extents();
            if channels == wanted.0 && latents.extents() != wanted {
                return Err(shape("latents", latents.tensor(), format!("{wanted:?}")));
            }
            self.input(&latents)
        };
        self.decode_packed(extents, fetch, options, observer, emit)
    }

    /// Latents as [`WanVae::input`] gives them to latent frames as the decoder leaves them, `[1, C, m, H, W]` each.
    fn decode_packed(
        &self,
        extents: (usize, usize, usize),
        fetch: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        options: &DecodeOptions,
        observer: &dyn Observer,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (count, height, width) = extents;
        let plan = self.decode_plan(extents, options)?;
        observer.notify(Event::Stage { name: "vae decode" })?;
        let chunk = memory::chunk(self.0.precision, height, width);
        // Runs of the first part and of the second.
        let runs = chunks(count, chunk).count();
        let (first, second) = match plan {
            ClipPlan::Whole => (runs, count),
            ClipPlan::Bands(bands) => (runs, count * bands),
            ClipPlan::Blended(geometry) => {
                let tiles = count * geometry.count(height, width);
                (tiles, tiles)
            }
        };
        let total = first * decoder.first_units() + second * decoder.second_units();
        let mut done = 0;
        let mut tick = || {
            done += 1;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        // Cut pictures are held until the last piece is done; beside them the latents are small.
        match plan {
            ClipPlan::Whole => {}
            ClipPlan::Bands(bands) => {
                let halos = self.architecture().decoder.as_ref().map(bands::decoder_halos).unwrap_or_default();
                return self.decode_bands(&fetch(0..count)?, bands, &halos, chunk, &mut tick, emit);
            }
            ClipPlan::Blended(geometry) => {
                return self.decode_blended(&fetch(0..count)?, geometry, &mut tick, emit);
            }
        }
        let mut state = DecoderState::new(self);
        for (first, frames) in chunks(count, chunk) {
            self.decode_with(&mut state, &fetch(first..first + frames)?, &mut tick, emit)?;
        }
        Ok(())
    }

    /// Latents `[1, z, n, h, w]` in bands with these halos.
    pub(crate) fn decode_bands(
        &self,
        latents: &Tensor,
        bands: usize,
        halos: &[Halo],
        chunk: usize,
        tick: Tick<'_>,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (_, _, count, height, _) = latents.dims5().what("latents")?;
        let mut cuts = Vec::new();
        let mut slots = decoder.slots();
        for (first, frames) in chunks(count, chunk) {
            slots.set_start(first == 0);
            let piece = latents.narrow(2, first, frames).what("frames of the latents")?;
            let cut = decoder.first_part(&piece, &mut slots, tick)?;
            for frame in 0..frames {
                cuts.push(cut.frame(frame)?);
            }
        }
        drop(slots);
        let mut pictures = vec![Vec::new(); count];
        for band in bands::split(height, bands) {
            let mut slots = decoder.slots();
            for (i, (cut, picture)) in cuts.iter().zip(&mut pictures).enumerate() {
                slots.set_start(i == 0);
                let window = Window::new(band.clone(), height, 1, halos);
                let rows = decoder.second_part(cut.rows(&window)?, Some(window), &mut slots, tick)?;
                picture.push(rows);
            }
        }
        drop(cuts);
        for bands in pictures {
            emit(Tensor::cat(&bands, 3).what("bands of a picture")?)?;
        }
        Ok(())
    }
}

/// The first latent frame of a clip alone, then `chunk` at a time: first and number.
fn chunks(count: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    let later = (1..count).step_by(chunk).map(move |first| (first, chunk.min(count - first)));
    std::iter::once((0, count.min(1))).filter(|&(_, frames)| frames > 0).chain(later)
}
