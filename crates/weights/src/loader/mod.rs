//! From names to tensors: a plan is checked as a whole before anything is allocated.

mod embedding;
mod options;
mod plan;
mod scan;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc};

use candle_core::{DType, Device, Tensor};
use candle_fork::{HostTensor, LinearWeight, What, stream::Staging};

pub use self::{
    embedding::Embedding,
    options::{LoaderOptions, QuantPolicy, ValueCheck},
    plan::{Expected, KNOWN_PREFIXES, Misshapen, PlanReport, Unusable},
};

use crate::{
    dtype::StoredDType,
    error::{Error, Result, list, shown},
    quant::Quantisation,
    source::{TensorInfo, TensorSource},
};

/// Hands out the tensors of a checked plan, each exactly once.
pub struct Loader {
    source: Arc<dyn TensorSource>,
    plan: HashMap<String, State>,
    dtype: DType,
    device: Device,
    options: LoaderOptions,
    staging: Staging,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Taken,
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("source", &self.source.describe())
            .field("planned", &self.plan.len())
            .field("dtype", &self.dtype)
            .finish()
    }
}

impl Loader {
    /// Checks names and shapes: every expected tensor is there with its shape, every tensor of the source is expected or
    /// `ignored`. One error lists missing, misshapen and unexpected names, and those whose element type cannot become
    /// `dtype`. Ignored tensors are never read, whatever their type.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn new(
        source: Arc<dyn TensorSource>,
        expected: &[Expected],
        ignored: impl Fn(&str) -> bool,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::with_options(source, expected, ignored, dtype, device, LoaderOptions::default())
    }

    /// Like [`Loader::new`], with options.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub fn with_options(
        source: Arc<dyn TensorSource>,
        expected: &[Expected],
        ignored: impl Fn(&str) -> bool,
        dtype: DType,
        device: &Device,
        options: LoaderOptions,
    ) -> Result<Self> {
        let report = PlanReport::new(&*source, expected, ignored, |info| is_loadable(info, dtype));
        if !report.fits() {
            return Err(Error::Plan { file: source.describe().to_owned(), report: Box::new(report) });
        }
        let plan = expected.iter().map(|e| (e.name.clone(), State::Waiting)).collect();
        Ok(Self { source, plan, dtype, device: device.clone(), options, staging: Staging::new(device) })
    }

    /// A tensor in the loader's dtype on its device, whatever it is stored as; finite values only.
    ///
    /// # Errors
    /// [`Error::NotPlanned`], [`Error::NotFinite`] (also for a value that the loader's dtype cannot hold),
    /// [`Error::Tensor`] if candle cannot allocate or convert; [`Error::Quantised`].
    pub fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let info = self.take(name)?;
        self.convert(&info)
    }

    /// A matrix for [`candle_fork::linear()`]. A quantised one takes part as the options say. On the CPU, 32-bit and 16-bit
    /// floats stay where they lie, in their stored dtype; otherwise it becomes a tensor in the loader's dtype.
    ///
    /// # Errors
    /// As [`Loader::tensor`], and [`Error::NotAMatrix`].
    pub fn linear(&mut self, name: &str) -> Result<LinearWeight> {
        let info = self.take(name)?;
        if info.shape.len() != 2 {
            let (file, tensor) = self.at(&info);
            return Err(Error::NotAMatrix { file, tensor, shape: info.shape });
        }
        if info.quantisation.is_some() {
            return self.quantised(&info);
        }
        let stays = matches!(info.dtype, StoredDType::F32 | StoredDType::F16 | StoredDType::BF16);
        let weight = if self.device.is_cpu() && stays {
            self.check(&info, None)?;
            LinearWeight::from_host(self.source.host(&info.name)?)
        } else {
            LinearWeight::from_tensor(self.convert(&info)?)
        };
        weight.map_err(|source| self.failed(&info, source))
    }

    /// The rows of several matrices one after another, as one map (q, k and v, for example). Matrices that stay where they
    /// lie stay apart; others become one tensor, for one product.
    ///
    /// # Errors
    /// As [`Loader::linear`]; [`Error::Tensor`] if the matrices do not have the same number of columns.
    pub fn linear_stack(&mut self, names: &[&str]) -> Result<LinearWeight> {
        let parts = names.iter().map(|name| self.linear(name)).collect::<Result<Vec<_>>>()?;
        LinearWeight::stack(parts).and_then(|stack| stack.merged()).map_err(|source| Error::Tensor {
            file: self.source.describe().to_owned(),
            tensor: list(names),
            source: Box::new(source),
        })
    }

    /// A table whose rows are looked up: it stays on the host as it is stored, whatever the device.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn embedding(&mut self, name: &str) -> Result<Embedding> {
        let info = self.take(name)?;
        if info.shape.len() != 2 {
            let (file, tensor) = self.at(&info);
            return Err(Error::NotAMatrix { file, tensor, shape: info.shape });
        }
        self.check(&info, None)?;
        Ok(match info.quantisation {
            Some(_) => Embedding::quantised(self.source.quant(&info.name)?),
            None => Embedding::plain(self.source.host(&info.name)?),
        })
    }

    /// Ends loading.
    ///
    /// # Errors
    /// [`Error::Unused`] if an expected tensor was not taken.
    pub fn finish(self) -> Result<()> {
        let mut left: Vec<&str> =
            self.plan.iter().filter(|(_, s)| **s == State::Waiting).map(|(n, _)| n.as_str()).collect();
        if left.is_empty() {
            return Ok(());
        }
        left.sort_unstable();
        Err(Error::Unused { file: self.source.describe().to_owned(), tensors: left.len(), names: list(left) })
    }

    /// Marks a planned tensor as taken.
    fn take(&mut self, name: &str) -> Result<TensorInfo> {
        let problem = match self.plan.get_mut(name) {
            None => "outside the plan",
            Some(State::Taken) => "twice",
            Some(state) => {
                *state = State::Taken;
                return self.source.require(name).cloned();
            }
        };
        Err(Error::NotPlanned { file: self.source.describe().to_owned(), tensor: shown(name), problem })
    }

    fn quantised(&self, info: &TensorInfo) -> Result<LinearWeight> {
        self.check(info, None)?;
        let weight = self.source.quant(&info.name)?;
        let full_precision = info.quantisation.as_ref().is_some_and(Quantisation::full_precision);
        let mode = self.options.quant.mode(&weight, full_precision, &self.device);
        LinearWeight::from_quant(weight, mode, self.dtype, &self.device).map_err(|source| self.failed(info, source))
    }

    fn convert(&mut self, info: &TensorInfo) -> Result<Tensor> {
        if info.quantisation.is_some() {
            self.check(info, None)?;
            let wide = self.source.quant(&info.name)?.dequantize(self.dtype, &self.device);
            let wide = wide.and_then(|t| t.reshape(info.shape.as_slice()).what("shape of a quantised tensor"));
            return wide.map_err(|source| self.failed(info, source));
        }
        self.check(info, Some(self.dtype))?;
        let host: HostTensor = self.source.host(&info.name)?;
        self.staging.upload(&host, self.dtype).map_err(|source| self.failed(info, source))
    }

    /// Looks at the values, before they are copied or converted to `target`.
    fn check(&self, info: &TensorInfo, target: Option<DType>) -> Result<()> {
        if self.options.values == ValueCheck::Off {
            return Ok(());
        }
        let bytes = self.source.bytes(&info.name)?;
        let found = match &info.quantisation {
            Some(quantisation) => scan::codes(bytes, quantisation),
            None => scan::scan(bytes, info.dtype, target),
        };
        if let Some(scan::Bad { index, value }) = found.bad {
            let (file, tensor) = self.at(info);
            return Err(Error::NotFinite { file, tensor, index, value });
        }
        if found.all_zero && info.shape.len() >= 2 && info.elements() > 1 {
            let (file, tensor) = self.at(info);
            tracing::warn!(file, tensor, shape = ?info.shape, "a whole weight matrix is zero");
        }
        Ok(())
    }

    /// File and name, for messages.
    fn at(&self, info: &TensorInfo) -> (String, String) {
        (self.source.file_of(info).to_owned(), shown(&info.name))
    }

    fn failed(&self, info: &TensorInfo, source: candle_fork::Error) -> Error {
        let (file, tensor) = self.at(info);
        Error::Tensor { file, tensor, source: Box::new(source) }
    }
}

/// Whether a tensor can become `dtype`: quantised ones if their format is understood, floats of 16 bits and more into each
/// other, anything else only into itself. Narrower types without a known scale are not widened.
fn is_loadable(info: &TensorInfo, dtype: DType) -> bool {
    let stored = info.dtype;
    if let Some(quantisation) = &info.quantisation {
        return quantisation.is_supported() && matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    }
    let float = matches!(stored, StoredDType::F64 | StoredDType::F32 | StoredDType::F16 | StoredDType::BF16);
    if float { dtype.is_float() && dtype.size_in_bytes() >= 2 } else { stored.to_candle() == Some(dtype) }
}
