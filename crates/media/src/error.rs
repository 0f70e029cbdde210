//! Errors of this crate.

use std::io;
use std::path::PathBuf;

use crate::{FrameRate, ImageFormat, VideoFormat};

/// What can be wrong with pixels, and with picture and video files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A picture has at least one pixel.
    #[error("a picture of {width} x {height} pixels is empty")]
    EmptyPicture {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// The number of values does not fit the size.
    #[error("{len} values for a picture of {width} x {height} pixels, expected three for each pixel")]
    PixelCount {
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// Number of values.
        len: usize,
    },
    /// A value is NaN or infinite.
    #[error("the picture holds {value} at channel {channel}, row {row}, column {column} (value {index})")]
    NonFinite {
        /// The value.
        value: f32,
        /// Its place among the planar values.
        index: usize,
        /// 0 red, 1 green, 2 blue.
        channel: usize,
        /// Row in pixels, from the top.
        row: usize,
        /// Column in pixels, from the left.
        column: usize,
    },
    /// The file name has no extension, or one that stands for no format.
    #[error("{}: {}, expected one of: .png, .jpg, .jpeg, .webp", path.display(), extension_found(extension.as_deref()))]
    Extension {
        /// The file name as given.
        path: PathBuf,
        /// Its extension, if any.
        extension: Option<String>,
    },
    /// The format cannot hold a picture of this size.
    #[error(
        "a picture of {width} x {height} pixels is too large for {format}, expected at most {max_side} for each side"
    )]
    TooLargeForFormat {
        /// The format.
        format: ImageFormat,
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// The largest side that the format can hold, in pixels.
        max_side: usize,
    },
    /// A PNG keyword is not allowed.
    #[error("`{}` is no PNG keyword, expected 1 to 79 Latin-1 characters without control characters or outer or double spaces", keyword.escape_debug())]
    Keyword {
        /// The keyword as given.
        keyword: String,
    },
    /// The encoder failed.
    #[error("cannot encode the picture as {format}")]
    Encode {
        /// The format.
        format: ImageFormat,
        /// What the encoder says.
        source: Box<image::ImageError>,
    },
    /// The PNG encoder failed.
    #[error("cannot encode the picture as PNG")]
    EncodePng {
        /// What the encoder says.
        source: Box<png::EncodingError>,
    },
    /// There is nothing to decode.
    #[error("the file is empty, expected a PNG, JPEG or WebP picture")]
    EmptyFile,
    /// The bytes are no picture that is known here.
    #[error("not a PNG, JPEG or WebP picture")]
    UnknownFormat,
    /// The picture is damaged, or uses a variety of the format that is not supported.
    #[error("broken {format} picture")]
    Decode {
        /// The format.
        format: ImageFormat,
        /// What the decoder says.
        source: Box<image::ImageError>,
    },
    /// The texts of a PNG cannot be read.
    #[error("broken PNG picture")]
    DecodePng {
        /// What the decoder says.
        source: Box<png::DecodingError>,
    },
    /// The file ends before the picture does.
    #[error("broken {format} picture: the file is cut off")]
    CutOff {
        /// The format.
        format: ImageFormat,
    },
    /// The picture has more pixels than are accepted.
    #[error("the picture has {width} x {height} pixels, expected at most {max_pixels}")]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// [`MAX_PIXELS`](crate::MAX_PIXELS).
        max_pixels: u64,
    },
    /// The file has more bytes than are accepted.
    #[error("the file has more than {max_bytes} bytes")]
    TooManyBytes {
        /// [`MAX_FILE_BYTES`](crate::MAX_FILE_BYTES).
        max_bytes: u64,
    },
    /// Something is wrong with the picture or the video in this file.
    #[error("{}: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: Box<Error>,
    },
    /// The name of a video stands for no format.
    #[error(
        "{}: {}, expected one of: .mp4, .y4m, .gif, a numbered PNG name such as frame-%05d.png, or - for Y4M to standard output",
        path.display(),
        extension_found(extension.as_deref())
    )]
    VideoExtension {
        /// The file name as given.
        path: PathBuf,
        /// Its extension, if any.
        extension: Option<String>,
    },
    /// The name of a series of pictures does not say where the number goes.
    #[error("{}: expected one place for the number of the frame, as in frame-%05d.png", path.display())]
    NumberPlace {
        /// The file name as given.
        path: PathBuf,
    },
    /// There are pictures already where a series is to be written.
    #[error("cannot write {}: {} exists already, expected a folder without pictures of this name", path.display(), found.display())]
    SequenceExists {
        /// The name with its pattern, as given.
        path: PathBuf,
        /// One of the pictures, without the folder.
        found: PathBuf,
    },
    /// The text is no frame rate, or one out of range.
    #[error("`{}` is no frame rate, expected 0.01 to 1000 frames a second, such as 16, 23.976 or 30000/1001", text.escape_debug())]
    FrameRate {
        /// What was given.
        text: String,
    },
    /// The format cannot keep this frame rate.
    #[error("{format} cannot show {fps} frames a second, expected at most {max}")]
    TooFast {
        /// The format.
        format: VideoFormat,
        /// The frame rate that was asked for.
        fps: FrameRate,
        /// The largest frame rate, in frames a second.
        max: u32,
    },
    /// The quality is out of range.
    #[error("a quality of {quality}, expected 0 to 100")]
    Quality {
        /// What was given.
        quality: u8,
    },
    /// The format cannot hold a video of this size.
    #[error("a video of {width} x {height} pixels does not fit {format}, expected {}", format.legal_sizes())]
    VideoSize {
        /// The format.
        format: VideoFormat,
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// This build lacks a part.
    #[error("{what} needs the feature `{feature}`, which this build is without")]
    NotCompiled {
        /// What was asked for.
        what: &'static str,
        /// The feature of this crate that provides it.
        feature: &'static str,
    },
    /// A frame has another size than the video.
    #[error("frame {frame} has {width} x {height} pixels, expected {expected_width} x {expected_height} as before")]
    FrameSize {
        /// The number of the frame, counted from 1.
        frame: u64,
        /// Its width in pixels.
        width: usize,
        /// Its height in pixels.
        height: usize,
        /// Width of the video in pixels.
        expected_width: usize,
        /// Height of the video in pixels.
        expected_height: usize,
    },
    /// A video has at least one frame.
    #[error("{}: a video without frames", path.display())]
    NoFrames {
        /// The file.
        path: PathBuf,
    },
    /// The format cannot count this many frames.
    #[error("too many frames for {format} at this frame rate, expected at most {max}")]
    TooManyFrames {
        /// The format.
        format: VideoFormat,
        /// The largest number of frames.
        max: u64,
    },
    /// An earlier error has ended the video.
    #[error("{}: the video has been given up after an earlier error", path.display())]
    GivenUp {
        /// The file.
        path: PathBuf,
    },
    /// The H.264 encoder failed.
    #[error("cannot encode frame {frame} as H.264: {reason}")]
    EncodeH264 {
        /// The number of the frame, counted from 1.
        frame: u64,
        /// What the encoder says, or what is wrong with its result.
        reason: String,
    },
    /// The GIF encoder failed.
    #[error("cannot encode frame {frame} as GIF")]
    EncodeGif {
        /// The number of the frame, counted from 1.
        frame: u64,
        /// What the encoder says.
        source: Box<gif::EncodingError>,
    },
    /// The bytes are no video that is read here.
    #[error(
        "not a Y4M, GIF, PNG, JPEG or WebP file; other videos can be made into pictures first, as with `ffmpeg -i clip.mp4 frame-%05d.png`"
    )]
    UnknownVideo,
    /// A Y4M file is damaged, or uses a variety of the format that is not supported.
    #[error("broken Y4M video: {found}, expected {expected}")]
    Y4m {
        /// What the file holds.
        found: String,
        /// What is legal there.
        expected: &'static str,
    },
    /// The file ends within a frame.
    #[error("broken {format} video: frame {frame} is cut off")]
    FrameCutOff {
        /// The format.
        format: VideoFormat,
        /// The number of the frame, counted from 1.
        frame: u64,
    },
    /// A GIF animation is damaged.
    #[error("broken GIF animation at frame {frame}")]
    DecodeGif {
        /// The number of the frame, counted from 1.
        frame: u64,
        /// What the decoder says.
        source: Box<gif::DecodingError>,
    },
    /// A WebP animation is damaged.
    #[error("broken WebP animation at frame {frame}")]
    DecodeWebP {
        /// The number of the frame, counted from 1.
        frame: u64,
        /// What the decoder says.
        source: Box<image_webp::DecodingError>,
    },
    /// The file is a PNG with several frames.
    #[error("an animated PNG, of which the frames are not read; expected a still picture")]
    AnimatedPng,
    /// A folder or a pattern has no pictures.
    #[error("{}: no numbered PNG, JPEG or WebP pictures", path.display())]
    NoPictures {
        /// The folder or the pattern.
        path: PathBuf,
    },
    /// A series of pictures has a gap, or a number twice.
    #[error("{}: frame {after} follows frame {before}, expected every number once", path.display())]
    Numbering {
        /// The folder or the pattern.
        path: PathBuf,
        /// The number before.
        before: u64,
        /// The number that follows.
        after: u64,
    },
    /// A folder has pictures that do not belong together.
    #[error("{}: {} and {} are not of one numbered series, expected a folder with the frames of one video", path.display(), first.display(), other.display())]
    MixedSeries {
        /// The folder.
        path: PathBuf,
        /// A picture of the folder.
        first: PathBuf,
        /// Another one.
        other: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        source: io::Error,
    },
    /// The place for a file is a folder, or the path ends like one.
    #[error("cannot write {}: it is a folder, expected a file name", path.display())]
    IsFolder {
        /// The path as given.
        path: PathBuf,
    },
    /// The folder for a file is missing.
    #[error("cannot write {}: the folder {} does not exist", path.display(), folder.display())]
    NoFolder {
        /// The path as given.
        path: PathBuf,
        /// The missing folder.
        folder: PathBuf,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The path as given.
        path: PathBuf,
        /// What the operating system says.
        source: io::Error,
    },
}

/// `Result` with the [`Error`] of this crate.
pub type Result<T> = std::result::Result<T, Error>;

fn extension_found(extension: Option<&str>) -> String {
    match extension {
        Some(extension) => format!("unknown extension .{extension}"),
        None => "no extension".to_owned(),
    }
}
