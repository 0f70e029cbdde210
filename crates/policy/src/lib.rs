//! Which backends a run uses, per model family, and how a run reports and is stopped.
//!
//! Two rules meet here:
//!
//! - **Stills keep their bytes.** An image family runs convolutions on im2col and attention on the math path in every
//!   build, so an archived seed renders the same picture whatever libraries are installed. Video families take the
//!   fast backends. The split is one function, [`ModelFamily::is_video`]; both policies ask it.
//! - **No hidden switches.** Nothing in this crate reads the environment. A program that wants `MOLD_CONV` and
//!   `MOLD_ATTENTION` to count calls [`overrides_from`] with the variables it is willing to look at. A policy is in force
//!   on one thread, from [`ConvPolicy::enter`] until its guard is dropped.
//!
//! What shaped a run's bytes is recorded in an [`ExecutionIdentity`].
//!
//! ```
//! use policy::{AttentionPolicy, ConvPolicy, ModelFamily, overrides_from};
//!
//! # fn main() -> Result<(), policy::Error> {
//! // A program passes `std::env::vars_os()` here.
//! let overrides = overrides_from([("MOLD_CONV", "im2col"), ("HOME", "/home/ada")])?;
//! assert_eq!(overrides.conv_for(ModelFamily::WanVae), ConvPolicy::Im2col);
//! assert_eq!(overrides.attention_for(ModelFamily::WanVae), AttentionPolicy::FusedAuto);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod backend;
mod cancel;
mod enter;
mod error;
mod identity;
mod observer;
mod overrides;

pub use backend::{AttentionPolicy, ConvPolicy, ModelFamily};
pub use cancel::{CancelToken, Cancellable};
pub use enter::{Backends, BackendsGuard, PolicyGuard};
pub use error::{Error, Result};
pub use identity::ExecutionIdentity;
pub use observer::{Cancelled, Event, Observer, Silent};
pub use overrides::{ATTENTION_VARIABLE, CONV_VARIABLE, Overrides, overrides_from};
