//! What every model loads from.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_fork::HostTensor;
use serde::Serialize;

use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
};

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type as stored.
    pub dtype: StoredDType,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Where its bytes lie in its file.
    #[serde(skip)]
    pub bytes: Range<usize>,
    /// Which of the source's files holds it: an index into [`TensorSource::files`].
    #[serde(skip)]
    pub file: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A set of named tensors.
pub trait TensorSource: Send + Sync {
    /// All tensors, sorted by name.
    fn tensors(&self) -> &[TensorInfo];

    /// The files behind the source, for messages and sizes, in the order that [`TensorInfo::file`] counts.
    fn files(&self) -> &[SourceFile];

    /// The bytes of one tensor as stored, where they lie (mapped or in memory): for element types that candle lacks.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    fn bytes(&self, name: &str) -> Result<&[u8]>;

    /// One tensor where it lies (mapped or in memory).
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; [`Error::DType`] if candle has no such element type.
    fn host(&self, name: &str) -> Result<HostTensor>;

    /// What this is, for messages: a path.
    fn describe(&self) -> &str;

    /// Free-form metadata of the file (`__metadata__`); of several files, the first that has the key counts.
    fn metadata(&self) -> &BTreeMap<String, String>;

    /// What the source says about one tensor.
    fn info(&self, name: &str) -> Option<&TensorInfo> {
        let tensors = self.tensors();
        tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok().map(|i| &tensors[i])
    }

    /// Like [`TensorSource::info`], for a tensor that must be there.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.info(name).ok_or_else(|| Error::NoSuchTensor { file: self.describe().to_owned(), tensor: shown(name) })
    }

    /// Name of the file that holds `tensor`, for messages.
    fn file_of(&self, tensor: &TensorInfo) -> &str {
        self.files().get(tensor.file).map_or(self.describe(), |f| &f.name)
    }
}

impl<S: TensorSource + ?Sized> TensorSource for Arc<S> {
    fn tensors(&self) -> &[TensorInfo] {
        (**self).tensors()
    }
    fn files(&self) -> &[SourceFile] {
        (**self).files()
    }
    fn bytes(&self, name: &str) -> Result<&[u8]> {
        (**self).bytes(name)
    }
    fn host(&self, name: &str) -> Result<HostTensor> {
        (**self).host(name)
    }
    fn describe(&self) -> &str {
        (**self).describe()
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        (**self).metadata()
    }
}

/// One file of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceFile {
    /// Path, or name of the buffer.
    pub name: String,
    /// Size of the file in bytes, header included.
    pub bytes: usize,
}
