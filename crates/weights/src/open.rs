//! A checkpoint of any format that is read here.

use std::{fs, io::Read, path::Path, sync::Arc};

use crate::{
    error::{Error, Result},
    folder::weights_in,
    gguf::{self, Gguf},
    pth::{self, Pth},
    quant,
    safetensors::{ReadMode, Safetensors, regular},
    source::TensorSource,
};

/// Opens a checkpoint, mapped: a safetensors file, an index with its shards, a folder with either, a PyTorch checkpoint, or
/// a GGUF file. Its first bytes decide, not its name; only an index is told by its ending `.json`. Quantised matrices are
/// joined with their side tensors, see [`mod@crate::quant`].
///
/// # Errors
/// Those of [`Safetensors::open`], [`Pth::open`], [`Gguf::open`] and [`quant::fold`].
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
    if meta.is_dir() {
        return open_with(weights_in(path)?, mode);
    }
    let first = first_bytes(path)?;
    if first.starts_with(pth::MAGIC) {
        return Ok(Arc::new(Pth::open_with(path, mode)?));
    }
    if first.starts_with(gguf::MAGIC) {
        return Ok(Arc::new(Gguf::open_with(path, mode)?));
    }
    quant::fold(Arc::new(Safetensors::open_with(path, mode)?))
}

/// As many bytes as tell the formats apart, or fewer if the file ends before.
pub(crate) fn first_bytes(path: &Path) -> Result<Vec<u8>> {
    regular(path)?;
    let file = fs::File::open(path).map_err(|e| Error::io("open", path, e))?;
    let mut first = Vec::new();
    file.take(256).read_to_end(&mut first).map_err(|e| Error::io("read", path, e))?;
    Ok(first)
}
