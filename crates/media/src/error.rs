//! Errors of this crate.

use std::io;
use std::path::PathBuf;

use crate::ImageFormat;

/// What can be wrong with pixels and picture files.
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
    /// Something is wrong with the picture in this file.
    #[error("{}: {reason}", path.display())]
    Picture {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: Box<Error>,
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
