//! Random weights that lie in no file.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_fork::HostBytes;
use half::bf16;
use rayon::prelude::*;
use weights::{Error, Expected, Result, SourceFile, StoredDType, TensorInfo, TensorSource};

use super::{TABLE, distribution};

/// Places in a buffer at which a tensor may begin.
const STARTS: u64 = 1 << 20;

/// A checkpoint of bf16 tensors of normal values, a fraction of its size in memory: tensors of a distribution are windows
/// into one buffer, not much larger than the largest of them. Windows begin at places drawn from the tensors' numbers, so
/// no two are alike.
///
/// What reads it finds more of it in the processor's caches than of a checkpoint of full size.
pub struct RandomWeights {
    name: String,
    tensors: Vec<TensorInfo>,
    windows: Vec<Window>,
    files: Vec<SourceFile>,
    metadata: BTreeMap<String, String>,
}

impl std::fmt::Debug for RandomWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RandomWeights").field("name", &self.name).field("tensors", &self.tensors.len()).finish()
    }
}

struct Window {
    buffer: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl RandomWeights {
    /// Values of `std` for each of `expected`, norm weights about 1, variances about 3.
    pub fn new(name: impl Into<String>, expected: &[Expected], std: f32) -> Self {
        let mut expected: Vec<&Expected> = expected.iter().collect();
        expected.sort_by(|a, b| a.name.cmp(&b.name));
        let bytes = |e: &Expected| 2 * e.shape.iter().product::<usize>();
        let kind = |e: &Expected| {
            let (mean, std) = distribution(e, std);
            (mean.to_bits(), std.to_bits())
        };
        let mut largest: BTreeMap<(u32, u32), usize> = BTreeMap::new();
        for e in &expected {
            let size = largest.entry(kind(e)).or_default();
            *size = bytes(e).max(*size);
        }
        let buffers: BTreeMap<_, _> = largest
            .into_iter()
            .map(|((mean, std), size)| {
                let values = normal_bytes(size + 2 * STARTS as usize, f32::from_bits(mean), f32::from_bits(std));
                ((mean, std), Arc::new(values))
            })
            .collect();
        let mut end = 0;
        let mut state = 0;
        let (tensors, windows) = expected
            .iter()
            .map(|e| {
                let start = 2 * (next(&mut state) % STARTS) as usize;
                let window = Window { buffer: buffers[&kind(e)].clone(), range: start..start + bytes(e) };
                let begin = end;
                end += bytes(e);
                let info = TensorInfo {
                    name: e.name.clone(),
                    dtype: StoredDType::BF16,
                    shape: e.shape.clone(),
                    bytes: begin..end,
                    file: 0,
                    quantisation: None,
                };
                (info, window)
            })
            .unzip();
        let name = name.into();
        let files = vec![SourceFile { name: name.clone(), bytes: end }];
        Self { name, tensors, windows, files, metadata: BTreeMap::new() }
    }

    fn window(&self, name: &str) -> Result<(&TensorInfo, &Window)> {
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name)).ok();
        found
            .map(|i| (&self.tensors[i], &self.windows[i]))
            .ok_or_else(|| Error::NoSuchTensor { file: self.name.clone(), tensor: name.to_owned() })
    }
}

impl TensorSource for RandomWeights {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        &self.files
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (_, window) = self.window(name)?;
        Ok(&window.buffer[window.range.clone()])
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        let (_, window) = self.window(name)?;
        Ok((window.buffer.clone(), window.range.clone()))
    }

    fn describe(&self) -> &str {
        &self.name
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// The next of splitmix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `len` bytes of bf16 values, drawn from a table by all threads.
fn normal_bytes(len: usize, mean: f32, std: f32) -> Vec<u8> {
    let normal = sampling::NoiseGenerator::Philox.normal(0, TABLE);
    let table: Vec<[u8; 2]> = normal.iter().map(|v| bf16::from_f32(mean + std * v).to_le_bytes()).collect();
    let mut bytes = vec![0; len];
    bytes.par_chunks_mut(1 << 20).enumerate().for_each(|(part, bytes)| {
        let mut state = part as u64;
        state = next(&mut state);
        for value in bytes.as_chunks_mut().0 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *value = table[(state >> 48) as usize];
        }
    });
    bytes
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use weights::{Loader, Safetensors};

    use super::*;
    use crate::synthetic::write_checkpoint;

    #[test]
    fn tensors_load_and_have_their_distributions() -> anyhow::Result<()> {
        let names = ["a.weight", "b.weight", "norm.weight", "bn.running_var"];
        let shapes = [vec![300, 200], vec![300, 200], vec![4096], vec![4096]];
        let expected: Vec<_> = names.into_iter().zip(shapes).map(|(name, shape)| Expected::new(name, shape)).collect();
        let source = Arc::new(RandomWeights::new("random", &expected, 0.02));
        let mut loader = Loader::new(source.clone(), &expected, |_| false, DType::F32, &Device::Cpu)?;
        for (name, mean, std) in [("a.weight", 0.0, 0.02), ("norm.weight", 1.0, 0.05), ("bn.running_var", 3.0, 0.1)] {
            let values: Vec<f32> = loader.tensor(name)?.flatten_all()?.to_vec1()?;
            let n = values.len() as f32;
            let got = values.iter().sum::<f32>() / n;
            let spread = (values.iter().map(|v| (v - got) * (v - got)).sum::<f32>() / n).sqrt();
            assert!((got - mean).abs() < 0.1 * std && (spread / std - 1.0).abs() < 0.1, "{name}: {got} {spread}");
        }
        assert_ne!(source.bytes("a.weight")?, source.bytes("b.weight")?);
        assert_eq!(source.host("b.weight")?.bytes(), source.bytes("b.weight")?);
        assert!(matches!(source.bytes("c.weight"), Err(Error::NoSuchTensor { .. })));

        let file = tempfile::NamedTempFile::new()?;
        write_checkpoint(file.path(), &expected, 0.02)?;
        let written = Safetensors::open(file.path())?;
        for tensor in source.tensors() {
            assert_eq!(written.require(&tensor.name)?.shape, tensor.shape);
            assert_eq!(written.bytes(&tensor.name)?, source.bytes(&tensor.name)?, "{}", tensor.name);
        }
        Ok(())
    }
}
