//! MP4 out.

mod boxes;
mod h264;
mod sequence;

use std::fs::File;
use std::io::{BufWriter, Read, Seek, Write};
use std::path::Path;

use self::boxes::Movie;
use self::h264::H264Encoder;
use super::target::Target;
use super::{FrameSink, VideoFormat, VideoOptions};
use crate::{Error, Result, Rgb8};

const BUFFER_BYTES: usize = 1 << 18;

/// H.264 in MP4. The coded frames wait in a nameless file, since the index that goes before them is known at the end;
/// in memory are their sizes.
pub(super) struct Mp4Writer {
    target: Target,
    coded: BufWriter<File>,
    encoder: H264Encoder,
    movie: Movie,
}

impl Mp4Writer {
    pub(super) fn create(path: &Path, options: &VideoOptions) -> Result<Self> {
        let encoder = H264Encoder::new(options)?;
        let target = Target::create(path)?;
        let coded = BufWriter::with_capacity(BUFFER_BYTES, target.scratch()?);
        Ok(Self { target, coded, encoder, movie: Movie::new(options) })
    }
}

impl FrameSink for Mp4Writer {
    fn describe(&mut self, text: &str) {
        self.movie.describe(text);
    }

    fn write(&mut self, frame: &Rgb8) -> Result<()> {
        if self.movie.frames() >= self.movie.max_frames() {
            return Err(Error::TooManyFrames { format: VideoFormat::Mp4, max: self.movie.max_frames() });
        }
        let frame = self.encoder.encode(frame)?;
        self.movie.push(frame.bytes, frame.is_key)?;
        self.coded.write_all(frame.bytes).map_err(|source| Error::Write { path: self.target.path().to_owned(), source })
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { mut target, coded, encoder, movie } = *self;
        let path = target.path().to_owned();
        let failed = |source| Error::Write { path: path.clone(), source };
        target.put(&movie.head(&encoder.parameter_sets()?))?;

        let mut coded = coded.into_inner().map_err(|error| failed(error.into_error()))?;
        coded.rewind().map_err(failed)?;
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match coded.read(&mut buffer).map_err(failed)? {
                0 => break,
                len => target.put(&buffer[..len])?,
            }
        }
        target.commit()
    }
}
