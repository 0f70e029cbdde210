//! Matrices that comfy-kitchen has quantised: read, decoded and quantised here as there.
//!
//! `goldens/convrot-kitchen.safetensors` comes from `reference/kitchen_golden.py`. Kitchen multiplies by the scale before
//! it rotates back and we afterwards, so its sums are rounded in another order; bounds are multiples of a row's scale.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use tests::{Container, Stored, data};
use weights::{Safetensors, TensorSource, quant::fold};

/// Largest error of a decoded f32 element, in scales of its row.
const DECODED: f32 = 2e-3;

const ALL: [&str; 8] =
    ["rotated_256", "rotated_64", "rotated_16", "rotated_bf16", "plain_rows", "plain_tensor", "w4a4", "w4a8"];

fn golden() -> Result<Container> {
    Container::read(&data("goldens/convrot-kitchen.safetensors"))
}

/// The part of the golden that a user's file has, opened as one.
fn source(golden: &Container) -> Result<Arc<dyn TensorSource>> {
    let mut file = golden.clone();
    file.tensors.retain(|name, _| name.starts_with("blocks."));
    let file: Arc<dyn TensorSource> = Arc::new(Safetensors::from_bytes(Arc::new(file.to_bytes()), "kitchen")?);
    Ok(fold(file)?)
}

fn floats(stored: &Stored) -> Result<Vec<f32>> {
    ensure!(stored.dtype == "F32", "{}", stored.dtype);
    Ok(stored.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn stored<'a>(golden: &'a Container, name: &str) -> Result<&'a Stored> {
    golden.tensors.get(name).with_context(|| name.to_owned())
}

/// The scale of each row.
fn scales(golden: &Container, case: &str) -> Result<Vec<f32>> {
    let suffix = if case == "w4a8" { "weight_s_channel" } else { "weight_scale" };
    let scales = floats(stored(golden, &format!("blocks.0.{case}.{suffix}"))?)?;
    let rows = stored(golden, &format!("out.{case}"))?.shape[0];
    Ok((0..rows).map(|row| scales[row % scales.len()]).collect())
}

#[test]
fn decoded_matrices_are_kitchens() -> Result<()> {
    let golden = golden()?;
    let source = source(&golden)?;
    for case in ALL {
        let weight = source.quant(&format!("blocks.0.{case}.weight")).with_context(|| case.to_owned())?;
        let bf16 = case == "rotated_bf16";
        let dtype = if bf16 { DType::BF16 } else { DType::F32 };
        let got = weight.dequantize(dtype, &Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let want = floats(stored(&golden, &format!("out.{case}"))?)?;
        let scales = scales(&golden, case)?;
        let columns = got[0].len();
        let mut worst = 0f32;
        for (row, (got, want)) in got.iter().zip(want.chunks_exact(columns)).enumerate() {
            for (g, w) in got.iter().zip(want) {
                // One unit of the last place of the narrow type besides.
                let rounding = if bf16 { w.abs() / 128.0 } else { 0.0 };
                let error = ((g - w).abs() - rounding).max(0.0) / scales[row];
                worst = worst.max(error);
                ensure!(error <= DECODED, "{case}: {g} instead of {w} in row {row}, scale {}", scales[row]);
            }
        }
        println!("{case}: worst error {worst:.1e} of a scale");
    }
    Ok(())
}

#[test]
fn codes_and_scales_are_kitchens() -> Result<()> {
    let golden = golden()?;
    for (case, group, share) in
        // Kitchen rounds to bf16 after the rotation and after the division, we do not.
        [
            ("rotated_256", 256, 0.002),
            ("rotated_64", 64, 0.002),
            ("rotated_16", 16, 0.002),
            ("rotated_bf16", 256, 0.2),
        ]
    {
        let plain = stored(&golden, &format!("in.{case}"))?;
        let plain = Tensor::from_vec(floats(plain)?, plain.shape.as_slice(), &Device::Cpu)?;
        let (codes, scales) = candle_fork::quantize_int8_convrot(&plain, Some(group))?;
        let codes: Vec<u8> = codes.flatten_all()?.to_vec1()?;
        let theirs = &stored(&golden, &format!("blocks.0.{case}.weight"))?.bytes;
        let differences = codes.iter().zip(theirs).map(|(a, b)| (*a as i8).abs_diff(*b as i8));
        let (most, changed) = differences.fold((0, 0), |(most, n), d| (most.max(d), n + usize::from(d > 0)));
        println!("{case}: {changed} of {} codes differ, by {most} at most", codes.len());
        ensure!(most <= 2 && changed as f64 <= share * codes.len() as f64, "{case}: {changed} codes, by {most}");
        for (ours, theirs) in scales.to_vec1::<f32>()?.iter().zip(self::scales(&golden, case)?) {
            // As far apart as the largest element of a row that was rounded to bf16.
            let most = if case == "rotated_bf16" { 1.0 / 256.0 } else { 1e-6 };
            ensure!((ours - theirs).abs() <= most * theirs, "{case}: scale {ours} instead of {theirs}");
        }
    }
    Ok(())
}
