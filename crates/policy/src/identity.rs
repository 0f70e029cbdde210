//! What shaped the bytes of a run.

use candle_core::{DType, Device};
use candle_fork::diagnosis;
use serde::{Deserialize, Serialize};

use crate::{AttentionPolicy, ConvPolicy};

/// What shaped the bytes of a result, apart from the model's own inputs (prompt, seed, sizes). Two runs with equal
/// identities and inputs give the same bytes.
///
/// Backends that are at their default are left out when it is written, so a record made before a backend existed stays
/// what it is:
///
/// ```
/// use candle_core::{DType, Device};
/// use policy::{AttentionPolicy, ConvPolicy, ExecutionIdentity};
///
/// let identity = ExecutionIdentity::resolve(ConvPolicy::CudnnAuto, AttentionPolicy::Math, &Device::Cpu, DType::F32);
/// let text = serde_json::to_string(&identity.with_weights("9f86d081"))?;
/// // On the CPU there is no cuDNN to be used.
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
    /// Convolution backend: `cudnn`. Absent for the default, im2col.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conv: Option<String>,
    /// Version of cuDNN. Absent if no backend uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cudnn: Option<String>,
    /// Attention backend: `fused`. Absent for the default, products and a softmax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
}

impl ExecutionIdentity {
    /// What the policies come to on `device`: a policy that wants cuDNN where there is none comes to im2col, and fused
    /// attention to products and a softmax as long as no device has a fused kernel. Looks for cuDNN if a policy wants it.
    #[must_use]
    pub fn resolve(conv: ConvPolicy, attention: AttentionPolicy, device: &Device, dtype: DType) -> Self {
        let cudnn = match conv {
            ConvPolicy::Im2col => None,
            ConvPolicy::CudnnAuto | ConvPolicy::CudnnRequired if device.is_cuda() => diagnosis::cudnn_version(),
            ConvPolicy::CudnnAuto | ConvPolicy::CudnnRequired => None,
        };
        // No wildcard: a fused kernel has to say here where it runs.
        let attention = match attention {
            AttentionPolicy::Math | AttentionPolicy::FusedAuto | AttentionPolicy::FusedRequired => None,
        };
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: diagnosis::device_class(device),
            dtype: dtype.as_str().to_owned(),
            weights: None,
            conv: cudnn.is_some().then(|| ConvPolicy::CudnnAuto.to_string()),
            cudnn,
            attention,
        }
    }

    /// The same with a hash of the weights.
    #[must_use]
    pub fn with_weights(self, hash: impl Into<String>) -> Self {
        Self { weights: Some(hash.into()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> ExecutionIdentity {
        ExecutionIdentity::resolve(ConvPolicy::Im2col, AttentionPolicy::Math, &Device::Cpu, DType::BF16)
    }

    #[test]
    fn default_backends_leave_no_trace() {
        let json = serde_json::to_string(&identity()).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(json, format!(r#"{{"version":"{version}","device":"cpu","dtype":"bf16"}}"#));
    }

    #[test]
    fn what_a_policy_wants_but_the_device_has_not_is_not_recorded() {
        for conv in [ConvPolicy::CudnnAuto, ConvPolicy::CudnnRequired] {
            for attention in [AttentionPolicy::FusedAuto, AttentionPolicy::FusedRequired] {
                let resolved = ExecutionIdentity::resolve(conv, attention, &Device::Cpu, DType::BF16);
                assert_eq!(resolved, identity(), "{conv:?} {attention:?}");
            }
        }
    }

    #[test]
    fn records_come_back_as_they_were_written() {
        let fast = ExecutionIdentity {
            device: "cuda-9.0".into(),
            conv: Some("cudnn".into()),
            cudnn: Some("9.19.0".into()),
            ..identity().with_weights("abc")
        };
        let json = serde_json::to_string(&fast).unwrap();
        assert!(json.ends_with(r#""dtype":"bf16","weights":"abc","conv":"cudnn","cudnn":"9.19.0"}"#), "{json}");
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
            ExecutionIdentity::resolve(ConvPolicy::Im2col, AttentionPolicy::Math, &Device::Cpu, DType::F32),
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
