//! The VAE.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::{Backends, BackendsGuard};

use crate::{
    architecture::Architecture,
    error::{Error, Result, shape},
    latents::{NormalizedLatents, RawLatents, Statistics},
    memory::Precision,
    network::{Decoder, Encoder, Tick},
    state::{DecoderState, EncoderState},
};

/// A Wan VAE: encoder, decoder, or both. Cloning shares the weights; threads may use one VAE at the same time.
#[derive(Debug, Clone)]
pub struct WanVae(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) architecture: Architecture,
    pub(crate) statistics: Option<Statistics>,
    pub(crate) encoder: Option<Encoder>,
    pub(crate) decoder: Option<Decoder>,
    pub(crate) device: Device,
    pub(crate) precision: Precision,
    pub(crate) backends: Backends,
}

impl WanVae {
    /// What the network looks like.
    pub fn architecture(&self) -> &Architecture {
        &self.0.architecture
    }

    /// Element types, and where it computes.
    pub fn precision(&self) -> Precision {
        self.0.precision
    }

    /// Channels of the latents.
    pub fn z_dim(&self) -> usize {
        self.0.architecture.z_dim
    }

    /// Pixels of the decoder's output per latent, in height and width.
    pub fn spatial_factor(&self) -> usize {
        self.0.architecture.spatial_factor()
    }

    /// Frames per latent frame behind the first.
    pub fn temporal_factor(&self) -> usize {
        self.0.architecture.temporal_factor()
    }

    /// Frames that so many latent frames stand for.
    pub fn frames(&self, latents: usize) -> usize {
        self.0.architecture.frames(latents)
    }

    /// Whether the weights hold an encoder.
    pub fn has_encoder(&self) -> bool {
        self.0.encoder.is_some()
    }

    /// Whether the weights hold a decoder.
    pub fn has_decoder(&self) -> bool {
        self.0.decoder.is_some()
    }

    /// Mean and standard deviation of the latents, if they are known.
    pub fn statistics(&self) -> Option<&Statistics> {
        self.0.statistics.as_ref()
    }

    /// What a transformer sees of these latents.
    ///
    /// # Errors
    /// [`Error::Channels`]; [`Error::Statistics`] if they are not known for this VAE.
    pub fn normalize(&self, latents: &RawLatents) -> Result<NormalizedLatents> {
        self.require_statistics()?.normalize(latents)
    }

    /// What the network decodes for latents of a transformer.
    ///
    /// # Errors
    /// [`Error::Channels`]; [`Error::Statistics`] if they are not known for this VAE.
    pub fn denormalize(&self, latents: &NormalizedLatents) -> Result<RawLatents> {
        self.require_statistics()?.denormalize(latents)
    }

    fn require_statistics(&self) -> Result<&Statistics> {
        let unknown = || Error::Statistics {
            field: "latents_mean",
            got: "no values".to_owned(),
            expected: format!("{} of a configuration: they are not in the weights", self.z_dim()),
        };
        self.0.statistics.as_ref().ok_or_else(unknown)
    }

    /// The next frames of a stream: `[C, m, H, W]` f32, clamped to -1..=1, of n latent frames `[z, n, h, w]`. m is
    /// `f n`, less `f - 1` at the start of the stream, with the temporal factor f.
    ///
    /// The frames do not depend, not by a bit, on how the stream is cut into calls.
    ///
    /// # Errors
    /// [`Error::Missing`] without a decoder; [`Error::Channels`], [`Error::NonFiniteLatents`] for latents that are not of
    /// this VAE or damaged; [`Error::ForeignState`], [`Error::BrokenState`], [`Error::ExtentsChanged`] for a state that
    /// cannot go on; [`Error::NonFinite`] if finite latents give none.
    pub fn decode(&self, state: &mut DecoderState, latents: &RawLatents) -> Result<Tensor> {
        let _policy = self.enter();
        self.require_decoder()?;
        let (_, _, height, width) = latents.extents();
        state.0.check(self, (height, width))?;
        let mut frames = Vec::new();
        self.decode_with(state, &self.input(latents)?, &mut || Ok(()), &mut |packed| {
            frames.push(self.frames_of(&packed)?);
            Ok(())
        })?;
        join(frames, "frames of a clip")
    }

    /// Puts the backends of this VAE in force on the thread.
    pub(crate) fn enter(&self) -> BackendsGuard {
        self.0.backends.enter()
    }

