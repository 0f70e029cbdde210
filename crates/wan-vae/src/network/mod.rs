//! Encoder and decoder, put together from layers.

mod decoder;
mod encoder;
mod middle;

pub(crate) use self::{decoder::Decoder, encoder::Encoder};

/// Called between units of work; an error ends the run.
pub(crate) type Tick<'a> = &'a mut dyn FnMut() -> crate::error::Result<()>;
