//! FLUX.2: a transformer step of klein 4B's true shapes, the VAE decode.

use std::{path::Path, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use flux2::{
    LoadOptions,
    config::{TransformerConfig, VaeConfig},
    transformer::Flux2Transformer,
    vae::Flux2Vae,
};
use policy::Silent;
use weights::{Safetensors, TensorSource};

use super::{Options, gemm};
use crate::{
    machine,
    peer::Peer,
    record::{Row, Sink},
    synthetic::write_checkpoint,
    timing::median,
};

const KLEIN_4B: &str = r#"{"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "attention_head_dim": 128,
    "joint_attention_dim": 7680, "in_channels": 128, "out_channels": null, "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32], "rope_theta": 2000, "timestep_guidance_channels": 256,
    "guidance_embeds": false, "eps": 1e-6, "patch_size": 1}"#;

const VAE: &str = r#"{"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 32,
    "norm_num_groups": 32, "batch_norm_eps": 0.0001, "in_channels": 3, "out_channels": 3, "patch_size": [2, 2],
    "mid_block_add_attention": true, "use_quant_conv": true, "use_post_quant_conv": true}"#;

/// Operations of one step of klein 4B at 256x256 with 512 text rows (linear layers and attention).
const STEP_256_FLOP: f64 = 4.917e12;

/// Operations of a VAE decode to 512x512.
const DECODE_512_FLOP: f64 = 2.516e12;

/// One transformer step at 256x256 with random weights of klein 4B's shapes, mapped bf16.
///
/// Meant for a process of its own: the peak it reports is the process's.
///
/// # Errors
/// If the checkpoint cannot be written to `folder` (7.75 GB), or a step or `sink` fails.
pub fn step_rows(folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let config: TransformerConfig = serde_json::from_str(KLEIN_4B)?;
    let file = folder.join("diffusion_pytorch_model.safetensors");
    write_checkpoint(&file, &Flux2Transformer::expected(&config), 0.02)?;
    let source: Arc<dyn TensorSource> = Arc::new(Safetensors::open(&file)?);
    let start = Instant::now();
    let model = Flux2Transformer::load(&config, source, &LoadOptions::default())?;
    println!("load and check: {:.2} s", start.elapsed().as_secs_f64());

    let device = Device::Cpu;
    let text = Tensor::randn(0f32, 1., (1, 512, config.joint_attention_dim), &device)?;
    let latents = Tensor::randn(0f32, 1., (1, 256, config.in_channels), &device)?;
    let prepared = model.prepare(&text, (16, 16))?;
    let before = gemm::rate(3)?;
    let time = median(3, || Ok(model.forward(&latents, 0.9, None, &prepared, &Silent)?))?;
    let after = gemm::rate(3)?;
    let rated = 0.5 * (before + after);
    let seconds = time.as_secs_f64();
    let floor = STEP_256_FLOP / rated / 1e9;
    let peak = machine::peak_resident().context("no /proc/self/status")?;
    sink(Row { name: "cpu_flux2_klein4b_step_256", value: seconds, unit: "s", floor: Some(floor), ..Row::default() })?;
    sink(Row { name: "cpu_flux2_klein4b_step_256_fraction", value: floor / seconds, unit: "-", ..Row::default() })?;
    let peak = peak as f64 / (1u64 << 30) as f64;
    sink(Row { name: "cpu_flux2_klein4b_step_256_peak", value: peak, unit: "GiB", ..Row::default() })
}

/// VAE decode to 512x512 in f32 with random weights of the published shapes, beside diffusers.
///
/// # Errors
/// If the decode, the peer or `sink` fails.
pub fn vae_rows(options: &Options, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let config: VaeConfig = serde_json::from_str(VAE)?;
    let file = folder.join("vae.safetensors");
    write_checkpoint(&file, &Flux2Vae::expected(&config), 0.02)?;
    let vae = Flux2Vae::load(&config, Arc::new(Safetensors::open(&file)?), &LoadOptions::default())?;
    let latents =
        Tensor::randn(0f32, 1., (1, 4 * config.latent_channels, 32, 32), &Device::Cpu)?.to_dtype(DType::F32)?;
    let time = median(2, || Ok(vae.decode(&latents, &Silent)?))?;
    let threads = rayon::current_num_threads().to_string();
    let run = |p: &Path| Peer::run(p, "diffusers_vae.py", &[&threads, "512", "512", "2"]);
    let peer = options.python.as_deref().map(run).transpose()?;
    let rated = gemm::rate(3)?;
    sink(Row {
        name: "cpu_flux2_vae_512",
        value: time.as_secs_f64(),
        unit: "s",
        peer: peer.as_ref().map(|p| p.name.clone()).unwrap_or_default(),
        peer_value: peer.as_ref().map(|p| p.get("seconds")).transpose()?,
        floor: Some(DECODE_512_FLOP / rated / 1e9),
        ..Row::default()
    })
}

/// The built-in demonstration: the command from process start to the written file.
///
/// # Errors
/// If the command or `sink` fails.
pub fn demo_rows(tallow: &Path, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let out = folder.join("circle.png");
    let time = median(7, || {
        let status = std::process::Command::new(tallow)
            .args(["generate", "a red circle on a blue background", "--seed", "1", "-q", "-o"])
            .arg(&out)
            .status()
            .with_context(|| tallow.display().to_string())?;
        anyhow::ensure!(status.success(), "{} failed", tallow.display());
        Ok(())
    })?;
    sink(Row { name: "cpu_demo_generate", value: time.as_secs_f64(), unit: "s", ..Row::default() })
}
