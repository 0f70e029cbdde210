//! Latents in files: ComfyUI's `.latent`, tensors that people dump, NumPy arrays.
//!
//! A `.latent` file is a safetensors file with the latents under `latent_tensor` and an empty tensor
//! `latent_format_version_0` (`Comfy-Org/ComfyUI`: `nodes.py`, `SaveLatent`). What it holds are raw latents. A dump says
//! nothing about its kind, so [`likeness`] compares its statistics with what either kind should have.

mod likeness;
mod npy;
#[cfg(test)]
mod tests;

use std::{fs, io::Read, path::Path, sync::Arc};

use candle_core::{DType, Device, Tensor};
use candle_fork::{HostBytes, HostTensor, What};
use weights::{
    Safetensors, StoredDType, TensorInfo, TensorSource,
    write::{Metadata, TensorData, to_file},
};

pub use self::likeness::{Kind, Likeness, likeness};
use crate::{
    error::{Error, Result},
    latents::RawLatents,
};

/// What is wrong with a file of latents.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LatentFileError {
    /// None of several tensors is known to hold latents.
    #[error("none of its tensors is named like latents ({}): {names}", KEYS.join(", "))]
    WhichTensor {
        /// The first names.
        names: String,
    },
    /// Another number of axes.
    #[error("the latents have shape {shape:?}, expected [z, n, h, w] or [1, z, n, h, w]")]
    Shape {
        /// Shape found.
        shape: Vec<usize>,
    },
    /// Several clips.
    #[error("the latents are a batch of {batch} clips, one at a time is taken")]
    Batch {
        /// How many.
        batch: usize,
    },
    /// Numbers that are no latents.
    #[error("the latents have element type {dtype}, expected a float of 16, 32 or 64 bits")]
    ElementType {
        /// The type's name.
        dtype: String,
    },
    /// A damaged or unusual NumPy array.
    #[error("NumPy array: {problem}")]
    Npy {
        /// What is wrong.
        problem: String,
    },
}

/// Names under which latents are stored, in the order in which they are tried.
const KEYS: &[&str] = &["latent_tensor", "latents", "samples", "latent"];

/// ComfyUI's mark of the format; without elements.
const VERSION: &str = "latent_format_version_0";

/// First bytes of a NumPy array.
const NPY: &[u8] = b"\x93NUMPY";

/// The latents in a file as `[z, n, h, w]` f32: a safetensors file (`.latent` is one), a PyTorch checkpoint of tensors, or
/// a NumPy array, told by its first bytes. One tensor may have any name; of several, one must be named `latent_tensor`,
/// `latents`, `samples` or `latent`. A first axis of 1 before the channels is dropped; `[1, z, h, w]` and `[z, h, w]` are
/// one latent frame.
///
/// Values are not looked at: [`WanVae::decode`](crate::WanVae::decode) refuses those that are not finite.
///
/// # Errors
/// [`Error::Weights`] if the file cannot be read or is damaged; [`Error::LatentFile`] if it holds no latents that can be
/// used.
pub fn read(path: impl AsRef<Path>) -> Result<Tensor> {
    let path = path.as_ref();
    let name = path.display().to_string();
    if path.is_file() && first_bytes(path, NPY.len())? == NPY {
        let file = fs::read(path).map_err(|source| io("read", path, source))?;
        return from_npy(Arc::new(file), &name);
    }
    from_source(&*weights::open(path)?)
}

/// Like [`read`], for a file in memory; `name` stands for the path in messages.
///
/// # Errors
/// As [`read`].
pub fn read_bytes(file: HostBytes, name: &str) -> Result<Tensor> {
    let bytes = (*file).as_ref();
    if bytes.starts_with(NPY) {
        return from_npy(file, name);
    }
    if bytes.starts_with(b"PK\x03\x04") {
        return from_source(&weights::Pth::from_bytes(file, name)?);
    }
    from_source(&Safetensors::from_bytes(file, name)?)
}

