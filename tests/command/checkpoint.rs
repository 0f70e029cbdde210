//! Damaging safetensors files on purpose.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

/// A safetensors file in memory.
pub(crate) struct Checkpoint {
    path: PathBuf,
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Checkpoint {
    pub(crate) fn open(path: impl AsRef<Path>) -> Self {
        let bytes = fs::read(&path).expect("a readable checkpoint");
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a header length");
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("a small header"));
        Self {
            path: path.as_ref().to_owned(),
            header: serde_json::from_slice(header).expect("a JSON header"),
            data: data.to_owned(),
        }
    }

    pub(crate) fn save(self) {
        let mut header = serde_json::to_string(&self.header).expect("JSON");
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let mut bytes = u64::try_from(header.len()).expect("a small header").to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(self.data);
        fs::write(self.path, bytes).expect("a writable checkpoint");
    }

    /// Every tensor: name, element type, shape, bytes.
    pub(crate) fn tensors(&self) -> Vec<(String, String, Vec<u64>, u64)> {
        let named = self.header.iter().filter(|(name, _)| *name != "__metadata__");
        named
            .map(|(name, info)| {
                let shape = info["shape"].as_array().expect("a shape");
                let [begin, end] = [0, 1].map(|index| info["data_offsets"][index].as_u64().expect("an offset"));
                let dtype = info["dtype"].as_str().expect("a dtype").to_owned();
                (name.clone(), dtype, shape.iter().map(|n| n.as_u64().expect("an extent")).collect(), end - begin)
            })
            .collect()
    }

    /// Exchanges the two extents of a matrix.
    pub(crate) fn transpose_shape(&mut self, tensor: &str) {
        let shape = self.header[tensor]["shape"].as_array_mut().expect("a shape");
        assert!(shape.len() == 2 && shape[0] != shape[1], "{tensor} {shape:?}");
        shape.swap(0, 1);
    }

    pub(crate) fn rename(&mut self, tensor: &str, to: &str) {
        let info = self.header.remove(tensor).expect(tensor);
        self.header.insert(to.to_owned(), info);
    }

    /// Takes tensors out, and their elements with them.
    pub(crate) fn remove(&mut self, is_out: impl Fn(&str) -> bool) {
        self.header.retain(|name, _| !is_out(name));
        let mut data = Vec::new();
        for (_, info) in self.header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            let [begin, end] = [0, 1].map(|index| info["data_offsets"][index].as_u64().expect("an offset") as usize);
            info["data_offsets"] = serde_json::json!([data.len(), data.len() + end - begin]);
            data.extend(&self.data[begin..end]);
        }
        self.data = data;
    }

    /// Makes 32-bit floats of all tensors, with these bits behind those of the brain floats that they are.
    pub(crate) fn widen(&mut self, low: u16) {
        for (name, info) in self.header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
            assert_eq!(info["dtype"], "BF16", "{name}");
            info["dtype"] = "F32".into();
            let [begin, end] = [0, 1].map(|index| info["data_offsets"][index].as_u64().expect("an offset"));
            info["data_offsets"] = serde_json::json!([2 * begin, 2 * end]);
        }
        let low = low.to_le_bytes();
        self.data = self.data.chunks_exact(2).flat_map(|high| [low[0], low[1], high[0], high[1]]).collect();
    }

    /// Sets the first `count` elements of a tensor.
    pub(crate) fn fill(&mut self, tensor: &str, value: f32, count: usize) {
        let info = &self.header[tensor];
        let [begin, end] = [0, 1].map(|index| info["data_offsets"][index].as_u64().expect("an offset") as usize);
        let element = match info["dtype"].as_str() {
            Some("F32") => value.to_le_bytes().to_vec(),
            // The upper half of the single-precision number.
            Some("BF16") => value.to_le_bytes()[2..].to_vec(),
            other => panic!("{tensor} is {other:?}"),
        };
        for place in self.data[begin..end].chunks_exact_mut(element.len()).take(count) {
            place.copy_from_slice(&element);
        }
    }
}
