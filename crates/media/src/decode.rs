//! Files to pictures.

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::Path;

use image::codecs::jpeg::JpegDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{DynamicImage, ImageDecoder, ImageResult, Limits};

use crate::{Error, ImageFormat, Result, Rgb8};

/// The largest picture that is decoded, in pixels: 8192 x 8192.
pub const MAX_PIXELS: u64 = 1 << 26;

/// The largest file that is read, in bytes: room for [`MAX_PIXELS`] of 16-bit RGBA that do not compress.
pub const MAX_FILE_BYTES: u64 = 1 << 29;

/// The picture in the bytes of a PNG, JPEG or WebP file; what the bytes are is told by their beginning.
///
/// Whatever the file holds becomes 8-bit RGB:
/// - a turn or mirroring in EXIF is carried out, so the picture stands as viewers show it;
/// - **transparency**: the picture is laid over white, `round((a * x + (255 - a) * 255) / 255)`;
/// - grey becomes three equal values, palettes and CMYK are resolved, 16 bits are rounded to 8;
/// - of an animation the first frame is taken;
/// - colour profiles and gamma chunks are not applied: values are taken as sRGB.
///
/// # Errors
/// - [`Error::EmptyFile`], [`Error::UnknownFormat`] if this is no picture.
/// - [`Error::TooManyPixels`] above [`MAX_PIXELS`], found before anything large is allocated.
/// - [`Error::Decode`], [`Error::CutOff`] if the file is damaged or of an unsupported variety.
pub fn decode(bytes: &[u8]) -> Result<Rgb8> {
    if bytes.is_empty() {
        return Err(Error::EmptyFile);
    }
    let Some(format) = ImageFormat::of_bytes(bytes) else {
        return Err(Error::UnknownFormat);
    };
    let broken = |source| Error::Decode { format, source: Box::new(source) };
    let mut limits = Limits::default();
    limits.max_alloc = Some(8 * MAX_PIXELS + (64 << 20));
    let input = Cursor::new(bytes);
    let decoder: ImageResult<Box<dyn ImageDecoder + '_>> = match format {
        ImageFormat::Png => {
            PngDecoder::with_limits(input, limits.clone()).map(|decoder| Box::new(decoder) as Box<dyn ImageDecoder>)
        }
        ImageFormat::Jpeg => JpegDecoder::new(input).map(|decoder| Box::new(decoder) as Box<dyn ImageDecoder>),
        ImageFormat::WebP => WebPDecoder::new(input).map(|decoder| Box::new(decoder) as Box<dyn ImageDecoder>),
    };
    let mut decoder = decoder.map_err(broken)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(Error::TooManyPixels { width, height, max_pixels: MAX_PIXELS });
    }
    // The JPEG decoder paints what is missing grey and reports success.
    if format == ImageFormat::Jpeg && !jpeg_is_complete(bytes) {
        return Err(Error::CutOff { format });
    }
    decoder.set_limits(limits).map_err(broken)?;
    let orientation = decoder.orientation().map_err(broken)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(broken)?;
    picture.apply_orientation(orientation);
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    Rgb8::new(over_white(picture), width, height)
}

/// The picture in a file: [`decode`] of its bytes.
///
/// # Errors
/// - [`Error::Read`] if the file cannot be read.
/// - [`Error::Picture`] with the path and an error of [`decode`], or [`Error::TooManyBytes`] above
///   [`MAX_FILE_BYTES`].
pub fn decode_file(path: impl AsRef<Path>) -> Result<Rgb8> {
    let path = path.as_ref();
    let unreadable = |source| Error::Read { path: path.to_owned(), source };
    let about = |reason| Error::Picture { path: path.to_owned(), reason: Box::new(reason) };
    let mut bytes = Vec::new();
    // Bounded while reading: a device has no length that could be asked for first.
    File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(about(Error::TooManyBytes { max_bytes: MAX_FILE_BYTES }));
    }
    decode(&bytes).map_err(about)
}

/// Interleaved 8-bit RGB.
fn over_white(picture: DynamicImage) -> Vec<u8> {
    if !picture.color().has_alpha() {
        return picture.into_rgb8().into_raw();
    }
    picture.into_rgba8().pixels().flat_map(|pixel| over_white_pixel(pixel.0)).collect()
}

/// A pixel of red, green, blue and alpha, laid over white.
pub(crate) fn over_white_pixel([r, g, b, alpha]: [u8; 4]) -> [u8; 3] {
    let alpha = u32::from(alpha);
    // At most 255.
    [r, g, b].map(|x| ((u32::from(x) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

/// Whether the marker that ends a JPEG picture is there. Segments are stepped over by their lengths, since a preview
/// inside one has an end marker of its own.
fn jpeg_is_complete(bytes: &[u8]) -> bool {
    const START_OF_IMAGE: u8 = 0xd8;
    const END_OF_IMAGE: u8 = 0xd9;
    let mut at = 0;
    while let Some(pair) = bytes.get(at..at + 2) {
        match (pair[0], pair[1]) {
            (0xff, END_OF_IMAGE) => return true,
            // Within coded pixels: stuffed bytes, restart markers, fill bytes, and everything that is not a marker.
            (0xff, 0x00 | 0x01 | 0xd0..=0xd7 | START_OF_IMAGE) => at += 2,
            (0xff, 0xff) | (0..=0xfe, _) => at += 1,
            (0xff, _) => match bytes.get(at + 2..at + 4) {
                Some(len) => at += 2 + usize::from(u16::from_be_bytes([len[0], len[1]])),
                None => return false,
            },
        }
    }
    false
}