/// Writes latents as ComfyUI does: f32, `[1, z, n, h, w]`. `metadata` goes into the file's header as it is.
///
/// # Errors
/// [`Error::Weights`] if the file cannot be written; [`Error::Op`].
pub fn write(path: impl AsRef<Path>, latents: &RawLatents, metadata: &Metadata) -> Result<()> {
    let (z, n, h, w) = latents.extents();
    let values = latents.tensor().to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1::<f32>());
    let values = values.what("latents to be written")?;
    let tensors = [TensorData::f32(KEYS[0], &[1, z, n, h, w], &values), TensorData::f32(VERSION, &[0], &[])];
    Ok(to_file(path, &tensors, metadata)?)
}

fn from_source(source: &dyn TensorSource) -> Result<Tensor> {
    let refuse = |problem| Error::LatentFile { file: source.describe().to_owned(), problem };
    let tensor = choose(source.tensors()).map_err(refuse)?;
    check_dtype(tensor.dtype).map_err(refuse)?;
    let axes = axes(&tensor.shape).map_err(refuse)?;
    as_tensor(&source.host(&tensor.name)?, axes)
}

fn from_npy(file: HostBytes, name: &str) -> Result<Tensor> {
    let refuse = |problem| Error::LatentFile { file: name.to_owned(), problem };
    let array = npy::parse((*file).as_ref()).map_err(refuse)?;
    let axes = axes(&array.shape).map_err(refuse)?;
    as_tensor(&HostTensor::new(file, array.bytes, array.dtype, array.shape.as_slice())?, axes)
}

fn as_tensor(host: &HostTensor, axes: [usize; 4]) -> Result<Tensor> {
    Ok(host.to_tensor(DType::F32, &Device::Cpu)?.reshape(axes.as_slice()).what("latents")?)
}

/// The tensor with the latents.
fn choose(tensors: &[TensorInfo]) -> Result<&TensorInfo, LatentFileError> {
    if let Some(known) = KEYS.iter().find_map(|key| tensors.iter().find(|t| t.name == *key)) {
        return Ok(known);
    }
    let others: Vec<&TensorInfo> = tensors.iter().filter(|t| t.name != VERSION).collect();
    match others.as_slice() {
        [only] => Ok(only),
        _ => {
            let names: Vec<String> =
                others.iter().take(10).map(|t| t.name.escape_debug().take(120).collect()).collect();
            let names = if names.is_empty() { "it holds none".to_owned() } else { names.join(", ") };
            Err(LatentFileError::WhichTensor { names })
        }
    }
}

fn check_dtype(dtype: StoredDType) -> Result<(), LatentFileError> {
    match dtype {
        StoredDType::F16 | StoredDType::BF16 | StoredDType::F32 | StoredDType::F64 => Ok(()),
        other => Err(LatentFileError::ElementType { dtype: other.to_string() }),
    }
}

/// Channels, frames, height and width.
fn axes(shape: &[usize]) -> Result<[usize; 4], LatentFileError> {
    let axes = match *shape {
        [1, z, n, h, w] => [z, n, h, w],
        [batch, _, _, _, _] if batch > 1 => return Err(LatentFileError::Batch { batch }),
        // No latents have one channel: the first axis counts clips.
        [1, z, h, w] => [z, 1, h, w],
        [z, n, h, w] => [z, n, h, w],
        [z, h, w] => [z, 1, h, w],
        _ => [0; 4],
    };
    if axes.contains(&0) { Err(LatentFileError::Shape { shape: shape.to_vec() }) } else { Ok(axes) }
}

fn first_bytes(path: &Path, len: usize) -> Result<Vec<u8>> {
    let file = fs::File::open(path).map_err(|source| io("open", path, source))?;
    let mut bytes = Vec::new();
    file.take(len as u64).read_to_end(&mut bytes).map_err(|source| io("read", path, source))?;
    Ok(bytes)
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    weights::Error::Io { action, path: path.display().to_string(), source }.into()
}
