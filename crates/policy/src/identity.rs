//! What shaped the bytes of a run.

use candle_core::{DType, Device};
use candle_fork::{cudnn_policy::Counters, diagnosis};
use serde::{Deserialize, Serialize};

use crate::{AttentionPolicy, ConvPolicy};

/// What shaped the bytes of a result, apart from the model's own inputs (prompt, seed, sizes). Two runs with equal
/// identities and inputs give the same bytes, as far as the hash knows the weights; where cuDNN computes, if it has chosen
/// the same plans, which it does when they are not timed
/// ([`PlanChoice::Heuristic`](candle_fork::cudnn_policy::PlanChoice::Heuristic)).
///
/// Backends that are at their default are left out when it is written, so a record made before a backend existed stays
/// what it is:
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fork::cudnn_policy::take_counters;
/// use policy::ExecutionIdentity;
///
/// take_counters();
/// // Here a model runs, on this thread.
/// let identity = ExecutionIdentity::executed(&take_counters(), &Device::Cpu, DType::F32);
/// let text = serde_json::to_string(&identity.with_weights("9f86d081"))?;
/// let version = env!("CARGO_PKG_VERSION");
/// assert_eq!(text, format!(r#"{{"version":"{version}","device":"cpu","dtype":"f32","weights":"9f86d081"}}"#));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExecutionIdentity {
    /// Version of this project.
    pub version: String,
    /// Kind of device: `cpu`, `cuda-9.0` (with the compute capability), `metal`.
    pub device: String,
    /// Element type of the arithmetic's results: `f32`, `bf16`, `f16`.
    pub dtype: String,
    /// Hash of the weights, in the form that its maker chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// How quantised weights were used, if that was asked for: `decoded`, `stored`, `int8`. Absent for the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quant: Option<String>,
    /// Convolution backend: `cudnn`. Absent for the default, im2col.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conv: Option<String>,
    /// Version of cuDNN. Absent if it has computed nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cudnn: Option<String>,
    /// Attention backend: `fused`. Absent for the default, products and a softmax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
}

impl ExecutionIdentity {
    /// What a run on `device` with results of `dtype` has come to. `counters` are those of its thread for the time of the
    /// run: a backend that a policy wanted is recorded if it has computed anything.
    #[must_use]
    pub fn executed(counters: &Counters, device: &Device, dtype: DType) -> Self {
        let [conv, attention] = [counters.dispatched, counters.attention.dispatched].map(|dispatched| dispatched > 0);
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: diagnosis::device_class(device),
            dtype: dtype.as_str().to_owned(),
            weights: None,
            quant: None,
            conv: conv.then(|| ConvPolicy::CudnnAuto.to_string()),
            cudnn: if conv || attention { diagnosis::cudnn_version() } else { None },
            attention: attention.then(|| AttentionPolicy::FusedAuto.to_string()),
        }
    }

    /// The same with a hash of the weights.
    #[must_use]
    pub fn with_weights(self, hash: impl Into<String>) -> Self {
        Self { weights: Some(hash.into()), ..self }
    }

    /// The same with the use of quantised weights that was asked for, if any.
    #[must_use]
    pub fn with_quant(self, quant: Option<String>) -> Self {
        Self { quant, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> ExecutionIdentity {
        ExecutionIdentity::executed(&Counters::default(), &Device::Cpu, DType::BF16)
    }

    #[test]
    fn default_backends_leave_no_trace() {
        let json = serde_json::to_string(&identity()).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(json, format!(r#"{{"version":"{version}","device":"cpu","dtype":"bf16"}}"#));
    }

    /// An attempt that has fallen back leaves no trace, a single dispatch does.
    #[test]
    fn cudnn_is_recorded_once_it_has_computed_something() {
        let mut counters = Counters::default();
        counters.attempts = 3;
        counters.plans_built = 2;
        let record = |counters: &Counters| ExecutionIdentity::executed(counters, &Device::Cpu, DType::BF16);
        assert_eq!(record(&counters), identity());
        counters.dispatched = 1;
        assert_eq!(record(&counters).conv.as_deref(), Some("cudnn"));
        assert_eq!(record(&counters).cudnn, diagnosis::cudnn_version());
    }

    #[test]
    fn records_come_back_as_they_were_written() {
        let fast = ExecutionIdentity {
            device: "cuda-9.0".into(),
            conv: Some("cudnn".into()),
            cudnn: Some("9.19.0".into()),
            ..identity().with_weights("abc").with_quant(Some("int8".into()))
        };
        let json = serde_json::to_string(&fast).unwrap();
        assert!(
            json.ends_with(r#""dtype":"bf16","weights":"abc","quant":"int8","conv":"cudnn","cudnn":"9.19.0"}"#),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<ExecutionIdentity>(&json).unwrap(), fast);
    }

    #[test]
    fn a_record_of_an_older_version_is_read() {
        let old = r#"{"version":"0.0.1","device":"cpu","dtype":"f32"}"#;
        let identity: ExecutionIdentity = serde_json::from_str(old).unwrap();
        assert_eq!((identity.version.as_str(), identity.conv.as_deref()), ("0.0.1", None));
        assert_eq!(serde_json::to_string(&identity).unwrap(), old);
    }

    #[test]
    fn each_part_makes_another_identity() {
        let base = identity();
        let others = [
            ExecutionIdentity::executed(&Counters::default(), &Device::Cpu, DType::F32),
            base.clone().with_weights("abc"),
            base.clone().with_weights("abd"),
            ExecutionIdentity { device: "cuda-9.0".into(), ..base.clone() },
            ExecutionIdentity { cudnn: Some("9.19.0".into()), ..base.clone() },
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(*other, base);
            assert!(!others[..i].contains(other));
        }
    }
}
