//! The picture formats, and how they are told from names and from bytes.

use std::fmt;
use std::path::Path;

use crate::{Error, Result};

/// A format of picture files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// PNG: lossless, and the only one here that carries texts.
    Png,
    /// JPEG: lossy.
    Jpeg,
    /// WebP: written losslessly, read in both forms.
    WebP,
}

impl ImageFormat {
    /// The format that the extension of `path` stands for, in upper or lower case: `png`, `jpg`, `jpeg` or `webp`.
    ///
    /// # Errors
    /// [`Error::Extension`] if there is none, or another one.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        match extension.as_deref().map(str::to_ascii_lowercase).as_deref() {
            Some("png") => Ok(ImageFormat::Png),
            Some("jpg" | "jpeg") => Ok(ImageFormat::Jpeg),
            Some("webp") => Ok(ImageFormat::WebP),
            _ => Err(Error::Extension { path: path.to_owned(), extension }),
        }
    }

    /// The format that `bytes` begin like, whatever a file is called.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            Some(ImageFormat::Png)
        } else if bytes.starts_with(b"\xff\xd8\xff") {
            Some(ImageFormat::Jpeg)
        } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            Some(ImageFormat::WebP)
        } else {
            None
        }
    }

    /// The largest side in pixels that a file of this format can hold.
    #[must_use]
    pub const fn max_side(self) -> usize {
        match self {
            ImageFormat::Png => i32::MAX as usize,
            ImageFormat::Jpeg => u16::MAX as usize,
            ImageFormat::WebP => (1 << 14) - 1,
        }
    }

    /// Whether [`encode`](crate::encode) stores texts in this format; the others are written without.
    #[must_use]
    pub const fn stores_text(self) -> bool {
        matches!(self, ImageFormat::Png)
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ImageFormat::Png => "PNG",
            ImageFormat::Jpeg => "JPEG",
            ImageFormat::WebP => "WebP",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_name_formats_in_any_case() {
        let cases = [
            ("a.png", ImageFormat::Png),
            ("dir.d/A.PNG", ImageFormat::Png),
            ("a.b.jpg", ImageFormat::Jpeg),
            ("a.Jpeg", ImageFormat::Jpeg),
            ("/x/a.webp", ImageFormat::WebP),
        ];
        for (path, format) in cases {
            assert_eq!(ImageFormat::from_path(path).unwrap(), format, "{path}");
        }
    }

    #[test]
    fn other_names_are_errors_that_list_the_extensions() {
        let legal = "expected one of: .png, .jpg, .jpeg, .webp";
        for (path, found) in [
            ("picture", "no extension"),
            ("dir.png/picture", "no extension"),
            (".png", "no extension"),
            ("", "no extension"),
            ("a.gif", "unknown extension .gif"),
            ("a.png.bak", "unknown extension .bak"),
            ("a.", "unknown extension ."),
        ] {
            let message = ImageFormat::from_path(path).unwrap_err().to_string();
            assert_eq!(message, format!("{path}: {found}, {legal}"));
        }
    }
}
