//! Matrices of every block type in a GGUF file of another writer: read, and decoded as the package gguf decodes them.
//!
//! `goldens/gguf-types.safetensors` comes from `reference/gguf_types.py`.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use tests::{Container, Stored, data};
use weights::{Expected, GgmlType, Gguf, Loader, Quantisation, TensorSource};

/// Largest error in the largest value of a matrix: some decoders add in another order.
const ERROR: f32 = 1e-6;

fn floats(stored: &Stored) -> Vec<f32> {
    stored.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn every_supported_type_has_the_values_of_the_reference() -> Result<()> {
    let golden = Container::read(&data("goldens/gguf-types.safetensors"))?;
    let stored = |name: &str| golden.tensors.get(name).with_context(|| name.to_owned());
    let file = Gguf::from_bytes(Arc::new(stored("file")?.bytes.clone()), "types.gguf")?;
    let source: Arc<dyn TensorSource> = Arc::new(file);
    let plan: Vec<_> = source.tensors().iter().map(|t| Expected::new(t.name.clone(), t.shape.clone())).collect();
    let load = || Loader::new(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu);
    let (mut tensors, mut maps) = (load()?, load()?);

    let mut seen = BTreeSet::new();
    for info in source.tensors() {
        let Some(Quantisation::Ggml(kind)) = info.quantisation else { continue };
        ensure!(info.name == format!("{kind}.weight"), "{} is {kind}", info.name);
        seen.insert(kind);
        let want = stored(&format!("out.{kind}"))?;
        ensure!(info.shape == want.shape, "{kind}: {:?}", info.shape);
        let want = floats(want);
        let most = want.iter().fold(0f32, |most, v| most.max(v.abs()));
        // Scales of candle's types reach it by way of sums; the others are one product.
        let bound = if kind.to_candle().is_some() { ERROR * most } else { 0.0 };
        let check = |got: Vec<f32>, how: &str| -> Result<()> {
            ensure!(got.len() == want.len(), "{kind} {how}");
            let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            println!("{kind} {how}: worst error {worst:.1e}, largest value {most:.2}");
            ensure!(worst <= bound, "{kind} {how}: {worst:e} of {most}");
            Ok(())
        };
        check(tensors.tensor(&info.name)?.flatten_all()?.to_vec1()?, "as a tensor")?;
        // Kept in blocks: a product with the unit matrix.
        let map = maps.linear(&info.name)?;
        let unit = Tensor::eye(info.shape[1], DType::F32, &Device::Cpu)?;
        check(candle_fork::linear(&unit, &map, None)?.t()?.flatten_all()?.to_vec1()?, "as a map")?;
    }
    let supported: BTreeSet<_> = GgmlType::ALL.iter().copied().filter(|kind| kind.is_supported()).collect();
    ensure!(seen == supported, "{seen:?} {supported:?}");
    Ok(())
}
