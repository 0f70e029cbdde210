//! Models of the Hugging Face hub, in the cache that Python programs share.
//!
//! A model is named `owner/name`, or `owner/name@revision`. [`fetch`] gives the folder of its files: with feature
//! `download` it asks the hub and gets what the cache lacks, without it, or offline, it only looks into the cache.
//!
//! ```
//! use hub::{RepoId, Settings, Want, fetch};
//!
//! # fn main() -> Result<(), hub::Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let variable = |name: &str| (name == "HF_HOME").then(|| folder.path().as_os_str().to_owned());
//! // In a program: `Settings::from_variables(|name| std::env::var_os(name))?`.
//! let settings = Settings { offline: true, ..Settings::from_variables(variable)? };
//! let repo = RepoId::parse("black-forest-labs/FLUX.2-klein-4B")?;
//! let missing = fetch(&repo, Want::Model { without: &[] }, &settings, &policy::Silent);
//! assert!(missing.unwrap_err().to_string().contains("FLUX.2-klein-4B"));
//! # Ok(())
//! # }
//! ```
//!
//! The layout of the cache is huggingface_hub's: `models--OWNER--NAME/{blobs,refs,snapshots}`, so a model that Python has
//! downloaded is not downloaded again, nor the other way round (huggingface/huggingface_hub:
//! `docs/source/en/guides/manage-cache.md`). The environment is read by nobody but [`Settings::from_variables`].

#![forbid(unsafe_code)]

pub mod cache;
pub mod digest;
#[cfg(feature = "download")]
mod download;
pub mod error;
mod fetch;
pub mod repo;
pub mod select;
pub mod settings;

pub use cache::{Cache, Snapshot};
pub use digest::Digest;
pub use error::{Error, Result};
pub use fetch::{Fetched, Want, fetch};
pub use repo::RepoId;
pub use settings::{Settings, Token};
