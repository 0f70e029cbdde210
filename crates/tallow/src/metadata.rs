//! What files say about their own making.

use std::fmt::Write;

use policy::ExecutionIdentity;
use sampling::NoiseGenerator;
use serde::Serialize;

/// Keyword of the text that other programs read.
const PARAMETERS_KEYWORD: &str = "parameters";
/// Keyword of our JSON.
const TALLOW_KEYWORD: &str = "tallow";

/// All that is needed to make the same picture again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Recipe<'a> {
    /// Version of this program.
    pub(crate) version: &'a str,
    /// Name of the model.
    pub(crate) model: &'a str,
    /// What was asked for.
    pub(crate) prompt: &'a str,
    /// Seed of this picture, not of the batch.
    pub(crate) seed: u64,
    /// Number of denoising steps.
    pub(crate) steps: usize,
    /// Guidance scale.
    pub(crate) guidance: f64,
    /// Width in pixels.
    pub(crate) width: usize,
    /// Height in pixels.
    pub(crate) height: usize,
    /// Name of the noise generator.
    pub(crate) rng: String,
    /// What computed it.
    pub(crate) execution: &'a ExecutionIdentity,
}

/// What is said of a picture or a video that was decoded from latents.
#[derive(Debug, Serialize)]
pub(crate) struct Decoded<'a> {
    /// Version of this program.
    pub(crate) version: &'a str,
    /// Name of the VAE.
    pub(crate) vae: &'a str,
    /// Seed of the decoder's noise, if it uses any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<u64>,
    /// Name of the generator of that noise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rng: Option<String>,
    /// What computed it.
    pub(crate) execution: &'a ExecutionIdentity,
}

impl<'a> Decoded<'a> {
    /// Of frames that this version has made with a VAE and noise.
    pub(crate) fn new(vae: &'a str, noise: Option<(u64, NoiseGenerator)>, execution: &'a ExecutionIdentity) -> Self {
        let (seed, rng) = noise.map(|(seed, generator)| (seed, generator.to_string())).unzip();
        Self { version: env!("CARGO_PKG_VERSION"), vae, seed, rng, execution }
    }

    /// The text.
    ///
    /// # Errors
    /// If the JSON cannot be made.
    pub(crate) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// Keyword and text for an iTXt chunk.
    ///
    /// # Errors
    /// If the JSON cannot be made.
    pub(crate) fn texts(&self) -> serde_json::Result<Vec<(String, String)>> {
        Ok(vec![(TALLOW_KEYWORD.to_owned(), self.json()?)])
    }
}

impl Recipe<'_> {
    /// Keywords and texts for iTXt chunks: the `parameters` text in the form that AUTOMATIC1111's web interface made
    /// common, and the recipe as JSON.
    ///
    /// # Errors
    /// If the JSON cannot be made.
    pub(crate) fn texts(&self) -> serde_json::Result<Vec<(String, String)>> {
        Ok(vec![
            (PARAMETERS_KEYWORD.to_owned(), self.parameters()),
            (TALLOW_KEYWORD.to_owned(), serde_json::to_string(self)?),
        ])
    }

    fn parameters(&self) -> String {
        let mut text = self.prompt.to_owned();
        let _ = write!(
            text,
            "\nSteps: {}, Sampler: Euler, CFG scale: {}, Seed: {}, Size: {}x{}, Model: {}, RNG: {}, Version: tallow {}",
            self.steps,
            self.guidance,
            self.seed,
            self.width,
            self.height,
            // Commas and line breaks separate fields.
            self.model.replace([',', '\n'], "_"),
            self.rng,
            self.version,
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use candle_core::{DType, Device};
    use candle_fork::cudnn_policy::Counters;

    use super::*;

    static EXECUTION: LazyLock<ExecutionIdentity> =
        LazyLock::new(|| ExecutionIdentity::executed(&Counters::default(), &Device::Cpu, DType::F32));

    fn recipe(prompt: &str) -> Recipe<'_> {
        Recipe {
            version: "0.1.0",
            model: "a,b",
            prompt,
            seed: u64::MAX,
            steps: 4,
            guidance: 1.0,
            width: 128,
            height: 64,
            rng: "philox".to_owned(),
            execution: &EXECUTION,
        }
    }

    #[test]
    fn parameters_text() {
        assert_eq!(
            recipe("a\nb").parameters(),
            "a\nb\nSteps: 4, Sampler: Euler, CFG scale: 1, Seed: 18446744073709551615, Size: 128x64, Model: a_b, \
             RNG: philox, Version: tallow 0.1.0"
        );
    }

    #[test]
    fn the_json_round_trips_every_prompt() {
        for prompt in ["", "日本語 🎨", "a\nb\0\"\\", &"x".repeat(100_000)] {
            let texts = recipe(prompt).texts().unwrap();
            let json: serde_json::Value = serde_json::from_str(&texts[1].1).unwrap();
            assert_eq!(json["prompt"], prompt);
            assert_eq!(json["seed"].as_u64(), Some(u64::MAX));
            assert!(texts[0].1.starts_with(prompt));
        }
    }
}