    /// What the decoder gave as frames `[C, m, H, W]` f32, checked and clamped.
    pub(crate) fn frames_of(&self, packed: &Tensor) -> Result<Tensor> {
        let pixels = self.require_decoder()?.unpack(packed)?;
        let pixels = pixels.to_dtype(DType::F32).what("frames")?;
        if not_finite(&pixels)?.is_some() {
            return Err(Error::NonFinite { what: "frames" });
        }
        Ok(pixels.clamp(-1f32, 1f32).what("clamped frames")?)
    }

    /// [`Self::decode`] of latents from [`Self::input`] with a state that may go on with them, which gives each latent
    /// frame as the decoder leaves it, `[1, C, m, H, W]`, to `emit` and calls `tick` between layers.
    pub(crate) fn decode_with(
        &self,
        state: &mut DecoderState,
        latents: &Tensor,
        tick: Tick<'_>,
        emit: &mut dyn FnMut(Tensor) -> Result<()>,
    ) -> Result<()> {
        let decoder = self.require_decoder()?;
        let (_, _, count, height, width) = latents.dims5().what("latents")?;
        let _span = tracing::debug_span!("vae.decode", shape = ?latents.dims()).entered();
        state.0.run((height, width), |stream| {
            for (first, frames) in pieces(stream.seen, count) {
                stream.slots.set_start(stream.seen == 0);
                let piece = latents.narrow(2, first, frames).what("frames of the latents")?;
                let cut = decoder.first_part(&piece, &mut stream.slots, tick)?;
                for frame in 0..frames {
                    let packed = decoder.second_part(cut.frame(frame)?, None, &mut stream.slots, tick)?;
                    stream.seen += 1;
                    emit(packed)?;
                }
            }
            Ok(())
        })
    }

    pub(crate) fn require_decoder(&self) -> Result<&Decoder> {
        self.0.decoder.as_ref().ok_or(Error::Missing { part: "decoder" })
    }

    /// Checked latents as the decoder takes them, `[1, z, n, h, w]`.
    pub(crate) fn input(&self, latents: &RawLatents) -> Result<Tensor> {
        let (channels, ..) = latents.extents();
        if channels != self.z_dim() {
            return Err(Error::Channels { got: channels, expected: self.z_dim() });
        }
        let latents = self.on_device(latents.tensor(), "latents")?;
        if let Some((channel, frame, value)) = not_finite(&latents)? {
            return Err(Error::NonFiniteLatents { value, channel, frame });
        }
        Ok(latents.unsqueeze(0).and_then(|latents| latents.to_dtype(self.0.precision.activations)).what("latents")?)
    }

    fn on_device(&self, x: &Tensor, what: &'static str) -> Result<Tensor> {
        let wide = x.to_dtype(DType::F32).and_then(|x| x.to_device(&self.0.device)?.contiguous());
        Ok(wide.what(what)?)
    }

    /// Takes the next frames of a stream, `[C, m, H, W]` in -1..=1, and gives the latents that have become whole: the
    /// first frame makes one, then every f frames do, with the temporal factor f. What is left waits in the state for the
    /// next call. Latents are the mean of the encoder's distribution, f32.
    ///
    /// The latents do not depend, not by a bit, on how the stream is cut into calls.
    ///
    /// # Errors
    /// [`Error::Missing`] without an encoder; [`Error::Shape`], [`Error::Size`], [`Error::NonFiniteFrames`] for frames
    /// that cannot be encoded; [`Error::ForeignState`], [`Error::BrokenState`], [`Error::ExtentsChanged`] for a state
    /// that cannot go on; [`Error::NonFinite`] if finite frames give none.
    pub fn encode(&self, state: &mut EncoderState, frames: &Tensor) -> Result<Option<RawLatents>> {
        let _policy = self.enter();
        self.encode_with(state, frames, &mut || Ok(()))
    }

