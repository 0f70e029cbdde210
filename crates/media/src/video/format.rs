//! The video formats, and how names stand for them.

use std::fmt;
use std::path::Path;

use super::numbered::NumberedName;
use crate::{Error, Result};

/// A format of video files that is written here; see [`video`](crate::video) for what each one keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VideoFormat {
    /// MP4 with H.264: small and plays everywhere; lossy. Needs the feature `mp4`.
    Mp4,
    /// YUV4MPEG2: large and simple, for pipes; loses only the rounding of the colour conversion.
    Y4m,
    /// A PNG picture for each frame: lossless.
    PngSequence,
    /// An animated GIF: 256 colours for each frame.
    Gif,
}

impl VideoFormat {
    /// The format that a name stands for.
    ///
    /// - `-`: [`Y4m`](Self::Y4m), to standard output.
    /// - the extensions `.mp4`, `.y4m` and `.gif`, in upper or lower case.
    /// - a name with the extension `.png` and one `%d` or `%05d` for the number of the frame.
    ///
    /// # Errors
    /// - [`Error::VideoExtension`] if there is no extension, or another one.
    /// - [`Error::NumberPlace`] if a PNG name has no place for a number, or several.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path == Path::new("-") {
            return Ok(VideoFormat::Y4m);
        }
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        match extension.as_deref().map(str::to_ascii_lowercase).as_deref() {
            Some("mp4") => Ok(VideoFormat::Mp4),
            Some("y4m") => Ok(VideoFormat::Y4m),
            Some("gif") => Ok(VideoFormat::Gif),
            Some("png") => NumberedName::of_path(path).map(|_| VideoFormat::PngSequence),
            _ => Err(Error::VideoExtension { path: path.to_owned(), extension }),
        }
    }

    /// The size that a decoder gives for a video of `width` x `height`: the same, but for odd sides in MP4. H.264 with
    /// 4:2:0 colours has even sides only, so the last column or row is doubled there, and the file says by its clean
    /// aperture (`clap`) and in its track header which part is the picture.
    #[must_use]
    pub fn stored_size(self, width: usize, height: usize) -> (usize, usize) {
        match self {
            VideoFormat::Mp4 => (width.next_multiple_of(2), height.next_multiple_of(2)),
            _ => (width, height),
        }
    }

    /// Checks that a video of `width` x `height` pixels fits.
    pub(super) fn check_size(self, width: usize, height: usize) -> Result<()> {
        let (long, short) = (width.max(height), width.min(height));
        let fits = match self {
            VideoFormat::Mp4 => long <= 3840 && (16..=2160).contains(&short),
            VideoFormat::Gif => long <= usize::from(u16::MAX),
            VideoFormat::Y4m | VideoFormat::PngSequence => long <= i32::MAX as usize,
        };
        let area = width.checked_mul(height).and_then(|area| u64::try_from(area).ok());
        if fits && short > 0 && area.is_some_and(|area| area <= crate::MAX_PIXELS) {
            Ok(())
        } else {
            Err(Error::VideoSize { format: self, width, height })
        }
    }

    pub(crate) const fn legal_sizes(self) -> &'static str {
        match self {
            VideoFormat::Mp4 => "sides of at least 16, and at most 3840 x 2160 or 2160 x 3840",
            VideoFormat::Gif => "sides of 1 to 65535, and at most 67108864 pixels",
            VideoFormat::Y4m | VideoFormat::PngSequence => "sides of at least 1, and at most 67108864 pixels",
        }
    }
}

impl fmt::Display for VideoFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            VideoFormat::Mp4 => "MP4",
            VideoFormat::Y4m => "Y4M",
            VideoFormat::PngSequence => "PNG",
            VideoFormat::Gif => "GIF",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_for_formats() {
        for (path, format) in [
            ("a.mp4", VideoFormat::Mp4),
            ("dir.d/A.MP4", VideoFormat::Mp4),
            ("clip-%05d.mp4", VideoFormat::Mp4),
            ("-", VideoFormat::Y4m),
            ("a.b.y4m", VideoFormat::Y4m),
            ("a.Gif", VideoFormat::Gif),
            ("frame-%05d.png", VideoFormat::PngSequence),
            ("dir/%d.PNG", VideoFormat::PngSequence),
        ] {
            assert_eq!(VideoFormat::from_path(path).unwrap(), format, "{path}");
        }
    }

    #[test]
    fn other_names_are_errors_that_list_what_is_legal() {
        let legal = "expected one of: .mp4, .y4m, .gif, a numbered PNG name such as frame-%05d.png, \
                     or - for Y4M to standard output";
        for (path, found) in [
            ("clip", "no extension"),
            ("", "no extension"),
            (".mp4", "no extension"),
            ("folder/", "no extension"),
            ("a.avi", "unknown extension .avi"),
            ("a.webp", "unknown extension .webp"),
        ] {
            let message = VideoFormat::from_path(path).unwrap_err().to_string();
            assert_eq!(message, format!("{path}: {found}, {legal}"));
        }
        for path in ["a.png", "%d-%d.png", "%5d.png", "%d/a.png"] {
            let message = VideoFormat::from_path(path).unwrap_err().to_string();
            let expected = format!("{path}: expected one place for the number of the frame, as in frame-%05d.png");
            assert_eq!(message, expected);
        }
    }

    #[test]
    fn sizes_have_limits() {
        let legal = |format: VideoFormat, width, height| format.check_size(width, height).is_ok();
        for format in [VideoFormat::Mp4, VideoFormat::Y4m, VideoFormat::PngSequence, VideoFormat::Gif] {
            assert!(legal(format, 16, 16) && legal(format, 33, 17) && legal(format, 2160, 3840), "{format}");
            for (width, height) in [(0, 64), (64, 0), (usize::MAX, 2), (1 << 20, 1 << 20)] {
                let error = format.check_size(width, height).unwrap_err();
                assert!(matches!(error, Error::VideoSize { .. }) && !error.to_string().contains('\n'), "{error}");
            }
        }
        for (width, height) in [(15, 64), (64, 15), (3841, 2160), (2161, 2161)] {
            assert!(!legal(VideoFormat::Mp4, width, height), "{width} x {height}");
        }
        assert!(legal(VideoFormat::Gif, 65_535, 1) && !legal(VideoFormat::Gif, 65_536, 1));
        assert!(legal(VideoFormat::Y4m, 1, 1) && legal(VideoFormat::Y4m, 1 << 26, 1));
    }
}
