//! Checks of a model folder that cost nothing: classes, configs, widths that must fit each other.

use serde::Deserialize;
use weights::ModelFolder;

use crate::{
    config::{Qwen3Config, TransformerConfig, VaeConfig},
    error::{Error, Result},
    generation::{GenerationDefaults, ModelIndex, ModelKind},
    sizes::check_side,
    text_encoder::check_out_layers,
};

/// Everything that the small files of a folder say.
#[derive(Debug, Clone)]
pub(super) struct Description {
    pub(super) kind: ModelKind,
    pub(super) defaults: GenerationDefaults,
    pub(super) text_encoder: Qwen3Config,
    pub(super) transformer: TransformerConfig,
    pub(super) vae: VaeConfig,
}

impl Description {
    /// Reads and checks the small files.
    pub(super) fn load(folder: &ModelFolder) -> Result<Self> {
        let kind = ModelIndex::load(folder)?;
        let description = Self {
            kind,
            defaults: GenerationDefaults::load(folder, kind)?,
            text_encoder: folder.json("text_encoder/config.json")?,
            transformer: folder.json("transformer/config.json")?,
            vae: folder.json("vae/config.json")?,
        };
        description.validate()?;
        const SCHEDULER: &str = "scheduler/scheduler_config.json";
        if folder.contains(SCHEDULER) {
            folder.json::<SchedulerConfig>(SCHEDULER)?.validate()?;
        }
        Ok(description)
    }

    /// Each config by itself, then the widths between them.
    pub(super) fn validate(&self) -> Result<()> {
        self.transformer.validate()?;
        self.text_encoder.validate()?;
        self.vae.validate()?;
        check_out_layers(&self.text_encoder, &self.defaults.text_encoder_out_layers)?;
        let (hidden_size, taps) = (self.text_encoder.hidden_size, self.defaults.text_encoder_out_layers.len());
        let joint_attention_dim = self.transformer.joint_attention_dim;
        if hidden_size * taps != joint_attention_dim {
            let hint = encoder_hint(joint_attention_dim, taps);
            return Err(Error::EncoderMismatch { hidden_size, taps, joint_attention_dim, hint });
        }
        if self.vae.packed_channels() != self.transformer.in_channels {
            return Err(Error::VaeMismatch {
                latent_channels: self.vae.latent_channels,
                in_channels: self.transformer.in_channels,
            });
        }
        check_side("height", self.defaults.height, self.vae.packed_factor())?;
        check_side("width", self.defaults.width, self.vae.packed_factor())
    }
}

/// Which encoder would fit, as the end of a message.
fn encoder_hint(joint_attention_dim: usize, taps: usize) -> String {
    if taps == 0 || !joint_attention_dim.is_multiple_of(taps) {
        return String::new();
    }
    let hidden_size = joint_attention_dim / taps;
    let name = match hidden_size {
        2560 => " (Qwen3-4B)",
        4096 => " (Qwen3-8B)",
        _ => "",
    };
    format!(": use the text encoder with hidden size {hidden_size}{name}")
}

/// `scheduler/scheduler_config.json`, as far as it can ask for something else than the FLUX.2 schedule.
#[derive(Debug, Clone, Deserialize)]
struct SchedulerConfig {
    #[serde(rename = "_class_name", default)]
    class_name: Option<String>,
    #[serde(default = "dynamic")]
    use_dynamic_shifting: bool,
    #[serde(default)]
    time_shift_type: Option<String>,
    #[serde(default)]
    shift_terminal: Option<f64>,
    #[serde(default)]
    invert_sigmas: bool,
    #[serde(default)]
    stochastic_sampling: bool,
    #[serde(default)]
    use_beta_sigmas: bool,
    #[serde(default)]
    use_exponential_sigmas: bool,
    #[serde(default)]
    use_karras_sigmas: bool,
}

fn dynamic() -> bool {
    true
}

impl SchedulerConfig {
    /// Refuses what would give another picture than the one schedule that is implemented.
    fn validate(&self) -> Result<()> {
        let class = self.class_name.as_deref().unwrap_or("FlowMatchEulerDiscreteScheduler");
        let shift = self.time_shift_type.as_deref().unwrap_or("exponential");
        let rules: [(&'static str, bool, String, &str); 9] = [
            (
                "_class_name",
                class == "FlowMatchEulerDiscreteScheduler",
                class.to_owned(),
                "FlowMatchEulerDiscreteScheduler",
            ),
            ("use_dynamic_shifting", self.use_dynamic_shifting, "false".to_owned(), "true"),
            ("time_shift_type", shift == "exponential", shift.to_owned(), "exponential"),
            ("shift_terminal", self.shift_terminal.is_none(), format!("{:?}", self.shift_terminal), "null"),
            ("invert_sigmas", !self.invert_sigmas, "true".to_owned(), "false"),
            ("stochastic_sampling", !self.stochastic_sampling, "true".to_owned(), "false"),
            ("use_beta_sigmas", !self.use_beta_sigmas, "true".to_owned(), "false"),
            ("use_exponential_sigmas", !self.use_exponential_sigmas, "true".to_owned(), "false"),
            ("use_karras_sigmas", !self.use_karras_sigmas, "true".to_owned(), "false"),
        ];
        match rules.into_iter().find(|rule| !rule.1) {
            None => Ok(()),
            Some((field, _, value, expected)) => {
                Err(Error::Config { component: "scheduler", field, value, expected: expected.to_owned() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheduler(json: &str) -> Result<()> {
        serde_json::from_str::<SchedulerConfig>(json).expect("json").validate()
    }

    #[test]
    fn only_the_flux2_schedule_passes() {
        scheduler("{}").expect("defaults");
        scheduler(r#"{"_class_name":"FlowMatchEulerDiscreteScheduler","use_dynamic_shifting":true,"shift":3.0}"#)
            .expect("published");
        for json in [
            r#"{"_class_name":"DDIMScheduler"}"#,
            r#"{"use_dynamic_shifting":false}"#,
            r#"{"time_shift_type":"linear"}"#,
            r#"{"shift_terminal":0.1}"#,
            r#"{"invert_sigmas":true}"#,
            r#"{"stochastic_sampling":true}"#,
            r#"{"use_beta_sigmas":true}"#,
            r#"{"use_exponential_sigmas":true}"#,
            r#"{"use_karras_sigmas":true}"#,
        ] {
            assert!(matches!(scheduler(json), Err(Error::Config { component: "scheduler", .. })), "{json}");
        }
    }

    #[test]
    fn the_hint_names_the_encoder() {
        assert_eq!(encoder_hint(12288, 3), ": use the text encoder with hidden size 4096 (Qwen3-8B)");
        assert_eq!(encoder_hint(7680, 3), ": use the text encoder with hidden size 2560 (Qwen3-4B)");
        assert_eq!(encoder_hint(96, 3), ": use the text encoder with hidden size 32");
        assert_eq!(encoder_hint(97, 3), "");
    }
}
