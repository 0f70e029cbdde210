//! What the tests of this crate share.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use sampling::NoiseGenerator;
use weights::{
    Safetensors, TensorSource,
    write::{TensorData, to_bytes},
};

use crate::{Architecture, LoadOptions, RawLatents, Statistics, VaeConfig, WanVae, expected};

/// A configuration with the parts that differ between networks.
pub(crate) fn config(base: [usize; 2], dim_mult: &[usize], z_dim: usize, blocks: usize, residual: bool) -> VaeConfig {
    let channels = if residual { 12 } else { 3 };
    VaeConfig {
        base_dim: base[0],
        decoder_base_dim: Some(base[1]),
        dim_mult: dim_mult.to_vec(),
        z_dim,
        num_res_blocks: blocks,
        temperal_downsample: (0..dim_mult.len() - 1).map(|i| i > 0).collect(),
        is_residual: residual,
        in_channels: channels,
        out_channels: channels,
        patch_size: residual.then_some(2),
        latents_mean: (0..z_dim).map(|i| 0.1 * i as f64 - 0.3).collect(),
        latents_std: (0..z_dim).map(|i| 1.0 + 0.2 * i as f64).collect(),
    }
}

/// The published Wan 2.1 network.
pub(crate) fn wan21() -> Architecture {
    Architecture::from_config(&config([96, 96], &[1, 2, 4, 4], 16, 2, false)).unwrap()
}

/// The published Wan 2.2 network.
pub(crate) fn wan22() -> Architecture {
    Architecture::from_config(&config([160, 256], &[1, 2, 4, 4], 48, 2, true)).unwrap()
}

/// The same two with a few channels.
pub(crate) fn tiny_configs() -> [VaeConfig; 2] {
    [config([8, 8], &[1, 2, 4, 4], 4, 2, false), config([8, 16], &[1, 2, 4, 4], 4, 2, true)]
}

/// `scale` times standard normal values.
pub(crate) fn noise(seed: u64, scale: f32, dims: &[usize]) -> Tensor {
    let values = NoiseGenerator::Philox.normal(seed, dims.iter().product());
    let values: Vec<f32> = values.into_iter().map(|v| scale * v).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

/// Latents of a clip.
pub(crate) fn latents(seed: u64, dims: [usize; 4]) -> RawLatents {
    RawLatents::new(noise(seed, 1.0, &dims)).unwrap()
}

/// The tensors of an architecture: kernels of unit gain, gammas around 1, small biases.
pub(crate) fn random_tensors(architecture: &Architecture) -> Vec<TensorData<'static>> {
    let tensor = |(seed, expected): (usize, weights::Expected)| {
        let fan_in: usize = expected.shape[1..].iter().product();
        let gamma = expected.name.ends_with("gamma");
        let scale = if gamma || expected.shape.len() == 1 { 0.2 } else { (fan_in as f32).powf(-0.5) };
        let mut values = elements(&noise(seed as u64, scale, &expected.shape));
        if gamma {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        TensorData::f32(expected.name, &expected.shape, &values)
    };
    expected(architecture).into_iter().enumerate().map(tensor).collect()
}

/// A file in memory.
pub(crate) fn file(tensors: &[TensorData<'_>]) -> Arc<dyn TensorSource> {
    let bytes = to_bytes(tensors, &Default::default()).unwrap();
    Arc::new(Safetensors::from_bytes(Arc::new(bytes), "random").unwrap())
}

/// A VAE of random weights.
pub(crate) fn random(architecture: Architecture) -> WanVae {
    let source = file(&random_tensors(&architecture));
    let z = architecture.z_dim;
    let statistics = Statistics::new(&vec![0.5; z], &vec![2.0; z]).unwrap();
    WanVae::from_architecture(architecture, Some(statistics), source, &LoadOptions::default()).unwrap()
}

/// Both tiny networks with random weights.
pub(crate) fn tiny() -> [WanVae; 2] {
    tiny_configs().map(|config| random(Architecture::from_config(&config).unwrap()))
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
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, want) in elements(got).into_iter().zip(elements(want)) {
        error += (f64::from(got) - f64::from(want)).powi(2);
        norm += f64::from(want).powi(2);
    }
    (error / norm).sqrt()
}

/// A path below the test package.
pub(crate) fn path(relative: &str) -> std::path::PathBuf {
    std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(relative)
}
