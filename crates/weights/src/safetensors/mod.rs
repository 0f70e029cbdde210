//! safetensors: one file, or shards with an index.

mod header;
mod index;
mod json;
mod problem;
mod sniff;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fs, io::Read, ops::Range, path::Path, sync::Arc};

use candle_fork::HostBytes;

pub(crate) use self::{header::METADATA, index::is_plain_path, json::shown_message, sniff::sniff};
pub use self::{
    header::{Header, MAX_HEADER, MAX_RANK, parse},
    problem::HeaderError,
};

use crate::{
    error::{Error, Result, shown},
    mmap::MappedFile,
    source::{SourceFile, TensorInfo, TensorSource},
};

/// How a file comes into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadMode {
    /// Mapped: pages are read when they are touched, and shared with the system's cache. A file that is shortened by
    /// somebody else while it is in use ends the process (SIGBUS).
    #[default]
    Map,
    /// Read as a whole into memory of our own: for network drives and for files that may change.
    Copy,
}

/// The tensors of a safetensors file, of several shards, or of bytes in memory.
///
/// The header is checked when the source is made (see [`parse`]); afterwards every tensor is a range of bytes that is
/// known to exist. Nothing is copied out of a mapping until a tensor is asked for.
pub struct Safetensors {
    name: String,
    files: Vec<SourceFile>,
    buffers: Vec<HostBytes>,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl std::fmt::Debug for Safetensors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Safetensors").field("name", &self.name).field("tensors", &self.tensors.len()).finish()
    }
}

impl Safetensors {
    /// Opens `path`, mapped: a safetensors file, an index (`*.index.json`) with its shards beside it, or a folder that
    /// holds one of the two.
    ///
    /// A mapped file must not be shortened while it is in use: that ends the process with SIGBUS. Replacing it by a
    /// rename is fine. [`Safetensors::open_with`] and [`ReadMode::Copy`] avoid the question.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`], [`Error::OtherFormat`], [`Error::Header`]; for shards [`Error::Json`],
    /// [`Error::MissingShards`], [`Error::IndexMismatch`], [`Error::PathEscapes`], [`Error::TensorInTwoFiles`]; for a
    /// folder [`Error::NoWeights`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, ReadMode::Map)
    }

    /// Like [`Safetensors::open`], with a choice of how the bytes come into memory.
    ///
    /// # Errors
    /// As [`Safetensors::open`].
    pub fn open_with(path: impl AsRef<Path>, mode: ReadMode) -> Result<Self> {
        let path = path.as_ref();
        let meta = fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
        if meta.is_dir() {
            return Self::open_with(crate::folder::weights_in(path)?, mode);
        }
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
            let text = read_small(path, index::MAX_INDEX)?;
            let dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
            let name = path.display().to_string();
            return Self::from_index(&text, &name, |shard| {
                let path = dir.join(shard);
                if !path.is_file() {
                    return Ok(None);
                }
                Ok(Some((read_file(&path, mode)?, path.display().to_string())))
            });
        }
        Self::from_bytes(read_file(path, mode)?, path.display().to_string())
    }

    /// A whole file in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// [`Error::OtherFormat`], [`Error::Header`].
    pub fn from_bytes(file: HostBytes, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        Self::from_files(name.clone(), vec![(file, name)])
    }

    /// A file built into the program.
    ///
    /// # Errors
    /// As [`Safetensors::from_bytes`].
    pub fn from_static(file: &'static [u8], name: impl Into<String>) -> Result<Self> {
        Self::from_bytes(Arc::new(file), name)
    }

    /// Shards named by the text of an index. `open` gives the bytes and the full name of a shard, or `None` if it is
    /// not there; it is called with plain relative paths only.
    ///
    /// # Errors
    /// As for an index in [`Safetensors::open`], and those of `open`.
    pub fn from_index(
        text: &[u8],
        name: &str,
        mut open: impl FnMut(&str) -> Result<Option<(HostBytes, String)>>,
    ) -> Result<Self> {
        let index = index::Index::parse(text, name)?;
        let mut files = Vec::new();
        let mut missing = Vec::new();
        for shard in index.shards() {
            match open(shard)? {
                Some(file) => files.push(file),
                None => missing.push(shard),
            }
        }
        if !missing.is_empty() {
            let files = missing.len();
            return Err(Error::MissingShards { index: name.to_owned(), files, missing: crate::error::list(missing) });
        }
        let source = Self::from_files(name.to_owned(), files)?;
        index.check(name, &source)?;
        Ok(source)
    }

    /// All files as one source; a tensor may stand in one of them only.
    fn from_files(name: String, files: Vec<(HostBytes, String)>) -> Result<Self> {
        let mut this =
            Self { name, files: Vec::new(), buffers: Vec::new(), tensors: Vec::new(), metadata: BTreeMap::new() };
        for (buffer, name) in files {
            let bytes = (*buffer).as_ref();
            let header = parse(bytes).map_err(|problem| match problem {
                HeaderError::OtherFormat { found } => Error::OtherFormat { file: name.clone(), found },
                problem => Error::Header { file: name.clone(), problem: Box::new(problem) },
            })?;
            let file = this.files.len();
            this.files.push(SourceFile { name, bytes: bytes.len() });
            this.tensors.extend(header.tensors.into_iter().map(|t| TensorInfo { file, ..t }));
            for (key, value) in header.metadata {
                this.metadata.entry(key).or_insert(value);
            }
            this.buffers.push(buffer);
        }
        this.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = this.tensors.windows(2).find(|w| w[0].name == w[1].name) {
            let file = |t: &TensorInfo| this.files[t.file].name.clone();
            let (tensor, first, second) = (shown(&pair[0].name), file(&pair[0]), file(&pair[1]));
            return Err(Error::TensorInTwoFiles { tensor, first, second });
        }
        Ok(this)
    }

    fn slice(&self, t: &TensorInfo) -> &[u8] {
        &(*self.buffers[t.file]).as_ref()[t.bytes.clone()]
    }
}

impl TensorSource for Safetensors {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        Ok(self.slice(self.require(name)?))
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        let t = self.require(name)?;
        Ok((self.buffers[t.file].clone(), t.bytes.clone()))
    }

    fn describe(&self) -> &str {
        &self.name
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// The bytes of a regular file.
pub(crate) fn read_file(path: &Path, mode: ReadMode) -> Result<HostBytes> {
    let meta = regular(path)?;
    let mut file = fs::File::open(path).map_err(|e| Error::io("open", path, e))?;
    // An empty file cannot be mapped everywhere; its message comes from the parser.
    if mode == ReadMode::Map && meta.len() > 0 {
        return Ok(Arc::new(MappedFile::new(&file, path)?));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    Ok(Arc::new(bytes))
}

/// A text file of at most `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let meta = regular(path)?;
    let file = fs::File::open(path).map_err(|e| Error::io("open", path, e))?;
    let too_large = |bytes| Error::TooLarge { file: path.display().to_string(), bytes, limit };
    if meta.len() > limit {
        return Err(too_large(meta.len()));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// Opening a pipe would wait for ever, and a device has no end: look before opening.
pub(crate) fn regular(path: &Path) -> Result<fs::Metadata> {
    let meta = fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    if meta.is_file() {
        Ok(meta)
    } else {
        let found = if meta.is_dir() { "a folder" } else { "a pipe or device" };
        Err(Error::NotAFile { path: path.display().to_string(), found })
    }
}
