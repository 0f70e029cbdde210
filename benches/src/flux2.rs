//! The published FLUX.2 klein models, for benches with random weights: their configurations, their work.

use anyhow::Result;
use flux2::{ModelFolder, Qwen3Config, TransformerConfig, VaeConfig};

/// Rows of text in every run.
pub const TEXT: usize = 512;

/// The hidden states of the text encoder that the published pipelines take.
pub const OUT_LAYERS: [usize; 3] = [9, 18, 27];

/// Operations of the text encoder: 27 layers of Qwen3-4B, keys and values of few real rows.
pub const TEXT_4B_FLOP: f64 = 2.654e12;

/// Operations of a VAE decode to 1024x1024.
pub const DECODE_1024_FLOP: f64 = 10.475e12;

macro_rules! published {
    ($path:literal) => {
        include_str!(concat!("../../tests/models/configs/", $path))
    };
}

macro_rules! demo {
    ($path:literal) => {
        ($path, include_bytes!(concat!("../../tests/models/flux2-demo/", $path)) as &[u8])
    };
}

/// Everything of klein 4B but its weights and its tokenizer, which is that of the demonstration model: its ids are few,
/// but a prompt becomes about as many of them, and the encoder does not mind which.
static KLEIN_4B: [(&str, &[u8]); 7] = [
    ("model_index.json", published!("klein-4b/model_index.json").as_bytes()),
    ("scheduler/scheduler_config.json", published!("klein-4b/scheduler/scheduler_config.json").as_bytes()),
    ("text_encoder/config.json", published!("klein-4b/text_encoder/config.json").as_bytes()),
    ("transformer/config.json", published!("klein-4b/transformer/config.json").as_bytes()),
    ("vae/config.json", published!("klein-4b/vae/config.json").as_bytes()),
    demo!("tokenizer/tokenizer.json"),
    demo!("tokenizer/tokenizer_config.json"),
];

/// A published model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Klein {
    /// 5 double and 20 single blocks of width 3072, Qwen3-4B.
    FourB,
    /// 8 double and 24 single blocks of width 4096, Qwen3-8B.
    NineB,
}

impl Klein {
    /// `config.json` of its transformer.
    pub fn transformer_json(self) -> &'static str {
        match self {
            Self::FourB => published!("klein-4b/transformer/config.json"),
            Self::NineB => published!("klein-9b/transformer/config.json"),
        }
    }

    /// Configuration of its transformer.
    ///
    /// # Errors
    /// None as the files stand.
    pub fn transformer(self) -> Result<TransformerConfig> {
        Ok(serde_json::from_str(self.transformer_json())?)
    }
}

/// `config.json` of the VAE, the same for all models.
pub const VAE_JSON: &str = published!("klein-4b/vae/config.json");

/// `config.json` of klein 4B's text encoder.
pub const TEXT_4B_JSON: &str = published!("klein-4b/text_encoder/config.json");

/// Configuration of the VAE.
///
/// # Errors
/// None as the file stands.
pub fn vae() -> Result<VaeConfig> {
    Ok(serde_json::from_str(VAE_JSON)?)
}

/// Configuration of klein 4B's text encoder.
///
/// # Errors
/// None as the file stands.
pub fn text_encoder() -> Result<Qwen3Config> {
    Ok(serde_json::from_str(TEXT_4B_JSON)?)
}

/// klein 4B without weights.
pub fn klein_4b() -> ModelFolder {
    ModelFolder::Memory("klein 4B", &KLEIN_4B)
}

/// Tokens of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens {
    /// Rows of text.
    pub text: usize,
    /// Tokens of the picture.
    pub image: usize,
    /// Tokens of reference pictures.
    pub references: usize,
}

impl Tokens {
    /// The whole sequence.
    pub fn all(self) -> usize {
        self.text + self.image + self.references
    }
}

/// Operations of a whole forward pass by definition, every row in every layer.
pub fn forward_flop(config: &TransformerConfig, tokens: Tokens) -> f64 {
    let h = (config.num_attention_heads * config.attention_head_dim) as f64;
    let blocks = (config.num_layers + config.num_single_layers) as f64;
    let (s, image) = (tokens.all() as f64, tokens.image as f64);
    let io = config.in_channels as f64;
    s * blocks * 26.0 * h * h
        + 4.0 * s * s * h * blocks
        + 2.0 * (image + tokens.references as f64) * io * h
        + text_in_flop(config, tokens)
        + 2.0 * image * io * h
}

/// Operations that a step needs: without those on the text alone, which no step changes, and without the rows of the last
/// block that nobody reads.
pub fn step_flop(config: &TransformerConfig, tokens: Tokens) -> f64 {
    let h = (config.num_attention_heads * config.attention_head_dim) as f64;
    let (s, unread) = (tokens.all() as f64, (tokens.all() - tokens.image) as f64);
    forward_flop(config, tokens) - text_in_flop(config, tokens) - unread * (22.0 * h * h + 4.0 * s * h)
}

fn text_in_flop(config: &TransformerConfig, tokens: Tokens) -> f64 {
    let h = config.num_attention_heads * config.attention_head_dim;
    2.0 * (tokens.text * config.joint_attention_dim * h) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(image: usize, references: usize) -> Tokens {
        Tokens { text: TEXT, image, references }
    }

    /// The published table, in 1e12.
    #[test]
    fn work_is_that_of_the_table() -> Result<()> {
        for (model, image, references, want) in [
            (Klein::FourB, 256, 0, 4.917),
            (Klein::FourB, 1024, 0, 10.173),
            (Klein::FourB, 4096, 0, 34.820),
            (Klein::FourB, 4096, 4096, 76.699),
            (Klein::NineB, 4096, 0, 75.514),
            (Klein::NineB, 4096, 4096, 161.280),
        ] {
            let got = forward_flop(&model.transformer()?, tokens(image, references)) / 1e12;
            assert!((got - want).abs() < 1e-3, "{model:?} {image} {references}: {got}");
        }
        Ok(())
    }

    #[test]
    fn a_step_saves_what_the_last_block_does_not_need() -> Result<()> {
        for (model, want) in [(Klein::FourB, 0.135), (Klein::NineB, 0.228)] {
            let config = model.transformer()?;
            let all = tokens(4096, 0);
            let saved = (forward_flop(&config, all) - text_in_flop(&config, all) - step_flop(&config, all)) / 1e12;
            assert!((saved - want).abs() < 1e-3, "{model:?}: {saved}");
        }
        Ok(())
    }
}
