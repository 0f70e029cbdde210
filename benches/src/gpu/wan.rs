//! Clips through the Wan VAEs in bf16: random weights of the published shapes, beside diffusers with the same weights and
//! inputs. A decode begins with latents on the device and ends with u8 frames on the host.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_fork::{cudnn_policy::take_counters, memory};
use policy::Silent;
use wan_vae::{
    Architecture, ClipMemory, ClipPlan, DecodeOptions, DecoderState, EncoderState, LoadOptions, RawLatents, Statistics,
    WanVae, expected,
};
use weights::{
    Safetensors,
    write::{TensorData, to_file},
};

use super::{Gpu, Options, floors::Floors, peer};
use crate::{
    peer::Peer,
    record::{Row, Sink},
    synthetic::write_checkpoint,
    wan::Model,
};

/// Runs of each clip.
const RUNS: usize = 5;
/// The clip that is also held against diffusers compiled.
const RECORD: &str = "wan21_decode_81f_480p_bf16";
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
/// If an op, a file, the peer or `sink` fails.
pub fn rows(model: Model, gpu: &Gpu, options: &Options, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let bench = Bench::new(model, gpu, folder)?;
    clips(model).into_iter().try_for_each(|clip| bench.clip(clip, floors, options, sink))
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

    /// The figures of a clip as they are measured, and once more when its peers have run.
    fn clip(&self, clip: Clip, floors: Floors, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
        let host = self.input(clip)?;
        let input = host.to_device(&self.gpu.device)?;
        let run = || match clip.task {
            Task::Decode => decode(&self.vae, &input).map(drop),
            Task::Encode => encode(&self.vae, &input).map(drop),
        };
        take_counters();
        let start = Instant::now();
        run()?;
        self.gpu.device.synchronize()?;
        let (seconds, counters) = (start.elapsed().as_secs_f64(), take_counters());
        let (built, loaded) = (counters.plans_built, counters.plans_loaded);
        println!("{}: first call {seconds:.2} s, with {built} plans built and {loaded} loaded", clip.name);
        let row = |name, value, unit| Row { name, value, unit, versions: self.gpu.versions.clone(), ..Row::default() };
        let time =
            Row { floor: Some(clip.tflop / floors.bf16 * 1e3), ..row(clip.name, self.gpu.clock(RUNS, run)?, "ms") };
        sink(time.clone())?;
        memory::reset_peak(&self.gpu.device)?;
        run()?;
        let peak = memory::peak(&self.gpu.device)?.unwrap_or(0) as f64 / GIB;
        let estimate = self.estimate(clip, &input)?;
        println!("{}: peak {peak:.2} GiB with weights, estimated {estimate:.2}", clip.name);
        let peak = row("wan21_decode_81f_480p_peak", peak, "GiB");
        let peak_counts = clip.name == RECORD;
        if peak_counts {
            sink(peak.clone())?;
        }
        let time = Row { error: self.error(clip, &input)?, ..time };
        sink(time.clone())?;

        let peers = self.peers(clip, &host, options)?;
        for peer in &peers {
            let psnr = peer.get("psnr").map_or(String::new(), |psnr| format!(", psnr {psnr:.1} dB against its f32"));
            println!("{}: {} {:.0} ms, {:.2} GiB{psnr}", clip.name, peer.name, peer.get("ms")?, peer.get("peak_gib")?);
        }
        let fastest = peers.iter().filter_map(|p| Some((p, p.get("ms").ok()?))).min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((peer, ms)) = fastest {
            sink(Row { peer: peer.name.clone(), peer_value: Some(ms), ..time })?;
        }
        if let Some(eager) = peers.first().filter(|_| peak_counts) {
            sink(Row { peer: eager.name.clone(), peer_value: eager.get("peak_gib").ok(), ..peak })?;
        }
        Ok(())
    }

    /// What the VAE says before, in GiB.
    fn estimate(&self, clip: Clip, input: &Tensor) -> Result<f64> {
        let (architecture, precision) = (self.vae.architecture(), self.vae.precision());
        let (_, count, height, width) = input.dims4()?;
        let memory = match clip.task {
            Task::Decode => ClipMemory::decode(architecture, precision, (count, height, width), ClipPlan::Whole),
            Task::Encode => ClipMemory::encode(architecture, precision, (count, height, width), ClipPlan::Whole),
        };
        Ok(memory.total() as f64 / GIB)
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
        if options.compiled_peer && clip.name == RECORD {
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
