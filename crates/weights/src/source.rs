//! What every model loads from.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_fork::{HostBytes, HostTensor, quant::QuantWeight};
use serde::Serialize;

use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
    quant::{self, Quantisation},
};

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type as stored.
    pub dtype: StoredDType,
    /// Extents, outermost first; empty for a scalar. Of a quantised tensor those of the values, not of the stored bytes.
    pub shape: Vec<usize>,
    /// Where its bytes lie in its file.
    #[serde(skip)]
    pub bytes: Range<usize>,
    /// Which of the source's files holds it: an index into [`TensorSource::files`].
    #[serde(skip)]
    pub file: usize,
    /// How its values are to be computed, if they are not the stored elements: see [`TensorSource::quant`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantisation: Option<Quantisation>,
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

    /// The memory that holds one tensor, and where in it the tensor's bytes lie: what [`TensorSource::bytes`] gives, to be
    /// kept.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)>;

    /// What this is, for messages: a path.
    fn describe(&self) -> &str;

    /// Free-form metadata of the file (`__metadata__`); of several files, the first that has the key counts.
    fn metadata(&self) -> &BTreeMap<String, String>;

    /// One tensor where it lies (mapped or in memory).
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; [`Error::DType`] if candle has no such element type, or the tensor is quantised.
    fn host(&self, name: &str) -> Result<HostTensor> {
        let info = self.require(name)?;
        let dtype = info.dtype.to_candle().filter(|_| info.quantisation.is_none()).ok_or_else(|| Error::DType {
            file: self.file_of(info).to_owned(),
            tensor: shown(name),
            dtype: info.dtype,
            wanted: "a tensor; its raw bytes can be read".to_owned(),
        })?;
        let (owner, range) = self.shared(name)?;
        HostTensor::new(owner, range, dtype, info.shape.as_slice()).map_err(|source| Error::Tensor {
            file: self.file_of(info).to_owned(),
            tensor: shown(name),
            source: Box::new(source),
        })
    }

    /// A quantised tensor where it lies, as a matrix: of rank 2 as it is; otherwise `[1, elements]`, or
    /// `[first extent, product of the others]` if its rows have scales of their own.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; [`Error::Quantised`] if it is not quantised, or in a way that is not supported, or if its
    /// scales do not fit.
    fn quant(&self, name: &str) -> Result<QuantWeight> {
        quant::without_scales(self, self.require(name)?)
    }

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
    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        (**self).shared(name)
    }
    fn host(&self, name: &str) -> Result<HostTensor> {
        (**self).host(name)
    }
    fn quant(&self, name: &str) -> Result<QuantWeight> {
        (**self).quant(name)
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
