//! Videos, frame by frame.
//!
//! [`VideoWriter`] takes the frames of a video one after the other, and [`VideoReader`] gives them back in the same way:
//! neither holds more than a frame at a time, however long the video is. A constant frame rate is an exact ratio
//! ([`FrameRate`]), every frame that is written is in the file once, and the file appears under its name with
//! [`VideoWriter::finish`]. A writer that is dropped before leaves nothing behind.
//!
//! # What is written
//!
//! | format | name | what is kept |
//! |---|---|---|
//! | MP4 | `.mp4` | H.264 (constrained baseline, constant quantiser, no B-frames), 4:2:0, tagged as BT.709 limited range in the stream and in the file; `moov` first; a key frame at the start and every five seconds |
//! | Y4M | `.y4m`, `-` | 4:4:4, 8 bits, limited range; loses at most 2 of 255 by rounding |
//! | PNG sequence | `frame-%05d.png` | everything; numbered from 1; frames of an older series must not be there |
//! | GIF | `.gif` | 256 colours for each frame (exact where a frame has no more), delays of 1/100 s that add up; at most 50 frames a second |
//!
//! **Odd sizes in MP4.** H.264 with 4:2:0 colours has even sides only. The last column or row is doubled, and the file
//! says which part is the picture (`clap` and the track header); players without regard for that show one column or row
//! more ([`VideoFormat::stored_size`]).
//!
//! **Colours in Y4M.** The format does not say which conversion its colours have had. Players take BT.601 for small
//! videos and BT.709 for large ones, so that is what is written: BT.709 from 1280 columns or above 576 rows on. A field
//! that other programs pass over, `XCOLORMATRIX`, says so. FFmpeg converts to RGB by BT.601 in every size unless told
//! otherwise (`-vf scale=in_color_matrix=bt709`); a PNG sequence has no such ambiguity.
//!
//! **Patents.** The feature `mp4` compiles Cisco's OpenH264 from source. Its licence (BSD) does not cover patents on
//! H.264, which some countries have; those that Cisco pays for are only for binaries that Cisco distributes.
//!
//! # What is read
//!
//! Y4M (4:2:0, 4:2:2, 4:4:4 and grey, 8 bits, progressive; also from standard input as `-`), folders and patterns of
//! numbered PNG, JPEG or WebP pictures, a single picture, and animations in GIF and WebP. What a file is, its bytes say.
//! MP4 is not read: `ffmpeg -i clip.mp4 frame-%05d.png` makes a series of pictures of it.
//!
//! # Example
//!
//! ```
//! use media::{FrameRate, Rgb8, VideoFormat, VideoOptions, VideoWriter, open_video};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("clip.y4m");
//! let options = VideoOptions::new(4, 2, FrameRate::new(16, 1)?);
//! let mut video = VideoWriter::create(&path, VideoFormat::from_path(&path)?, &options)?;
//! for level in [0.0, 0.5, 1.0] {
//!     video.write(&Rgb8::from_planar_f32(&[level; 3 * 4 * 2], 4, 2)?)?;
//! }
//! assert_eq!(video.finish()?, 3);
//!
//! let video = open_video(&path)?;
//! assert_eq!((video.width(), video.height(), video.fps()), (4, 2, Some(options.fps)));
//! assert_eq!(video.collect::<Result<Vec<_>, _>>()?.len(), 3);
//! # Ok(())
//! # }
//! ```

mod format;
mod frame_rate;
mod gif;
#[cfg(feature = "mp4")]
mod mp4;
mod numbered;
mod png_sequence;
mod read;
mod target;
mod y4m;
mod ycbcr;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::{Error, Result, Rgb8};

pub use format::VideoFormat;
pub use frame_rate::FrameRate;
pub use read::{VideoReader, open_video};

/// What a video is to be like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct VideoOptions {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    /// Frames a second.
    pub fps: FrameRate,
    /// For MP4: 0 (smallest file) to 100 (best). The quantiser of H.264 is
    /// `51 - 39 * quality / 100`, rounded to the nearest: 51 to 12. Other formats have no such choice.
    pub quality: u8,
}

impl VideoOptions {
    /// The best one: the colours of a test card come back within 3 of 255. At 85, those of a still one do within 4, and
    /// files are about 3/5 as large.
    pub const DEFAULT_QUALITY: u8 = 100;

    /// Options with the default quality.
    #[must_use]
    pub const fn new(width: usize, height: usize, fps: FrameRate) -> Self {
        Self { width, height, fps, quality: Self::DEFAULT_QUALITY }
    }

    /// The same with another quality.
    #[must_use]
    pub const fn with_quality(self, quality: u8) -> Self {
        Self { quality, ..self }
    }
}

