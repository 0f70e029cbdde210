//! What the tests of this folder share.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use sampling::NoiseGenerator;
use serde_json::{Value, json};
use weights::{
    Safetensors, TensorSource,
    write::{TensorData, to_bytes},
};

use super::{
    DiffusionDecoder,
    config::{DiffusionDecoderConfig, OutputType},
    names::{self, Spelling},
};
use crate::options::LoadOptions;

/// The configuration inside of the published file.
pub(crate) fn published_json() -> Value {
    json!({
        "vae": {
            "_class_name": "CausalDiffusionVAE",
            "model_output_type": "x0",
            "decoder": {
                "_class_name": "NADiffusionDecoder",
                "in_channels": 128,
                "out_channels": 3,
                "patch_size": 4,
                "head_dim": 64,
                "stage_channels": [2048, 1024, 512, 512, 256],
                "stage_depths": [4, 6, 4, 2, 8],
                "stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [11, 11, 11]],
                "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
                "stage5_kernel": [11, 11, 11],
                "timestep_scale_multiplier": 1000.0,
                "default_num_inference_steps": 1,
                "resampler_kind": "linear",
                "spatial_padding_mode": "zeros",
            },
        },
    })
}

/// The same, read.
pub(crate) fn published() -> DiffusionDecoderConfig {
    DiffusionDecoderConfig {
        in_channels: 128,
        out_channels: 3,
        patch_size: 4,
        head_dim: 64,
        stage_channels: vec![2048, 1024, 512, 512, 256],
        stage_depths: vec![4, 6, 4, 2, 8],
        stage_kernels: vec![[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5]],
        upsample_strides: vec![[1, 2, 2], [2, 1, 1], [2, 2, 2], [2, 2, 2]],
        upsample_channel_reductions: vec![2, 2, 1, 2],
        stage5_kernel: [11, 11, 11],
        t_emb_dim: 384,
        timestep_scale_multiplier: 1000.0,
        model_output_type: OutputType::X0,
        num_inference_steps: 1,
    }
}

/// A network of a few channels.
pub(crate) fn tiny() -> DiffusionDecoderConfig {
    DiffusionDecoderConfig {
        in_channels: 6,
        patch_size: 2,
        head_dim: 8,
        stage_channels: vec![16, 16, 8],
        stage_depths: vec![1, 1, 2],
        stage_kernels: vec![[3, 3, 3], [3, 5, 3]],
        upsample_strides: vec![[2, 1, 2], [2, 2, 1]],
        upsample_channel_reductions: vec![1, 2],
        stage5_kernel: [5, 3, 7],
        t_emb_dim: 12,
        ..published()
    }
}

/// `scale` times standard normal values.
pub(crate) fn noise(seed: u64, scale: f32, dims: &[usize]) -> Tensor {
    let values = NoiseGenerator::Philox.normal(seed, dims.iter().product());
    Tensor::from_vec(values.into_iter().map(|v| scale * v).collect::<Vec<_>>(), dims, &Device::Cpu).unwrap()
}

/// Random tensors under the names of `spelling`; the fused maps hold the rows of the separate ones.
pub(crate) fn random_file(config: &DiffusionDecoderConfig, spelling: Spelling) -> Arc<dyn TensorSource> {
    let seeded = |name: &str, shape: &[usize]| -> Vec<f32> {
        let seed = name.bytes().fold(7u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let norm = name.contains("norm") || name == "latents_std";
        let fan_in = shape[1..].iter().product::<usize>() as f32;
        let scale = if shape.len() == 1 { 0.3 } else { fan_in.powf(-0.5) };
        let values = elements(&noise(seed, scale, shape));
        values.into_iter().map(|v| if norm { 1.0 + v.tanh() / 2.0 } else { v }).collect()
    };
    let plain = names::expected(config, Spelling::Diffusers);
    let mut tensors = Vec::new();
    for expected in &plain {
        let (name, shape) = (expected.name.as_str(), expected.shape.as_slice());
        match (spelling.is_fused(), name.split_once("attn.to_q.")) {
            (true, Some((prefix, kind))) => {
                let part = |part: &str| seeded(&format!("{prefix}attn.{part}.{kind}"), shape);
                let values = ["to_q", "to_k", "to_v"].map(part).concat();
                let mut shape = shape.to_vec();
                shape[0] *= 3;
                tensors.push(TensorData::f32(spelling.spell(&format!("{prefix}attn.qkv.{kind}")), &shape, &values));
            }
            (true, None) if name.contains("attn.to_k.") || name.contains("attn.to_v.") => {}
            _ => {
                let mut values = seeded(name, shape);
                if spelling.is_gated() && is_behind_a_gate(name) {
                    let row = values.len() / shape[0];
                    values.iter_mut().enumerate().for_each(|(i, v)| *v /= gate(i / row));
                }
                tensors.push(TensorData::f32(spelling.spell(name), shape, &values));
            }
        }
    }
    if spelling.is_gated() {
        let channels = config.stage_channels[config.deterministic()];
        let gates: Vec<f32> = (0..channels).map(gate).collect();
        for block in 0..config.stage_depths[config.deterministic()] {
            for name in names::GATES {
                let name = spelling.spell(&format!("decoder.diff_blocks.{block}.{name}"));
                tensors.push(TensorData::f32(name, &[channels], &gates));
            }
        }
    }
    let bytes = to_bytes(&tensors, &Default::default()).unwrap();
    Arc::new(Safetensors::from_bytes(Arc::new(bytes), "random").unwrap())
}

/// A power of two, so that products and quotients are exact.
fn gate(row: usize) -> f32 {
    [0.5, 1.0, 2.0][row % 3]
}

fn is_behind_a_gate(name: &str) -> bool {
    let gated = ["attn.to_out.0.", "mlp.w_down.", "context_proj."];
    name.contains("diff_blocks.") && gated.iter().any(|part| name.contains(part))
}

/// A decoder of random weights.
pub(crate) fn random(config: &DiffusionDecoderConfig) -> DiffusionDecoder {
    let source = random_file(config, Spelling::Diffusers);
    DiffusionDecoder::load(config, source, &LoadOptions::default()).unwrap()
}

/// The elements, row-major.
pub(crate) fn elements(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Their bits.
pub(crate) fn bits(x: &Tensor) -> Vec<u32> {
    elements(x).into_iter().map(f32::to_bits).collect()
}

/// `|got - want| / |want|` in the Euclidean norm.
pub(crate) fn relative_l2(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    let (got, want) = (elements(got), elements(want));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(&want).map(|(g, w)| square(g - w)).sum();
    (error / want.iter().copied().map(square).sum::<f64>()).sqrt()
}
