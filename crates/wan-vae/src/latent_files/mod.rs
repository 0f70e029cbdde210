//! Latents in files: ComfyUI's `.latent`, tensors that people dump, NumPy arrays.
//!
//! A `.latent` file is a safetensors file with the latents under `latent_tensor` and an empty tensor
//! `latent_format_version_0` (`Comfy-Org/ComfyUI`: `nodes.py`, `SaveLatent`). What it holds are raw latents. A dump says
//! nothing about its kind, so [`likeness`] compares its statistics with what either kind should have.

mod likeness;
mod npy;
mod reader;
#[cfg(test)]
mod tests;

use std::path::Path;

use candle_core::{DType, Tensor};
use candle_fork::{HostBytes, What};
use weights::{
    StoredDType, TensorInfo,
    write::{Metadata, TensorData, header, to_file},
};

pub use self::{
    likeness::{Kind, Likeness, likeness},
    reader::LatentFile,
};
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

/// The latents in a file as `[z, n, h, w]` f32, all at once ([`LatentFile`] gives them piece by piece).
///
/// # Errors
/// As [`LatentFile::open`].
pub fn read(path: impl AsRef<Path>) -> Result<Tensor> {
    LatentFile::open(path)?.all()
}

/// Like [`read`], for a file in memory; `name` stands for the path in messages.
///
/// # Errors
/// As [`LatentFile::open`].
pub fn read_bytes(file: HostBytes, name: &str) -> Result<Tensor> {
    LatentFile::from_bytes(file, name)?.all()
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

/// What stands before the elements in a file as [`write()`] makes it; they follow as f32, little-endian, in the order
/// `[z, n, h, w]`, and end the file. For latents that are written as they come.
///
/// # Errors
/// [`Error::Weights`] if the metadata are too long, or the extents too large.
pub fn head((z, n, h, w): (usize, usize, usize, usize), metadata: &Metadata) -> Result<Vec<u8>> {
    let axes = [1, z, n, h, w];
    let tensors = [(KEYS[0], StoredDType::F32, &axes[..]), (VERSION, StoredDType::F32, &[0][..])];
    Ok(header(tensors, metadata)?)
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

fn io(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    weights::Error::Io { action, path: path.display().to_string(), source }.into()
}
