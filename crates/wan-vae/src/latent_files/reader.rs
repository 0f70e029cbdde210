//! Latents that stay in their file until they are asked for.

use std::{collections::BTreeMap, fs, io::Read, path::Path, sync::Arc};

use candle_core::{DType, Device, Tensor};
use candle_fork::{HostBytes, HostTensor, What};
use weights::{Pth, Safetensors, TensorSource};

use super::{NPY, axes, check_dtype, choose, io, npy};
use crate::error::{Error, Result};

/// Frames of a sample: enough for statistics, whatever the length of the clip.
const SAMPLE: usize = 16;

/// Elements that are looked at in one go.
const BLOCK: usize = 1 << 18;

/// A file with latents `[z, n, h, w]`: a safetensors file (`.latent` is one) or a PyTorch checkpoint, both mapped, or a
/// NumPy array, told by its first bytes. What is asked for is copied out of it, so a clip of any length takes no memory.
///
/// One tensor may have any name; of several, one must be named `latent_tensor`, `latents`, `samples` or `latent`. A first
/// axis of 1 before the channels is dropped; `[1, z, h, w]` and `[z, h, w]` are one latent frame.
#[derive(Debug, Clone)]
pub struct LatentFile {
    name: String,
    /// `[z n, h, w]`: the frames of the first channel come first.
    planes: HostTensor,
    axes: [usize; 4],
    metadata: BTreeMap<String, String>,
}

impl LatentFile {
    /// Opens a file. Its values are not looked at ([`LatentFile::check_finite`]).
    ///
    /// # Errors
    /// [`Error::Weights`] if the file cannot be read or is damaged; [`Error::LatentFile`] if it holds no latents that can
    /// be used.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        if path.is_file() && first_bytes(path)? == NPY {
            let file = fs::read(path).map_err(|source| io("read", path, source))?;
            return Self::from_npy(Arc::new(file), name);
        }
        Self::from_source(&*weights::open(path)?, name)
    }

    /// Like [`LatentFile::open`], for a file in memory; `name` stands for the path in messages.
    ///
    /// # Errors
    /// As [`LatentFile::open`].
    pub fn from_bytes(file: HostBytes, name: &str) -> Result<Self> {
        let bytes = (*file).as_ref();
        if bytes.starts_with(NPY) {
            return Self::from_npy(file, name.to_owned());
        }
        if bytes.starts_with(b"PK\x03\x04") {
            return Self::from_source(&Pth::from_bytes(file, name)?, name.to_owned());
        }
        Self::from_source(&Safetensors::from_bytes(file, name)?, name.to_owned())
    }

    fn from_source(source: &dyn TensorSource, name: String) -> Result<Self> {
        let refuse = |problem| Error::LatentFile { file: name.clone(), problem };
        let tensor = choose(source.tensors()).map_err(refuse)?;
        check_dtype(tensor.dtype).map_err(refuse)?;
        let axes = axes(&tensor.shape).map_err(refuse)?;
        let planes = source.host(&tensor.name)?.reshape(planes(axes))?;
        Ok(Self { name, planes, axes, metadata: source.metadata().clone() })
    }

    fn from_npy(file: HostBytes, name: String) -> Result<Self> {
        let refuse = |problem| Error::LatentFile { file: name.clone(), problem };
        let array = npy::parse((*file).as_ref()).map_err(refuse)?;
        let axes = axes(&array.shape).map_err(refuse)?;
        let planes = HostTensor::new(file, array.bytes, array.dtype, planes(axes))?;
        Ok(Self { name, planes, axes, metadata: BTreeMap::new() })
    }

    /// The path, or what stands for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Channels, latent frames, height and width in latents. None of them is 0.
    pub fn extents(&self) -> (usize, usize, usize, usize) {
        self.axes.into()
    }

    /// Element type as stored.
    pub fn dtype(&self) -> DType {
        self.planes.dtype()
    }

    /// Free-form metadata of the file; a NumPy array has none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Latent frames `first..first + count`, `[z, count, h, w]` f32 on the CPU.
    ///
    /// # Errors
    /// [`Error::Op`] if there are not as many.
    pub fn frames(&self, first: usize, count: usize) -> Result<Tensor> {
        let [channels, frames, height, width] = self.axes;
        // Else the frames of the next channel would follow.
        if first.checked_add(count).is_none_or(|end| end > frames) {
            let what = format!("frames {first} to {first} + {count} of {frames} in {}", self.name);
            return Err(candle_fork::Error::Argument { op: "latent file", what }.into());
        }
        let channel = |channel: usize| {
            let rows = self.planes.rows(channel * frames + first, count)?;
            rows.to_tensor(DType::F32, &Device::Cpu)
        };
        let channels: Vec<Tensor> = (0..channels).map(channel).collect::<Result<_, _>>()?;
        let latents = Tensor::cat(&channels, 0).and_then(|x| x.reshape(((), count, height, width)));
        Ok(latents.what("latents of a file")?)
    }

    /// All latent frames.
    ///
    /// # Errors
    /// [`Error::Op`] if they do not fit into memory.
    pub fn all(&self) -> Result<Tensor> {
        let latents = self.planes.to_tensor(DType::F32, &Device::Cpu)?;
        Ok(latents.reshape(self.axes.as_slice()).what("latents of a file")?)
    }

    /// A few frames from all over the clip, for [`likeness`](super::likeness).
    ///
    /// # Errors
    /// [`Error::Op`].
    pub fn sample(&self) -> Result<Tensor> {
        let [_, frames, ..] = self.axes;
        let taken = frames.min(SAMPLE);
        let pieces: Vec<Tensor> = (0..taken).map(|i| self.frames(i * frames / taken, 1)).collect::<Result<_>>()?;
        Ok(Tensor::cat(&pieces, 1).what("sample of latents")?)
    }

    /// Looks at every value.
    ///
    /// # Errors
    /// [`Error::NonFiniteLatents`] with the first that is NaN or infinite, also if it only becomes infinite as f32.
    pub fn check_finite(&self) -> Result<()> {
        let [channels, frames, height, width] = self.axes;
        let (planes, plane) = (channels * frames, height * width);
        let step = (BLOCK / plane).max(1);
        for first in (0..planes).step_by(step) {
            let block = self.planes.rows(first, step.min(planes - first))?.to_tensor(DType::F32, &Device::Cpu)?;
            let values: Vec<f32> = block.flatten_all().and_then(|x| x.to_vec1()).what("check of latents")?;
            if let Some(index) = values.iter().position(|v| !v.is_finite()) {
                let at = first + index / plane;
                let (channel, frame) = (at / frames, at % frames);
                return Err(Error::NonFiniteLatents { value: values[index], channel, frame });
            }
        }
        Ok(())
    }
}

fn planes([channels, frames, height, width]: [usize; 4]) -> (usize, usize, usize) {
    // No overflow: as many elements are in the file.
    (channels * frames, height, width)
}

fn first_bytes(path: &Path) -> Result<Vec<u8>> {
    let file = fs::File::open(path).map_err(|source| io("open", path, source))?;
    let mut bytes = Vec::new();
    file.take(NPY.len() as u64).read_to_end(&mut bytes).map_err(|source| io("read", path, source))?;
    Ok(bytes)
}
