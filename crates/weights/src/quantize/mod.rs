//! Making quantised checkpoints of plain ones.

mod choose;
mod fp8;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_fork::What;
use policy::{Cancelled, Event, Observer};

pub use self::choose::Kept;
use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
    source::{TensorInfo, TensorSource},
    write::PlacedFile,
};

/// Bytes of f32 values that are held at once.
const BLOCK: usize = 32 << 20;

/// How matrices are stored. Both are formats that ComfyUI reads (`Comfy-Org/ComfyUI: QUANTIZATION.md`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Signed bytes with a scale for each row, of rows that were rotated in groups first:
    /// [`candle_fork::quantize_int8_convrot`].
    Int8ConvRot {
        /// Columns of a group: 4, 16, 64, 256 or 1024. Published files have 256.
        group_size: usize,
    },
    /// 8-bit floats, 4 bits of exponent and 3 of mantissa, with one scale for each matrix.
    Fp8Scaled,
}

/// What became of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Quantised {
    /// Matrices that were quantised.
    pub matrices: usize,
    /// Tensors that were copied, by reason.
    pub kept: BTreeMap<Kept, usize>,
    /// Bytes of all tensors before.
    pub bytes_before: u64,
    /// Bytes of all tensors after, with the scales.
    pub bytes_after: u64,
}

impl Format {
    /// What marks each quantised matrix in the file.
    fn marker(self) -> String {
        match self {
            Self::Int8ConvRot { group_size } => {
                format!(r#"{{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":{group_size}}}"#)
            }
            Self::Fp8Scaled => r#"{"format":"float8_e4m3fn"}"#.to_owned(),
        }
    }

    fn dtype(self) -> StoredDType {
        match self {
            Self::Int8ConvRot { .. } => StoredDType::I8,
            Self::Fp8Scaled => StoredDType::F8E4M3,
        }
    }

    /// Extents of the scales of a matrix with `rows` rows.
    fn scale_shape(self, rows: usize) -> Vec<usize> {
        match self {
            Self::Int8ConvRot { .. } => vec![rows, 1],
            Self::Fp8Scaled => Vec::new(),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int8ConvRot { group_size } => write!(f, "int8-convrot (groups of {group_size})"),
            Self::Fp8Scaled => f.write_str("fp8-scaled"),
        }
    }
}

/// Writes `source` to `path` with the matrices of its numbered blocks (`transformer_blocks.3.…`, `layers.7.…`) in `format`
/// and everything else as it is: layers at the input and the output, norms, modulation, embeddings, kernels. Names stay,
/// so a program reads the new file where it reads the old one.
///
/// Each matrix `NAME.weight` gets the tensors `NAME.weight_scale` and `NAME.comfy_quant` beside it. A block of rows is in
/// memory at a time. The observer hears the stage `quantize` and its progress in tensors.
///
/// # Errors
/// [`Error::NotQuantisable`] if no matrix fits the format or one is quantised already; [`Error::NotFinite`];
/// [`Error::Unwritable`], [`Error::Io`]; [`Error::Cancelled`], which leaves no file.
pub fn quantize(
    source: &dyn TensorSource,
    format: Format,
    path: impl AsRef<Path>,
    observer: &dyn Observer,
) -> Result<Quantised> {
    observer.notify(Event::Stage { name: "quantize" })?;
    let path = path.as_ref();
    let run = Run { source, format };
    let (chosen, mut report) = run.plan()?;
    let marker = format.marker();
    let mut entries = Vec::new();
    for (tensor, kept) in source.tensors().iter().zip(&chosen) {
        if kept.is_some() {
            entries.push((tensor.name.clone(), tensor.dtype, tensor.shape.clone()));
        } else {
            let module = module(&tensor.name);
            entries.push((tensor.name.clone(), format.dtype(), tensor.shape.clone()));
            entries.push((format!("{module}.weight_scale"), StoredDType::F32, format.scale_shape(tensor.shape[0])));
            entries.push((format!("{module}.comfy_quant"), StoredDType::U8, vec![marker.len()]));
        }
    }
    report.bytes_after =
        entries.iter().filter_map(|(_, dtype, shape)| dtype.byte_len(shape)).map(|bytes| bytes as u64).sum();
    let entries = entries.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()));
    let mut file = PlacedFile::create(path, entries, source.metadata())?;
    let total = chosen.len();
    for (done, (tensor, kept)) in source.tensors().iter().zip(&chosen).enumerate() {
        let progress = || observer.notify(Event::Progress { done, total });
        progress()?;
        if kept.is_some() {
            file.append(&tensor.name, source.bytes(&tensor.name)?)?;
            continue;
        }
        run.matrix(tensor, &mut file, progress)?;
        file.append(&format!("{}.comfy_quant", module(&tensor.name)), marker.as_bytes())?;
    }
    file.finish()?;
    observer.notify(Event::Progress { done: total, total })?;
    Ok(report)
}

