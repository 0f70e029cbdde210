//! Clips through the Wan VAEs in bf16: random weights of the published shapes, beside diffusers with the same weights and
//! inputs. A decode begins with latents on the device and ends with u8 frames on the host.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_fork::memory;
use policy::Silent;
use wan_vae::{
    Architecture, DecodeOptions, DecoderState, EncoderState, LoadOptions, RawLatents, Statistics, WanVae, expected,
};
use weights::{
    Safetensors,
    write::{TensorData, to_file},
};

use super::{Gpu, Options, floors::Floors, peer};
use crate::{peer::Peer, record::Row, synthetic::write_checkpoint, wan::Model};

/// Runs of each clip.
const RUNS: usize = 5;
const GIB: f64 = (1u64 << 30) as f64;

/// The clips of the record.
fn clips(model: Model) -> Vec<Clip> {
    let clip = |name, task, frames, height, width, tflop| Clip { name, task, frames, height, width, tflop };
    match model {
        Model::Wan21 => vec![
            clip("wan21_decode_81f_480p_bf16", Task::Decode, 81, 480, 832, 272.7),
            clip("wan21_decode_81f_720p_bf16", Task::Decode, 81, 720, 1280, 633.1),
            clip("wan21_encode_81f_480p", Task::Encode, 81, 480, 832, 162.0),
        ],
        Model::Wan22 => vec![clip("wan22_decode_121f_704p_bf16", Task::Decode, 121, 704, 1280, 1999.0)],
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Decode,
    Encode,
}

/// One figure.
#[derive(Debug, Clone, Copy)]
struct Clip {
    name: &'static str,
    task: Task,
    frames: usize,
    height: usize,
    width: usize,
    /// Operations of the convolutions and the attention.
    tflop: f64,
}

/// All clips of a network. `folder` gets its checkpoint.
///
/// # Errors
/// If an op, a file or the peer fails.
pub fn rows(model: Model, gpu: &Gpu, options: &Options, folder: &Path) -> Result<Vec<Row>> {
    let floors = Floors::measure(gpu)?;
    let bench = Bench::new(model, gpu, folder)?;
    let mut rows = Vec::new();
    for clip in clips(model) {
        rows.extend(bench.clip(clip, floors, options)?);
    }
    Ok(rows)
}

struct Bench<'a> {
    model: Model,
    gpu: &'a Gpu,
    folder: &'a Path,
    weights: PathBuf,
    vae: WanVae,
}

impl<'a> Bench<'a> {
    fn new(model: Model, gpu: &'a Gpu, folder: &'a Path) -> Result<Self> {
        let architecture = Architecture::from_config(&model.config())?;
        let weights = folder.join("vae.safetensors");
        write_checkpoint(&weights, &expected(&architecture), 0.02)?;
        let vae = load(model, &weights, DType::BF16, &gpu.device)?;
        Ok(Self { model, gpu, folder, weights, vae })
    }

    /// Latents of a decode, frames of an encode, on the host.
    fn input(&self, clip: Clip) -> Result<Tensor> {
        let dims = match clip.task {
            Task::Decode => {
                let side = self.vae.spatial_factor();
                [self.vae.z_dim(), clip.frames.div_ceil(4), clip.height / side, clip.width / side]
            }
            Task::Encode => [3, clip.frames, clip.height, clip.width],
        };
        let noise = sampling::NoiseGenerator::Philox.normal(7, dims.iter().product());
        let noise = Tensor::from_vec(noise, &dims, &Device::Cpu)?;
        Ok(if clip.task == Task::Encode { (noise * 0.4)?.clamp(-1f32, 1f32)? } else { noise })
    }

