//! The variables that override a family's policy.

use std::ffi::OsStr;
use std::str::FromStr;

use crate::{AttentionPolicy, ConvPolicy, Error, ModelFamily, Result};

/// Overrides the convolution policy: `cudnn` or `im2col`.
pub const CONV_VARIABLE: &str = "MOLD_CONV";
/// Overrides the attention policy: `fused` or `math`.
pub const ATTENTION_VARIABLE: &str = "MOLD_ATTENTION";

/// What a user asked for instead of the families' own policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Overrides {
    /// Convolution policy for every family, if given.
    pub conv: Option<ConvPolicy>,
    /// Attention policy for every family, if given.
    pub attention: Option<AttentionPolicy>,
}

impl Overrides {
    /// The convolution policy of a run of `family`: the override, or else [`ConvPolicy::for_family`].
    #[must_use]
    pub fn conv_for(&self, family: ModelFamily) -> ConvPolicy {
        self.conv.unwrap_or(ConvPolicy::for_family(family))
    }

    /// The attention policy of a run of `family`: the override, or else [`AttentionPolicy::for_family`].
    #[must_use]
    pub fn attention_for(&self, family: ModelFamily) -> AttentionPolicy {
        self.attention.unwrap_or(AttentionPolicy::for_family(family))
    }
}

/// Reads [`CONV_VARIABLE`] and [`ATTENTION_VARIABLE`] from `vars`, for example from [`std::env::vars_os`]. Other
/// variables are passed over. A variable with an empty value counts as not set, as a shell's `MOLD_CONV= command`
/// means it; of a variable that comes twice the last value counts.
///
/// # Errors
/// [`Error::Variable`] with the variable, its value and the legal values, if a value is not known.
pub fn overrides_from<K, V>(vars: impl IntoIterator<Item = (K, V)>) -> Result<Overrides>
where
    K: AsRef<OsStr>,
    V: AsRef<OsStr>,
{
    let mut overrides = Overrides::default();
    for (name, value) in vars {
        let (name, value) = (name.as_ref(), value.as_ref());
        if name == CONV_VARIABLE {
            overrides.conv = parse(CONV_VARIABLE, value)?;
        } else if name == ATTENTION_VARIABLE {
            overrides.attention = parse(ATTENTION_VARIABLE, value)?;
        }
    }
    Ok(overrides)
}

fn parse<P: FromStr<Err = Error>>(variable: &'static str, value: &OsStr) -> Result<Option<P>> {
    if value.is_empty() {
        return Ok(None);
    }
    // Bytes that are not Unicode match no legal value; the replacement marks show them in the message.
    let value = value.to_string_lossy();
    value.parse().map(Some).map_err(|reason| Error::Variable { variable, reason: Box::new(reason) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_variables_each_family_keeps_its_policy() {
        let none: [(&str, &str); 2] = [("HOME", "/"), ("MOLD_LOG", "cudnn")];
        let overrides = overrides_from(none).unwrap();
        assert_eq!(overrides, Overrides::default());
        for &family in ModelFamily::ALL {
            assert_eq!(overrides.conv_for(family), ConvPolicy::for_family(family));
            assert_eq!(overrides.attention_for(family), AttentionPolicy::for_family(family));
        }
    }

    #[test]
    fn an_override_counts_for_every_family_in_both_directions() {
        for (conv, attention) in [("im2col", "math"), ("cudnn", "fused")] {
            let overrides = overrides_from([(CONV_VARIABLE, conv), (ATTENTION_VARIABLE, attention)]).unwrap();
            for &family in ModelFamily::ALL {
                assert_eq!(overrides.conv_for(family).to_string(), conv);
                assert_eq!(overrides.attention_for(family).to_string(), attention);
            }
        }
    }

    #[test]
    fn one_variable_leaves_the_other_policy_alone() {
        let overrides = overrides_from([(CONV_VARIABLE, "im2col")]).unwrap();
        assert_eq!(overrides.conv_for(ModelFamily::Ltx), ConvPolicy::Im2col);
        assert_eq!(overrides.attention_for(ModelFamily::Ltx), AttentionPolicy::FusedAuto);
        let overrides = overrides_from([(ATTENTION_VARIABLE, "fused")]).unwrap();
        assert_eq!(overrides.conv_for(ModelFamily::Flux2), ConvPolicy::Im2col);
        assert_eq!(overrides.attention_for(ModelFamily::Flux2), AttentionPolicy::FusedAuto);
    }

    #[test]
    fn an_empty_value_is_not_set_and_the_last_value_counts() {
        assert_eq!(overrides_from([(CONV_VARIABLE, "")]), Ok(Overrides::default()));
        let twice = [(CONV_VARIABLE, "cudnn"), (CONV_VARIABLE, "im2col")];
        assert_eq!(overrides_from(twice).unwrap().conv, Some(ConvPolicy::Im2col));
    }

    #[test]
    fn an_unknown_value_names_the_variable_and_the_legal_values() {
        let error = overrides_from([(CONV_VARIABLE, "cudnnn")]).unwrap_err();
        let expected = "MOLD_CONV: unknown convolution backend `cudnnn`, expected one of: cudnn, im2col";
        assert_eq!(error.to_string(), expected);
        let error = overrides_from([(ATTENTION_VARIABLE, "flash")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "MOLD_ATTENTION: unknown attention backend `flash`, expected one of: fused, math"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_unicode_is_an_error_and_no_panic() {
        use std::os::unix::ffi::OsStrExt;
        let value = OsStr::from_bytes(b"cudnn\xff");
        assert!(overrides_from([(CONV_VARIABLE, value)]).unwrap_err().to_string().starts_with("MOLD_CONV: unknown"));
        // Elsewhere in the environment such bytes are nobody's business.
        assert_eq!(overrides_from([(value, value)]), Ok(Overrides::default()));
    }
}
