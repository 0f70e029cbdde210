//! Model families and the backends that each may use.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A family of models that share one policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModelFamily {
    /// FLUX.2: stills.
    Flux2,
    /// The Wan video VAEs: clips.
    WanVae,
    /// LTX-2: clips.
    Ltx,
}

impl ModelFamily {
    /// Every family.
    pub const ALL: &'static [ModelFamily] = &[ModelFamily::Flux2, ModelFamily::WanVae, ModelFamily::Ltx];

    /// Whether the family makes clips. The only place that divides the families: [`ConvPolicy::for_family`] and
    /// [`AttentionPolicy::for_family`] both ask it, so they cannot come to different answers.
    #[must_use]
    pub const fn is_video(self) -> bool {
        // No wildcard: a new family does not compile before somebody decides.
        match self {
            ModelFamily::Flux2 => false,
            ModelFamily::WanVae | ModelFamily::Ltx => true,
        }
    }
}

/// Which convolution backend a run may use.
///
/// `FromStr` reads the values of `MOLD_CONV`: `cudnn` ([`ConvPolicy::CudnnAuto`]) and `im2col`. The strict
/// [`ConvPolicy::CudnnRequired`] is for benches and parity tests and has no value there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum ConvPolicy {
    /// Our im2col; the bytes of a result do not depend on the libraries that are present.
    #[default]
    Im2col,
    /// cuDNN where it serves, im2col otherwise.
    CudnnAuto,
    /// cuDNN; a fallback is an error.
    CudnnRequired,
}

impl ConvPolicy {
    /// The policy of a family when nobody overrides it: [`ConvPolicy::CudnnAuto`] for video, [`ConvPolicy::Im2col`]
    /// for stills.
    #[must_use]
    pub const fn for_family(family: ModelFamily) -> Self {
        if family.is_video() { ConvPolicy::CudnnAuto } else { ConvPolicy::Im2col }
    }
}

impl fmt::Display for ConvPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ConvPolicy::Im2col => "im2col",
            ConvPolicy::CudnnAuto => "cudnn",
            ConvPolicy::CudnnRequired => "cudnn (required)",
        })
    }
}

impl FromStr for ConvPolicy {
    type Err = Error;

    fn from_str(value: &str) -> Result<Self, Error> {
        match value {
            "cudnn" => Ok(ConvPolicy::CudnnAuto),
            "im2col" => Ok(ConvPolicy::Im2col),
            _ => Err(Error::UnknownConv { value: value.to_owned() }),
        }
    }
}

/// Which attention backend a run may use.
///
/// `FromStr` reads the values of `MOLD_ATTENTION`: `fused` ([`AttentionPolicy::FusedAuto`]) and `math`. The strict
/// [`AttentionPolicy::FusedRequired`] is for benches and parity tests and has no value there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum AttentionPolicy {
    /// Our tiled product-softmax-product.
    #[default]
    Math,
    /// A fused kernel where it serves, the math path otherwise.
    FusedAuto,
    /// A fused kernel; a fallback is an error.
    FusedRequired,
}

impl AttentionPolicy {
    /// The policy of a family when nobody overrides it: [`AttentionPolicy::FusedAuto`] for video,
    /// [`AttentionPolicy::Math`] for stills.
    #[must_use]
    pub const fn for_family(family: ModelFamily) -> Self {
        if family.is_video() { AttentionPolicy::FusedAuto } else { AttentionPolicy::Math }
    }
}

impl fmt::Display for AttentionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AttentionPolicy::Math => "math",
            AttentionPolicy::FusedAuto => "fused",
            AttentionPolicy::FusedRequired => "fused (required)",
        })
    }
}

impl FromStr for AttentionPolicy {
    type Err = Error;

    fn from_str(value: &str) -> Result<Self, Error> {
        match value {
            "fused" => Ok(AttentionPolicy::FusedAuto),
            "math" => Ok(AttentionPolicy::Math),
            _ => Err(Error::UnknownAttention { value: value.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_policies_divide_the_families_alike() {
        for &family in ModelFamily::ALL {
            let fast_conv = ConvPolicy::for_family(family) != ConvPolicy::default();
            let fast_attention = AttentionPolicy::for_family(family) != AttentionPolicy::default();
            assert_eq!(fast_conv, fast_attention, "{family:?}");
            assert_eq!(fast_conv, family.is_video(), "{family:?}");
        }
    }

    #[test]
    fn stills_keep_the_reproducible_backends_and_clips_take_the_fast_ones() {
        assert_eq!(ConvPolicy::for_family(ModelFamily::Flux2), ConvPolicy::Im2col);
        assert_eq!(AttentionPolicy::for_family(ModelFamily::Flux2), AttentionPolicy::Math);
        for family in [ModelFamily::WanVae, ModelFamily::Ltx] {
            assert_eq!(ConvPolicy::for_family(family), ConvPolicy::CudnnAuto);
            assert_eq!(AttentionPolicy::for_family(family), AttentionPolicy::FusedAuto);
        }
    }

    #[test]
    fn all_lists_each_family_once() {
        let distinct: std::collections::HashSet<_> = ModelFamily::ALL.iter().collect();
        assert_eq!(distinct.len(), ModelFamily::ALL.len());
        // A family that is missing from ALL fails to compile here first, then to count.
        let known = |family| match family {
            ModelFamily::Flux2 | ModelFamily::WanVae | ModelFamily::Ltx => 3,
        };
        assert_eq!(ModelFamily::ALL.len(), known(ModelFamily::Flux2));
    }

    #[test]
    fn legal_values_come_back_as_they_are_printed() {
        for name in ["cudnn", "im2col"] {
            assert_eq!(name.parse::<ConvPolicy>().map(|p| p.to_string()), Ok(name.to_owned()));
        }
        for name in ["fused", "math"] {
            assert_eq!(name.parse::<AttentionPolicy>().map(|p| p.to_string()), Ok(name.to_owned()));
        }
    }

    #[test]
    fn a_typo_is_an_error_that_names_the_legal_values() {
        for typo in ["cuDNN", "cudnn ", "", "1", "im2col,cudnn", "cudnn (required)"] {
            let message = typo.parse::<ConvPolicy>().map_err(|e| e.to_string());
            let expected = format!("unknown convolution backend `{typo}`, expected one of: cudnn, im2col");
            assert_eq!(message, Err(expected));
        }
        for typo in ["flash", "Math", "", "fused (required)"] {
            let message = typo.parse::<AttentionPolicy>().map_err(|e| e.to_string());
            assert_eq!(message, Err(format!("unknown attention backend `{typo}`, expected one of: fused, math")));
        }
    }
}
