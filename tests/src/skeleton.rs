//! PyTorch checkpoints as `torch.save` writes them, for weights that are stored elsewhere.

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::Path,
};

use anyhow::{Context, Result, ensure};

use crate::{container::Container, data};

/// A `.pth` file without the elements of its tensors; see `reference/wan_checkpoints.py`.
#[derive(Debug, Clone)]
pub struct PthSkeleton {
    /// All other bytes of the file.
    rest: Vec<u8>,
    /// Offset and length of each storage, and the tensor that it belongs to, in the order of the file.
    spans: Vec<(u64, u64, String)>,
}

impl PthSkeleton {
    /// Opens `goldens/NAME.safetensors`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn open(name: &str) -> Result<Self> {
        let mut container = Container::read(&data(&format!("goldens/{name}.safetensors")))?;
        let rest = container.tensors.remove("rest").with_context(|| format!("{name}: no bytes"))?.bytes;
        let spans = container.metadata.get("spans").with_context(|| format!("{name}: no spans"))?;
        let mut spans: Vec<(u64, u64, String)> = serde_json::from_str(spans)?;
        spans.sort();
        Ok(Self { rest, spans })
    }

    /// Names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.spans.iter().map(|(_, _, name)| name.as_str())
    }

    /// Writes the file with these elements and returns its length. Where there are none, the file has a hole: zeros that
    /// take no space.
    ///
    /// # Errors
    /// If it cannot be written, or elements are not as many as the file has.
    pub fn write<'a>(&self, path: &Path, elements: impl Fn(&str) -> Option<&'a [u8]>) -> Result<u64> {
        let mut file = fs::File::create(path).with_context(|| path.display().to_string())?;
        let (mut rest, mut at) = (self.rest.as_slice(), 0);
        for (start, len, name) in &self.spans {
            let (before, behind) = rest.split_at_checked((start - at) as usize).with_context(|| name.clone())?;
            file.write_all(before)?;
            match elements(name) {
                Some(bytes) => {
                    ensure!(bytes.len() as u64 == *len, "{name} has {} bytes, the file {len}", bytes.len());
                    file.write_all(bytes)?;
                }
                None => {
                    file.seek(SeekFrom::Current(i64::try_from(*len)?))?;
                }
            }
            (rest, at) = (behind, start + len);
        }
        file.write_all(rest)?;
        Ok(at + rest.len() as u64)
    }
}
