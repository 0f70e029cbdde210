//! The demonstration VAE against the reference implementation.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use weights::{Safetensors, TensorSource};

use crate::{
    DecoderState, EncoderState, LoadOptions, RawLatents, VaeConfig, WanVae,
    testing::{path, relative_l2},
};

fn demo() -> WanVae {
    let config = std::fs::read(path("models/wan-vae-demo/config.json")).unwrap();
    let config: VaeConfig = serde_json::from_slice(&config).unwrap();
    let weights = Safetensors::open(path("models/wan-vae-demo/diffusion_pytorch_model.safetensors")).unwrap();
    WanVae::load(Arc::new(weights), Some(&config), &LoadOptions::default()).unwrap()
}

/// Holds the bounds that the whole network must keep.
#[test]
fn encode_and_decode_agree_with_diffusers() {
    let vae = demo();
    for name in ["wan-a", "wan-b", "wan-c"] {
        let golden = Safetensors::open(path(&format!("goldens/{name}.safetensors"))).unwrap();
        let tensor = |name: &str| -> Tensor {
            golden.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap().squeeze(0).unwrap()
        };
        let mean = tensor("latent_mean");
        let encoded = vae.encode(&mut EncoderState::new(&vae), &tensor("video")).unwrap().unwrap();
        let error = relative_l2(encoded.tensor(), &mean);
        assert!(error <= 1e-5, "{name}: encode {error:e}");
        let latents = RawLatents::new(mean).unwrap();
        let decoded = vae.decode(&mut DecoderState::new(&vae), &latents).unwrap();
        let error = relative_l2(&decoded, &tensor("decoded"));
        assert!(error <= 1e-5, "{name}: decode {error:e}");
    }
}
