//! Pixels, picture files and video files.
//!
//! [`Rgb8`] is a picture in memory, [`encode`] and [`decode`] carry it to and from PNG, JPEG and WebP, and
//! [`OutputFile`] is a file that appears only when it is complete. [`VideoWriter`] and [`VideoReader`] carry pictures to
//! and from videos one by one ([`video`] describes the formats).
//!
//! ```
//! use std::io::Write;
//!
//! use media::{ImageFormat, OutputFile, Rgb8};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("grey.png");
//! let format = ImageFormat::from_path(&path)?;
//! let mut file = OutputFile::create(&path)?; // fails now rather than after the long part
//!
//! let picture = Rgb8::from_planar_f32(&[0.5; 3 * 4 * 2], 4, 2)?;
//! let bytes = media::encode(&picture, format, &[("parameters".to_owned(), "Seed: 42".to_owned())])?;
//! file.write_all(&bytes)?;
//! file.commit()?;
//!
//! assert_eq!(media::decode_file(&path)?, picture);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod decode;
mod encode;
mod error;
mod format;
mod output;
mod png_pixels;
mod png_text;
mod rgb8;
pub mod video;

pub use decode::{MAX_FILE_BYTES, MAX_PIXELS, decode, decode_file};
pub use encode::encode;
pub use error::{Error, Result};
pub use format::ImageFormat;
pub use output::OutputFile;
pub use png_text::read_png_text;
pub use rgb8::Rgb8;
pub use video::{FrameRate, VideoFormat, VideoOptions, VideoReader, VideoWriter, open_video};
