//! Errors of this crate.

use crate::latent_files::LatentFileError;

/// What went wrong while a VAE was loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layers do not fit one another.
    #[error("not a network that can be run: {what}")]
    Architecture {
        /// What does not fit, values included.
        what: String,
    },
    /// The file holds something else.
    #[error("{file} holds no vae of the Wan family: {found}")]
    NotAVae {
        /// File.
        file: String,
        /// What it looks like instead.
        found: String,
    },
    /// A map that every latent passes is zero.
    #[error(
        "tensor `{tensor}` of {file} is zero throughout, so that every picture would be the same flat field: get another copy of the vae"
    )]
    Zeroed {
        /// File.
        file: String,
        /// Name in the file.
        tensor: String,
    },
    /// A file with latents cannot be used.
    #[error("{file}: {problem}")]
    LatentFile {
        /// File.
        file: String,
        /// What is wrong.
        problem: LatentFileError,
    },
    /// The statistics that normalise latents do not fit the VAE.
    #[error("{field} has {got}, expected {expected}")]
    Statistics {
        /// `latents_mean` or `latents_std`.
        field: &'static str,
        /// What was found.
        got: String,
        /// What is needed.
        expected: String,
    },
    /// The weights hold no encoder or no decoder.
    #[error("the weights hold no {part}")]
    Missing {
        /// `encoder` or `decoder`.
        part: &'static str,
    },
    /// The latents are those of another VAE.
    #[error("the latents have {got} channels, this vae takes {expected}{}", vae_for(*got))]
    Channels {
        /// Channels of the latents.
        got: usize,
        /// Channels of the VAE.
        expected: usize,
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
    /// A side of the picture cannot be halved as often as the encoder does.
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
    /// The latents hold NaN or infinity.
    #[error(
        "the latents hold {value} at channel {channel}, frame {frame}: the sampler that made them is at fault, not the vae"
    )]
    NonFiniteLatents {
        /// Value found.
        value: f32,
        /// Channel.
        channel: usize,
        /// Latent frame in the call.
        frame: usize,
    },
    /// The frames to encode hold NaN or infinity.
    #[error("the frames to encode hold {value} at channel {channel}, frame {frame}")]
    NonFiniteFrames {
        /// Value found.
        value: f32,
        /// Channel.
        channel: usize,
        /// Frame in the call.
        frame: usize,
    },
    /// Finite input gave NaN or infinity.
    #[error("the {what} hold non-finite values: the weights are damaged or the input is far out of range")]
    NonFinite {
        /// What holds them.
        what: &'static str,
    },
    /// A call continues with other extents than the stream began with.
    #[error("the stream began with {began:?} (height, width), this call has {got:?}")]
    ExtentsChanged {
        /// Height and width of the first call.
        began: (usize, usize),
        /// Height and width of this call.
        got: (usize, usize),
    },
    /// The state belongs to another VAE.
    #[error("the state was made for another vae")]
    ForeignState,
    /// An earlier call with this state failed or was cancelled half-way.
    #[error("an earlier call with this state did not finish: start anew, or go on from a clone taken before it")]
    BrokenState,
    /// No way to decode or encode the clip fits the limit.
    #[error("{what} needs at least {} MiB ({how}), the limit is {} MiB", needed.div_ceil(1 << 20), max_bytes >> 20)]
    Memory {
        /// `decoding` or `encoding`.
        what: &'static str,
        /// Bytes that the smallest plan takes.
        needed: u64,
        /// The limit.
        max_bytes: u64,
        /// What that plan is, in words.
        how: String,
    },
    /// The tiling asked for is not possible.
    #[error("{what}")]
    Tiling {
        /// What is wrong, values included.
        what: String,
    },
    /// What the caller passed in to give or take frames failed.
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

/// The end of a message: which VAE has made latents of so many channels.
fn vae_for(channels: usize) -> &'static str {
    match channels {
        16 => ": 16-channel latents need the Wan 2.1 VAE (also for Wan 2.2 14B)",
        48 => ": 48-channel latents need the Wan 2.2 VAE (TI2V-5B only)",
        128 => ": 128-channel latents need the VAE of LTX-2, 2.3 or 2.5",
        _ => "",
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

    #[test]
    fn a_wrong_number_of_channels_names_the_vae_that_fits() {
        let message = Error::Channels { got: 16, expected: 48 }.to_string();
        let want = "the latents have 16 channels, this vae takes 48: 16-channel latents need the Wan 2.1 VAE \
                    (also for Wan 2.2 14B)";
        assert_eq!(message, want);
        assert_eq!(
            Error::Channels { got: 4, expected: 16 }.to_string(),
            "the latents have 4 channels, this vae takes 16"
        );
    }
}