/// Name of a module, from that of its matrix.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

struct Run<'a> {
    source: &'a dyn TensorSource,
    format: Format,
}

impl Run<'_> {
    /// Why each tensor is kept; none for those to be quantised.
    fn plan(&self) -> Result<(Vec<Option<Kept>>, Quantised)> {
        let mut report = Quantised::default();
        let mut chosen = Vec::new();
        for tensor in self.source.tensors() {
            if tensor.quantisation.is_some() || choose::is_side_tensor(&tensor.name) {
                let problem = format!("`{}` belongs to a quantised matrix already", shown(&tensor.name));
                return Err(self.refuse(problem));
            }
            let kept = choose::kept(tensor, self.format);
            report.bytes_before += tensor.bytes.len() as u64;
            match kept {
                Some(reason) => *report.kept.entry(reason).or_default() += 1,
                None => report.matrices += 1,
            }
            chosen.push(kept);
        }
        if report.matrices == 0 {
            let uneven = report.kept.get(&Kept::UnevenRows).copied().unwrap_or(0);
            return Err(self.refuse(match self.format {
                Format::Int8ConvRot { group_size } if uneven > 0 => format!(
                    "the rows of its {uneven} matrices are no whole number of groups of {group_size}; choose smaller groups"
                ),
                _ => "it holds no matrices in numbered blocks".to_owned(),
            }));
        }
        Ok((chosen, report))
    }

    fn refuse(&self, problem: String) -> Error {
        Error::NotQuantisable { file: self.source.describe().to_owned(), problem }
    }

    /// Writes codes and scales of one matrix; `progress` may stop it before each block of rows.
    fn matrix(
        &self,
        tensor: &TensorInfo,
        file: &mut PlacedFile,
        progress: impl Fn() -> Result<(), Cancelled>,
    ) -> Result<()> {
        let scale_name = format!("{}.weight_scale", module(&tensor.name));
        let &[rows, columns] = tensor.shape.as_slice() else { return Ok(()) };
        let step = (BLOCK / (4 * columns.max(1))).max(1);
        let blocks = || (0..rows).step_by(step).map(|start| (start, step.min(rows - start)));
        match self.format {
            Format::Int8ConvRot { group_size } => {
                for (start, len) in blocks() {
                    progress()?;
                    let x = self.block(tensor, start, len)?;
                    let (codes, scales) = candle_fork::quantize_int8_convrot(&x, Some(group_size))
                        .map_err(|source| self.failed(tensor, source))?;
                    let codes: Vec<u8> = self.values(tensor, &codes)?;
                    let scales: Vec<f32> = self.values(tensor, &scales)?;
                    file.append(&tensor.name, &codes)?;
                    file.append(&scale_name, &le_bytes(&scales))?;
                }
            }
            Format::Fp8Scaled => {
                let mut largest = 0f32;
                for (start, len) in blocks() {
                    let x: Vec<f32> = self.values(tensor, &self.block(tensor, start, len)?)?;
                    largest = x.iter().fold(largest, |most, v| most.max(v.abs()));
                }
                let scale = fp8::scale(largest);
                for (start, len) in blocks() {
                    progress()?;
                    let x: Vec<f32> = self.values(tensor, &self.block(tensor, start, len)?)?;
                    file.append(&tensor.name, &fp8::encode(&x, scale))?;
                }
                file.append(&scale_name, &scale.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// Rows of a matrix in f32, all finite.
    fn block(&self, tensor: &TensorInfo, start: usize, len: usize) -> Result<Tensor> {
        let rows = self.source.host(&tensor.name)?.rows(start, len);
        let x = rows.and_then(|rows| rows.to_tensor(DType::F32, &Device::Cpu));
        let x = x.map_err(|source| self.failed(tensor, source))?;
        let values: Vec<f32> = self.values(tensor, &x)?;
        if let Some(bad) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::NotFinite {
                file: self.source.file_of(tensor).to_owned(),
                tensor: shown(&tensor.name),
                index: start * tensor.shape.get(1).copied().unwrap_or(1) + bad,
                value: values[bad].to_string(),
            });
        }
        Ok(x)
    }

    fn values<T: candle_core::WithDType>(&self, tensor: &TensorInfo, x: &Tensor) -> Result<Vec<T>> {
        x.flatten_all().and_then(|x| x.to_vec1()).what("quantize").map_err(|source| self.failed(tensor, source))
    }

    fn failed(&self, tensor: &TensorInfo, source: candle_fork::Error) -> Error {
        let file = self.source.file_of(tensor).to_owned();
        Error::Tensor { file, tensor: shown(&tensor.name), source: Box::new(source) }
    }
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
