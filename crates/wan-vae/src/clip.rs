//! Whole clips, with progress, cancellation and a memory budget.

use candle_core::{Device, Tensor};
use candle_fork::What;
use policy::{Event, Observer};

use crate::{
    bands::{self, Window},
    error::{Error, Result},
    latents::RawLatents,
    memory::{self, DecodePlan},
    network::Tick,
    options::{DecodeOptions, EncodeOptions, Remainder},
    state::{DecoderState, EncoderState},
    vae::{WanVae, finished},
};

/// What [`WanVae::encode_clip`] made of a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedClip {
    /// Frames that the clip had.
    pub frames: usize,
    /// Latent frames made.
    pub latents: usize,
    /// Frames at the end that were left out.
    pub trimmed: usize,
    /// Copies of the last frame that were added.
    pub repeated: usize,
}

impl WanVae {
    /// How [`WanVae::decode_clip`] goes about latents of so many frames, rows and columns.
    ///
    /// # Errors
    /// [`Error::Memory`] if nothing fits the limit; [`Error::Tiling`] for a number of bands that is not possible.
    pub fn decode_plan(&self, extents: (usize, usize, usize), options: &DecodeOptions) -> Result<DecodePlan> {
        memory::plan(self.architecture(), self.0.weight_size, extents, options)
    }

    /// Decodes a clip: `sink` gets the frames of each latent frame in order, `[C, m, H, W]` f32 in -1..=1, with m 1 and
    /// then the temporal factor.
    ///
    /// With [`DecodePlan::Whole`] frames leave as they are done and memory does not grow with the clip; with bands they
    /// leave when the last band is done. Both give the same bits. The observer hears of one stage, `vae decode`, and of
    /// progress between layers, and can stop the run there.
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
        let decoder = self.require_decoder()?;
        let (_, count, height, width) = latents.extents();
        let checked = self.input(latents)?;
        let plan = self.decode_plan((count, height, width), options)?;
        observer.notify(Event::Stage { name: "vae decode" })?;
        let chunk = memory::chunk(height, width);
        // Runs of the first part and of the second.
        let runs = 1 + (count - 1).div_ceil(chunk);
        let (first, second) = match plan {
            DecodePlan::Whole => (runs, count),
            DecodePlan::Bands(bands) => (runs, count * bands),
            DecodePlan::Blended(geometry) => {
                let tiles = count * geometry.along(height).len() * geometry.along(width).len();
                (tiles, tiles)
            }
        };
        let total = first * decoder.first_units() + second * decoder.second_units();
        let mut done = 0;
        let mut tick = || {
            done += 1;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        match plan {
            DecodePlan::Whole => {}
            DecodePlan::Bands(bands) => return self.decode_bands(&checked, bands, chunk, &mut tick, sink),
            DecodePlan::Blended(geometry) => return self.decode_blended(&checked, geometry, &mut tick, sink),
        }
        let mut state = DecoderState::new(self);
        for (first, frames) in chunks(count, chunk) {
            self.decode_with(&mut state, &latents.frames(first, frames)?, &mut tick, sink)?;
        }
        Ok(())
    }

    fn decode_bands(
        &self,
        latents: &Tensor,
        bands: usize,
        chunk: usize,
        tick: Tick<'_>,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let halos = self.architecture().decoder.as_ref().map(bands::halos).unwrap_or_default();
        self.decode_bands_with(latents, bands, &halos, chunk, tick, sink)
    }

    /// Latents `[1, z, n, h, w]` in bands with these halos.
    pub(crate) fn decode_bands_with(
        &self,
        latents: &Tensor,
        bands: usize,
        halos: &[usize],
        chunk: usize,
        tick: Tick<'_>,
        sink: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (_, _, count, height, width) = latents.dims5().what("latents")?;
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
        let factor = self.spatial_factor();
        let mut pictures: Vec<Picture> = (0..count)
            .map(|i| {
                let frames = if i == 0 { 1 } else { self.temporal_factor() };
                Picture::new(self.architecture().out_channels() * frames, height * factor, width * factor)
            })
            .collect();
        for band in bands::split(height, bands) {
            let mut slots = decoder.slots();
            let top = band.start * factor;
            for (i, (cut, picture)) in cuts.iter().zip(&mut pictures).enumerate() {
                slots.set_start(i == 0);
                let window = Window::new(band.clone(), height, halos);
                let rows = decoder.second_part(cut.rows(&window)?, Some(window), &mut slots, tick)?;
                picture.put(top, &finished(&decoder.unpack(&rows)?)?)?;
            }
        }
        for picture in pictures {
            sink(picture.into_tensor(self.architecture().out_channels(), &self.0.device)?)?;
        }
        Ok(())
    }

