//! Quantised checkpoints: matrices and the side tensors that their values are computed from, as one tensor each.
//!
//! | written by | recognised by | scales |
//! |---|---|---|
//! | Comfy, int8 and ConvRot | I8, `comfy_quant` | `weight_scale`, one or one for each row |
//! | Comfy, fp8 | F8, `comfy_quant` | `weight_scale` |
//! | older Comfy fp8 | F8, `scaled_fp8` | `scale_weight` |
//! | BFL and LTX fp8 | F8, `_quantization_metadata` in the metadata, or nothing | `weight_scale` |
//! | fp8 with blocks, as of Qwen | F8 | `weight_scale_inv`, one for each 128x128 |
//! | plain casts to fp8 | F8 | none |
//! | Comfy, 4 bits with ConvRot | I8, `comfy_quant` | `weight_scale`; `weight_s_rel` and `weight_s_channel` |
//! | GGUF | block types | in the blocks |
//!
//! [`fold`] makes a source whose quantised tensors have the shape of their values, and from which the side tensors are
//! gone. A scale that is there is used, or opening fails; a side tensor that belongs to nothing stays in sight, so that a
//! plan reports it.

mod format;
mod marker;
mod modules;
mod scales;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use candle_core::DType;
use candle_fork::{
    HostBytes, HostTensor,
    quant::{QuantWeight, W4a8Scales, decode_w4a8, unpack_w4a4},
};

pub use self::format::{Granularity, Quantisation};
use self::modules::{Module, Modules};
use crate::{
    error::{Error, Result, shown},
    gguf::GgmlType,
    source::{SourceFile, TensorInfo, TensorSource},
};

/// Joins quantised matrices with their side tensors; a source without any is returned as it is.
///
/// # Errors
/// [`Error::Quantised`] for a marker that does not parse, a scale that is missing or fits nothing, or a rotation that does
/// not fit the matrix; [`Error::Json`] for metadata that do not parse. A format that is known and not supported is an error
/// of the plan that needs the tensor.
pub fn fold(source: Arc<dyn TensorSource>) -> Result<Arc<dyn TensorSource>> {
    let modules = Modules::find(&*source)?;
    if modules.modules.is_empty() && modules.hidden.is_empty() {
        return Ok(source);
    }
    Ok(Arc::new(Folded::new(source, modules)))
}

/// How the tensors of a source are quantised: pairs of what is stored and what it means, sorted by name. Nothing large is
/// read.
///
/// # Errors
/// As [`fold`].
pub fn quantised(source: &dyn TensorSource) -> Result<Vec<(&TensorInfo, Quantisation)>> {
    let mut modules = Modules::find(source)?.modules;
    let mut found = Vec::new();
    for info in source.tensors() {
        let meaning = info.quantisation.clone().or_else(|| Some(modules.remove(&info.name)?.quantisation));
        found.extend(meaning.map(|meaning| (info, meaning)));
    }
    Ok(found)
}

/// A source whose quantised tensors are one tensor each.
struct Folded {
    inner: Arc<dyn TensorSource>,
    tensors: Vec<TensorInfo>,
    modules: Modules,
}

impl Folded {
    fn new(inner: Arc<dyn TensorSource>, modules: Modules) -> Self {
        let visible = inner.tensors().iter().filter(|t| !modules.hidden.contains(&t.name)).cloned();
        let tensors = visible.map(|mut t| {
            if let Some(module) = modules.modules.get(&t.name) {
                t.quantisation = Some(module.quantisation.clone());
                t.shape.clone_from(&module.shape);
            }
            t
        });
        let tensors = tensors.collect();
        Self { inner, tensors, modules }
    }

