//! PyTorch checkpoints (`.pth`, `.pt`, `.ckpt`), read without running anything that they say.
//!
//! Format (`pytorch/pytorch`: `torch/serialization.py`): an uncompressed zip archive with `ROOT/data.pkl`, a pickle of the
//! saved object, and `ROOT/data/KEY`, the elements of one storage each; `ROOT/byteorder` names the byte order. The pickle
//! is read by a machine that knows the dozen classes and functions of plain tensors and refuses all others by name.
//! Elements stay where they lie in the mapped file, unless a tensor's strides scatter them.

mod pickle;
mod problem;
mod state;
#[cfg(test)]
mod tests;
mod zip;

use std::{collections::BTreeMap, ops::Range, path::Path, sync::Arc};

use candle_fork::HostBytes;

pub use self::problem::PthError;
use self::{pickle::Pickle, state::gather, zip::Archive};
use crate::{
    error::{Error, Result, shown},
    safetensors::{ReadMode, read_file, sniff},
    source::{SourceFile, TensorInfo, TensorSource},
};

/// Longest pickle that is read: 16 MiB. Those of published models have 0.03 to 2.
pub const MAX_PICKLE: usize = 16 << 20;

/// First bytes of a zip archive.
pub(crate) const MAGIC: &[u8] = b"PK\x03\x04";

const PICKLE: &str = "data.pkl";

/// The tensors of a PyTorch checkpoint.
///
/// The saved object is a dictionary of tensors, or holds one under `state_dict`, `model_state`, `gen_model` or
/// `generator` (in this order, also nested), or is a single tensor, which is then named `tensor`. Parameters count as
/// tensors; other values beside the tensors are passed over.
pub struct Pth {
    files: [SourceFile; 1],
    file: HostBytes,
    tensors: Vec<TensorInfo>,
    /// Elements of those tensors, by the same index, that did not lie one after another.
    gathered: BTreeMap<usize, HostBytes>,
    metadata: BTreeMap<String, String>,
}

impl std::fmt::Debug for Pth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pth").field("name", &self.files[0].name).field("tensors", &self.tensors.len()).finish()
    }
}

impl Pth {
    /// Opens a file, mapped; as for [`crate::Safetensors::open`], it must not be shortened while it is in use.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`]; [`Error::Pth`] for what is no checkpoint, is damaged, or holds more than plain
    /// tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, ReadMode::Map)
    }

    /// Like [`Pth::open`], with a choice of how the bytes come into memory.
    ///
    /// # Errors
    /// As [`Pth::open`].
    pub fn open_with(path: impl AsRef<Path>, mode: ReadMode) -> Result<Self> {
        let path = path.as_ref();
        Self::from_bytes(read_file(path, mode)?, path.display().to_string())
    }

    /// A whole file in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// [`Error::Pth`].
    pub fn from_bytes(file: HostBytes, name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        match read((*file).as_ref()) {
            Ok((tensors, gathered)) => {
                let files = [SourceFile { name, bytes: (*file).as_ref().len() }];
                Ok(Self { files, file, tensors, gathered, metadata: BTreeMap::new() })
            }
            Err(problem) => Err(Error::Pth { file: name, problem: Box::new(problem) }),
        }
    }

    fn find(&self, name: &str) -> Result<usize> {
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name));
        found.map_err(|_| Error::NoSuchTensor { file: self.files[0].name.clone(), tensor: shown(name) })
    }
}

type Contents = (Vec<TensorInfo>, BTreeMap<usize, HostBytes>);

/// The tensors of a file, sorted by name, and the elements of those that had to be gathered.
fn read(file: &[u8]) -> Result<Contents, PthError> {
    if !file.starts_with(MAGIC) {
        let found =
            if file.is_empty() { "an empty file" } else { sniff(file).unwrap_or("a file of an unknown format") };
        return Err(PthError::NotAnArchive { found });
    }
    let archive = Archive::parse(file)?;
    // The root is one folder, whose name is that of the file when it was saved.
    let is_root = |root: &&str| root.is_empty() || root.find('/') == Some(root.len() - 1);
    let mut roots = archive.names().filter_map(|name| name.strip_suffix(PICKLE).filter(is_root));
    let root = roots.next().ok_or(PthError::NoPickle)?;
    if roots.next().is_some() {
        return Err(PthError::SeveralPickles);
    }
    if let Some(order) = archive.find(&format!("{root}byteorder"))? {
        let order = file[order.start..order.end.min(order.start + 32)].trim_ascii();
        if order != b"little" {
            return Err(PthError::ByteOrder { order: shown(&String::from_utf8_lossy(order)) });
        }
    }
    let text = archive.find(&format!("{root}{PICKLE}"))?.ok_or(PthError::NoPickle)?;
    if text.len() > MAX_PICKLE {
        return Err(PthError::PickleTooLarge { bytes: text.len(), limit: MAX_PICKLE });
    }
    let pickle = Pickle::parse(&file[text])?;
    let mut placed = state::tensors(&pickle, &archive, root)?;
    placed.sort_by(|a, b| a.name.cmp(&b.name));

    let mut tensors = Vec::with_capacity(placed.len());
    let mut gathered = BTreeMap::new();
    let mut copied = 0usize;
    for (i, t) in placed.into_iter().enumerate() {
        let mut bytes = t.bytes;
        if let Some((strides, offset)) = t.strided {
            let size = t.dtype.bits() / 8;
            // At most the length of the storage each; several views of one storage could still multiply it.
            let len = t.shape.iter().product::<usize>() * size;
            copied = copied.saturating_add(len);
            if copied > file.len() {
                let problem =
                    "and others are views of the same elements that would take more memory than the file".to_owned();
                return Err(PthError::Tensor { tensor: shown(&t.name), problem });
            }
            let elements = gather(&file[bytes.clone()], size, &t.shape, &strides, offset);
            gathered.insert(i, Arc::new(elements) as HostBytes);
            bytes.end = bytes.start + len;
        }
        tensors.push(TensorInfo { name: t.name, dtype: t.dtype, shape: t.shape, bytes, file: 0, quantisation: None });
    }
    Ok((tensors, gathered))
}

impl TensorSource for Pth {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        let i = self.find(name)?;
        Ok(match self.gathered.get(&i) {
            Some(elements) => (**elements).as_ref(),
            None => &(*self.file).as_ref()[self.tensors[i].bytes.clone()],
        })
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        let i = self.find(name)?;
        Ok(match self.gathered.get(&i) {
            Some(elements) => (elements.clone(), 0..(**elements).as_ref().len()),
            None => (self.file.clone(), self.tensors[i].bytes.clone()),
        })
    }

    fn describe(&self) -> &str {
        &self.files[0].name
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}
