//! Goldens: weights, arguments and results from the reference implementation.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use weights::{Safetensors, TensorSource};

use crate::{
    container::{Container, Stored},
    data,
};

/// One file of `goldens/`; see `reference/golden_file.py` for the form.
#[derive(Debug, Clone)]
pub struct Golden {
    name: String,
    container: Container,
}

impl Golden {
    /// Opens `goldens/NAME.safetensors`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn open(name: &str) -> Result<Self> {
        let container = Container::read(&data(&format!("goldens/{name}.safetensors")))?;
        Ok(Self { name: name.to_owned(), container })
    }

    /// An entry of the metadata.
    ///
    /// # Errors
    /// If there is none.
    pub fn metadata(&self, key: &str) -> Result<&str> {
        let value = self.container.metadata.get(key).with_context(|| format!("{}: no metadata {key}", self.name))?;
        Ok(value)
    }

    /// An entry of the metadata, parsed.
    ///
    /// # Errors
    /// If there is none or it does not parse.
    pub fn number<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>>(&self, key: &str) -> Result<T> {
        self.metadata(key)?.parse().with_context(|| format!("{}: metadata {key}", self.name))
    }

    /// The model's `config.json`.
    ///
    /// # Errors
    /// If there is none.
    pub fn config(&self) -> Result<Value> {
        Ok(serde_json::from_str(self.metadata("config")?)?)
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.container.tensors.get(name).with_context(|| format!("{}: no tensor {name}", self.name))
    }

    /// A tensor of floats as f32, or one of bytes.
    ///
    /// # Errors
    /// If there is none or it holds integers.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let dtype = match stored.dtype.as_str() {
            "F32" => DType::F32,
            "U8" => DType::U8,
            dtype => bail!("{}: {name} has type {dtype}", self.name),
        };
        Ok(Tensor::from_raw_buffer(&stored.bytes, dtype, &stored.shape, &Device::Cpu)?)
    }

    /// A tensor of integers.
    ///
    /// # Errors
    /// If there is none or it holds other numbers.
    pub fn integers(&self, name: &str) -> Result<Vec<u32>> {
        let stored = self.stored(name)?;
        anyhow::ensure!(stored.dtype == "I32", "{}: {name} has type {}", self.name, stored.dtype);
        let values = stored.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        values.map(|v| Ok(u32::try_from(v)?)).collect()
    }

    /// Whether there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.container.tensors.contains_key(name)
    }

    /// The weights, without arguments and results.
    pub fn container(&self) -> Container {
        let weights =
            self.container.tensors.iter().filter(|(name, _)| !name.starts_with("in.") && !name.starts_with("out."));
        Container { metadata: BTreeMap::new(), tensors: weights.map(|(name, t)| (name.clone(), t.clone())).collect() }
    }

    /// The weights as a source to load a model from.
    ///
    /// # Errors
    /// If the crate `weights` refuses them.
    pub fn weights(&self) -> Result<Arc<dyn TensorSource>> {
        let bytes = Arc::new(self.container().to_bytes());
        Ok(Arc::new(Safetensors::from_bytes(bytes, self.name.clone())?))
    }
}
