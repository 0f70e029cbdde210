//! Where decoded frames go: a video, or one picture.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use media::{Error, FrameRate, ImageFormat, OutputFile, Rgb8, VideoFormat, VideoOptions, VideoWriter};

use crate::metadata::Decoded;

/// What the name of the output stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Video(VideoFormat),
    /// Only for clips of a single frame.
    Picture(ImageFormat),
}

impl Format {
    /// The format that a name stands for.
    ///
    /// # Errors
    /// If it stands for none, or standard output is a terminal.
    pub(crate) fn of(path: &Path) -> anyhow::Result<Self> {
        if is_stdout(path) && io::stdout().is_terminal() {
            bail!("standard output is a terminal, expected a pipe or a file behind `-o -`");
        }
        match (VideoFormat::from_path(path), ImageFormat::from_path(path)) {
            (Ok(format), _) => Ok(Self::Video(format)),
            // A PNG name without a number, or a format for pictures only.
            (Err(_), Ok(format)) if !has_number(path) => Ok(Self::Picture(format)),
            (Err(error), _) => Err(error.into()),
        }
    }
}

/// Whether the name is for standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Whether the file's name has something like a place for a number, which is then wrong in some way.
fn has_number(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().contains(&b'%'))
}

/// The frames on their way to a file.
pub(crate) enum Pictures {
    Video(VideoWriter),
    Picture { path: PathBuf, format: ImageFormat, picture: Option<Rgb8> },
}

impl Pictures {
    /// Checks that frames like these can be written, and begins.
    ///
    /// # Errors
    /// Those of [`VideoWriter::create`]; if there are several frames for one picture.
    pub(crate) fn create(
        path: &Path,
        format: Format,
        (frames, width, height): (usize, usize, usize),
        fps: FrameRate,
    ) -> anyhow::Result<Self> {
        match format {
            Format::Video(format) => {
                Ok(Self::Video(VideoWriter::create(path, format, &VideoOptions::new(width, height, fps))?))
            }
            Format::Picture(format) => {
                ensure!(
                    frames == 1,
                    "{}: the clip has {frames} frames, expected a name that ends with .mp4, .y4m or .gif, or a series of \
                     pictures such as frame-%05d.png",
                    path.display()
                );
                let side = width.max(height);
                if side > format.max_side() {
                    return Err(Error::TooLargeForFormat { format, width, height, max_side: format.max_side() }.into());
                }
                Ok(Self::Picture { path: path.to_owned(), format, picture: None })
            }
        }
    }

    /// Takes the next frame.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write(&mut self, frame: Rgb8) -> media::Result<()> {
        match self {
            Self::Video(video) => video.write(&frame),
            Self::Picture { picture, .. } => {
                *picture = Some(frame);
                Ok(())
            }
        }
    }

    /// Puts the file in its place. PNG and MP4 files say what they are; the others have no place for it.
    ///
    /// # Errors
    /// If it cannot be written; then nothing of it remains.
    pub(crate) fn finish(self, about: &Decoded<'_>) -> anyhow::Result<()> {
        match self {
            Self::Video(mut video) => {
                video.describe(&about.json().context("cannot describe the video")?);
                video.finish()?;
            }
            Self::Picture { path, format, picture } => {
                let picture = picture.context("no frame was decoded")?;
                let mut file = OutputFile::create(&path)?;
                let texts = about.texts().context("cannot describe the picture")?;
                let bytes = media::encode(&picture, format, &texts)?;
                file.write_all(&bytes).with_context(|| format!("cannot write {}", path.display()))?;
                file.commit()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_for_formats() {
        let of = |name: &str| Format::of(Path::new(name)).ok();
        assert_eq!(of("a.mp4"), Some(Format::Video(VideoFormat::Mp4)));
        assert_eq!(of("%03d.png"), Some(Format::Video(VideoFormat::PngSequence)));
        assert_eq!(of("a.png"), Some(Format::Picture(ImageFormat::Png)));
        assert_eq!(of("a.webp"), Some(Format::Picture(ImageFormat::WebP)));
        for name in ["a", "a.avi", "%d-%d.png", "%x.png", "%d.jpg"] {
            assert_eq!(of(name), None, "{name}");
        }
    }
}
