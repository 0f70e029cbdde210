//! Names and shapes of the published models, without their weights.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{container::write_header_only, data};

/// One table of `models/names`, in the order of the reference implementation.
#[derive(Debug, Clone)]
pub struct NameTable {
    /// Name and extents of each tensor.
    pub tensors: Vec<(String, Vec<usize>)>,
}

impl NameTable {
    /// Reads `models/names/NAME.tsv`.
    ///
    /// # Errors
    /// If it cannot be read or a line does not parse.
    pub fn open(name: &str) -> Result<Self> {
        let path = data(&format!("models/names/{name}.tsv"));
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let parse = |line: &str| {
            let (name, shape) = line.split_once('\t').with_context(|| line.to_owned())?;
            let extents = shape.split(',').filter(|extent| !extent.is_empty());
            let shape = extents.map(str::parse).collect::<Result<_, _>>().with_context(|| line.to_owned())?;
            Ok((name.to_owned(), shape))
        };
        Ok(Self { tensors: lines.map(parse).collect::<Result<_>>()? })
    }

    /// Number of elements of all tensors.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// Writes a sparse safetensors file with these names and shapes in bf16 (counters in i64, as torch stores them) and
    /// returns its length in bytes. The file takes next to no space.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_header_only(&self, path: &Path) -> Result<u64> {
        let dtype = |name: &str| if name.ends_with("num_batches_tracked") { "I64" } else { "BF16" };
        let tensors: Vec<_> =
            self.tensors.iter().map(|(name, shape)| (name.clone(), dtype(name), shape.clone())).collect();
        write_header_only(path, &tensors)
    }
}

/// A config as it is published: `models/configs/PATH`.
///
/// # Errors
/// If it cannot be read.
pub fn published_config(path: &str) -> Result<Value> {
    let path = data(&format!("models/configs/{path}"));
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}
