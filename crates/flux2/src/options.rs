//! How models are loaded and run.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device};
use candle_fork::cudnn_policy::PlanChoice;
use policy::{AttentionPolicy, Backends, ConvPolicy, ModelFamily};
use weights::{Expected, Loader, LoaderOptions, QuantPolicy, TensorSource, ValueCheck};

use crate::error::Result;

/// Where a model runs, in which element type, and what is checked.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Device that holds the tensors.
    pub device: Device,
    /// Element type of the activations; `F32` on the CPU. Matrices keep their stored type where the device allows it.
    pub dtype: DType,
    /// Whether the values of weights are looked at.
    pub values: ValueCheck,
    /// Convolution backend of every call; by default that of [`ModelFamily::Flux2`].
    pub conv: ConvPolicy,
    /// Attention backend of every call; by default that of [`ModelFamily::Flux2`].
    pub attention: AttentionPolicy,
    /// How quantised matrices take part in products.
    pub quant: QuantPolicy,
    /// How cuDNN's plans are chosen where a policy lets it work: by default the fastest, timed once for each shape.
    pub plans: PlanChoice,
    /// Folder that keeps chosen plans for later processes; none keeps them in memory only.
    pub plan_cache: Option<Arc<Path>>,
    /// Whether a pipeline's text encoder stays on the device while the transformer is there.
    pub text_encoder: Residency,
    /// How a step of the transformer is given to a device.
    pub launches: Launches,
    /// Most bytes that a pipeline's tensors may take on a device of its own; none is no limit. What does not fit is
    /// streamed from the host block by block, with the same results.
    pub max_vram: Option<u64>,
}

/// Whether a component of a pipeline stays on the device while another works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Residency {
    /// It stays: what a process needs that makes pictures of many prompts.
    Stay,
    /// It is read again for each new prompt, and on a device of its own makes room for what comes next. On the CPU weights
    /// stay mapped and cost nothing, so it stays.
    #[default]
    Release,
}

/// How a step of the transformer is given to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Launches {
    /// Op by op.
    #[default]
    Eager,
    /// As a graph of the driver: the second step of a shape is recorded, later ones of the process replay it. Worth it where
    /// the host cannot keep up with the device, for small pictures. Where a step cannot be recorded (on the CPU, while
    /// blocks are streamed, on a device that was not made by [`candle_fork::stream::cuda_device`]) it runs op by op.
    Recorded,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let Backends { conv, attention, plans, plan_cache } = Backends::for_family(ModelFamily::Flux2);
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            values: ValueCheck::default(),
            conv,
            attention,
            quant: QuantPolicy::default(),
            plans,
            plan_cache,
            text_encoder: Residency::default(),
            launches: Launches::default(),
            max_vram: None,
        }
    }
}

impl LoadOptions {
    /// Options for `device` with activations of `dtype`.
    pub fn new(device: Device, dtype: DType) -> Self {
        Self { device, dtype, ..Self::default() }
    }

    /// Options with a check of values.
    pub fn with_values(self, values: ValueCheck) -> Self {
        Self { values, ..self }
    }

    /// Options with backends.
    pub fn with_backends(self, conv: ConvPolicy, attention: AttentionPolicy) -> Self {
        Self { conv, attention, ..self }
    }

    /// Options with a policy for quantised matrices.
    pub fn with_quant(self, quant: QuantPolicy) -> Self {
        Self { quant, ..self }
    }

    /// Options with a place for the text encoder.
    pub fn with_text_encoder(self, text_encoder: Residency) -> Self {
        Self { text_encoder, ..self }
    }

    /// Options with a limit of memory in bytes.
    pub fn with_max_vram(self, max_vram: Option<u64>) -> Self {
        Self { max_vram, ..self }
    }

    /// The backends that they name.
    pub(crate) fn backends(&self) -> Backends {
        let Self { conv, attention, plans, plan_cache, .. } = self.clone();
        Backends { conv, attention, plans, plan_cache }
    }

    /// A loader for these options.
    pub(crate) fn loader(
        &self,
        source: Arc<dyn TensorSource>,
        expected: &[Expected],
        ignored: impl Fn(&str) -> bool,
    ) -> Result<Loader> {
        let checks = LoaderOptions::default().with_values(self.values).with_quant(self.quant);
        Ok(Loader::with_options(source, expected, ignored, self.dtype, &self.device, checks)?)
    }
}
