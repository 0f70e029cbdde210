//! One file of the cache, downloaded in as many attempts as it takes.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use policy::Cancelled;

use super::client::{Opened, RepoFile};
use crate::{
    digest::{Digest, sha256},
    error::{Error, Result},
};

/// Bytes that are read at once.
const BLOCK: usize = 1 << 18;
/// Attempts that bring nothing before the download is given up.
const ATTEMPTS: u32 = 4;
/// Pause before the next attempt; it doubles with each one that brings nothing.
const PAUSE: Duration = Duration::from_millis(250);
/// Pause between two looks at a lock that another program holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Receives the number of bytes that are there, and stops the download.
pub(super) type Progress<'a> = &'a dyn Fn(u64) -> Result<(), Cancelled>;

/// The contents of a file of a repository.
pub(super) struct Blob<'a> {
    /// Folder of the repository in the cache.
    pub(super) folder: &'a Path,
    pub(super) file: &'a RepoFile,
}

impl Blob<'_> {
    /// Where it lies when it is complete.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join("blobs").join(self.file.digest.name())
    }

    /// Downloads what is missing. `open` asks for the contents from a byte on.
    pub(super) fn fill(&self, progress: Progress<'_>, open: impl Fn(u64) -> Result<Opened>) -> Result<()> {
        progress(0)?;
        if !self.is_complete() {
            let _lock = self.lock(progress)?;
            // Another program may have been at it.
            if !self.is_complete() {
                self.download(progress, open)?;
            }
        }
        Ok(progress(self.file.size)?)
    }

    fn is_complete(&self) -> bool {
        fs::metadata(self.path()).is_ok_and(|found| found.len() == self.file.size)
    }

    /// Takes the lock that Python programs take for the same blob; the system lets go of it when the process ends.
    fn lock(&self, progress: Progress<'_>) -> Result<File> {
        let name = self.folder.file_name().unwrap_or_default();
        let folder = self.folder.with_file_name(".locks").join(name);
        fs::create_dir_all(&folder).map_err(|e| Error::io("make", &folder, e))?;
        let path = folder.join(format!("{}.lock", self.file.digest.name()));
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|e| Error::io("open", &path, e))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(fs::TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
                // Some network drives have no locks. Two downloads at once are then found by the checksum.
                Err(fs::TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => return Ok(file),
                Err(fs::TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
            }
            progress(0)?;
        }
    }

    fn download(&self, progress: Progress<'_>, open: impl Fn(u64) -> Result<Opened>) -> Result<()> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(|e| Error::io("make", &blobs, e))?;
        let partial = blobs.join(format!("{}.incomplete", self.file.digest.name()));
        let mut fruitless = 0;
        loop {
            let before = fs::metadata(&partial).map_or(0, |found| found.len());
            let outcome = self.attempt(&partial, before, progress, &open);
            let broke = match outcome {
                Ok(()) => break,
                Err(error @ Error::Transport { .. }) => error,
                Err(error) => return Err(error),
            };
            let grown = fs::metadata(&partial).is_ok_and(|found| found.len() > before);
            fruitless = if grown { 0 } else { fruitless + 1 };
            if fruitless == ATTEMPTS {
                return Err(broke);
            }
            tracing::debug!(error = %broke, file = self.file.path, "the download is taken up again");
            thread::sleep(PAUSE * 2u32.pow(fruitless));
            progress(before)?;
        }
        self.check(&partial)?;
        fs::rename(&partial, self.path()).map_err(|e| Error::io("rename", &partial, e))
    }

    /// Appends what is missing to `partial`, which has `have` bytes.
    fn attempt(
        &self,
        partial: &Path,
        have: u64,
        progress: Progress<'_>,
        open: &impl Fn(u64) -> Result<Opened>,
    ) -> Result<()> {
        let have = if have > self.file.size { 0 } else { have };
        if have == self.file.size && have > 0 {
            return Ok(());
        }
        let Opened { start, mut reader, url } = open(have)?;
        let io = |action, e| Error::io(action, partial, e);
        let mut file = OpenOptions::new().create(true).append(true).open(partial).map_err(|e| io("open", e))?;
        // A server that knows no ranges begins at the beginning again.
        file.set_len(start).map_err(|e| io("shorten", e))?;
        let mut done = start;
        let mut block = vec![0; BLOCK];
        loop {
            let n = reader.read(&mut block).map_err(|e| Error::Transport { url: url.clone(), source: Box::new(e) })?;
            if n == 0 {
                break;
            }
            done += n as u64;
            if done > self.file.size {
                break;
            }
            file.write_all(&block[..n]).map_err(|e| io("write", e))?;
            progress(done)?;
        }
        file.sync_all().map_err(|e| io("write", e))?;
        if done < self.file.size {
            let source = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(Error::Transport { url, source: Box::new(source) });
        }
        if done > self.file.size {
            // Whatever this is, it is not the file.
            fs::remove_file(partial).map_err(|e| io("remove", e))?;
            return Err(self.damaged("its size", format!("more than {done} bytes"), self.file.size.to_string()));
        }
        Ok(())
    }

    /// Compares the contents with the hub's checksum.
    fn check(&self, partial: &Path) -> Result<()> {
        let Digest::Sha256(expected) = &self.file.digest else { return Ok(()) };
        let found = sha256(partial, &policy::Silent)?;
        if found == *expected {
            return Ok(());
        }
        fs::remove_file(partial).map_err(|e| Error::io("remove", partial, e))?;
        Err(self.damaged("its sha256", found, expected.clone()))
    }

    fn damaged(&self, what: &'static str, found: String, expected: String) -> Error {
        Error::Damaged { file: self.file.path.clone(), what, found, expected }
    }
}
