//! Clips through the diffusion decoder of LTX-2.5 in bf16: random weights of the published shapes, beside diffusers with the
//! same shapes. Clips begin and end on the device; a decode is also timed to bytes on the host. Noise is drawn on the host.

use std::{sync::Arc, time::Instant};

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    cuda::paths::{Path, taken},
    memory,
    noise::philox_normal,
};
use ltx::{
    DiffusionDecoder, DiffusionDecoderConfig, LoadOptions,
    diffusion_decoder::{DecodeOptions, Noise},
};
use policy::Silent;
use sampling::NoiseGenerator;
use weights::{Expected, Safetensors, write::to_bytes};

use super::{Gpu, Options, floors::Floors, flux2::kernels::after_a_pause, peer, relative_error};
use crate::{
    record::{Row, Sink},
    synthetic::RandomWeights,
};

/// Of the noise.
const SEED: u64 = 1;
const GIB: f64 = (1u64 << 30) as f64;
const CONFIG: &str = include_str!("../../../tests/models/configs/ltx25-diffusion-decoder.diffusers.json");

/// A clip of the record.
#[derive(Debug, Clone, Copy)]
pub struct Clip {
    name: &'static str,
    peak: &'static str,
    /// Frames, rows and columns in latents.
    latents: [usize; 3],
    /// Operations of the maps and of attention to the keys that are seen.
    tflop: f64,
    /// Most bytes of a decode.
    max_bytes: Option<u64>,
    runs: usize,
    /// Whether diffusers takes the clip whole.
    whole_peer: bool,
    /// Whether the clip is larger than what 32 bits count, so that its end is checked.
    checks_end: bool,
}

/// 121 frames of 768 x 512.
pub const SMALL: Clip = Clip {
    name: "ltx25_diffusion_decode_121f_768x512",
    peak: "ltx25_diffusion_decode_121f_768x512_peak",
    latents: [16, 16, 24],
    tflop: 105.4,
    max_bytes: Some(8 << 30),
    runs: 7,
    whole_peer: true,
    checks_end: false,
};
/// 121 frames of 1280 x 704.
pub const MIDDLE: Clip = Clip {
    name: "ltx25_diffusion_decode_121f_1280x704",
    peak: "ltx25_diffusion_decode_121f_1280x704_peak",
    latents: [16, 22, 40],
    tflop: 241.5,
    max_bytes: None,
    runs: 5,
    whole_peer: true,
    checks_end: false,
};
/// 257 frames of 1920 x 1088 within 40 GiB.
pub const LARGE: Clip = Clip {
    name: "ltx25_diffusion_decode_257f_1920x1088",
    peak: "ltx25_diffusion_decode_257f_1920x1088_peak",
    latents: [33, 34, 60],
    tflop: 1187.0,
    max_bytes: Some(40 << 30),
    runs: 1,
    whole_peer: false,
    checks_end: true,
};

/// Time and peak of a clip.
///
/// # Errors
/// If an op or `sink` fails, or a fast path was not taken.
pub fn rows(clip: Clip, gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let bench = Bench::new(gpu, clip)?;
    let Clip { name, .. } = clip;
    bench.first_call()?;
    memory::release_scratch(&gpu.device);
    gpu.device.synchronize()?;
    memory::reset_peak(&gpu.device)?;
    bench.run()?;
    let peak = memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB;
    let row = |name, value, unit| Row { name, value, unit, versions: gpu.versions.clone(), ..Row::default() };
    let peak = row(clip.peak, peak, "GiB");
    sink(peak.clone())?;
    let value = gpu.clock(clip.runs, || bench.run().map(drop))?;
    let time = Row { floor: Some(clip.tflop / floors.bf16 * 1e3), ..row(name, value, "ms") };
    sink(time.clone())?;
    println!("{name}: to bytes on the host {:.1} ms", gpu.clock(clip.runs, || bench.host())?);
    let error = if clip.checks_end { bench.error_of_the_end()? } else { bench.error()? };
    let time = Row { error, ..time };
    sink(time.clone())?;
    let extents = format!("{:?}", clip.latents);
    let how: &[&str] = if clip.whole_peer { &[] } else { &["--tiled", "--runs", "1"] };
    drop(bench);
    memory::give_back(&gpu.device)?;
    if let Some(peer) = peer::ltx_diffusion(options, &[&[CONFIG, &extents][..], how].concat()) {
        let figure = |name| peer.get(name).map_or(String::new(), |value| format!(", {name} {value:.1}"));
        println!("{name}: {}{}", peer.name, ["ms", "host_ms", "peak_gib"].map(figure).concat());
        sink(Row { peer: peer.name.clone(), peer_value: peer.get("ms").ok(), ..time })?;
        sink(Row { peer: peer.name.clone(), peer_value: peer.get("peak_gib").ok(), ..peak })?;
    }
    Ok(())
}

/// A decode for `benches/profile/kernels.c`.
///
/// # Errors
/// If an op fails.
pub fn kernels(gpu: &Gpu) -> Result<()> {
    let bench = Bench::new(gpu, SMALL)?;
    after_a_pause(gpu, || bench.run().map(drop))
}

