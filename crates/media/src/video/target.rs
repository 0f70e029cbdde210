//! Where the bytes of a video go.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::{Error, OutputFile, Result};

/// Large enough that a write is worth its call.
const BUFFER_BYTES: usize = 1 << 18;

/// A file that appears when it is complete, or standard output for `-`.
#[derive(Debug)]
pub(super) struct Target {
    path: PathBuf,
    writer: BufWriter<Inner>,
}

#[derive(Debug)]
enum Inner {
    File(OutputFile),
    Stdout(io::Stdout),
}

impl Target {
    /// # Errors
    /// Those of [`OutputFile::create`].
    pub(super) fn create(path: &Path) -> Result<Self> {
        let inner =
            if path == Path::new("-") { Inner::Stdout(io::stdout()) } else { Inner::File(OutputFile::create(path)?) };
        Ok(Self { path: path.to_owned(), writer: BufWriter::with_capacity(BUFFER_BYTES, inner) })
    }

    /// # Errors
    /// [`Error::Write`].
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(|source| Error::Write { path: self.path.clone(), source })
    }

    #[cfg(feature = "mp4")]
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A nameless file for parts that are to be written later.
    ///
    /// # Errors
    /// [`Error::Write`].
    #[cfg(feature = "mp4")]
    pub(super) fn scratch(&self) -> Result<std::fs::File> {
        match self.writer.get_ref() {
            Inner::File(file) => file.scratch(),
            Inner::Stdout(_) => tempfile::tempfile().map_err(|source| Error::Write { path: self.path.clone(), source }),
        }
    }

    /// # Errors
    /// [`Error::Write`].
    pub(super) fn commit(self) -> Result<()> {
        let Self { path, writer } = self;
        match writer.into_inner().map_err(io::IntoInnerError::into_error) {
            Ok(Inner::File(file)) => file.commit(),
            Ok(Inner::Stdout(mut stdout)) => stdout.flush().map_err(|source| Error::Write { path, source }),
            Err(source) => Err(Error::Write { path, source }),
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Write for Inner {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Inner::File(file) => file.write(bytes),
            Inner::Stdout(stdout) => stdout.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Inner::File(file) => file.flush(),
            Inner::Stdout(stdout) => stdout.flush(),
        }
    }
}