    /// [`Self::encode`] that calls `tick` between layers.
    pub(crate) fn encode_with(
        &self,
        state: &mut EncoderState,
        frames: &Tensor,
        tick: Tick<'_>,
    ) -> Result<Option<RawLatents>> {
        let encoder = self.require_encoder()?;
        let (count, height, width) = self.frame_extents(frames)?;
        state.stream.check(self, (height, width))?;
        let mut frames = self.packable(frames)?;
        let _span = tracing::debug_span!("vae.encode", shape = ?frames.dims()).entered();
        let EncoderState { stream, waiting, latents: made } = state;
        stream.run((height, width), |stream| {
            if let Some(waiting) = waiting.take() {
                frames = Tensor::cat(&[&waiting, &frames], 1).what("frames of a group")?;
            }
            let group = self.temporal_factor();
            let present = frames.dim(1).what("frames of a group")?;
            let (mut next, mut latents) = (0, Vec::new());
            loop {
                let wanted = if *made == 0 { 1 } else { group };
                if present - next < wanted {
                    break;
                }
                stream.slots.set_start(*made == 0);
                let piece = frames.narrow(1, next, wanted).what("frames of a group")?;
                latents.push(encoder.forward(&piece, &mut stream.slots, tick)?);
                next += wanted;
                *made += 1;
            }
            stream.seen += count;
            if next < present {
                let rest = frames.narrow(1, next, present - next).and_then(|rest| rest.force_contiguous());
                *waiting = Some(rest.what("frames of a group")?);
            }
            if latents.is_empty() {
                return Ok(None);
            }
            let latents = join(latents, "latents of a clip")?;
            encoded(latents).map(Some)
        })
    }

    pub(crate) fn require_encoder(&self) -> Result<&Encoder> {
        self.0.encoder.as_ref().ok_or(Error::Missing { part: "encoder" })
    }

    /// Checked number, height and width of frames `[C, m, H, W]`.
    pub(crate) fn frame_extents(&self, frames: &Tensor) -> Result<(usize, usize, usize)> {
        let channels = self.architecture().in_channels();
        let (count, height, width) = match *frames.dims() {
            [c, m, h, w] if c == channels && m > 0 => (m, h, w),
            _ => return Err(shape("frames", frames, format!("[{channels}, m, H, W]"))),
        };
        let multiple = self.architecture().encoder_spatial_factor();
        for (axis, got) in [("height", height), ("width", width)] {
            if got == 0 || !got.is_multiple_of(multiple) {
                return Err(Error::Size { axis, got, multiple });
            }
        }
        Ok((count, height, width))
    }

    /// Checked frames `[C, m, H, W]` as the encoder takes them.
    pub(crate) fn packable(&self, frames: &Tensor) -> Result<Tensor> {
        self.frame_extents(frames)?;
        let frames = self.on_device(frames, "frames")?;
        if let Some((channel, frame, value)) = not_finite(&frames)? {
            return Err(Error::NonFiniteFrames { value, channel, frame });
        }
        Ok(frames.to_dtype(self.0.precision.activations).what("frames")?)
    }
}

/// Runs of latent frames that the first part of the decoder takes at once: first and number. The first of a stream goes
/// alone.
fn pieces(seen: usize, count: usize) -> impl Iterator<Item = (usize, usize)> {
    let alone = if seen == 0 { count.min(1) } else { 0 };
    [(0, alone), (alone, count - alone)].into_iter().filter(|&(_, frames)| frames > 0)
}

/// Checked latents `[z, n, h, w]`.
pub(crate) fn encoded(latents: Tensor) -> Result<RawLatents> {
    let latents = latents.to_dtype(DType::F32).what("latents")?;
    if not_finite(&latents)?.is_some() {
        return Err(Error::NonFinite { what: "latents" });
    }
    RawLatents::new(latents)
}

/// Channel, frame and value of the first element of `[C, T, H, W]` that is not finite.
fn not_finite(x: &Tensor) -> Result<Option<(usize, usize, f32)>> {
    const WHAT: &str = "check of values";
    if !x.device().is_cpu() {
        // One number comes back instead of all: a value that is not finite makes the sum NaN.
        let sum = x.affine(0.0, 0.0).and_then(|zeros| zeros.sum_all()?.to_scalar::<f32>()).what(WHAT)?;
        if sum == 0.0 {
            return Ok(None);
        }
    }
    let values: Vec<f32> = x.flatten_all().and_then(|x| x.to_vec1()).what(WHAT)?;
    let Some(index) = values.iter().position(|v| !v.is_finite()) else { return Ok(None) };
    let (_, frames, height, width) = x.dims4().what(WHAT)?;
    let plane = (height * width).max(1);
    Ok(Some((index / (frames * plane).max(1), index / plane % frames.max(1), values[index])))
}

/// Pieces of a clip, in order, as one tensor.
pub(crate) fn join(mut pieces: Vec<Tensor>, what: &'static str) -> Result<Tensor> {
    match pieces.pop() {
        Some(only) if pieces.is_empty() => Ok(only),
        Some(last) => {
            pieces.push(last);
            Ok(Tensor::cat(&pieces, 1).what(what)?)
        }
        None => Err(Error::Shape { what, got: Vec::new(), expected: "at least one".to_owned() }),
    }
}
