//! Which model a run uses, and how its quantised weights take part.

use std::path::PathBuf;

use candle_fork::QuantMode;
use clap::{Args, ValueEnum};
use flux2::QuantPolicy;

/// A model, and files that stand for some of its components.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// FLUX.2 model: a folder in the diffusers layout, or OWNER/NAME of the Hugging Face hub [default: the built-in
    /// demonstration model]
    ///
    /// OWNER/NAME@REVISION is a branch, tag or commit of it. The cache is the one of Python programs (HF_HOME,
    /// HF_HUB_CACHE); HF_HUB_OFFLINE=1 looks nowhere else; HF_TOKEN is for models that ask for it.
    #[arg(short, long, value_name = "DIR|OWNER/NAME")]
    pub(crate) model: Option<PathBuf>,

    /// Transformer instead of the model's
    ///
    /// A safetensors file with the names of diffusers, BFL or ComfyUI, an index of shards, or a GGUF file, plain or
    /// quantised; on disk, or in the hub as OWNER/NAME/PATH.
    #[arg(long, value_name = "FILE")]
    pub(crate) transformer: Option<PathBuf>,

    /// Text encoder instead of the model's
    #[arg(long, value_name = "FILE")]
    pub(crate) text_encoder: Option<PathBuf>,

    /// VAE instead of the model's
    #[arg(long = "vae", value_name = "FILE")]
    pub(crate) component_vae: Option<PathBuf>,
}

/// How quantised weights take part in products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantUse {
    /// Stored on the CPU, decoded on CUDA
    Auto,
    /// Widened once when they are loaded: the speed and the memory of plain weights
    Decoded,
    /// Kept as they are in the file, and widened for each product
    Stored,
    /// Signed bytes multiplied as bytes, with arguments quantised as well: less memory, faster on CUDA, about 1 % of noise
    Int8,
}

impl QuantUse {
    pub(crate) fn policy(self) -> QuantPolicy {
        match self {
            Self::Auto => QuantPolicy::Auto,
            Self::Decoded => QuantPolicy::Mode(QuantMode::DequantizeOnce),
            Self::Stored => QuantPolicy::Mode(QuantMode::DequantizePerLayer),
            Self::Int8 => QuantPolicy::Mode(QuantMode::W8A8),
        }
    }

    /// Name on the command line; none for the default.
    pub(crate) fn asked_for(self) -> Option<String> {
        let name = self.to_possible_value().filter(|_| self != Self::Auto)?;
        Some(name.get_name().to_owned())
    }
}
