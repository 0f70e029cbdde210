//! Animated GIF out.

use std::path::{Path, PathBuf};

use gif::{Encoder, EncodingError, Frame, Repeat};

use super::target::Target;
use super::{FrameRate, FrameSink, VideoFormat, VideoOptions};
use crate::{Error, Result, Rgb8};

/// Browsers take a shorter display than 1/50 s for a mistake and show the frame for 1/10 s.
const MAX_FPS: u32 = 50;

/// NeuQuant learns the palette of a picture from about this many of its pixels, and from each tenth at least.
const PALETTE_PIXELS: usize = 40_000;

/// Frames with a palette each, shown again and again.
pub(super) struct GifWriter {
    path: PathBuf,
    encoder: Encoder<Target>,
    fps: FrameRate,
    written: u64,
}

impl GifWriter {
    pub(super) fn create(path: &Path, options: &VideoOptions) -> Result<Self> {
        let fps = options.fps;
        if u64::from(fps.numerator()) > u64::from(MAX_FPS) * u64::from(fps.denominator()) {
            return Err(Error::TooFast { format: VideoFormat::Gif, fps, max: MAX_FPS });
        }
        let (width, height) = sides(options.width, options.height)?;
        let target = Target::create(path)?;
        let mut encoder = Encoder::new(target, width, height, &[]).map_err(|source| failed(path, 1, source))?;
        encoder.set_repeat(Repeat::Infinite).map_err(|source| failed(path, 1, source))?;
        Ok(Self { path: path.to_owned(), encoder, fps, written: 0 })
    }
}

impl FrameSink for GifWriter {
    fn write(&mut self, frame: &Rgb8) -> Result<()> {
        let number = self.written + 1;
        let (width, height) = sides(frame.width(), frame.height())?;
        let stride = (frame.width() * frame.height() / PALETTE_PIXELS).clamp(1, 10) as i32;
        let mut picture = Frame::from_rgb_speed(width, height, frame.pixels(), stride);
        picture.delay = delay(self.fps, self.written);
        self.encoder.write_frame(&picture).map_err(|source| failed(&self.path, number, source))?;
        self.written = number;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { path, encoder, written, .. } = *self;
        encoder.into_inner().map_err(|source| failed(&path, written, source))?.commit()
    }
}

/// How long frame `index` is shown, in 1/100 s: from the rounded time of its beginning to that of its end, so that the
/// error does not add up.
fn delay(fps: FrameRate, index: u64) -> u16 {
    let time = |index: u64| {
        let (numerator, denominator) = (u128::from(fps.numerator()), u128::from(fps.denominator()));
        (2 * 100 * denominator * u128::from(index) + numerator) / (2 * numerator)
    };
    // At most 100 s, by the smallest frame rate.
    u16::try_from(time(index + 1) - time(index)).unwrap_or(u16::MAX)
}

fn sides(width: usize, height: usize) -> Result<(u16, u16)> {
    match (u16::try_from(width), u16::try_from(height)) {
        (Ok(w), Ok(h)) => Ok((w, h)),
        _ => Err(Error::VideoSize { format: VideoFormat::Gif, width, height }),
    }
}

fn failed(path: &Path, frame: u64, source: EncodingError) -> Error {
    match source {
        EncodingError::Io(source) => Error::Write { path: path.to_owned(), source },
        source => Error::EncodeGif { frame, source: Box::new(source) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_add_up_to_the_duration() {
        for fps in ["16", "24", "30000/1001", "12.5", "50", "0.01", "7"] {
            let fps: FrameRate = fps.parse().unwrap();
            let mut total = 0_u64;
            for index in 0..2000 {
                let delay = delay(fps, index);
                assert!(delay >= 2);
                total += u64::from(delay);
                assert!((total as f64 - 100.0 * fps.seconds(index + 1)).abs() <= 0.5 + 1e-6, "{fps} {index}");
            }
        }
        let sixteen = FrameRate::new(16, 1).unwrap();
        assert_eq!([0, 1, 2, 3].map(|index| delay(sixteen, index)), [6, 7, 6, 6]);
    }
}
