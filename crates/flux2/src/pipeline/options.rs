//! What a run is asked for and what it gives back.

use candle_core::Tensor;
use sampling::NoiseGenerator;

use crate::{
    error::Result,
    generation::{GenerationDefaults, ModelKind},
    sizes::{check_guidance, check_side, check_steps},
};

/// One picture. Values left at `None` are the model's [`GenerationDefaults`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// What to draw; may be empty.
    pub prompt: String,
    /// Height in pixels.
    pub height: Option<usize>,
    /// Width in pixels.
    pub width: Option<usize>,
    /// Number of steps.
    pub num_inference_steps: Option<usize>,
    /// Guidance scale. Above 1 a base model runs twice per step, with the prompt and with an empty one; distilled models
    /// ignore it ([`Notice::GuidanceIgnored`]).
    pub guidance_scale: Option<f64>,
    /// Seed of the noise. Picture i of a batch is the picture of `seed + i`.
    pub seed: u64,
    /// Generator of the noise.
    pub noise: NoiseGenerator,
}

/// A finished picture.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Generated {
    /// Picture `[3, height, width]`, f32 in \[0, 1\], on the host.
    pub image: Tensor,
    /// Height in pixels.
    pub height: usize,
    /// Width in pixels.
    pub width: usize,
    /// Steps that were made.
    pub num_inference_steps: usize,
    /// Guidance scale that took effect; 1 for a distilled model.
    pub guidance_scale: f64,
    /// Seed of the noise.
    pub seed: u64,
    /// What the caller should tell its user.
    pub notices: Vec<Notice>,
}

/// A finished picture as bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GeneratedRgb8 {
    /// Red, green and blue of each pixel, row by row from the top: `[height, width, 3]`.
    pub pixels: Vec<u8>,
    /// Height in pixels.
    pub height: usize,
    /// Width in pixels.
    pub width: usize,
    /// Steps that were made.
    pub num_inference_steps: usize,
    /// Guidance scale that took effect; 1 for a distilled model.
    pub guidance_scale: f64,
    /// Seed of the noise.
    pub seed: u64,
    /// What the caller should tell its user.
    pub notices: Vec<Notice>,
}

/// Something that was not done as asked.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notice {
    /// The prompt with its template was longer than the model's text; the last `dropped` tokens were cut off.
    PromptTruncated {
        /// Tokens cut off.
        dropped: usize,
    },
    /// The model is distilled and has no guidance.
    GuidanceIgnored {
        /// Value asked for.
        requested: f64,
    },
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PromptTruncated { dropped } => {
                write!(f, "the prompt is too long for the model: its last {dropped} tokens were ignored")
            }
            Self::GuidanceIgnored { requested } => {
                write!(f, "guidance_scale {requested} was ignored: the model is distilled and runs without guidance")
            }
        }
    }
}

/// Options with every value decided and checked.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) num_inference_steps: usize,
    pub(super) guidance_scale: f64,
    pub(super) notices: Vec<Notice>,
}

impl Run {
    /// Fills in defaults and checks; `multiple` is the side of the square of pixels that one token stands for.
    pub(super) fn new(
        options: &GenerateOptions,
        defaults: &GenerationDefaults,
        kind: ModelKind,
        multiple: usize,
    ) -> Result<Self> {
        let height = options.height.unwrap_or(defaults.height);
        let width = options.width.unwrap_or(defaults.width);
        let num_inference_steps = options.num_inference_steps.unwrap_or(defaults.num_inference_steps);
        let mut guidance_scale = options.guidance_scale.unwrap_or(defaults.guidance_scale);
        check_side("height", height, multiple)?;
        check_side("width", width, multiple)?;
        check_steps(num_inference_steps)?;
        check_guidance(guidance_scale)?;
        let mut notices = Vec::new();
        if kind == ModelKind::Distilled && guidance_scale != 1.0 {
            notices.push(Notice::GuidanceIgnored { requested: guidance_scale });
            guidance_scale = 1.0;
        }
        Ok(Self { height, width, num_inference_steps, guidance_scale, notices })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn run(options: &GenerateOptions, kind: ModelKind) -> Result<Run> {
        Run::new(options, &GenerationDefaults::of(kind), kind, 16)
    }

    #[test]
    fn defaults_fill_the_gaps() {
        let options = GenerateOptions { width: Some(768), ..GenerateOptions::default() };
        let run = run(&options, ModelKind::Base).expect("legal");
        let expected =
            Run { height: 1024, width: 768, num_inference_steps: 50, guidance_scale: 4.0, notices: Vec::new() };
        assert_eq!(run, expected);
    }

    #[test]
    fn a_distilled_model_ignores_guidance_and_says_so() {
        let options = GenerateOptions { guidance_scale: Some(4.0), ..GenerateOptions::default() };
        let distilled = run(&options, ModelKind::Distilled).expect("legal");
        assert_eq!(distilled.guidance_scale, 1.0);
        assert_eq!(distilled.notices, [Notice::GuidanceIgnored { requested: 4.0 }]);
        assert_eq!(run(&options, ModelKind::Base).expect("legal").notices, []);
        assert_eq!(run(&GenerateOptions::default(), ModelKind::Distilled).expect("legal").notices, []);
    }

    #[test]
    fn illegal_values_are_refused() {
        let base = GenerateOptions::default();
        for options in
            [GenerateOptions { height: Some(1000), ..base.clone() }, GenerateOptions { width: Some(0), ..base.clone() }]
        {
            assert!(matches!(run(&options, ModelKind::Base), Err(Error::Size { .. })), "{options:?}");
        }
        let options = GenerateOptions { num_inference_steps: Some(0), ..base.clone() };
        assert!(matches!(run(&options, ModelKind::Base), Err(Error::Steps { got: 0 })));
        let options = GenerateOptions { guidance_scale: Some(f64::NAN), ..base };
        assert!(matches!(run(&options, ModelKind::Distilled), Err(Error::Guidance { .. })));
    }
}
