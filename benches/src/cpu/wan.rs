//! The Wan 2.1 decoder at its published size, random weights: the first latent frame of a clip and two more.

use std::{path::Path, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use policy::Silent;
use wan_vae::{Architecture, DecodeOptions, LoadOptions, RawLatents, Statistics, WanVae, expected};
use weights::{
    Safetensors,
    write::{TensorData, to_file},
};

use super::{Options, gemm};
use crate::{
    machine,
    peer::Peer,
    record::{Row, Sink},
    synthetic::write_checkpoint,
    wan::Model,
};

/// Operations by the definition of every layer: 1.70 for the first latent frame, 13.55 for each of the others.
const FLOP: f64 = 28.80e12;
/// Latent channels, frames, rows, columns.
const LATENTS: [usize; 4] = [16, 3, 60, 104];

/// Time, share of the machine's matrix product rate, and the peak in what is printed. One run: it takes minutes.
///
/// # Errors
/// If the decode, the peer or `sink` fails.
pub fn rows(options: &Options, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let rated = gemm::rate(3)?;
    let architecture = Architecture::from_config(&Model::Wan21.config())?;
    let file = folder.join("vae.safetensors");
    write_checkpoint(&file, &expected(&architecture), 0.02)?;
    let z = architecture.z_dim;
    let statistics = Statistics::new(&vec![0.0; z], &vec![1.0; z])?;
    let source = Arc::new(Safetensors::open(&file)?);
    let vae = WanVae::from_architecture(architecture, Some(statistics), source, &LoadOptions::default())?;
    let noise = sampling::NoiseGenerator::Philox.normal(7, LATENTS.iter().product());
    let latents = RawLatents::new(Tensor::from_vec(noise.clone(), &LATENTS, &Device::Cpu)?)?;
    let start = Instant::now();
    let mut frames = Vec::new();
    vae.decode_clip(&latents, &DecodeOptions::default(), &Silent, &mut |chunk| {
        frames.push(chunk);
        Ok(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let peak = machine::peak_resident().context("no resident size")? as f64 / (1u64 << 30) as f64;
    println!("cpu_wan21_decode_3lat_480p: peak {peak:.2} GiB resident");
    drop(vae);
    let row = Row {
        name: "cpu_wan21_decode_3lat_480p",
        value: seconds,
        unit: "s",
        floor: Some(FLOP / rated / 1e9),
        ..Row::default()
    };
    sink(Row {
        name: "cpu_wan21_decode_3lat_480p_fraction",
        value: FLOP / rated / 1e9 / seconds,
        unit: "-",
        ..Row::default()
    })?;
    sink(row.clone())?;

    let threads = rayon::current_num_threads().to_string();
    let peer = |python: &Path| -> Result<(Peer, f64)> {
        let input = folder.join("latents.safetensors");
        to_file(&input, &[TensorData::f32("input", &LATENTS, &noise)], &Default::default())?;
        let output = folder.join("frames.safetensors");
        let paths = [&file, &input, &output].map(|path| path.to_str().unwrap_or_default());
        let peer = Peer::run(python, "wan_diffusers_cpu.py", &[&[threads.as_str()][..], &paths].concat())?;
        let theirs = candle_core::safetensors::load(&output, &Device::Cpu)?;
        let theirs = theirs.get("frames").context("no frames")?.flatten_all()?.to_vec1::<f32>()?;
        let ours = Tensor::cat(&frames, 1)?.flatten_all()?.to_vec1::<f32>()?;
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let error = square(&mut ours.iter().zip(&theirs).map(|(a, b)| f64::from(a - b)));
        Ok((peer, (error / square(&mut theirs.iter().map(|&v| f64::from(v)))).sqrt()))
    };
    let Some(python) = &options.python else { return Ok(()) };
    // Minutes later, once more with the peer.
    let (peer, error) = peer(python)?;
    sink(Row {
        peer_value: Some(peer.get("seconds")?),
        error: format!("rel_l2 {error:.1e} against diffusers f32"),
        peer: peer.name,
        ..row
    })
}
