//! Whole clips encoded, with progress, cancellation and a memory budget.

use candle_core::Tensor;
use candle_fork::What;
use policy::{Event, Observer};

use crate::{
    bands::{self, Halo, Window},
    error::{Error, Result},
    latents::RawLatents,
    memory::{self, ClipPlan},
    network::Tick,
    options::{EncodeOptions, Remainder},
    state::EncoderState,
    vae::{WanVae, encoded},
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

/// Tensors `[C, m, H, W]` of a clip, in order.
type Frames<'a> = &'a mut dyn Iterator<Item = Result<Tensor>>;

impl WanVae {
    /// How [`WanVae::encode_clip`] goes about so many frames, rows and columns of pixels.
    ///
    /// # Errors
    /// [`Error::Memory`] if nothing fits the limit; [`Error::Tiling`] for bands or tiles that are not possible.
    pub fn encode_plan(&self, extents: (usize, usize, usize), options: &EncodeOptions) -> Result<ClipPlan> {
        memory::encode_plan(self.architecture(), self.0.precision, extents, options)
    }

    /// Encodes a clip: `frames` gives tensors `[C, m, H, W]` in -1..=1 with any m, `sink` gets latents `[z, n, h, w]`.
    ///
    /// With [`ClipPlan::Whole`] latents leave as they become whole, and memory does not grow with the clip; with bands
    /// or tiles all frames are taken first, and latents leave at the end. Bands give the same result as whole pictures
    /// ([`Tiling::Bands`](crate::Tiling::Bands)).
    /// The observer hears of one stage, `vae encode`, and of progress (in frames, of as many as `frames` says that it
    /// has at most or has given, or in layers with bands or tiles), and can stop the run between layers.
    ///
    /// # Errors
    /// As [`WanVae::encode`] and [`WanVae::encode_plan`]; [`Error::Frames`] for a clip without frames, or of a length
    /// that [`EncodeOptions::remainder`] refuses, at its end; [`Error::Cancelled`]; whatever `frames` or `sink` return.
    pub fn encode_clip(
        &self,
        frames: Frames<'_>,
        options: &EncodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(RawLatents) -> Result<()>,
    ) -> Result<EncodedClip> {
        self.require_encoder()?;
        let _policy = self.enter();
        observer.notify(Event::Stage { name: "vae encode" })?;
        let mut frames = frames.peekable();
        let only = frames.size_hint().1 == Some(1);
        if let Some(Ok(first)) = frames.peek() {
            let (count, height, width) = self.frame_extents(first)?;
            // What comes behind is not known, and whole pictures need as much for any length but that of a picture.
            let least = if only { count } else { count.max(1 + self.temporal_factor()) };
            if self.encode_plan((least, height, width), options)? != ClipPlan::Whole {
                return self.encode_held(&mut frames, options, observer, sink);
            }
        }
        self.encode_whole(&mut frames, options, observer, sink)
    }

    fn encode_whole(
        &self,
        frames: Frames<'_>,
        options: &EncodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(RawLatents) -> Result<()>,
    ) -> Result<EncodedClip> {
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
        let clip = settle(state.frames(), self.temporal_factor(), options.remainder)?;
        if let Some(waiting) = state.waiting.clone().filter(|_| clip.repeated > 0) {
            let last = waiting.dim(1).and_then(|n| waiting.narrow(1, n - 1, 1)?.repeat((1, clip.repeated, 1, 1)));
            take(&last.what("copies of the last frame")?, Some(0), &mut state)?;
        }
        Ok(clip)
    }

    /// Takes all frames before it encodes them, piece by piece.
    fn encode_held(
        &self,
        frames: Frames<'_>,
        options: &EncodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(RawLatents) -> Result<()>,
    ) -> Result<EncodedClip> {
        const WHAT: &str = "frames of a clip";
        let mut held: Vec<Tensor> = Vec::new();
        let mut extents = None;
        for next in frames {
            let next = self.packable(&next?)?;
            let (channels, count, height, width) = next.dims4().what(WHAT)?;
            let got = (height, width);
            let began = *extents.get_or_insert(got);
            if began != got {
                return Err(Error::ExtentsChanged { began, got });
            }
            for i in 0..count {
                held.push(next.narrow(1, i, 1).and_then(|frame| frame.force_contiguous()).what(WHAT)?);
            }
            // Frames that alone take more than the limit: the plan says how much is needed.
            let bytes = 4 * (held.len() * channels * height * width) as u64;
            if options.max_bytes.is_some_and(|limit| bytes > limit) {
                self.encode_plan((held.len(), height, width), options)?;
            }
            observer.notify(Event::Progress { done: 0, total: held.len() })?;
        }
        let clip = settle(held.len(), self.temporal_factor(), options.remainder)?;
        held.truncate(clip.frames - clip.trimmed);
        held.extend(held.last().cloned().into_iter().cycle().take(clip.repeated));
        let (height, width) = extents.unwrap_or_default();
        let plan = self.encode_plan((held.len(), height, width), options)?;
        let groups = grouped(held, self.temporal_factor())?;

        let encoder = self.require_encoder()?;
        let factor = self.architecture().encoder_spatial_factor();
        let (first, second) = match plan {
            ClipPlan::Whole => (1, 1),
            ClipPlan::Bands(bands) => (bands, 1),
            ClipPlan::Blended(geometry) => {
                let tiles = geometry.count(height / factor, width / factor);
                (tiles, tiles)
            }
        };
        let total = clip.latents * (first * encoder.first_units() + second * encoder.second_units());
        let mut done = 0;
        let mut tick = || {
            done += 1;
            Ok(observer.notify(Event::Progress { done, total })?)
        };
        if let ClipPlan::Blended(geometry) = plan {
            sink(encoded(self.encode_blended(&groups, geometry, &mut tick)?)?)?;
        } else {
            let halos = self.architecture().encoder.as_ref().map(bands::encoder_halos).unwrap_or_default();
            self.encode_bands(&groups, first, &halos, &mut tick, sink)?;
        }
        Ok(clip)
    }

    /// The frames of each latent frame, `[C, m, H, W]`, in bands with these halos.
    pub(crate) fn encode_bands(
        &self,
        groups: &[Tensor],
        bands: usize,
        halos: &[Halo],
        tick: Tick<'_>,
        sink: &mut dyn FnMut(RawLatents) -> Result<()>,
    ) -> Result<()> {
        const WHAT: &str = "rows of a band";
        let encoder = self.require_encoder()?;
        let architecture = self.architecture();
        let factor = architecture.encoder_spatial_factor();
        let scale = factor / architecture.patch_size;
        let rows = groups.first().map_or(Ok(0), |group| group.dim(2)).what(WHAT)? / factor;
        let mut cuts = vec![Vec::new(); groups.len()];
        for band in bands::split(rows, bands) {
            let mut slots = encoder.slots();
            for (i, (group, cut)) in groups.iter().zip(&mut cuts).enumerate() {
                slots.set_start(i == 0);
                let window = Window::new(band.clone(), rows, scale, halos);
                let packed = window.cut(&encoder.pack(group)?).what(WHAT)?;
                cut.push(encoder.first_part(packed, Some(window), &mut slots, tick)?);
            }
        }
        let mut slots = encoder.slots();
        for (i, cut) in cuts.into_iter().enumerate() {
            slots.set_start(i == 0);
            let x = Tensor::cat(&cut, 3).what(WHAT)?;
            drop(cut);
            sink(encoded(encoder.second_part(x, &mut slots, tick)?)?)?;
        }
        Ok(())
    }
}

/// The first frame by itself, then `group` at a time.
fn grouped(frames: Vec<Tensor>, group: usize) -> Result<Vec<Tensor>> {
    let mut frames = frames.into_iter();
    let mut groups: Vec<Tensor> = frames.next().into_iter().collect();
    loop {
        let next: Vec<Tensor> = frames.by_ref().take(group).collect();
        if next.is_empty() {
            return Ok(groups);
        }
        groups.push(Tensor::cat(&next, 1).what("frames of a group")?);
    }
}

/// What `remainder` makes of a clip of `count` frames.
fn settle(count: usize, group: usize, remainder: Remainder) -> Result<EncodedClip> {
    let left = count.checked_sub(1).map(|later| later % group);
    let (trimmed, repeated) = match (left, remainder) {
        (Some(0), _) => (0, 0),
        (Some(left), Remainder::Trim) => (left, 0),
        (Some(left), Remainder::Repeat) => (0, group - left),
        (Some(_), Remainder::Refuse) | (None, _) => {
            return Err(Error::Frames { got: count, group, nearest: nearest(count, group) });
        }
    };
    let latents = (count - trimmed + repeated).div_ceil(group);
    Ok(EncodedClip { frames: count, latents, trimmed, repeated })
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
