//! What a pipeline does when the caller does not say: steps, guidance, size, text length, encoder taps.
//!
//! The published pipelines hold these values in code. Here they depend on the kind of model, and a file
//! `generation.json` beside the model overrides each of them.

use serde::Deserialize;
use weights::ModelFolder;

use crate::{
    error::{Error, Result},
    sizes::{MAX_SIDE, check_guidance, check_side, check_steps},
};

/// Longest text that a model may ask for, in tokens.
const MAX_TEXT: usize = 4096;

/// How a model was trained to be sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelKind {
    /// Few steps, no guidance.
    Distilled,
    /// Many steps with classifier-free guidance.
    Base,
}

/// The file `model_index.json`, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct ModelIndex {
    /// Class of the pipeline.
    #[serde(rename = "_class_name")]
    pub(crate) class_name: String,
    /// Whether the model is step-distilled; not written by the key-value pipeline.
    #[serde(default)]
    is_distilled: Option<bool>,
}

impl ModelIndex {
    /// Reads the index of `folder` and decides the kind of model.
    pub(crate) fn load(folder: &ModelFolder) -> Result<ModelKind> {
        folder.check()?;
        folder.json::<Self>("model_index.json")?.kind(&folder.describe())
    }

    /// The kind of model, or why it cannot be run.
    fn kind(&self, folder: &str) -> Result<ModelKind> {
        match self.class_name.as_str() {
            "Flux2KleinPipeline" | "Flux2KleinInpaintPipeline" => {
                Ok(if self.is_distilled == Some(true) { ModelKind::Distilled } else { ModelKind::Base })
            }
            // Without reference pictures the key-value variant is an ordinary distilled model.
            "Flux2KleinKVPipeline" => Ok(ModelKind::Distilled),
            "Flux2Pipeline" => Err(Error::UnsupportedModel {
                folder: folder.to_owned(),
                what: "Flux2Pipeline (FLUX.2 dev with its Mistral text encoder)".to_owned(),
            }),
            class => Err(Error::NotThisModel {
                folder: folder.to_owned(),
                found: format!("it holds a {class}"),
                expected: "a Flux2KleinPipeline",
            }),
        }
    }
}

/// The values that a run takes where its options leave them open.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Hidden states of the text encoder that make the prompt embeddings: k is the residual stream after k layers.
    pub text_encoder_out_layers: Vec<usize>,
    /// Length of the text in tokens, padding included.
    pub max_sequence_length: usize,
    /// Number of steps.
    pub num_inference_steps: usize,
    /// Guidance scale; at most 1 means none.
    pub guidance_scale: f64,
    /// Height of the picture in pixels.
    pub height: usize,
    /// Width of the picture in pixels.
    pub width: usize,
}

/// `generation.json`: every key is optional, an unknown one is an error (it would be an ignored wish).
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct GenerationFile {
    text_encoder_out_layers: Option<Vec<usize>>,
    max_sequence_length: Option<usize>,
    num_inference_steps: Option<usize>,
    guidance_scale: Option<f64>,
    height: Option<usize>,
    width: Option<usize>,
}

impl GenerationDefaults {
    /// The published values for `kind`: taps 9, 18 and 27, 512 tokens, 1024x1024; distilled models take 4 steps without
    /// guidance, base models 50 steps with guidance 4.
    pub fn of(kind: ModelKind) -> Self {
        let (num_inference_steps, guidance_scale) = match kind {
            ModelKind::Distilled => (4, 1.0),
            ModelKind::Base => (50, 4.0),
        };
        Self {
            text_encoder_out_layers: vec![9, 18, 27],
            max_sequence_length: 512,
            num_inference_steps,
            guidance_scale,
            height: 1024,
            width: 1024,
        }
    }

    /// [`Self::of`] with the values of the folder's `generation.json`, if it is there.
    ///
    /// # Errors
    /// [`Error::Weights`] if the file cannot be parsed, [`Error::Config`] if a value is not usable.
    pub fn load(folder: &ModelFolder, kind: ModelKind) -> Result<Self> {
        const FILE: &str = "generation.json";
        let file: GenerationFile = if folder.contains(FILE) { folder.json(FILE)? } else { GenerationFile::default() };
        let defaults = Self::of(kind).with(file);
        defaults.validate()?;
        Ok(defaults)
    }

