//! Loading a checkpoint of 7.75 GB, mapped.

use std::{path::Path, sync::Arc};

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device};
use flux2::{Flux2Transformer, LoadOptions};
use rayon::prelude::*;
use weights::{Safetensors, TensorSource, ValueCheck};

use crate::{
    flux2::Klein,
    memory::peak_beside_files,
    record::{Row, Sink},
    synthetic::write_checkpoint,
    timing::medians,
};

/// Bytes that a thread reads in one go.
const PIECE: usize = 1 << 20;

/// Reads every byte of a source once, mapped afresh: what a load that looks at all values cannot beat.
fn touch(path: &Path) -> Result<()> {
    let source = Safetensors::open(path)?;
    let any = source.tensors().iter().try_fold(0u64, |any, tensor| -> Result<u64> {
        let words = |piece: &[u8]| piece.as_chunks().0.iter().fold(0, |any, word| any | u64::from_le_bytes(*word));
        Ok(any | source.bytes(&tensor.name)?.par_chunks(PIECE).map(words).reduce(|| 0, |a, b| a | b))
    })?;
    ensure!(any != 0, "a checkpoint of zeros");
    Ok(())
}

/// klein 4B's transformer from a file in the system's cache to a model that can be called, every value looked at; the floor
/// is one pass over the mapped bytes. And the memory that it takes beside them.
///
/// # Errors
/// If the checkpoint cannot be written to `folder` (7.75 GB) or loaded, or `sink` fails.
pub fn rows(folder: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let config = Klein::FourB.transformer()?;
    let path = folder.join("transformer.safetensors");
    write_checkpoint(&path, &Flux2Transformer::expected(&config), 0.02)?;
    let load = |values| -> Result<Flux2Transformer> {
        let source: Arc<dyn TensorSource> = Arc::new(Safetensors::open(&path)?);
        let options = LoadOptions::new(Device::Cpu, DType::F32).with_values(values);
        Ok(Flux2Transformer::load(&config, source, &options)?)
    };
    let (_, peak) = peak_beside_files(|| load(ValueCheck::Finite).map(drop))?;
    let times = medians(
        3,
        &mut [&mut || load(ValueCheck::Finite).map(drop), &mut || load(ValueCheck::Off).map(drop), &mut || {
            touch(&path)
        }],
    )?;
    let [checked, unchecked, touched] = times[..] else { bail!("a time for each arm") };
    println!("without a look at the values: {:.1} ms", unchecked.as_secs_f64() * 1e3);
    sink(Row {
        name: "cpu_load_flux2_klein4b",
        value: checked.as_secs_f64(),
        unit: "s",
        floor: Some(touched.as_secs_f64()),
        ..Row::default()
    })?;
    let peak = peak as f64 / (1u64 << 30) as f64;
    sink(Row { name: "cpu_load_flux2_klein4b_peak", value: peak, unit: "GiB", ..Row::default() })
}
