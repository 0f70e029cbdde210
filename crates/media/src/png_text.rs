//! The texts of a PNG file.

use std::io::Cursor;

use crate::{Error, ImageFormat, Result};

/// Text that unpacks to more than this many bytes is passed over, so that a small file cannot fill the memory.
const MAX_UNPACKED_BYTES: usize = 16 << 20;

/// Keywords and texts of a PNG file, from its tEXt, zTXt and iTXt chunks in that order of kinds, wherever they stand in
/// the file.
///
/// # Errors
/// - [`Error::EmptyFile`], [`Error::UnknownFormat`] if `bytes` are no PNG.
/// - [`Error::DecodePng`] if the file is damaged.
pub fn read_png_text(bytes: &[u8]) -> Result<Vec<(String, String)>> {
    if bytes.is_empty() {
        return Err(Error::EmptyFile);
    }
    if ImageFormat::of_bytes(bytes) != Some(ImageFormat::Png) {
        return Err(Error::UnknownFormat);
    }
    let broken = |source| Error::DecodePng { source: Box::new(source) };
    let mut reader = png::Decoder::new(Cursor::new(bytes)).read_info().map_err(broken)?;
    // Reads past the pixels to the end of the file: texts may follow them.
    reader.finish().map_err(broken)?;
    let info = reader.info();

    let mut texts = Vec::new();
    for chunk in &info.uncompressed_latin1_text {
        texts.push((chunk.keyword.clone(), chunk.text.clone()));
    }
    for chunk in &info.compressed_latin1_text {
        let mut chunk = chunk.clone();
        if chunk.decompress_text_with_limit(MAX_UNPACKED_BYTES).is_ok()
            && let Ok(text) = chunk.get_text()
        {
            texts.push((chunk.keyword, text));
        }
    }
    for chunk in &info.utf8_text {
        let mut chunk = chunk.clone();
        if chunk.decompress_text_with_limit(MAX_UNPACKED_BYTES).is_ok()
            && let Ok(text) = chunk.get_text()
        {
            texts.push((chunk.keyword, text));
        }
    }
    Ok(texts)
}
