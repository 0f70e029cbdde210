//! Configuration of the text encoder.

use serde::Deserialize;

use super::{check_counts, check_positive, invalid};
use crate::error::{Error, Result};

/// `text_encoder/config.json` (`Qwen3Model` or `Qwen3ForCausalLM`).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Qwen3Config {
    /// Family; `qwen3`.
    #[serde(default)]
    pub model_type: Option<String>,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside of the MLPs.
    pub intermediate_size: usize,
    /// Number of layers in the checkpoint.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Channels of one head; not derived from the hidden size.
    pub head_dim: usize,
    /// Activation of the MLPs.
    #[serde(default = "super::silu")]
    pub hidden_act: String,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies (transformers 4).
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Rotary parameters (transformers 5).
    #[serde(default)]
    pub rope_parameters: Option<RopeParameters>,
    /// Scaling of the rotary positions (transformers 4); not supported.
    #[serde(default)]
    pub rope_scaling: Option<serde_json::Value>,
    /// Whether the projections have biases; not supported.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether attention is limited to a window; not supported.
    #[serde(default)]
    pub use_sliding_window: bool,
    /// Id of the padding token, where the tokenizer does not say.
    #[serde(default)]
    pub pad_token_id: Option<u32>,
}

/// Rotary parameters as transformers 5 writes them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct RopeParameters {
    /// Base of the rotary frequencies.
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// Kind of scaling; `default` means none.
    #[serde(default)]
    pub rope_type: Option<String>,
}

impl Qwen3Config {
    const COMPONENT: &'static str = "text encoder";

    /// Base of the rotary frequencies, from either place.
    ///
    /// # Errors
    /// [`Error::Config`] if neither is there.
    pub fn rope_theta(&self) -> Result<f64> {
        match self.rope_parameters.as_ref().and_then(|p| p.rope_theta).or(self.rope_theta) {
            Some(theta) => Ok(theta),
            None => Err(Error::Config {
                component: Self::COMPONENT,
                field: "rope_theta",
                value: "missing".to_owned(),
                expected: "rope_theta or rope_parameters.rope_theta".to_owned(),
            }),
        }
    }

    /// Checks that the values describe a model of this architecture.
    ///
    /// # Errors
    /// [`Error::Config`] names the first key that does not.
    pub fn validate(&self) -> Result<()> {
        let c = Self::COMPONENT;
        if let Some(kind) = &self.model_type
            && kind != "qwen3"
        {
            return invalid(c, "model_type", kind, "qwen3");
        }
        check_counts(c, 1 << 24, &[("vocab_size", self.vocab_size)])?;
        check_counts(
            c,
            1 << 17,
            &[
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_attention_heads", self.num_attention_heads),
                ("num_key_value_heads", self.num_key_value_heads),
                ("head_dim", self.head_dim),
            ],
        )?;
        check_counts(c, 1024, &[("num_hidden_layers", self.num_hidden_layers)])?;
        if self.num_attention_heads.saturating_mul(self.head_dim) > 1 << 17 {
            return invalid(c, "num_attention_heads", self.num_attention_heads, "at most 131072 query channels");
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads ({})", self.num_attention_heads);
            return invalid(c, "num_key_value_heads", self.num_key_value_heads, expected);
        }
        if !self.head_dim.is_multiple_of(2) {
            return invalid(c, "head_dim", self.head_dim, "an even number");
        }
        if self.hidden_act != "silu" {
            return invalid(c, "hidden_act", &self.hidden_act, "silu");
        }
        if self.attention_bias {
            return invalid(c, "attention_bias", true, "false");
        }
        if self.use_sliding_window {
            return invalid(c, "use_sliding_window", true, "false");
        }
        let scaling = self.rope_parameters.as_ref().and_then(|p| p.rope_type.as_deref());
        if let Some(kind) = scaling
            && kind != "default"
        {
            return invalid(c, "rope_parameters.rope_type", kind, "default");
        }
        if let Some(scaling) = &self.rope_scaling {
            return invalid(c, "rope_scaling", scaling, "null");
        }
        check_positive(c, "rms_norm_eps", self.rms_norm_eps)?;
        check_positive(c, "rope_theta", self.rope_theta()?)
    }
}
