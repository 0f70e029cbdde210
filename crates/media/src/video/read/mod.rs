//! Videos in.

mod animation;
mod pictures;
mod y4m;

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use super::{FrameRate, check_frame_size};
use crate::{Error, Result, Rgb8};

/// Where frames come from. After an error or the end it is not asked again.
trait FrameSource: Send {
    /// `number` counts from 1.
    fn next(&mut self, number: u64) -> Result<Option<Rgb8>>;

    fn fps(&self) -> Option<FrameRate> {
        None
    }

    /// The number of frames, where it is known before reading them.
    fn len(&self) -> Option<u64> {
        None
    }
}

/// The frames of a video in a file or folder: [`VideoReader::open`].
///
/// # Errors
/// Those of [`VideoReader::open`].
pub fn open_video(path: impl AsRef<Path>) -> Result<VideoReader> {
    VideoReader::open(path)
}

/// The frames of a video, one after the other, all of the same size. After an error there are no more.
pub struct VideoReader {
    path: PathBuf,
    source: Option<Box<dyn FrameSource>>,
    first: Option<Rgb8>,
    width: usize,
    height: usize,
    fps: Option<FrameRate>,
    len: Option<u64>,
    given: u64,
}

impl VideoReader {
    /// Opens a video and reads its first frame.
    ///
    /// `path` is a file (Y4M, GIF, PNG, JPEG or WebP, whatever it is called), a folder with the numbered pictures of one
    /// video, a name with one `%d` or `%05d` for the numbers of such pictures, or `-` for Y4M from standard input.
    /// Pictures become RGB as [`decode`](crate::decode) does it. The colours of a Y4M file are taken for BT.709 from
    /// 1280 columns or above 576 rows on and for BT.601 otherwise, unless a field `XCOLORMATRIX` says which; the range
    /// is limited without `XCOLORRANGE=FULL`.
    ///
    /// # Errors
    /// - [`Error::Read`] if something cannot be read.
    /// - [`Error::Picture`] with the path and what is wrong: [`Error::UnknownVideo`], [`Error::Y4m`],
    ///   [`Error::DecodeGif`], [`Error::DecodeWebP`], [`Error::AnimatedPng`], [`Error::TooManyPixels`], or an error of
    ///   [`decode`](crate::decode).
    /// - [`Error::NoFrames`], [`Error::NoPictures`] if there is no frame.
    /// - [`Error::Numbering`], [`Error::MixedSeries`] if the pictures in a folder are not one complete series.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut source = open_source(path)?;
        let Some(first) = source.next(1)? else {
            return Err(Error::NoFrames { path: path.to_owned() });
        };
        Ok(Self {
            path: path.to_owned(),
            width: first.width(),
            height: first.height(),
            first: Some(first),
            fps: source.fps(),
            len: source.len(),
            source: Some(source),
            given: 0,
        })
    }

    /// Width of the frames in pixels.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height of the frames in pixels.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// Frames a second, if the file says it; of an animation, by its first frame.
    #[must_use]
    pub fn fps(&self) -> Option<FrameRate> {
        self.fps
    }

    /// The number of all frames, if that is known before reading them.
    #[must_use]
    pub fn frame_count(&self) -> Option<u64> {
        self.len
    }

    fn read(&mut self) -> Result<Option<Rgb8>> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        let Some(source) = &mut self.source else { return Ok(None) };
        let number = self.given + 1;
        let Some(frame) = source.next(number)? else { return Ok(None) };
        check_frame_size(&frame, number, self.width, self.height).map_err(|reason| about(&self.path, reason))?;
        Ok(Some(frame))
    }
}

impl Iterator for VideoReader {
    type Item = Result<Rgb8>;

    fn next(&mut self) -> Option<Self::Item> {
        let frame = self.read().transpose();
        match frame {
            Some(Ok(_)) => self.given += 1,
            Some(Err(_)) | None => self.source = None,
        }
        frame
    }
}

impl std::iter::FusedIterator for VideoReader {}

impl fmt::Debug for VideoReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, width, height, fps, given, .. } = self;
        let mut fields = f.debug_struct("VideoReader");
        fields.field("path", path).field("width", width).field("height", height).field("fps", fps);
        fields.field("given", given).finish_non_exhaustive()
    }
}

fn open_source(path: &Path) -> Result<Box<dyn FrameSource>> {
    if path == Path::new("-") {
        return y4m::open(path, BufReader::new(io::stdin()));
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A file of this name comes first.
        Err(error) if error.kind() == io::ErrorKind::NotFound => match pictures::of_pattern(path) {
            Some(source) => return Ok(Box::new(source?)),
            None => return Err(unreadable(path, error)),
        },
        Err(error) => return Err(unreadable(path, error)),
    };
    if metadata.is_dir() {
        return Ok(Box::new(pictures::of_folder(path)?));
    }
    let mut file = BufReader::new(File::open(path).map_err(|source| unreadable(path, source))?);
    let start = file.fill_buf().map_err(|source| unreadable(path, source))?;
    if start.starts_with(y4m::MAGIC) {
        return y4m::open(path, file);
    }
    if start.starts_with(b"GIF8") {
        return animation::open_gif(path, file);
    }
    if animation::is_animated_webp(start) {
        return animation::open_webp(path, file);
    }
    if start.is_empty() || crate::ImageFormat::of_bytes(start).is_none() {
        return Err(about(path, Error::UnknownVideo));
    }
    if start.starts_with(b"\x89PNG")
        && animation::is_animated_png(&mut file).map_err(|error| unreadable(path, error))?
    {
        return Err(about(path, Error::AnimatedPng));
    }
    Ok(Box::new(pictures::single(path)))
}

fn unreadable(path: &Path, source: io::Error) -> Error {
    Error::Read { path: path.to_owned(), source }
}

fn about(path: &Path, reason: Error) -> Error {
    match reason {
        // Names the file itself.
        reason @ (Error::Read { .. } | Error::Picture { .. }) => reason,
        reason => Error::Picture { path: path.to_owned(), reason: Box::new(reason) },
    }
}

/// What is read in several goes.
trait Input: Read + Seek + BufRead + Send {}

impl<R: Read + Seek + BufRead + Send> Input for R {}