/// A format's side of a video that is being written. Frames have the size of the options.
trait FrameSink: Send {
    /// Keeps a text about the video, in formats that have a place for one.
    fn describe(&mut self, _text: &str) {}

    /// Dropped after an error.
    fn write(&mut self, frame: &Rgb8) -> Result<()>;

    /// Called after at least one frame, and no error.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A video on its way to a file.
///
/// Nothing is under the final name before [`finish`](Self::finish), and an older file stays until then; standard output
/// and devices get the bytes as they come (MP4 only at the end, since its index goes first). Memory does not grow with
/// the number of frames, but for 4 bytes a frame in MP4.
pub struct VideoWriter {
    path: PathBuf,
    options: VideoOptions,
    frames: u64,
    /// None after an error.
    sink: Option<Box<dyn FrameSink>>,
}

impl VideoWriter {
    /// Checks that a video like this can be written at `path`, and begins it. Called before the long part of a run, it
    /// finds what is wrong while nothing is lost.
    ///
    /// # Errors
    /// - [`Error::VideoSize`], [`Error::Quality`], [`Error::TooFast`] if `format` cannot have it like this.
    /// - [`Error::NotCompiled`] for MP4 without the feature `mp4`.
    /// - [`Error::NumberPlace`], [`Error::SequenceExists`] for a PNG sequence without a place for the number, or in the
    ///   place of an older one.
    /// - Those of [`OutputFile::create`](crate::OutputFile::create).
    pub fn create(path: impl AsRef<Path>, format: VideoFormat, options: &VideoOptions) -> Result<Self> {
        let path = path.as_ref();
        format.check_size(options.width, options.height)?;
        if options.quality > 100 {
            return Err(Error::Quality { quality: options.quality });
        }
        let sink: Box<dyn FrameSink> = match format {
            #[cfg(feature = "mp4")]
            VideoFormat::Mp4 => Box::new(mp4::Mp4Writer::create(path, options)?),
            #[cfg(not(feature = "mp4"))]
            VideoFormat::Mp4 => return Err(Error::NotCompiled { what: "MP4 output", feature: "mp4" }),
            VideoFormat::Y4m => Box::new(y4m::Y4mWriter::create(path, options)?),
            VideoFormat::PngSequence => Box::new(png_sequence::PngSequenceWriter::create(path, options)?),
            VideoFormat::Gif => Box::new(gif::GifWriter::create(path, options)?),
        };
        Ok(Self { path: path.to_owned(), options: *options, frames: 0, sink: Some(sink) })
    }

    /// Adds a frame.
    ///
    /// # Errors
    /// - [`Error::FrameSize`] if the frame has another size than the options; the video can go on without it.
    /// - [`Error::Write`], or one of the encoders. That ends the video, and what there was of it is removed.
    /// - [`Error::GivenUp`] after such an error.
    pub fn write(&mut self, frame: &Rgb8) -> Result<()> {
        let Some(sink) = &mut self.sink else {
            return Err(Error::GivenUp { path: self.path.clone() });
        };
        check_frame_size(frame, self.frames + 1, self.options.width, self.options.height)?;
        if let Err(error) = sink.write(frame) {
            self.sink = None;
            return Err(error);
        }
        self.frames += 1;
        Ok(())
    }

    /// Says what the video is: MP4 keeps the last text as its description (`moov/udta/meta/ilst/desc`), the other formats
    /// keep none.
    pub fn describe(&mut self, text: &str) {
        if let Some(sink) = &mut self.sink {
            sink.describe(text);
        }
    }

    /// The number of frames so far.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Completes the video, puts it in its place, and returns the number of frames.
    ///
    /// # Errors
    /// - [`Error::NoFrames`] if there is none.
    /// - [`Error::GivenUp`] after an error of [`write`](Self::write) that has ended the video.
    /// - [`Error::Write`] if the disk is full or fails.
    ///
    /// An older file is then untouched, and nothing of this one remains.
    pub fn finish(self) -> Result<u64> {
        let Self { path, frames, sink, .. } = self;
        match sink {
            None => Err(Error::GivenUp { path }),
            Some(_) if frames == 0 => Err(Error::NoFrames { path }),
            Some(sink) => sink.finish().map(|()| frames),
        }
    }
}

impl fmt::Debug for VideoWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, options, frames, sink: _ } = self;
        let mut fields = f.debug_struct("VideoWriter");
        fields.field("path", path).field("options", options).field("frames", frames).finish_non_exhaustive()
    }
}

/// `frame` counts from 1.
fn check_frame_size(picture: &Rgb8, frame: u64, expected_width: usize, expected_height: usize) -> Result<()> {
    let (width, height) = (picture.width(), picture.height());
    if (width, height) == (expected_width, expected_height) {
        Ok(())
    } else {
        Err(Error::FrameSize { frame, width, height, expected_width, expected_height })
    }
}
