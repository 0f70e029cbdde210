//! GGUF files, written by candle.

use std::io::Cursor;

use anyhow::{Result, bail};
use candle_core::{
    DType, Device, Tensor,
    quantized::{
        GgmlDType, QTensor,
        gguf_file::{self, Value},
    },
};

use crate::container::{Container, Stored};

/// The bytes of a GGUF file of `architecture` with the tensors of `container`; `dtype` says how each is stored.
///
/// # Errors
/// If a tensor is not of floats, or its rows are no whole number of blocks.
pub fn gguf(container: &Container, architecture: &str, dtype: impl Fn(&str, &[usize]) -> GgmlDType) -> Result<Vec<u8>> {
    let mut tensors = Vec::new();
    for (name, stored) in &container.tensors {
        tensors.push((name.as_str(), QTensor::quantize(&widened(stored)?, dtype(name, &stored.shape))?));
    }
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let architecture = Value::String(architecture.to_owned());
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &[("general.architecture", &architecture)], &tensors)?;
    Ok(out.into_inner())
}

/// The values in f32.
fn widened(stored: &Stored) -> Result<Tensor> {
    let dtype = match stored.dtype.as_str() {
        "BF16" => DType::BF16,
        "F32" => DType::F32,
        dtype => bail!("a tensor of type {dtype}"),
    };
    let raw = Tensor::from_raw_buffer(&stored.bytes, dtype, &stored.shape, &Device::Cpu)?;
    Ok(raw.to_dtype(DType::F32)?)
}
