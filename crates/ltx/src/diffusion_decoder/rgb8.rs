//! Frames as bytes on the host.

use candle_core::Tensor;
use candle_fork::{
    What,
    frames::{Downloads, HostFrames, PatchOrder, frames_to_rgb8},
};
use policy::Observer;

use super::{DecodeOptions, DiffusionDecoder};
use crate::error::{Error, Result, shape};

/// Frames that are made bytes and brought to the host in one go.
const RUN: usize = 8;

impl DiffusionDecoder {
    /// [`DiffusionDecoder::decode`] of one clip that hands over its frames as bytes, in order.
    ///
    /// # Errors
    /// As [`DiffusionDecoder::decode`]; [`Error::Shape`] for a batch; errors of `sink`.
    pub fn decode_rgb8(
        &self,
        latents: &Tensor,
        options: &DecodeOptions,
        observer: &dyn Observer,
        sink: &mut dyn FnMut(HostFrames) -> Result<()>,
    ) -> Result<()> {
        if latents.dims().first() != Some(&1) {
            return Err(shape("latents", latents, "one clip, [1, C, T, H, W]"));
        }
        let _backends = self.backends.enter();
        let pixels = self.decode(latents, options, observer)?;
        let frames = pixels.dim(2).what("frames")?;
        let mut downloads = Downloads::default();
        let mut emit = |frames: Option<HostFrames>| match frames {
            Some(frames) if !frames.all_finite => Err(Error::NonFinite { what: "frames" }),
            Some(frames) => sink(frames),
            None => Ok(()),
        };
        for start in (0..frames).step_by(RUN) {
            let run = pixels.narrow(2, start, RUN.min(frames - start)).what("frames")?;
            emit(downloads.push(frames_to_rgb8(&run, 1, PatchOrder::RowMajor)?)?)?;
        }
        emit(downloads.finish()?)
    }
}
