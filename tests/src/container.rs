//! A safetensors file in memory that a suite can change.

use std::{collections::BTreeMap, fs, io::Write, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

/// One stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Element type by its name in the format (`F32`, `BF16`…).
    pub dtype: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Elements, little-endian.
    pub bytes: Vec<u8>,
}

/// The contents of a safetensors file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Container {
    /// The text under `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// The tensors.
    pub tensors: BTreeMap<String, Stored>,
}

impl Container {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read or is not well-formed.
    pub fn read(path: &Path) -> Result<Self> {
        let data = fs::read(path).with_context(|| path.display().to_string())?;
        Self::parse(&data).with_context(|| path.display().to_string())
    }

    fn parse(data: &[u8]) -> Result<Self> {
        let len = u64::from_le_bytes(data.get(..8).context("no header")?.try_into()?) as usize;
        let header: Map<String, Value> = serde_json::from_slice(data.get(8..8 + len).context("short header")?)?;
        let data = &data[8 + len..];
        let mut this = Self::default();
        for (name, entry) in header {
            if name == "__metadata__" {
                this.metadata = serde_json::from_value(entry)?;
                continue;
            }
            let shape = serde_json::from_value(entry["shape"].clone())?;
            let [start, end]: [usize; 2] = serde_json::from_value(entry["data_offsets"].clone())?;
            let bytes = data.get(start..end).with_context(|| format!("range of {name}"))?.to_vec();
            let dtype = entry["dtype"].as_str().with_context(|| format!("dtype of {name}"))?.to_owned();
            this.tensors.insert(name, Stored { dtype, shape, bytes });
        }
        Ok(this)
    }

    /// The bytes of a file with these contents.
    pub fn to_bytes(&self) -> Vec<u8> {
        let shapes =
            self.tensors.iter().map(|(name, t)| (name.as_str(), t.dtype.as_str(), t.shape.as_slice(), t.bytes.len()));
        let mut out = header(&self.metadata, shapes);
        for tensor in self.tensors.values() {
            out.extend_from_slice(&tensor.bytes);
        }
        out
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.to_bytes()).with_context(|| path.display().to_string())
    }

    /// Overwrites one element of a tensor.
    ///
    /// # Errors
    /// If there is no such tensor or element, or its type is neither `F32` nor `BF16`.
    pub fn set(&mut self, name: &str, index: usize, value: f32) -> Result<()> {
        let tensor = self.tensors.get_mut(name).with_context(|| format!("no tensor {name}"))?;
        let element = match tensor.dtype.as_str() {
            "F32" => value.to_le_bytes().to_vec(),
            // The upper half of a 32-bit float, truncated.
            "BF16" => value.to_le_bytes()[2..].to_vec(),
            dtype => bail!("cannot set an element of type {dtype}"),
        };
        let start = index * element.len();
        ensure!(start + element.len() <= tensor.bytes.len(), "{name} has no element {index}");
        tensor.bytes[start..start + element.len()].copy_from_slice(&element);
        Ok(())
    }
}

/// Length and JSON of the header for tensors that lie one after another.
fn header<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, &'a str, &'a [usize], usize)>,
) -> Vec<u8> {
    let mut fields = Map::new();
    if !metadata.is_empty() {
        fields.insert("__metadata__".to_owned(), json!(metadata));
    }
    let mut start = 0;
    for (name, dtype, shape, len) in tensors {
        let field = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, start + len]});
        fields.insert(name.to_owned(), field);
        start += len;
    }
    let mut json = Value::Object(fields).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.append(&mut json);
    out
}

/// Writes a file whose data is a hole: names, shapes and length are real, the elements are zeros that take no space.
pub(crate) fn write_header_only(path: &Path, tensors: &[(String, &'static str, Vec<usize>)]) -> Result<u64> {
    let size = |dtype: &str| if dtype == "I64" { 8 } else { 2 };
    let bytes = |dtype: &str, shape: &[usize]| shape.iter().product::<usize>() * size(dtype);
    let entries =
        tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice(), bytes(dtype, shape)));
    let header = header(&BTreeMap::new(), entries);
    let data: usize = tensors.iter().map(|(_, dtype, shape)| bytes(dtype, shape)).sum();
    let total = (header.len() + data) as u64;
    let mut file = fs::File::create(path).with_context(|| path.display().to_string())?;
    file.write_all(&header)?;
    file.set_len(total)?;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Container {
        let mut this = Container::default();
        this.metadata.insert("note".to_owned(), "a \"quoted\" word".to_owned());
        let f32s: Vec<u8> = [1.0f32, -2.5].iter().flat_map(|v| v.to_le_bytes()).collect();
        this.tensors.insert("a".to_owned(), Stored { dtype: "F32".to_owned(), shape: vec![2, 1], bytes: f32s });
        let bf16 = Stored { dtype: "BF16".to_owned(), shape: vec![3], bytes: vec![0; 6] };
        this.tensors.insert("b".to_owned(), bf16);
        this
    }

    #[test]
    fn what_is_written_is_read_back() -> Result<()> {
        assert_eq!(Container::parse(&sample().to_bytes())?, sample());
        Ok(())
    }

    #[test]
    fn single_elements_can_be_set() -> Result<()> {
        let mut this = sample();
        this.set("a", 1, f32::NAN)?;
        this.set("b", 2, 1.0)?;
        assert_eq!(this.tensors["a"].bytes[4..], f32::NAN.to_le_bytes());
        assert_eq!(this.tensors["b"].bytes, [0, 0, 0, 0, 0x80, 0x3f]);
        assert!(this.set("b", 3, 1.0).is_err());
        assert!(this.set("c", 0, 1.0).is_err());
        Ok(())
    }
}
