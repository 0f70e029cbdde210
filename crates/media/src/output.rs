//! A file that appears only when it is complete.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// As many links to links as Linux follows.
const MAX_LINKS: usize = 40;

/// A file on its way to `path`: written beside its place under another name and put there by [`OutputFile::commit`].
/// Until then an older file stays as it is; dropped without a commit, nothing remains.
///
/// - A symbolic link is followed: the file that it leads to is replaced, not the link.
/// - A new file has the permissions that the process gives to new files, a replaced one keeps its own.
/// - What is no regular file (`/dev/stdout`, `/dev/full`, a pipe) is opened and written directly.
///
/// Writes are not buffered: use large ones, or a [`std::io::BufWriter`] around `&mut` of this.
#[derive(Debug)]
pub struct OutputFile {
    /// As given, for messages.
    path: PathBuf,
    writer: Writer,
}

#[derive(Debug)]
enum Writer {
    /// A temporary file in the folder of the target.
    Beside { file: NamedTempFile, target: PathBuf },
    /// The target itself.
    Direct(File),
}

impl OutputFile {
    /// Checks that a file can be written at `path`, and begins it. Called before the long part of a run, it finds a
    /// mistyped folder while nothing is lost.
    ///
    /// # Errors
    /// - [`Error::IsFolder`] if there is a folder at `path`, or `path` ends like one.
    /// - [`Error::NoFolder`] if the folder for the file does not exist.
    /// - [`Error::Write`] if the folder does not let a file be made in it, if there is a file that is marked read-only,
    ///   or if the path is invalid otherwise.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |source| Error::Write { path: path.to_owned(), source };
        if ends_like_a_folder(path) {
            return Err(Error::IsFolder { path: path.to_owned() });
        }
        let writer = if is_descriptor(path) {
            Writer::Direct(open_device(path).map_err(failed)?)
        } else {
            let target = follow_links(path).map_err(failed)?;
            match fs::metadata(&target) {
                Ok(metadata) if metadata.is_dir() => return Err(Error::IsFolder { path: path.to_owned() }),
                Ok(metadata) if metadata.is_file() => {
                    if metadata.permissions().readonly() {
                        let source = io::Error::new(io::ErrorKind::PermissionDenied, "the file is marked read-only");
                        return Err(failed(source));
                    }
                    let file = begin_beside(&target).map_err(failed)?;
                    file.as_file().set_permissions(metadata.permissions()).map_err(failed)?;
                    Writer::Beside { file, target }
                }
                Ok(_) => Writer::Direct(open_device(&target).map_err(failed)?),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let folder = folder_of(&target);
                    if !folder.is_dir() {
                        return Err(Error::NoFolder { path: path.to_owned(), folder: folder.to_owned() });
                    }
                    Writer::Beside { file: begin_beside(&target).map_err(failed)?, target }
                }
                Err(error) => return Err(failed(error)),
            }
        };
        Ok(Self { path: path.to_owned(), writer })
    }

    /// The path as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A nameless file for parts that are to be written later, on the disk that the file itself goes to; it goes away
    /// with its handle, also when the process is killed.
    #[cfg(feature = "mp4")]
    pub(crate) fn scratch(&self) -> Result<File> {
        let scratch = match &self.writer {
            Writer::Beside { target, .. } => tempfile::tempfile_in(folder_of(target)),
            Writer::Direct(_) => tempfile::tempfile(),
        };
        scratch.map_err(|source| Error::Write { path: self.path.clone(), source })
    }

    /// Brings what was written to the disk and the file to its place, replacing an older one in one step.
    ///
    /// # Errors
    /// [`Error::Write`] if the disk is full or fails, or if the file cannot be put in its place; then an older file is
    /// untouched and the temporary one is removed.
    pub fn commit(self) -> Result<()> {
        let Self { path, writer } = self;
        let done = match writer {
            Writer::Beside { mut file, target } => file
                .flush()
                .and_then(|()| file.as_file().sync_all())
                .and_then(|()| file.persist(&target).map(drop).map_err(|error| error.error)),
            // Pipes and terminals cannot be synchronised; every write has reported its own failure.
            Writer::Direct(mut file) => file.flush(),
        };
        done.map_err(|source| Error::Write { path, source })
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Writer::Beside { file, .. } => file.write(bytes),
            Writer::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.writer {
            Writer::Beside { file, .. } => file.flush(),
            Writer::Direct(file) => file.flush(),
        }
    }
}

/// An empty path, one without a name at its end (`..`), or one that ends with a separator.
fn ends_like_a_folder(path: &Path) -> bool {
    let last = path.as_os_str().as_encoded_bytes().last();
    path.file_name().is_none() || last.is_some_and(|&byte| std::path::is_separator(char::from(byte)))
}

/// A name for an open file of this process. Where it leads to a regular file (`> picture.png`), that file is held open
/// by somebody else and must not be replaced by another one.
fn is_descriptor(path: &Path) -> bool {
    let named = [Path::new("/dev/stdout"), Path::new("/dev/stderr")].contains(&path);
    cfg!(unix) && (named || path.starts_with("/dev/fd") || path.starts_with("/proc"))
}

fn open_device(path: &Path) -> io::Result<File> {
    File::options().write(true).open(path)
}

/// The folder that a file lies in; `.` for a bare name.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != OsStr::new("") => folder,
        _ => Path::new("."),
    }
}

/// Where a chain of symbolic links ends, whether or not something is there.
fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::symlink_metadata(&target) {
            Ok(metadata) if metadata.is_symlink() => target = folder_of(&target).join(fs::read_link(&target)?),
            _ => return Ok(target),
        }
    }
    Err(io::Error::other("too many symbolic links"))
}

/// A temporary file in the folder of `target`, so that renaming does not copy.
fn begin_beside(target: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".unfinished-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Less the process's umask, as for any new file; the default would be readable by the owner alone.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder_of(target))
}