    /// Takes what the file says.
    fn with(self, file: GenerationFile) -> Self {
        Self {
            text_encoder_out_layers: file.text_encoder_out_layers.unwrap_or(self.text_encoder_out_layers),
            max_sequence_length: file.max_sequence_length.unwrap_or(self.max_sequence_length),
            num_inference_steps: file.num_inference_steps.unwrap_or(self.num_inference_steps),
            guidance_scale: file.guidance_scale.unwrap_or(self.guidance_scale),
            height: file.height.unwrap_or(self.height),
            width: file.width.unwrap_or(self.width),
        }
    }

    /// Checks the values that do not depend on the models (a multiple of 1 is any size here).
    fn validate(&self) -> Result<()> {
        let config = |field, value: String, expected: String| Error::Config {
            component: "generation.json",
            field,
            value,
            expected,
        };
        if self.text_encoder_out_layers.is_empty() || self.text_encoder_out_layers.len() > 16 {
            let value = format!("{:?}", self.text_encoder_out_layers);
            return Err(config("text_encoder_out_layers", value, "1 to 16 layers".to_owned()));
        }
        if !(1..=MAX_TEXT).contains(&self.max_sequence_length) {
            return Err(config(
                "max_sequence_length",
                self.max_sequence_length.to_string(),
                format!("1 to {MAX_TEXT}"),
            ));
        }
        check_steps(self.num_inference_steps)?;
        check_guidance(self.guidance_scale)?;
        for (field, side) in [("height", self.height), ("width", self.width)] {
            check_side(field, side, 1).map_err(|_| config(field, side.to_string(), format!("at most {MAX_SIDE}")))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(json: &str) -> Result<ModelKind> {
        serde_json::from_str::<ModelIndex>(json).expect("json").kind("folder")
    }

    #[test]
    fn the_kind_comes_from_the_index() {
        let kind = |json| index(json).expect("a klein model");
        assert_eq!(kind(r#"{"_class_name":"Flux2KleinPipeline","is_distilled":true}"#), ModelKind::Distilled);
        assert_eq!(kind(r#"{"_class_name":"Flux2KleinPipeline","is_distilled":false}"#), ModelKind::Base);
        assert_eq!(kind(r#"{"_class_name":"Flux2KleinPipeline"}"#), ModelKind::Base);
        assert_eq!(kind(r#"{"_class_name":"Flux2KleinKVPipeline"}"#), ModelKind::Distilled);
    }

    #[test]
    fn another_pipeline_is_named() {
        let error = index(r#"{"_class_name":"StableDiffusionPipeline"}"#).expect_err("not FLUX.2");
        assert_eq!(
            error.to_string(),
            "folder: not a FLUX.2 model folder: it holds a StableDiffusionPipeline, expected a Flux2KleinPipeline"
        );
        assert!(matches!(index(r#"{"_class_name":"Flux2Pipeline"}"#), Err(Error::UnsupportedModel { .. })));
    }

    #[test]
    fn a_file_overrides_single_values() {
        let file = serde_json::from_str(r#"{"height": 128, "text_encoder_out_layers": [2, 4, 6]}"#).expect("json");
        let defaults = GenerationDefaults::of(ModelKind::Base).with(file);
        assert_eq!(defaults.text_encoder_out_layers, [2, 4, 6]);
        assert_eq!((defaults.height, defaults.width, defaults.num_inference_steps), (128, 1024, 50));
        assert_eq!(defaults.guidance_scale, 4.0);
        defaults.validate().expect("valid");
    }

    #[test]
    fn bad_values_and_unknown_keys_are_errors() {
        assert!(serde_json::from_str::<GenerationFile>(r#"{"num_inference_step": 4}"#).is_err());
        for json in [
            r#"{"text_encoder_out_layers": []}"#,
            r#"{"max_sequence_length": 0}"#,
            r#"{"num_inference_steps": 0}"#,
            r#"{"guidance_scale": -1.0}"#,
            r#"{"height": 8}"#,
            r#"{"width": 100000}"#,
        ] {
            let file = serde_json::from_str(json).expect("json");
            assert!(GenerationDefaults::of(ModelKind::Distilled).with(file).validate().is_err(), "{json}");
        }
    }
}