    /// The matrix of a module. Codes of 4 bits become bytes in memory of their own, all others stay where they lie.
    fn weight(&self, info: &TensorInfo, module: &Module) -> Result<QuantWeight> {
        let inner = &*self.inner;
        let failed = |source| tensor_error(inner, info, source);
        let scale = || match &module.scale {
            Some(name) => scales::values(inner, name),
            None => Ok(vec![1.0]),
        };
        let [rows, columns] = matrix(&module.shape);
        let weight = match module.quantisation {
            Quantisation::Int8 { group, .. } => {
                QuantWeight::int8(bytes_of(inner, info, [rows, columns])?, scale()?, group)
            }
            Quantisation::Fp8 { format, scales, .. } => {
                let scales = scales::fp8(inner, module.scale.as_deref(), scales)?;
                QuantWeight::fp8(bytes_of(inner, info, [rows, columns])?, format, scales)
            }
            Quantisation::W4A4 { group } => {
                let codes = unpack_w4a4(inner.bytes(&info.name)?, columns).map_err(failed)?;
                QuantWeight::int8(owned(codes, [rows, columns]).map_err(failed)?, scale()?, Some(group))
            }
            Quantisation::W4A8 { scale_group: group_size, group, .. } => {
                let relative = module.relative.as_deref().map_or(Ok(Vec::new()), |name| scales::values(inner, name))?;
                let codebook = module.codebook.as_deref().map(|name| scales::values(inner, name)).transpose()?;
                let codebook: Option<[f32; 16]> = match codebook {
                    Some(values) => Some(values.try_into().map_err(|values: Vec<f32>| {
                        refuse(inner, info, format!("has a codebook of {} values, not 16", values.len()))
                    })?),
                    None => None,
                };
                let scales = W4a8Scales { relative: &relative, group_size, codebook: codebook.as_ref() };
                let codes = decode_w4a8(inner.bytes(&info.name)?, rows, columns, scales).map_err(failed)?;
                QuantWeight::int8(owned(codes, [rows, columns]).map_err(failed)?, scale()?, group)
            }
            Quantisation::Ggml(_) | Quantisation::Unsupported(_) => return without_scales(inner, info),
        };
        weight.map_err(failed)
    }
}

impl TensorSource for Folded {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        self.inner.files()
    }

    fn bytes(&self, name: &str) -> Result<&[u8]> {
        self.inner.bytes(&self.require(name)?.name)
    }

    fn shared(&self, name: &str) -> Result<(HostBytes, Range<usize>)> {
        self.inner.shared(&self.require(name)?.name)
    }

    fn quant(&self, name: &str) -> Result<QuantWeight> {
        let info = self.require(name)?;
        match self.modules.modules.get(name) {
            Some(module) => self.weight(info, module),
            None => self.inner.quant(name),
        }
    }

    fn describe(&self) -> &str {
        self.inner.describe()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.inner.metadata()
    }
}

/// A tensor whose stored bytes say everything: blocks of a GGUF file. The body of [`TensorSource::quant`] where a source
/// knows nothing of side tensors.
pub(crate) fn without_scales<S: TensorSource + ?Sized>(source: &S, info: &TensorInfo) -> Result<QuantWeight> {
    let refuse = |problem: String| Error::Quantised {
        file: source.file_of(info).to_owned(),
        tensor: shown(&info.name),
        problem,
    };
    match &info.quantisation {
        Some(Quantisation::Ggml(blocks)) => {
            let (owner, range) = source.shared(&info.name)?;
            let len = range.len();
            let weight = HostTensor::new(owner, range, DType::U8, len)
                .and_then(|bytes| blocks.weight(bytes, matrix(&info.shape)).transpose());
            match weight {
                Ok(Some(weight)) => Ok(weight),
                Ok(None) => Err(refuse(not_supported(*blocks))),
                Err(source_error) => Err(Error::Tensor {
                    file: source.file_of(info).to_owned(),
                    tensor: shown(&info.name),
                    source: Box::new(source_error),
                }),
            }
        }
        Some(other) => Err(refuse(format!("is quantised as {other}, which is not supported"))),
        None => Err(refuse("is not quantised".to_owned())),
    }
}

/// Why blocks of a GGUF file cannot be used.
pub(crate) fn not_supported(blocks: GgmlType) -> String {
    format!("uses {blocks} (type {}), which is not supported; supported: {}", blocks.id(), GgmlType::supported())
}

/// Rows and columns of a tensor that is quantised as a matrix.
fn matrix(shape: &[usize]) -> [usize; 2] {
    match shape {
        [] => [1, 1],
        [n] => [1, *n],
        // Beside an extent of 0 the others may be anything.
        [rows, rest @ ..] => [*rows, rest.iter().fold(1, |n: usize, &d| n.saturating_mul(d))],
    }
}

fn bytes_of(source: &dyn TensorSource, info: &TensorInfo, dims: [usize; 2]) -> Result<HostTensor> {
    let (owner, range) = source.shared(&info.name)?;
    HostTensor::new(owner, range, DType::U8, (dims[0], dims[1])).map_err(|error| tensor_error(source, info, error))
}

fn owned(bytes: Vec<u8>, dims: [usize; 2]) -> candle_fork::Result<HostTensor> {
    let range = 0..bytes.len();
    HostTensor::new(Arc::new(bytes), range, DType::U8, (dims[0], dims[1]))
}

fn refuse(source: &dyn TensorSource, info: &TensorInfo, problem: String) -> Error {
    Error::Quantised { file: source.file_of(info).to_owned(), tensor: shown(&info.name), problem }
}

fn tensor_error(source: &dyn TensorSource, info: &TensorInfo, error: candle_fork::Error) -> Error {
    Error::Tensor { file: source.file_of(info).to_owned(), tensor: shown(&info.name), source: Box::new(error) }
}
