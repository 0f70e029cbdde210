//! Why cuDNN did not serve: always a value, never a panic.

use super::sys::{Status, status};
use crate::cudnn_policy::FallbackReason;

/// A call that failed, with what the library said about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} returned {status} ({text})")]
pub(crate) struct Failure {
    pub(super) call: &'static str,
    pub(super) status: Status,
    pub(super) text: String,
}

impl Failure {
    /// The installation is broken (parts missing or of different versions): nothing else will work either.
    pub(super) fn is_installation(&self) -> bool {
        self.status / 1000 == 1
    }

    /// The library has no way to do what was asked: a property of the problem.
    fn is_unsupported(&self) -> bool {
        self.status / 1000 == 3
    }
}

/// Why a problem has to be solved elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {text}")]
pub(crate) struct Refusal {
    /// What is counted.
    pub(crate) reason: FallbackReason,
    /// What is logged.
    pub(crate) text: String,
    /// Whether asking again for the same thing may turn out otherwise.
    pub(super) passing: bool,
}

impl Refusal {
    /// A refusal that holds for as long as the process runs.
    pub(crate) fn lasting(reason: FallbackReason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into(), passing: false }
    }

    /// A refusal that depends on the moment.
    pub(crate) fn passing(reason: FallbackReason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into(), passing: true }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let reason = if failure.is_installation() {
            FallbackReason::Unavailable
        } else if failure.is_unsupported() {
            FallbackReason::Unsupported
        } else {
            FallbackReason::Failed
        };
        let passing = failure.status == status::DEVICE_ALLOCATION_FAILED;
        Self { reason, text: failure.to_string(), passing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_become_reasons_by_their_thousands() {
        let expected = [
            (1002, FallbackReason::Unavailable, false),
            (1008, FallbackReason::Unavailable, false),
            (2003, FallbackReason::Failed, false),
            (3000, FallbackReason::Unsupported, false),
            (3008, FallbackReason::Unsupported, false),
            (4003, FallbackReason::Failed, false),
            (4004, FallbackReason::Failed, true),
            (5000, FallbackReason::Failed, false),
        ];
        for (status, reason, passing) in expected {
            let failure = Failure { call: "cudnnBackendFinalize", status, text: "because".into() };
            let refusal = Refusal::from(failure);
            assert_eq!((refusal.reason, refusal.passing), (reason, passing), "{status}");
            assert!(refusal.text.contains("cudnnBackendFinalize") && refusal.text.contains("because"));
        }
    }
}
