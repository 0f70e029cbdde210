//! Errors of this crate.

/// What can be wrong with a policy that a user asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text names no convolution backend.
    #[error("unknown convolution backend `{value}`, expected one of: cudnn, im2col")]
    UnknownConv {
        /// The text as given.
        value: String,
    },
    /// The text names no attention backend.
    #[error("unknown attention backend `{value}`, expected one of: fused, math")]
    UnknownAttention {
        /// The text as given.
        value: String,
    },
    /// A variable holds a value that its policy does not know.
    #[error("{variable}: {reason}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// What is wrong with its value.
        reason: Box<Error>,
    },
}

/// `Result` with the [`Error`] of this crate.
pub type Result<T> = std::result::Result<T, Error>;
