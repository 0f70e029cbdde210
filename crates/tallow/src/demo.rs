//! The demonstration models inside the program: trained miniatures of FLUX.2, which draws coloured shapes, and of the Wan
//! 2.1 VAE, with a clip of latents.

use weights::ModelFolder;

/// Name of the FLUX.2 model in messages and metadata.
pub(crate) const NAME: &str = "flux2-demo";
/// What that model can do, in one sentence.
pub(crate) const KNOWS: &str = "it knows only coloured shapes, such as \"a red circle on a blue background\" or \"a small green square above a \
     yellow triangle on a white background\"";

/// Name of the VAE in messages and metadata.
pub(crate) const VAE_NAME: &str = "wan-vae-demo";
/// Name of the clip in messages.
pub(crate) const CLIP_NAME: &str = "wan-demo.latent";

/// Bytes at an address that suits every element type, so that tensors can be used where they lie.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

macro_rules! bytes {
    ($path:expr) => {{
        const FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../../../tests/models/", $path)));
        &FILE.0
    }};
}

macro_rules! model_files {
    ($folder:literal: $($path:literal),* $(,)?) => {
        &[$(($path, bytes!(concat!($folder, "/", $path)))),*]
    };
}

static FILES: &[(&str, &[u8])] = model_files![
    "flux2-demo":
    "generation.json",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/chat_template.jinja",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
];

static VAE_FILES: &[(&str, &[u8])] = model_files!["wan-vae-demo": "config.json", "diffusion_pytorch_model.safetensors"];

static CLIP: &[u8] = bytes!("wan-demo.latent");

/// The FLUX.2 model.
pub(crate) fn model() -> ModelFolder {
    ModelFolder::Memory(NAME, FILES)
}

/// Bytes of its files.
pub(crate) fn size() -> usize {
    sum(FILES)
}

/// The VAE.
pub(crate) fn vae() -> ModelFolder {
    ModelFolder::Memory(VAE_NAME, VAE_FILES)
}

/// Bytes of its files.
pub(crate) fn vae_size() -> usize {
    sum(VAE_FILES)
}

/// The clip: a file of latents that the VAE has encoded.
pub(crate) fn clip() -> &'static [u8] {
    CLIP
}

fn sum(files: &[(&str, &[u8])]) -> usize {
    files.iter().map(|(_, bytes)| bytes.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_whole_and_aligned() {
        for (path, bytes) in FILES.iter().chain(VAE_FILES).chain(&[(CLIP_NAME, CLIP)]) {
            assert!(!bytes.is_empty(), "{path}");
            assert_eq!(bytes.as_ptr().addr() % 64, 0, "{path}");
        }
        assert!(size() > 14_000_000 && vae_size() > 3_000_000);
    }
}
