//! Errors of this crate.

/// What can be wrong with a schedule or a step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of steps is zero or above [`MAX_STEPS`](crate::MAX_STEPS).
    #[error("{num_inference_steps} steps asked for, expected 1 to {max}")]
    Steps {
        /// Steps asked for.
        num_inference_steps: usize,
        /// The largest legal number.
        max: usize,
    },
    /// An image without tokens has no schedule.
    #[error("the image has no tokens, so there is nothing to sample")]
    NoTokens,
    /// The shift is not a number that gives a schedule.
    #[error("shift mu is {mu}, expected a finite number")]
    Shift {
        /// The shift as given.
        mu: f64,
    },
    /// The schedule has no such step.
    #[error("step {index} of a schedule of {num_inference_steps} steps (counted from 0)")]
    StepIndex {
        /// Step asked for, from 0.
        index: usize,
        /// Steps of the schedule.
        num_inference_steps: usize,
    },
    /// Latents and velocity belong together element by element.
    #[error("{latents} latents and {velocity} velocities, expected as many of each")]
    Length {
        /// Number of latent values.
        latents: usize,
        /// Number of velocity values.
        velocity: usize,
    },
}

/// `Result` with the [`Error`] of this crate.
pub type Result<T> = std::result::Result<T, Error>;