    /// Encodes a clip: `frames` gives tensors `[C, m, H, W]` in -1..=1 with any m, `sink` gets latents as they become
    /// whole. Memory does not grow with the clip. The observer hears of one stage, `vae encode`, and of progress in
    /// frames (of as many as `frames` says that it has at most, or has given), and can stop the run between layers.
    ///
    /// # Errors
    /// As [`WanVae::encode`]; [`Error::Frames`] for a clip without frames, or of a length that
    /// [`EncodeOptions::remainder`] refuses, at its end; [`Error::Cancelled`]; whatever `frames` or `sink` return.
    pub fn encode_clip(
        &self,
        frames: &mut dyn Iterator<Item = Result<Tensor>>,
        options: &EncodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(RawLatents) -> Result<()>,
    ) -> Result<EncodedClip> {
        observer.notify(Event::Stage { name: "vae encode" })?;
        let mut state = EncoderState::new(self);
        let mut seen = 0;
        let mut take = |frames: &Tensor, left: Option<usize>, state: &mut EncoderState| {
            seen += frames.dims().get(1).copied().unwrap_or(0);
            let (done, total) = (seen, seen + left.unwrap_or(0));
            let mut tick = || Ok(observer.notify(Event::Progress { done: done.saturating_sub(1), total })?);
            if let Some(latents) = self.encode_with(state, frames, &mut tick)? {
                sink(latents)?;
            }
            Ok::<_, Error>(observer.notify(Event::Progress { done, total })?)
        };
        while let Some(next) = frames.next() {
            let left = frames.size_hint().1;
            take(&next?, left, &mut state)?;
        }
        let count = state.frames();
        let group = self.temporal_factor();
        let waiting = state.waiting.clone();
        let left = waiting.as_ref().map_or(0, |waiting| waiting.dims()[1]);
        let refused = count == 0 || (left > 0 && options.remainder == Remainder::Refuse);
        if refused {
            return Err(Error::Frames { got: count, group, nearest: nearest(count, group) });
        }
        let mut clip = EncodedClip { frames: count, latents: state.latents, trimmed: left, repeated: 0 };
        if let (Remainder::Repeat, Some(waiting)) = (options.remainder, waiting) {
            let last = waiting.narrow(1, left - 1, 1).and_then(|last| last.repeat((1, group - left, 1, 1)));
            take(&last.what("copies of the last frame")?, Some(0), &mut state)?;
            clip = EncodedClip { latents: state.latents, trimmed: 0, repeated: group - left, ..clip };
        }
        Ok(clip)
    }
}

/// Legal lengths around `count`, in words.
fn nearest(count: usize, group: usize) -> String {
    match count {
        0 => "1".to_owned(),
        _ => {
            let below = (count - 1) / group * group + 1;
            format!("{below} or {}", below + group)
        }
    }
}

/// The first latent frame of a clip alone, then `chunk` at a time: first and number.
fn chunks(count: usize, chunk: usize) -> impl Iterator<Item = (usize, usize)> {
    let later = (1..count).step_by(chunk).map(move |first| (first, chunk.min(count - first)));
    std::iter::once((0, count.min(1))).filter(|&(_, frames)| frames > 0).chain(later)
}

/// Frames that are put together from bands.
struct Picture {
    /// `[planes, height, width]`.
    values: Vec<f32>,
    height: usize,
    width: usize,
}

impl Picture {
    fn new(planes: usize, height: usize, width: usize) -> Self {
        Self { values: vec![0.0; planes * height * width], height, width }
    }

    /// `rows` `[C, m, rows, W]` from row `top` on.
    fn put(&mut self, top: usize, rows: &Tensor) -> Result<()> {
        let band: Vec<f32> = rows.flatten_all().and_then(|rows| rows.to_vec1()).what("rows of a band")?;
        let (_, _, height, width) = rows.dims4().what("rows of a band")?;
        let planes = self.values.chunks_exact_mut(self.height * self.width);
        for (plane, band) in planes.zip(band.chunks_exact((height * width).max(1))) {
            plane[top * width..][..band.len()].copy_from_slice(band);
        }
        Ok(())
    }

    fn into_tensor(self, channels: usize, device: &Device) -> Result<Tensor> {
        let frames = self.values.len() / (channels * self.height * self.width).max(1);
        let dims = (channels, frames, self.height, self.width);
        Ok(Tensor::from_vec(self.values, dims, device).what("frames of a clip")?)
    }
}
