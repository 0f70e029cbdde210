//! The demonstration model inside the program: a trained miniature of FLUX.2 that draws coloured shapes.

use weights::ModelFolder;

/// Name of the model in messages and metadata.
pub(crate) const NAME: &str = "flux2-demo";
/// What the model can do, in one sentence.
pub(crate) const KNOWS: &str = "it knows only coloured shapes, such as \"a red circle on a blue background\" or \"a small green square above a \
     yellow triangle on a white background\"";

/// Bytes at an address that suits every element type, so that tensors can be used where they lie.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

macro_rules! model_files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, {
            const FILE: &Aligned<[u8]> =
                &Aligned(*include_bytes!(concat!("../../../tests/models/flux2-demo/", $path)));
            &FILE.0
        })),*]
    };
}

static FILES: &[(&str, &[u8])] = model_files![
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

/// The demonstration model.
pub(crate) fn model() -> ModelFolder {
    ModelFolder::Memory(NAME, FILES)
}

/// Bytes of the model's files.
pub(crate) fn size() -> usize {
    FILES.iter().map(|(_, bytes)| bytes.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_whole_and_aligned() {
        for (path, bytes) in FILES {
            assert!(!bytes.is_empty(), "{path}");
            assert_eq!(bytes.as_ptr().addr() % 64, 0, "{path}");
        }
        assert!(size() > 14_000_000);
    }
}
