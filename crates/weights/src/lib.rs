//! Checkpoints of every layout, read with suspicion.
//!
//! A file is hostile until its header has been checked: lengths are compared with what is there before anything is
//! allocated, names are unique, ranges cover the data exactly once. What is wrong is said in one line that names the file.
//!
//! - [`Safetensors`] opens one file, shards with an index, or bytes in memory, mapped by default.
//! - [`Pth`] reads PyTorch checkpoints without running their pickles, [`Gguf`] the block-quantised files of GGML;
//!   [`open()`] takes a file of any format.
//! - [`mod@quant`] joins quantised matrices with their scales, [`layout`] translates other programs' names.
//! - [`ModelFolder`] is a model in the diffusers layout, on disk or built into the program.
//! - [`Loader`] compares what a model needs with what a source holds, as a whole, and then hands out tensors.
//! - [`mod@inspect`] says what a file or folder is.
//! - [`sample_hash()`] names the weights of a model.
//! - [`write`](mod@write) makes safetensors files, [`mod@quantize`] quantised ones.
//!
//! ```
//! use std::sync::Arc;
//! use candle_core::{DType, Device};
//! use weights::{Expected, Loader, Safetensors, write::{TensorData, to_bytes}};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = to_bytes(&[TensorData::bf16("proj.weight", &[1, 2], &[0.5, -2.0])], &Default::default())?;
//! let source = Arc::new(Safetensors::from_bytes(Arc::new(file), "example")?);
//! let plan = [Expected::new("proj.weight", [1, 2])];
//! let mut loader = Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu)?;
//! assert_eq!(loader.tensor("proj.weight")?.to_vec2::<f32>()?, [[0.5, -2.0]]);
//! loader.finish()?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

pub mod dtype;
pub mod error;
pub mod folder;
pub mod gguf;
pub mod inspect;
pub mod layout;
pub mod loader;
mod mmap;
pub mod open;
pub mod pth;
pub mod quant;
pub mod quantize;
pub mod safetensors;
mod sample_hash;
pub mod source;
pub mod write;

pub use dtype::StoredDType;
pub use error::{Error, Result};
pub use folder::ModelFolder;
pub use gguf::{GgmlType, Gguf};
pub use inspect::inspect;
pub use loader::{Embedding, Expected, Loader, LoaderOptions, QuantPolicy, ValueCheck};
pub use open::open;
pub use pth::Pth;
pub use quant::Quantisation;
pub use safetensors::{ReadMode, Safetensors};
pub use sample_hash::sample_hash;
pub use source::{SourceFile, TensorInfo, TensorSource};
