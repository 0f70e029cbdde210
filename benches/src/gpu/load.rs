//! Loading a checkpoint of 7.75 GB from a file onto the device.

use std::{path::Path, sync::Arc, time::Instant};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::stream::{HostBlock, Uploads};
use flux2::{Flux2Transformer, LoadOptions};
use weights::{Safetensors, TensorSource, ValueCheck};

use super::{Gpu, Options, peer};
use crate::{
    flux2::Klein,
    memory::peak_beside_files,
    record::{Row, Sink},
    synthetic::write_checkpoint,
};

/// Elements of the upload whose rate is the floor.
const PROBED: usize = 512 << 20;

/// GB/s of an upload from page-locked memory.
fn upload_rate(gpu: &Gpu) -> Result<f64> {
    let block = HostBlock::new(&Tensor::zeros(PROBED, DType::BF16, &Device::Cpu)?, &gpu.device)?;
    let slot = Tensor::zeros(PROBED, DType::BF16, &gpu.device)?;
    let uploads = Uploads::new(&gpu.device)?;
    let ms = gpu.clock(3, || Ok(uploads.start(&block, &slot)?.wait()?))?;
    Ok(2.0 * PROBED as f64 / ms / 1e6)
}

/// klein 4B's transformer from a file in the system's cache to the device, every value looked at; the floor is the upload of
/// its bytes. And the host's memory that it takes beside the file's pages.
///
/// # Errors
/// If the checkpoint cannot be written to `folder` (7.75 GB) or loaded, or `sink` fails.
pub fn rows(gpu: &Gpu, options: &Options, folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let config = Klein::FourB.transformer()?;
    let path = folder.join("transformer.safetensors");
    let start = Instant::now();
    write_checkpoint(&path, &Flux2Transformer::expected(&config), 0.02)?;
    let bytes = path.metadata()?.len() as f64;
    println!("{:.2} GB written in {:.1} s", bytes / 1e9, start.elapsed().as_secs_f64());

    let rate = upload_rate(gpu)?;
    println!("upload from page-locked memory: {rate:.1} GB/s");
    let load = |values| -> Result<()> {
        let source: Arc<dyn TensorSource> = Arc::new(Safetensors::open(&path)?);
        let options = LoadOptions::new(gpu.device.clone(), DType::BF16).with_values(values);
        let model = Flux2Transformer::load(&config, source, &options)?;
        // The device is done with the uploads before the model goes.
        gpu.device.synchronize()?;
        drop(model);
        Ok(())
    };
    let (_, peak) = peak_beside_files(|| load(ValueCheck::Finite))?;
    let checked = gpu.clock(3, || load(ValueCheck::Finite))?;
    let unchecked = gpu.clock(3, || load(ValueCheck::Off))?;
    let gbs = |ms: f64| bytes / ms / 1e6;
    println!("{:.1} GB/s, {:.1} GB/s without a look at the values", gbs(checked), gbs(unchecked));
    let peer = peer::load(options, &path);
    sink(Row {
        name: "load_flux2_klein4b",
        value: checked,
        unit: "ms",
        peer: peer.as_ref().map(|p| p.name.clone()).unwrap_or_default(),
        peer_value: peer.as_ref().and_then(|p| p.get("load").ok()),
        floor: Some(bytes / rate / 1e6),
        versions: gpu.versions.clone(),
        ..Row::default()
    })?;
    sink(Row {
        name: "load_flux2_klein4b_host_peak",
        value: peak as f64 / (1u64 << 30) as f64,
        unit: "GiB",
        versions: gpu.versions.clone(),
        ..Row::default()
    })
}
