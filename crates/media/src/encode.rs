//! Pictures to files.

use std::borrow::Cow;
use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{ExtendedColorType, ImageEncoder};

use crate::{Error, ImageFormat, Result, Rgb8, png_pixels};

/// High enough that blocks do not show; the file is about a third of the PNG.
const JPEG_QUALITY: u8 = 95;

/// The file of a picture, in memory.
///
/// - **PNG**: 8-bit RGB, compressed by all threads, with each of `text` (keyword, text) as an uncompressed iTXt chunk before
///   the pixels, so any Unicode text survives. A NUL, which iTXt forbids, is stored as U+2400 (symbol for null).
/// - **JPEG**: baseline, quality 95, chroma not subsampled (4:4:4). `text` is not stored.
/// - **WebP**: lossless. `text` is not stored.
///
/// [`ImageFormat::stores_text`] tells which formats keep `text`. The bytes depend on the arguments and on the versions
/// of the encoders, not on the machine.
///
/// # Errors
/// - [`Error::TooLargeForFormat`] if a side is above [`ImageFormat::max_side`].
/// - [`Error::Keyword`] if PNG does not allow a keyword of `text`: 1 to 79 printable Latin-1 characters, no space at
///   either end, no two spaces in a row. The picture can be encoded again without it.
/// - [`Error::Encode`], [`Error::EncodePng`] if an encoder fails otherwise.
pub fn encode(picture: &Rgb8, format: ImageFormat, text: &[(String, String)]) -> Result<Vec<u8>> {
    let size = |side| u32::try_from(side).ok().filter(|_| side <= format.max_side());
    let (Some(width), Some(height)) = (size(picture.width()), size(picture.height())) else {
        let (width, height) = (picture.width(), picture.height());
        return Err(Error::TooLargeForFormat { format, width, height, max_side: format.max_side() });
    };
    let mut bytes = Vec::new();
    let written = match format {
        ImageFormat::Png => return encode_png(picture, (width, height), text),
        ImageFormat::Jpeg => JpegEncoder::new_with_quality(&mut bytes, JPEG_QUALITY).write_image(
            picture.pixels(),
            width,
            height,
            ExtendedColorType::Rgb8,
        ),
        ImageFormat::WebP => WebPEncoder::new_lossless(Cursor::new(&mut bytes)).write_image(
            picture.pixels(),
            width,
            height,
            ExtendedColorType::Rgb8,
        ),
    };
    written.map_err(|source| Error::Encode { format, source: Box::new(source) })?;
    Ok(bytes)
}

fn encode_png(picture: &Rgb8, (width, height): (u32, u32), text: &[(String, String)]) -> Result<Vec<u8>> {
    let failed = |source| Error::EncodePng { source: Box::new(source) };
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    for (keyword, text) in text {
        check_keyword(keyword)?;
        encoder.add_itxt_chunk(keyword.clone(), without_nul(text).into_owned()).map_err(failed)?;
    }
    let mut writer = encoder.write_header().map_err(failed)?;
    for piece in png_pixels::compress(picture.pixels(), picture.width()) {
        writer.write_chunk(png::chunk::IDAT, &piece).map_err(failed)?;
    }
    writer.finish().map_err(failed)?;
    Ok(bytes)
}

/// The rules of the PNG specification, section 11.3.3.2; the crate `png` checks the length only.
fn check_keyword(keyword: &str) -> Result<()> {
    let count = keyword.chars().count();
    let printable = |c| matches!(c, ' '..='~' | '\u{a1}'..='\u{ff}');
    let spaced = keyword.starts_with(' ') || keyword.ends_with(' ') || keyword.contains("  ");
    if (1..=79).contains(&count) && keyword.chars().all(printable) && !spaced {
        Ok(())
    } else {
        Err(Error::Keyword { keyword: keyword.to_owned() })
    }
}

fn without_nul(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { Cow::Owned(text.replace('\0', "\u{2400}")) } else { Cow::Borrowed(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keywords_follow_the_specification() {
        let long = "k".repeat(79);
        for keyword in ["parameters", "a b", "Überschrift", &long] {
            assert!(check_keyword(keyword).is_ok(), "{keyword}");
        }
        let long = "k".repeat(80);
        for keyword in ["", " a", "a ", "a  b", "a\nb", "a\0", "日本", "\u{a0}", &long] {
            let error = check_keyword(keyword).unwrap_err();
            assert!(matches!(error, Error::Keyword { .. }), "{keyword:?}");
            assert!(!error.to_string().contains(['\n', '\0']), "{error}");
        }
    }

    #[test]
    fn a_side_that_the_format_cannot_hold_is_an_error_before_encoding() {
        let wide = Rgb8::new(vec![0; 3 * 70_000], 70_000, 1).unwrap();
        for format in [ImageFormat::Jpeg, ImageFormat::WebP] {
            assert!(matches!(encode(&wide, format, &[]), Err(Error::TooLargeForFormat { .. })), "{format}");
        }
        assert!(encode(&wide, ImageFormat::Png, &[]).is_ok());
        for (width, height) in [(1, 16_383), (16_383, 1)] {
            let largest = Rgb8::new(vec![9; 3 * 16_383], width, height).unwrap();
            let bytes = encode(&largest, ImageFormat::WebP, &[]).unwrap();
            assert_eq!(crate::decode(&bytes).unwrap(), largest);
        }
    }
}
