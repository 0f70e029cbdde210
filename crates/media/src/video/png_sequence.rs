//! A PNG picture for each frame.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::numbered::NumberedName;
use super::{FrameSink, VideoOptions};
use crate::{Error, ImageFormat, Result, Rgb8};

/// The number of the first frame, as FFmpeg's.
const FIRST: u64 = 1;

/// Pictures in a folder beside their place, moved there at the end.
#[derive(Debug)]
pub(super) struct PngSequenceWriter {
    /// As given, for messages.
    path: PathBuf,
    name: NumberedName,
    unfinished: TempDir,
    next: u64,
}

impl PngSequenceWriter {
    pub(super) fn create(path: &Path, _: &VideoOptions) -> Result<Self> {
        let name = NumberedName::of_path(path)?;
        let folder = name.folder();
        if !folder.is_dir() {
            return Err(Error::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
        }
        // Older pictures behind the last new one would become part of the video.
        if let Some(&number) = name.existing()?.first() {
            return Err(Error::SequenceExists { path: path.to_owned(), found: name.name(number).into() });
        }
        let unfinished = tempfile::Builder::new()
            .prefix(".unfinished-")
            .tempdir_in(folder)
            .map_err(|source| Error::Write { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), name, unfinished, next: FIRST })
    }
}

impl FrameSink for PngSequenceWriter {
    fn write(&mut self, frame: &Rgb8) -> Result<()> {
        let bytes = crate::encode(frame, ImageFormat::Png, &[])?;
        let write = |path: &Path| {
            let mut file = File::create_new(path)?;
            file.write_all(&bytes)?;
            // What a full disk or a network drive keeps back comes out now.
            file.sync_all()
        };
        write(&self.unfinished.path().join(self.name.name(self.next)))
            .map_err(|source| Error::Write { path: self.name.path(self.next), source })?;
        self.next += 1;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { path, name, unfinished, next } = *self;
        // Somebody else may have been here meanwhile.
        if let Some(&number) = name.existing()?.first() {
            return Err(Error::SequenceExists { path, found: name.name(number).into() });
        }
        for number in FIRST..next {
            let (from, to) = (unfinished.path().join(name.name(number)), name.path(number));
            if let Err(source) = fs::rename(from, &to) {
                for number in FIRST..number {
                    // The error that led here is the one to report.
                    let _ = fs::remove_file(name.path(number));
                }
                return Err(Error::Write { path: to, source });
            }
        }
        unfinished.close().map_err(|source| Error::Write { path, source })
    }
}
