//! Clips through the convolutional VAE of LTX-2 in bf16: random weights of the published shapes, beside diffusers with the
//! same shapes. Clips begin and end on the device; a decode is also timed to bytes on the host.

use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    cuda::paths::{Path, taken},
    cudnn_policy::take_counters,
    memory,
};
use ltx::{
    ConvVae, LoadOptions,
    conv_vae::{ConvDecodeOptions, ConvEncodeOptions, config::from_diffusers, names},
};
use policy::Silent;
use serde_json::Value;
use weights::Expected;

use super::{Gpu, Options, floors::Floors, flux2::kernels::after_a_pause, peer, relative_error};
use crate::{
    peer::Peer,
    record::{Row, Sink},
    synthetic::RandomWeights,
};

/// Runs of each clip.
const RUNS: usize = 7;
const GIB: f64 = (1u64 << 30) as f64;
/// Frames, rows and columns of the clips, in latents and in pixels.
const LATENTS: [usize; 3] = [16, 16, 24];
const PIXELS: [usize; 3] = [121, 512, 768];

const LTX20: &str = include_str!("../../../tests/models/configs/ltx20-conv-vae.diffusers.json");
const LTX23: &str = include_str!("../../../tests/models/configs/ltx23-conv-vae.diffusers.json");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Decode,
    Encode,
}

impl Task {
    fn name(self) -> &'static str {
        if self == Self::Decode { "decode" } else { "encode" }
    }

    fn extents(self) -> [usize; 3] {
        if self == Self::Decode { LATENTS } else { PIXELS }
    }
}

/// The figures of 2.0; those of 2.3 are printed.
///
/// # Errors
/// If an op or `sink` fails, or a fast path was not taken.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let bench = Bench::new(gpu, "2.0", LTX20)?;
    bench.clip(Task::Decode, "ltx2_conv_decode_121f_768x512", 60.2, floors, options, sink)?;
    bench.clip(Task::Encode, "ltx2_conv_encode_121f_768x512", 139.7, floors, options, sink)?;
    drop(bench);
    let bench = Bench::new(gpu, "2.3", LTX23)?;
    for (task, tflop) in [(Task::Decode, 117.5), (Task::Encode, 113.9)] {
        let ms = bench.time(task, None)?;
        println!("ltx 2.3 {}: {ms:.1} ms, floor {:.1}", task.name(), tflop / floors.bf16 * 1e3);
    }
    Ok(())
}

/// A decode of 2.0 for `benches/profile/kernels.c`.
///
/// # Errors
/// If an op fails.
pub fn kernels(gpu: &Gpu) -> Result<()> {
    let bench = Bench::new(gpu, "2.0", LTX20)?;
    after_a_pause(gpu, || bench.run(Task::Decode, None).map(drop))
}