struct Bench<'a> {
    clip: Clip,
    gpu: &'a Gpu,
    source: Arc<RandomWeights>,
    decoder: DiffusionDecoder,
    latents: Tensor,
    options: DecodeOptions,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, clip: Clip) -> Result<Self> {
        let config = config()?;
        let empty = Safetensors::from_bytes(Arc::new(to_bytes(&[], &Default::default())?), "empty")?;
        let expected: Vec<Expected> = DiffusionDecoder::expected(&config, &empty);
        let source = Arc::new(RandomWeights::new("ltx diffusion decoder", &expected, 0.02));
        let decoder = load(&source, DType::BF16, &gpu.device)?;
        let [t, h, w] = clip.latents;
        let dims = [1, config.in_channels, t, h, w];
        let values = NoiseGenerator::Philox.normal(7, dims.iter().product());
        let latents = Tensor::from_vec(values, &dims, &gpu.device)?;
        let noise = Noise::Seed { seed: SEED, generator: NoiseGenerator::Philox };
        let options = DecodeOptions::default().with_noise(noise).with_max_bytes(clip.max_bytes);
        Ok(Self { clip, gpu, source, decoder, latents, options })
    }

    fn run(&self) -> Result<Tensor> {
        Ok(self.decoder.decode(&self.latents, &self.options, &Silent)?)
    }

    /// The first call has to take the fast paths.
    fn first_call(&self) -> Result<()> {
        let counts = || [taken(Path::TokenBlock), taken(Path::WarpGroupNeighborhood), taken(Path::TiledNeighborhood)];
        let (before, start) = (counts(), Instant::now());
        let pixels = self.run()?;
        self.gpu.device.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        let [passes, groups, tiled] = std::array::from_fn(|i| counts()[i] - before[i]);
        println!(
            "{}: first call {seconds:.2} s, {passes} passes, {groups} of {tiled} attentions by groups of warps, {:?}",
            self.clip.name,
            pixels.dims()
        );
        ensure!(passes >= 16 && groups >= 8 && tiled >= 24, "{} did not take the fast paths", self.clip.name);
        Ok(())
    }

    /// Until all frames lie on the host as bytes.
    fn host(&self) -> Result<()> {
        let mut bytes = 0;
        self.decoder.decode_rgb8(&self.latents, &self.options, &Silent, &mut |frames| {
            bytes += frames.pixels.len();
            Ok(())
        })?;
        ensure!(bytes > 0, "no bytes");
        Ok(())
    }

    /// bf16 against f32 over a few frames of a small picture.
    fn error(&self) -> Result<String> {
        let few = self.latents.narrow(2, 0, 3)?.narrow(3, 0, 8)?.narrow(4, 0, 8)?.contiguous()?;
        let options = self.options.clone().with_max_bytes(None);
        let exact = load(&self.source, DType::F32, &self.gpu.device)?;
        let run = |decoder: &DiffusionDecoder| -> Result<Tensor> { Ok(decoder.decode(&few, &options, &Silent)?) };
        let (got, want) = (run(&self.decoder)?.to_dtype(DType::F32)?, run(&exact)?);
        Ok(format!("rel_l2 {:.1e} against f32; 17 frames of 256x256", relative_error(&got, &want)?))
    }

    /// The last frames against those of a clip that begins later: windows and depth keep what differs at its beginning from
    /// reaching them.
    fn error_of_the_end(&self) -> Result<String> {
        const LATER: usize = 8;
        const FRAMES: usize = 16;
        let whole = self.run()?;
        let (frames, drawn) = (whole.dim(2)?, whole.dims()[1..].to_vec());
        let noise = philox_normal(SEED, drawn, DType::BF16, &self.gpu.device)?.unsqueeze(0)?;
        let kept = frames - 8 * LATER;
        let noise = Noise::Given(noise.narrow(2, 8 * LATER, kept)?.contiguous()?);
        let latents = self.latents.narrow(2, LATER, self.latents.dim(2)? - LATER)?.contiguous()?;
        let part = self.decoder.decode(&latents, &self.options.clone().with_noise(noise), &Silent)?;
        let end = |clip: &Tensor, frames: usize| -> Result<Tensor> {
            Ok(clip.narrow(2, frames - FRAMES, FRAMES)?.to_dtype(DType::F32)?)
        };
        let error = relative_error(&end(&whole, frames)?, &end(&part, kept)?)?;
        ensure!(error < 5e-2, "the last frames are off by {error:.1e}");
        Ok(format!("rel_l2 {error:.1e} of the last {FRAMES} frames against a clip that begins {LATER} latents later"))
    }
}

fn config() -> Result<DiffusionDecoderConfig> {
    Ok(DiffusionDecoderConfig::from_json(&serde_json::from_str(CONFIG)?)?)
}

fn load(source: &Arc<RandomWeights>, dtype: DType, device: &Device) -> Result<DiffusionDecoder> {
    Ok(DiffusionDecoder::load(&config()?, source.clone(), &LoadOptions::new(device.clone(), dtype))?)
}
