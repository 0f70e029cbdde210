//! The VAEs of the Wan family.

pub(super) mod decode;
pub(super) mod encode;
mod vae;

use wan_vae::{ClipPlan, Error};

pub(super) use self::vae::Vae;
use super::count;

/// What the library reports, or what a caller's own part of the work did, without a frame around it.
fn failed(error: Error) -> anyhow::Error {
    match error {
        Error::Caller { source, .. } => anyhow::Error::from_boxed(source),
        other => other.into(),
    }
}

/// An error of the caller's part of the work, on its way through the library.
fn caller(what: &'static str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Caller { what, source: error.into() }
}

/// A plan in words.
fn plan(plan: ClipPlan) -> String {
    match plan {
        ClipPlan::Whole => "whole pictures".to_owned(),
        ClipPlan::Bands(bands) => count(bands, "band"),
        ClipPlan::Blended(_) => "blended tiles, which differ from the whole picture".to_owned(),
        other => format!("{other:?}"),
    }
}