struct Bench<'a> {
    gpu: &'a Gpu,
    config: &'static str,
    source: Arc<RandomWeights>,
    vae: ConvVae,
    latents: Tensor,
    frames: Tensor,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, name: &str, config: &'static str) -> Result<Self> {
        let architecture = from_diffusers(&serde_json::from_str(config)?)?;
        let encoder = architecture.encoder.as_ref().context("an encoder")?;
        let layout = names::Layout::Diffusers { encoder_end: encoder.blocks.len() - 1 };
        let theirs = |e: Expected| Expected::new(layout.name_in_file(&e.name), e.shape);
        let expected: Vec<Expected> = names::expected(&architecture)?.into_iter().map(theirs).collect();
        let source = Arc::new(RandomWeights::new(name, &expected, 0.02));
        let vae = load(&source, config, DType::BF16, &gpu.device)?;
        let noise = |dims: [usize; 5]| -> Result<Tensor> {
            let values = sampling::NoiseGenerator::Philox.normal(7, dims.iter().product());
            Ok(Tensor::from_vec(values, &dims, &gpu.device)?)
        };
        let [t, h, w] = LATENTS;
        let latents = noise([1, architecture.latent_channels, t, h, w])?;
        let [t, h, w] = PIXELS;
        let frames = (noise([1, 3, t, h, w])? * 0.4)?.clamp(-1f32, 1f32)?;
        Ok(Self { gpu, config, source, vae, latents, frames })
    }

    fn run(&self, task: Task, chunk: Option<usize>) -> Result<Tensor> {
        Ok(match task {
            Task::Decode => self.vae.decode(&self.latents, &ConvDecodeOptions::default().with_chunk(chunk))?,
            Task::Encode => self.vae.encode(&self.frames, &ConvEncodeOptions::default().with_chunk(chunk), &Silent)?,
        })
    }

    fn time(&self, task: Task, chunk: Option<usize>) -> Result<f64> {
        self.gpu.clock(RUNS, || self.run(task, chunk).map(drop))
    }

    fn clip(
        &self,
        task: Task,
        name: &'static str,
        tflop: f64,
        floors: Floors,
        options: &Options,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        self.first_call(task, name)?;
        let value = self.time(task, None)?;
        let floor = Some(tflop / floors.bf16 * 1e3);
        let row = Row { name, value, unit: "ms", floor, versions: self.gpu.versions.clone(), ..Row::default() };
        sink(row.clone())?;
        let chunks = if task == Task::Decode { [8, 4, 1] } else { [64, 32, 8] };
        for chunk in [None].into_iter().chain(chunks.map(Some)) {
            let ms = if chunk.is_none() { value } else { self.time(task, chunk)? };
            memory::reset_peak(&self.gpu.device)?;
            self.run(task, chunk)?;
            let peak = memory::peak(&self.gpu.device)?.unwrap_or(0) as f64 / GIB;
            println!("{name}: frames at a time {chunk:?}: {ms:.1} ms, {peak:.2} GiB with weights, input and result");
        }
        if task == Task::Decode {
            for chunk in [None, Some(8), Some(4)] {
                println!("{name}: to bytes on the host, chunk {chunk:?}: {:.1} ms", self.host(chunk)?);
            }
        }
        let row = Row { error: self.error(task)?, ..row };
        sink(row.clone())?;
        let peers = self.peers(task, options);
        for peer in &peers {
            let figure = |name| peer.get(name).map_or(String::new(), |value| format!(", {name} {value:.1}"));
            let figures = ["ms", "host_ms", "peak_gib", "psnr"].map(figure).concat();
            println!("{name}: {}{figures}", peer.name);
        }
        let fastest = peers.iter().filter_map(|p| Some((p, p.get("ms").ok()?))).min_by(|a, b| a.1.total_cmp(&b.1));
        match fastest {
            Some((peer, ms)) => sink(Row { peer: peer.name.clone(), peer_value: Some(ms), ..row }),
            None => Ok(()),
        }
    }

    /// The first call finds plans; it has to take the fused paths.
    fn first_call(&self, task: Task, name: &str) -> Result<()> {
        take_counters();
        let counts = || [taken(Path::Surround), taken(Path::DepthToSpace)];
        let (before, start) = (counts(), Instant::now());
        self.run(task, None)?;
        self.gpu.device.synchronize()?;
        let (seconds, counters) = (start.elapsed().as_secs_f64(), take_counters());
        let [surround, cells] = counts();
        println!(
            "{name}: first call {seconds:.2} s, {} plans built, {} loaded, {} convolutions by cudnn, fallbacks {:?}",
            counters.plans_built, counters.plans_loaded, counters.dispatched, counters.fallbacks
        );
        ensure!(surround > before[0], "{name} was not surrounded by the kernel");
        ensure!(task == Task::Encode || cells > before[1], "{name} did not move channels by the kernel");
        Ok(())
    }

    /// Milliseconds until all frames lie on the host as bytes.
    fn host(&self, chunk: Option<usize>) -> Result<f64> {
        let options = ConvDecodeOptions::default().with_chunk(chunk);
        self.gpu.clock(RUNS, || {
            let mut bytes = 0;
            self.vae.decode_rgb8(&self.latents, &options, &Silent, &mut |frames| {
                bytes += frames.pixels.len();
                Ok(())
            })?;
            ensure!(bytes == 3 * PIXELS.iter().product::<usize>(), "{bytes} bytes");
            Ok(())
        })
    }

    /// bf16 against f32 over a few frames.
    fn error(&self, task: Task) -> Result<String> {
        let exact = load(&self.source, self.config, DType::F32, &self.gpu.device)?;
        let few = |vae: &ConvVae| -> Result<Tensor> {
            Ok(match task {
                Task::Decode => vae.decode(&self.latents.narrow(2, 0, 2)?, &ConvDecodeOptions::default())?,
                Task::Encode => vae.encode(&self.frames.narrow(2, 0, 9)?, &ConvEncodeOptions::default(), &Silent)?,
            })
        };
        let (got, want) = (few(&self.vae)?, few(&exact)?);
        let rel_l2 = relative_error(&got, &want)?;
        if task == Task::Encode {
            return Ok(format!("rel_l2 {rel_l2:.1e} against f32; 9 frames"));
        }
        let squared = (got - want)?.sqr()?.flatten_to(3)?.mean(1)?.mean(0)?.to_scalar::<f32>()?;
        let psnr = 10.0 * (4.0 / f64::from(squared)).log10();
        Ok(format!("psnr {psnr:.1} dB rel_l2 {rel_l2:.1e} against f32; 9 frames"))
    }

    /// diffusers eager, and compiled if that is asked for. Figures of ours do not wait for a peer that does not run.
    fn peers(&self, task: Task, options: &Options) -> Vec<Peer> {
        let extents = format!("{:?}", task.extents());
        let base = [task.name(), self.config, &extents];
        let mut peers = Vec::from_iter(peer::ltx_conv(options, &base));
        if options.compiled_peer {
            peers.extend(peer::ltx_conv(options, &[&base[..], &["--compile"]].concat()));
        }
        peers
    }
}

fn load(source: &Arc<RandomWeights>, config: &str, dtype: DType, device: &Device) -> Result<ConvVae> {
    let config: Value = serde_json::from_str(config)?;
    Ok(ConvVae::load(source.clone(), Some(&config), &LoadOptions::new(device.clone(), dtype))?)
}