    fn clip(&self, clip: Clip, floors: Floors, options: &Options) -> Result<Vec<Row>> {
        let host = self.input(clip)?;
        let input = host.to_device(&self.gpu.device)?;
        let run = || match clip.task {
            Task::Decode => decode(&self.vae, &input).map(drop),
            Task::Encode => encode(&self.vae, &input).map(drop),
        };
        let ms = self.gpu.clock(RUNS, run)?;
        memory::reset_peak(&self.gpu.device)?;
        run()?;
        let peak = memory::peak(&self.gpu.device)?.unwrap_or(0);
        let error = self.error(clip, &input)?;
        let peers = self.peers(clip, &host, options)?;
        let fastest = peers.iter().filter_map(|p| Some((p, p.get("ms").ok()?))).min_by(|a, b| a.1.total_cmp(&b.1));
        for peer in &peers {
            let psnr = peer.get("psnr").map_or(String::new(), |psnr| format!(", psnr {psnr:.1} dB against its f32"));
            println!("{}: {} {:.0} ms, {:.2} GiB{psnr}", clip.name, peer.name, peer.get("ms")?, peer.get("peak_gib")?);
        }
        let row = |name, value, unit| Row { name, value, unit, versions: self.gpu.versions.clone(), ..Row::default() };
        let mut rows = vec![Row {
            peer: fastest.map(|(p, _)| p.name.clone()).unwrap_or_default(),
            peer_value: fastest.map(|(_, ms)| ms),
            floor: Some(clip.tflop / floors.bf16 * 1e3),
            error,
            ..row(clip.name, ms, "ms")
        }];
        let peak = peak as f64 / GIB;
        println!("{}: peak {peak:.2} GiB with weights", clip.name);
        if clip.name == "wan21_decode_81f_480p_bf16" {
            let eager = peers.first();
            rows.push(Row {
                peer: eager.map(|p| p.name.clone()).unwrap_or_default(),
                peer_value: eager.and_then(|p| p.get("peak_gib").ok()),
                ..row("wan21_decode_81f_480p_peak", peak, "GiB")
            });
        }
        Ok(rows)
    }

    /// bf16 against f32 over the first two latents.
    fn error(&self, clip: Clip, input: &Tensor) -> Result<String> {
        let exact = load(self.model, &self.weights, DType::F32, &self.gpu.device)?;
        let few = input.narrow(1, 0, if clip.task == Task::Decode { 2 } else { 5 })?;
        let [got, want] = [&self.vae, &exact].map(|vae| -> Result<Tensor> {
            Ok(match clip.task {
                Task::Decode => vae.decode(&mut DecoderState::new(vae), &RawLatents::new(few.clone())?)?,
                Task::Encode => encode(vae, &few)?,
            })
        });
        let (got, want) = (got?.to_dtype(DType::F32)?, want?);
        let rel_l2 = super::relative_error(&got, &want)?;
        let mean =
            |t: Tensor| -> Result<f64> { Ok(f64::from(t.sqr()?.flatten_to(2)?.mean(1)?.mean(0)?.to_scalar::<f32>()?)) };
        let psnr = 10.0 * (4.0 / mean((got - want)?)?).log10();
        Ok(format!("psnr {psnr:.1} dB rel_l2 {rel_l2:.1e} against f32; 2 latents"))
    }

    /// diffusers eager, and compiled for the clip of the record.
    fn peers(&self, clip: Clip, host: &Tensor, options: &Options) -> Result<Vec<Peer>> {
        if options.python.is_none() {
            return Ok(Vec::new());
        }
        let file = self.folder.join("input.safetensors");
        let values: Vec<f32> = host.flatten_all()?.to_vec1()?;
        to_file(&file, &[TensorData::f32("input", host.dims(), &values)], &Default::default())?;
        let task = if clip.task == Task::Decode { "decode" } else { "encode" };
        let (weights, file) = (self.weights.to_str().context("path")?, file.to_str().context("path")?);
        let base = [task, self.model.name(), weights, file];
        let mut peers = Vec::from_iter(peer::diffusers(options, &[&base[..], &["--error"]].concat())?);
        if options.compiled_peer {
            peers.extend(peer::diffusers(options, &[&base[..], &["--compile"]].concat())?);
        }
        Ok(peers)
    }
}

fn load(model: Model, weights: &Path, dtype: DType, device: &Device) -> Result<WanVae> {
    let options = LoadOptions::default().with_device(device.clone()).with_dtype(Some(dtype));
    let architecture = Architecture::from_config(&model.config())?;
    let z = architecture.z_dim;
    let statistics = Statistics::new(&vec![0.0; z], &vec![1.0; z])?;
    Ok(WanVae::from_architecture(architecture, Some(statistics), Arc::new(Safetensors::open(weights)?), &options)?)
}

/// Frames of a clip as bytes on the host, piece by piece.
fn decode(vae: &WanVae, latents: &Tensor) -> Result<Vec<Vec<u8>>> {
    let mut pieces = Vec::new();
    let latents = RawLatents::new(latents.clone())?;
    vae.decode_clip_rgb8(&latents, &DecodeOptions::default(), &Silent, &mut |frames| {
        pieces.push(frames.pixels);
        Ok(())
    })?;
    Ok(pieces)
}

/// Latents of a clip on the device.
fn encode(vae: &WanVae, frames: &Tensor) -> Result<Tensor> {
    let latents = vae.encode(&mut EncoderState::new(vae), frames)?;
    Ok(latents.context("a clip without latents")?.into_tensor())
}
