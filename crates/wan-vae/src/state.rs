//! What a stream carries from one call to the next.

use std::sync::Weak;

use candle_core::Tensor;

use crate::{
    error::{Error, Result},
    layers::Slots,
    vae::{Inner, WanVae},
};

/// Where a stream of latents stands. Clone it to go on twice from one point; drop it at any time.
///
/// It belongs to the VAE that it was made for, and to one height and width from its first call on.
#[derive(Debug, Clone)]
pub struct DecoderState(pub(crate) Stream);

impl DecoderState {
    /// The start of a stream.
    pub fn new(vae: &WanVae) -> Self {
        Self(Stream::new(vae, vae.0.decoder.as_ref().map(|decoder| decoder.slots())))
    }

    /// Latent frames seen.
    pub fn latents(&self) -> usize {
        self.0.seen
    }

    /// Bytes that the state holds.
    pub fn bytes(&self) -> u64 {
        self.0.slots.bytes()
    }
}

/// Where a stream of frames stands. Clone it to go on twice from one point; drop it at any time.
///
/// It belongs to the VAE that it was made for, and to one height and width from its first call on.
#[derive(Debug, Clone)]
pub struct EncoderState {
    pub(crate) stream: Stream,
    /// Frames `[C, n, H, W]` of a group that is not whole yet.
    pub(crate) waiting: Option<Tensor>,
    pub(crate) latents: usize,
}

/// What is left when a stream of frames ends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Leftover {
    /// Latent frames made.
    pub latents: usize,
    /// Frames that no latent frame stands for: those of the last group, which was not whole.
    pub frames: usize,
    /// These frames, `[C, frames, H, W]`.
    pub waiting: Option<Tensor>,
}

impl EncoderState {
    /// The start of a stream.
    pub fn new(vae: &WanVae) -> Self {
        let slots = vae.0.encoder.as_ref().map(|encoder| encoder.slots());
        Self { stream: Stream::new(vae, slots), waiting: None, latents: 0 }
    }

    /// Frames seen, those of a group that is not whole yet included.
    pub fn frames(&self) -> usize {
        self.stream.seen
    }

    /// Ends the stream and says what was left of it.
    ///
    /// # Errors
    /// [`Error::BrokenState`] if a call failed half-way.
    pub fn finish(self) -> Result<Leftover> {
        if self.stream.broken {
            return Err(Error::BrokenState);
        }
        let frames = self.waiting.as_ref().map_or(0, |waiting| waiting.dims().get(1).copied().unwrap_or(0));
        Ok(Leftover { latents: self.latents, frames, waiting: self.waiting })
    }
}

/// What both kinds of state have.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    vae: Weak<Inner>,
    pub(crate) slots: Slots,
    /// Frames taken in.
    pub(crate) seen: usize,
    extents: Option<(usize, usize)>,
    broken: bool,
}

impl Stream {
    fn new(vae: &WanVae, slots: Option<Slots>) -> Self {
        Self {
            vae: std::sync::Arc::downgrade(&vae.0),
            slots: slots.unwrap_or_else(|| Slots::new(0)),
            seen: 0,
            extents: None,
            broken: false,
        }
    }

    /// Checks that a call of these extents may go on.
    pub(crate) fn check(&self, vae: &WanVae, extents: (usize, usize)) -> Result<()> {
        if !std::ptr::eq(self.vae.as_ptr(), std::sync::Arc::as_ptr(&vae.0)) {
            return Err(Error::ForeignState);
        }
        if self.broken {
            return Err(Error::BrokenState);
        }
        match self.extents {
            Some(began) if began != extents => Err(Error::ExtentsChanged { began, got: extents }),
            _ => Ok(()),
        }
    }

    /// Runs a call that has passed [`Self::check`]. If it fails, some layers have seen its frames and others have not, so
    /// the state can no longer be used. (Keeping what was before, to go back to it, would double the memory.)
    pub(crate) fn run<R>(&mut self, extents: (usize, usize), call: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.broken = true;
        let result = call(self)?;
        self.broken = false;
        self.extents = Some(extents);
        Ok(result)
    }
}
