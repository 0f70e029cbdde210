//! The published configuration files, parsed unchanged.
//!
//! Keys that a file does not need here are ignored. Keys that older published files lack take the value that the
//! constructor of the reference implementation (diffusers, transformers) gives them; widths and counts have no default.

mod qwen3;
#[cfg(test)]
mod tests;
mod transformer;
mod vae;

use crate::error::{Error, Result};

pub use self::{
    qwen3::{Qwen3Config, RopeParameters},
    transformer::TransformerConfig,
    vae::VaeConfig,
};

/// A violated rule.
fn invalid<T>(
    component: &'static str,
    field: &'static str,
    value: impl std::fmt::Debug,
    expected: impl Into<String>,
) -> Result<T> {
    Err(Error::Config { component, field, value: format!("{value:?}"), expected: expected.into() })
}

/// Fails unless every `(field, value)` lies in `1..=max`; bounds what a damaged file can make us allocate.
fn check_counts(component: &'static str, max: usize, fields: &[(&'static str, usize)]) -> Result<()> {
    for &(field, value) in fields {
        if value == 0 || value > max {
            return invalid(component, field, value, format!("1 to {max}"));
        }
    }
    Ok(())
}

/// Fails unless a floating-point value is finite and positive.
fn check_positive(component: &'static str, field: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value > 0.0 { Ok(()) } else { invalid(component, field, value, "a positive number") }
}

/// Default of switches that the reference turns on.
fn yes() -> bool {
    true
}

/// Default activation.
fn silu() -> String {
    "silu".to_owned()
}
