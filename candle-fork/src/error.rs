//! Errors of the layer.

use candle_core::DType;

use crate::cudnn_policy::FallbackReason;

/// What went wrong in an op of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has a shape that the op does not accept.
    #[error("{op}: {operand} has shape {got:?}, expected {expected}")]
    Shape {
        /// Name of the op.
        op: &'static str,
        /// Name of the operand.
        operand: &'static str,
        /// Shape found.
        got: Vec<usize>,
        /// Shape wanted, in words or letters.
        expected: String,
    },
    /// An argument has an element type that the op does not accept.
    #[error("{op}: {operand} has dtype {got:?}, expected {expected}")]
    DType {
        /// Name of the op.
        op: &'static str,
        /// Name of the operand.
        operand: &'static str,
        /// Element type found.
        got: DType,
        /// Element types accepted.
        expected: &'static str,
    },
    /// A scalar argument is outside its range.
    #[error("{op}: {what}")]
    Argument {
        /// Name of the op.
        op: &'static str,
        /// What is wrong, value included.
        what: String,
    },
    /// The byte range of a host tensor does not hold what its shape and dtype say.
    #[error("host tensor of {expected} bytes lies at {start}..{end} of a buffer of {len} bytes")]
    HostRange {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// Bytes that shape and dtype need.
        expected: usize,
        /// Length of the buffer.
        len: usize,
    },
    /// The operation was built without the feature that it needs.
    #[error("{op}: not compiled into this build (feature `{feature}`)")]
    NotCompiled {
        /// Name of the op.
        op: &'static str,
        /// Cargo feature.
        feature: &'static str,
    },
    /// The arguments are legal, but the device has no path for them.
    #[error("{op}: no path for {what}")]
    Unsupported {
        /// Name of the op.
        op: &'static str,
        /// What has no path.
        what: String,
    },
    /// The policy allows no fallback, and one would have been needed.
    #[error("{op}: the policy allows no fallback, but {detail}")]
    FallbackRefused {
        /// Name of the op.
        op: &'static str,
        /// Why a fallback would have been needed.
        reason: FallbackReason,
        /// The reason in words, with what the library said.
        detail: String,
    },
    /// A call into candle failed.
    #[error("{what}")]
    Candle {
        /// What was being done.
        what: &'static str,
        /// Candle's error.
        #[source]
        source: Box<candle_core::Error>,
    },
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names the step during which candle failed.
pub trait What<T> {
    /// Attaches `what` to a candle error.
    fn what(self, what: &'static str) -> Result<T>;
}

impl<T> What<T> for candle_core::Result<T> {
    fn what(self, what: &'static str) -> Result<T> {
        self.map_err(|source| Error::Candle { what, source: Box::new(source) })
    }
}
