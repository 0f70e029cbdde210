//! GGUF: one file with metadata and, mostly, block-quantised tensors.

mod cursor;
mod header;
mod metadata;
mod problem;
#[cfg(test)]
mod tests;
mod types;

use std::{collections::BTreeMap, ops::Range, path::Path};

use candle_fork::HostBytes;

pub(crate) use self::header::MAGIC;
pub use self::{problem::GgufError, types::GgmlType};
use crate::{
    error::{Error, Result},
    safetensors::{ReadMode, read_file},
    source::{SourceFile, TensorInfo, TensorSource},
};

/// The tensors of a GGUF file.
///
/// The header is checked when the source is made: afterwards every tensor is a range of bytes that is known to exist.
/// Block-quantised tensors have their logical shape and an element type of [`GgmlType`]. Types that cannot be computed
/// with are listed like others, and refused by a [`crate::Loader`]'s plan.
pub struct Gguf {
    files: [SourceFile; 1],
    file: HostBytes,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl std::fmt::Debug for Gguf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gguf").field("name", &self.files[0].name).field("tensors", &self.tensors.len()).finish()
    }
}

impl Gguf {
    /// Opens a file, mapped; as for [`crate::Safetensors::open`], it must not be shortened while it is in use.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`]; [`Error::Gguf`] for what is no GGUF file, is damaged or hostile.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, ReadMode::Map)
    }

    /// Like [`Gguf::open`], with a choice of how the bytes come into memory.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open_with(path: impl AsRef<Path>, mode: ReadMode) -> Result<Self> {
        let path = path.as_ref();
        Self::from_bytes(read_file(path, mode)?, path.display().to_string())
    }

    /// A whole file in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// [`Error::Gguf`].
    pub fn from_bytes(file: HostBytes, name: impl Into<String>) -> Result<Self> {
        let (name, bytes) = (name.into(), (*file).as_ref().len());
        match header::parse((*file).as_ref()) {
            Ok(header::Header { tensors, metadata }) => {
                Ok(Self { files: [SourceFile { name, bytes }], file, tensors, metadata })
            }
            Err(problem) => Err(Error::Gguf { file: name, problem: Box::new(problem) }),
        }
    }

    /// The architecture that the file names, for example `flux` or `qwen3`.
    pub fn architecture(&self) -> Option<&str> {
        self.metadata.get(ARCHITECTURE).map(String::as_str)
    }
}

/// Metadata key of the architecture.
pub const ARCHITECTURE: &str = "general.architecture";

impl TensorSource for Gguf {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        Ok(&(*self.file).as_ref()[self.require(name)?.bytes.clone()])
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        Ok((self.file.clone(), self.require(name)?.bytes.clone()))
    }

    fn describe(&self) -> &str {
        &self.files[0].name
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}
