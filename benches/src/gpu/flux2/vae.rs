//! The VAE's decoder: latents on the device to bytes on the host.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{cudnn_policy::take_counters, memory};
use flux2::{Flux2Vae, vae::Bands};
use policy::{ConvPolicy, Silent};

use super::{
    super::{Gpu, Options, floors::Floors, peer, relative_error},
    GIB, STD, load_options, row,
};
use crate::{
    flux2::{self as published, DECODE_1024_FLOP, VAE_JSON},
    record::{Row, Sink},
    synthetic::RandomWeights,
};

/// Timed runs.
const RUNS: usize = 21;

/// Bands as a run takes them.
const BANDS: Bands = Bands::OfBytes(Bands::BYTES);

/// A picture of 1024x1024 on the default path and with cuDNN's convolutions.
///
/// # Errors
/// If an op fails or a row cannot be kept.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let config = published::vae()?;
    let peers = peer::flux2(options, &["vae", VAE_JSON, "1024x1024"]);
    let weights = Arc::new(RandomWeights::new("vae", &Flux2Vae::expected(&config), STD));
    let load = |dtype, conv| -> Result<Flux2Vae> {
        let mut options = load_options(gpu, dtype);
        options.conv = conv;
        Ok(Flux2Vae::load(&config, weights.clone(), &options)?)
    };
    let latents = gpu.noise(1.0, &[1, config.packed_channels(), 64, 64], DType::F32)?;
    let want = load(DType::F32, ConvPolicy::Im2col)?.decode(&latents, &Silent)?;
    for (name, conv) in
        [("flux2_vae_1024_default", ConvPolicy::Im2col), ("flux2_vae_1024_cudnn", ConvPolicy::CudnnAuto)]
    {
        let vae = load(DType::BF16, conv)?;
        take_counters();
        let got = vae.decode(&latents, &Silent)?;
        println!("{name}: {:?}", take_counters());
        let banded = vae.decode_in(BANDS, &latents, &Silent)?;
        println!("{name}: bands are {:.1e} from the whole", relative_error(&banded, &got)?);
        drop(banded);
        let error =
            format!("psnr {:.1} dB rel_l2 {:.1e} against f32", psnr(&got, &want)?, relative_error(&got, &want)?);
        drop(got);
        memory::reset_peak(&gpu.device)?;
        let ms = gpu.clock(RUNS, || {
            Ok(vae.decode_rgb8(&latents, &Silent)?.pixels().flatten_all()?.to_vec1::<u8>().map(drop)?)
        })?;
        println!("{name}: peak {:.2} GiB", memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB);
        for side in [64, 128] {
            let latents = gpu.noise(1.0, &[1, config.packed_channels(), side, side], DType::F32)?;
            for bands in [Bands::Whole, BANDS] {
                memory::reset_peak(&gpu.device)?;
                let ms = gpu.clock(3, || Ok(vae.decode_rgb8_in(bands, &latents, &Silent).map(drop)?))?;
                let peak = memory::peak(&gpu.device)?.unwrap_or(0) as f64 / GIB;
                println!("{name}: {bands:?}, {} pixels a side: {ms:.1} ms, peak {peak:.2} GiB", 16 * side);
            }
        }
        sink(Row {
            floor: Some(DECODE_1024_FLOP / floors.bf16 / 1e9),
            error,
            ..row(gpu, name, ms, "ms", &peers, "vae")
        })?;
    }
    Ok(())
}

/// Of pictures in -1..=1, in decibels.
fn psnr(got: &Tensor, want: &Tensor) -> Result<f64> {
    let square = (got.to_dtype(DType::F32)? - want)?.sqr()?.flatten_to(2)?.mean(1)?.mean(0)?;
    Ok(10.0 * (4.0 / f64::from(square.to_scalar::<f32>()?)).log10())
}
