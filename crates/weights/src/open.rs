//! A checkpoint of any format that is read here.

use std::{fs, io::Read, path::Path, sync::Arc};

use crate::{
    error::{Error, Result},
    pth::{MAGIC, Pth},
    safetensors::{ReadMode, Safetensors, regular},
    source::TensorSource,
};

/// Opens a checkpoint, mapped: a safetensors file, an index with its shards, a folder with either, or a PyTorch
/// checkpoint. Its first bytes decide, not its name; only an index is told by its ending `.json`.
///
/// # Errors
/// Those of [`Safetensors::open`] and [`Pth::open`].
pub fn open(path: impl AsRef<Path>) -> Result<Arc<dyn TensorSource>> {
    open_with(path, ReadMode::Map)
}

/// Like [`open`], with a choice of how the bytes come into memory.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: impl AsRef<Path>, mode: ReadMode) -> Result<Arc<dyn TensorSource>> {
    let path = path.as_ref();
    let meta = fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    if !meta.is_dir() && starts_with(path, MAGIC)? {
        return Ok(Arc::new(Pth::open_with(path, mode)?));
    }
    Ok(Arc::new(Safetensors::open_with(path, mode)?))
}

fn starts_with(path: &Path, magic: &[u8]) -> Result<bool> {
    regular(path)?;
    let file = fs::File::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut first = Vec::new();
    file.take(magic.len() as u64).read_to_end(&mut first).map_err(|e| Error::io("read", path, e))?;
    Ok(first == magic)
}
