//! Errors of this crate.

/// What went wrong while a model was loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is not one that can be built.
    #[error("config `{field}` {problem}")]
    Config {
        /// Path of the field, for example `decoder_blocks[3]`.
        field: String,
        /// What is wrong with it, values included.
        problem: String,
    },
    /// The file carries no configuration, and the shapes alone do not say which model it is.
    #[error("{file} carries no `config` in its metadata: get the file as it was published, or pass its config.json")]
    NoConfig {
        /// File.
        file: String,
    },
    /// The weights hold no encoder or no decoder.
    #[error("the weights hold no {part}")]
    Missing {
        /// `encoder` or `decoder`.
        part: &'static str,
    },
    /// A tensor passed to the model has another shape than the model needs.
    #[error("{what} has shape {got:?}, expected {expected}")]
    Shape {
        /// Name of the tensor.
        what: &'static str,
        /// Shape found.
        got: Vec<usize>,
        /// Shape wanted, in words or letters.
        expected: String,
    },
    /// A side of the picture is not a multiple of what one latent stands for.
    #[error("{axis} {got} is not possible: it must be a multiple of {multiple}, not 0")]
    Size {
        /// `height` or `width`.
        axis: &'static str,
        /// Value found, in pixels.
        got: usize,
        /// What it must be a multiple of.
        multiple: usize,
    },
    /// The clip's length is not one that latents stand for.
    #[error("{got} frames are not possible: a clip has 1 frame more than a multiple of {group}, nearest: {nearest}")]
    Frames {
        /// Frames found.
        got: usize,
        /// Frames per latent frame.
        group: usize,
        /// Nearest legal numbers, in words.
        nearest: String,
    },
    /// An argument cannot be used.
    #[error("{what}")]
    Argument {
        /// What is wrong, values included.
        what: String,
    },
    /// Input holds NaN or infinity.
    #[error("the {what} hold non-finite values")]
    NonFiniteInput {
        /// `latents` or `frames`.
        what: &'static str,
    },
    /// Finite input gave NaN or infinity.
    #[error("the {what} hold non-finite values: the weights are damaged or the input is far out of range")]
    NonFinite {
        /// What holds them.
        what: &'static str,
    },
    /// The smallest way to decode or encode the clip does not fit the limit.
    #[error("{what} needs at least {} MiB, the limit is {} MiB", needed.div_ceil(1 << 20), max_bytes >> 20)]
    Memory {
        /// `decoding` or `encoding`.
        what: &'static str,
        /// Bytes that it takes.
        needed: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// What the caller passed in to take frames failed.
    #[error("{what}")]
    Caller {
        /// What was being done.
        what: &'static str,
        /// The caller's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The run was stopped by its observer.
    #[error(transparent)]
    Cancelled(#[from] policy::Cancelled),
    /// A checkpoint cannot be used.
    #[error(transparent)]
    Weights(Box<weights::Error>),
    /// An operation failed.
    #[error(transparent)]
    Op(Box<candle_fork::Error>),
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<weights::Error> for Error {
    fn from(source: weights::Error) -> Self {
        Self::Weights(Box::new(source))
    }
}

impl From<candle_fork::Error> for Error {
    fn from(source: candle_fork::Error) -> Self {
        Self::Op(Box::new(source))
    }
}

/// [`Error::Shape`] of a tensor.
pub(crate) fn shape(what: &'static str, x: &candle_core::Tensor, expected: impl Into<String>) -> Error {
    Error::Shape { what, got: x.dims().to_vec(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_small() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }
}
