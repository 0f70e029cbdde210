//! Which model a run uses.

use std::path::PathBuf;

use clap::Args;

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
