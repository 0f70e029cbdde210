//! Files mapped into memory: the only unsafe code of this crate.

use std::{fs::File, path::Path};

use memmap2::Mmap;

use crate::error::{Error, Result};

/// A read-only mapping of a whole file.
pub(crate) struct MappedFile(Mmap);

impl MappedFile {
    /// Maps `file`, which was opened from `path`.
    ///
    /// The mapping follows the file: a file that is *replaced* (written beside, then renamed, as this crate's writer
    /// does) stays readable here under its old contents; a file that another process *shortens* in place makes later
    /// reads fail with SIGBUS. Where that can happen (network drives, downloads in progress), read into memory instead.
    pub(crate) fn new(file: &File, path: &Path) -> Result<Self> {
        // SAFETY: the mapping is private to this value and read-only, and is handed out only as `&[u8]` borrowed from
        // it, so no reference outlives it and nothing in this process writes through it. What remains is another process
        // that changes the file in place; bytes may then differ from one read to the next, which every reader of this
        // crate tolerates because it checks ranges once against the length, fixed when the file was mapped, and any
        // bit pattern is a valid `u8`. Shortening the file raises SIGBUS, which ends the process: documented above and
        // at `Safetensors::open`, with `ReadMode::Copy` as the way around.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(file) };
        map.map(Self).map_err(|e| Error::io("map", path, e))
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
