//! What the tests of this crate share.

use std::{path::PathBuf, sync::Arc};

use candle_core::{DType, Device, Tensor};
use weights::{ModelFolder, Safetensors, TensorSource, write::TensorData};

/// A path below the test package.
pub(crate) fn path(relative: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(relative)
}

/// The demonstration model.
pub(crate) fn demo() -> ModelFolder {
    ModelFolder::Disk(path("models/flux2-demo"))
}

/// The demonstration model in memory with some files replaced; an empty replacement removes the file.
pub(crate) fn demo_with(changes: &[(&str, &[u8])]) -> ModelFolder {
    const FILES: [&str; 11] = [
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
    ];
    const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
    let files = FILES.iter().copied().chain([VAE]).filter_map(|name| {
        let bytes = match changes.iter().find(|(changed, _)| *changed == name) {
            Some((_, [])) => return None,
            Some((_, bytes)) => bytes.to_vec(),
            None => std::fs::read(path("models/flux2-demo").join(name)).expect("a file of the demonstration model"),
        };
        Some((name, &*bytes.leak()))
    });
    let files: Vec<(&'static str, &'static [u8])> = files.collect();
    ModelFolder::Memory("demo", files.leak())
}

/// A file of reference tensors.
pub(crate) struct Golden(Safetensors);

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        Self(Safetensors::open(path("goldens").join(name)).expect("a golden file"))
    }

    pub(crate) fn meta(&self, key: &str) -> &str {
        self.0.metadata().get(key).unwrap_or_else(|| panic!("no {key} in the metadata"))
    }

    /// The tensors of the model, without the inputs and outputs that stand beside them.
    pub(crate) fn model(&self) -> Arc<dyn TensorSource> {
        let model =
            self.0.tensors().iter().filter(|info| !info.name.starts_with("in.") && !info.name.starts_with("out."));
        let tensors: Vec<_> = model
            .map(|info| TensorData::new(&info.name, info.dtype, &info.shape, self.0.bytes(&info.name).expect("bytes")))
            .collect();
        let file = weights::write::to_bytes(&tensors, &Default::default()).expect("a file");
        Arc::new(Safetensors::from_bytes(Arc::new(file), "model").expect("a source"))
    }

    /// A tensor in f32.
    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        self.0.host(name).expect("a tensor").to_tensor(DType::F32, &Device::Cpu).expect("f32")
    }

    /// An integer tensor.
    pub(crate) fn ints(&self, name: &str) -> Vec<u32> {
        let bytes = self.0.bytes(name).expect("a tensor");
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

/// The elements in f32, row-major.
pub(crate) fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1()).expect("f32 values")
}

/// `|got - want| / |want|` in the Euclidean norm.
pub(crate) fn relative_l2(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (values(got), values(want));
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(&want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    let norm: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    (error / norm).sqrt()
}

/// Largest absolute difference.
pub(crate) fn max_abs(got: &Tensor, want: &Tensor) -> f32 {
    assert_eq!(got.dims(), want.dims());
    values(got).iter().zip(values(want)).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max)
}
