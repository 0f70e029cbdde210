//! Errors of this crate.

use crate::sizes::{MAX_SIDE, MAX_STEPS, MIN_SIDE};

/// What went wrong while a model was loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The folder holds no FLUX.2 pipeline in the diffusers layout.
    #[error("{folder}: not a FLUX.2 model folder: {found}, expected {expected}")]
    NotThisModel {
        /// The folder.
        folder: String,
        /// What it holds instead.
        found: String,
        /// What was looked for.
        expected: &'static str,
    },
    /// The folder holds a FLUX.2 pipeline of a kind that cannot be run yet.
    #[error("{folder}: {what} is not supported yet")]
    UnsupportedModel {
        /// The folder.
        folder: String,
        /// What is missing here.
        what: String,
    },
    /// A GGUF file holds another model than the one that is needed.
    #[error("{file} holds a model of architecture `{found}`, `{expected}` is needed")]
    Architecture {
        /// The file.
        file: String,
        /// Architecture that it names.
        found: String,
        /// Architecture that is needed.
        expected: &'static str,
    },
    /// A value of a configuration file is outside of what the architecture allows.
    #[error("{component} config: {field} is {value}, expected {expected}")]
    Config {
        /// Component that the file belongs to.
        component: &'static str,
        /// Key of the file.
        field: &'static str,
        /// Value found.
        value: String,
        /// Values accepted.
        expected: String,
    },
    /// The text encoder does not fit the transformer.
    #[error(
        "text encoder with hidden size {hidden_size} and {taps} taps gives {} channels, \
         the transformer wants joint_attention_dim {joint_attention_dim}{hint}",
        hidden_size * taps
    )]
    EncoderMismatch {
        /// Width of the text encoder.
        hidden_size: usize,
        /// Number of hidden states that are concatenated.
        taps: usize,
        /// Width of the transformer's text input.
        joint_attention_dim: usize,
        /// Which encoder to use, as the end of the message; may be empty.
        hint: String,
    },
    /// The VAE does not fit the transformer.
    #[error(
        "vae with {latent_channels} latent channels gives {} channels after 2x2 patches, \
         the transformer wants in_channels {in_channels}",
        latent_channels * 4
    )]
    VaeMismatch {
        /// Channels of the VAE's latents.
        latent_channels: usize,
        /// Channels of the transformer's tokens.
        in_channels: usize,
    },
    /// `tokenizer.json` cannot be used.
    #[error("{path}: not a usable tokenizer")]
    Tokenizer {
        /// The file.
        path: String,
        /// The tokenizer library's reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A token id lies outside of the text encoder's vocabulary.
    #[error("token id {id} is outside of the text encoder's vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// Height or width is not a size that the model can make.
    #[error(
        "{axis} {got} is not possible: it must be a multiple of {multiple} from {MIN_SIDE} to {MAX_SIDE}, nearest: {nearest}"
    )]
    Size {
        /// `height` or `width`.
        axis: &'static str,
        /// Value asked for, in pixels.
        got: usize,
        /// Side of the square of pixels that one token stands for.
        multiple: usize,
        /// Nearest legal values, in words.
        nearest: String,
    },
    /// The number of steps is not usable.
    #[error("num_inference_steps {got} is not possible: it must be from 1 to {MAX_STEPS}")]
    Steps {
        /// Value asked for.
        got: usize,
    },
    /// The guidance scale is not usable.
    #[error("guidance_scale {got} is not possible: it must be a finite number that is not negative")]
    Guidance {
        /// Value asked for.
        got: f64,
    },
    /// The VAE's statistics hold a variance that has no square root.
    #[error("bn.running_var[{channel}] is {value}, expected a variance")]
    LatentVariance {
        /// Channel of the packed latents.
        channel: usize,
        /// Value found.
        value: f32,
    },
    /// A guidance scale was given to a transformer that takes none, or none to one that takes it.
    #[error("the transformer {}", if *given { "takes no guidance scale as input" } else { "needs a guidance scale as input" })]
    GuidanceInput {
        /// Whether a scale was given.
        given: bool,
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
    /// Classifier-free guidance was asked for without the embeddings that it starts from.
    #[error("guidance_scale {guidance_scale} needs negative_prompt_embeds")]
    NoNegativePrompt {
        /// Value asked for.
        guidance_scale: f64,
    },
    /// The latents hold NaN or infinity.
    #[error(
        "the latents hold non-finite values after step {step} of {num_inference_steps}: the weights are damaged or the dtype overflows"
    )]
    NonFiniteLatents {
        /// Step that made them, from 1.
        step: usize,
        /// Steps of the run.
        num_inference_steps: usize,
    },
    /// A stage gave NaN or infinity.
    #[error("{what} hold non-finite values: the weights are damaged or the dtype overflows")]
    NonFinite {
        /// What holds them.
        what: &'static str,
    },
    /// No way to make the picture fits the limit of memory.
    #[error("{what} needs at least {} MiB, the limit is {} MiB: {hint}", needed.div_ceil(1 << 20), max_vram >> 20)]
    Memory {
        /// The component that does not fit.
        what: &'static str,
        /// Bytes that it needs with everything streamed that can be.
        needed: u64,
        /// The limit in bytes.
        max_vram: u64,
        /// What would help.
        hint: &'static str,
    },
    /// The device has no memory left.
    #[error(
        "the device is out of memory: a limit (max_vram) below what is free streams weights from the host, a smaller \
         picture takes less"
    )]
    OutOfMemory {
        /// What asked for memory.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The schedule or one of its steps cannot be computed.
    #[error(transparent)]
    Schedule(#[from] sampling::Error),
    /// The run was stopped by its observer.
    #[error(transparent)]
    Cancelled(#[from] policy::Cancelled),
    /// A checkpoint or another file of the model folder cannot be used.
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
        if is_out_of_memory(&source) {
            return Self::OutOfMemory { source: Box::new(source) };
        }
        Self::Weights(Box::new(source))
    }
}

impl From<candle_fork::Error> for Error {
    fn from(source: candle_fork::Error) -> Self {
        if is_out_of_memory(&source) {
            return Self::OutOfMemory { source: Box::new(source) };
        }
        Self::Op(Box::new(source))
    }
}

/// Whether an error or one behind it is that of a driver without memory. Candle keeps only the text of such errors.
fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source())
        .any(|error| error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_without_memory_is_told_apart() {
        let failed = |text: &str| candle_fork::Error::Candle {
            what: "memory for a result",
            source: Box::new(candle_core::Error::Msg(text.to_owned())),
        };
        let error = Error::from(failed("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")"));
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
        assert!(matches!(Error::from(failed("DriverError(CUDA_ERROR_UNKNOWN)")), Error::Op(_)));
    }

    #[test]
    fn errors_are_small() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }
}
