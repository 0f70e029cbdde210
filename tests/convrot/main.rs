//! ConvRot on the CPU: the published vectors, and what a quantised layer is off.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    LinearWeight, QuantMode, QuantWeight, convrot::take_counters, dequantize_int8_convrot, linear,
    quantize_int8_convrot,
};
use tests::{
    convrot::{check, host},
    gpu::{Failures, noise, relative_error, values},
};

#[test]
fn every_vector_bit_by_bit() -> Result<()> {
    let mut failures = Failures::default();
    check(&Device::Cpu, &mut failures)?;
    failures.finish("convrot vectors on the cpu")
}

/// A matrix with columns of 40 times the usual size, which is what rotation is for.
fn outliers(rows: usize, columns: usize, seed: u64) -> Result<Tensor> {
    let factors: Vec<f32> = (0..columns).map(|c| if c % 97 == 5 { 40.0 } else { 1.0 }).collect();
    Ok(noise(seed, 0.05, &[rows, columns], DType::F32)?.broadcast_mul(&Tensor::new(factors, &Device::Cpu)?)?)
}

fn quantized(weight: &Tensor, group: Option<usize>) -> Result<QuantWeight> {
    let (rows, columns) = weight.dims2()?;
    let (codes, scales) = quantize_int8_convrot(weight, group)?;
    Ok(QuantWeight::int8(host(codes.flatten_all()?.to_vec1()?, rows, columns)?, scales.to_vec1()?, group)?)
}

/// A rotation that is missing on both sides cancels in every test of equality; it does not in this one.
#[test]
fn rotation_is_worth_its_while() -> Result<()> {
    let (x, w) = (outliers(64, 1024, 1)?, outliers(256, 1024, 2)?);
    // Outliers of x and w meet in different columns.
    let x = Tensor::cat(&[&x.narrow(1, 500, 524)?, &x.narrow(1, 0, 500)?], 1)?;
    let exact = values(&linear(&x, &LinearWeight::from_tensor(w.clone())?, None)?)?;
    let error = |group, mode| -> Result<f64> {
        let weight = LinearWeight::from_quant(quantized(&w, group)?, mode, DType::F32, &Device::Cpu)?;
        take_counters();
        let error = relative_error(&values(&linear(&x, &weight, None)?)?, &exact);
        anyhow::ensure!(take_counters().cpu == u64::from(mode == QuantMode::W8A8), "another path was taken");
        Ok(error)
    };
    let (rotated, plain) = (error(Some(256), QuantMode::W8A8)?, error(None, QuantMode::W8A8)?);
    assert!(rotated < 0.03, "{rotated}");
    assert!(plain > 2.0 * rotated, "{plain} {rotated}");
    let decoded = error(Some(256), QuantMode::DequantizePerLayer)?;
    assert!(decoded < rotated, "{decoded} {rotated}");
    Ok(())
}

/// Sylvester's order has everything that the matrix is known by but the published rows.
#[test]
fn sylvester_is_told_apart() -> Result<()> {
    let codes: Vec<u8> = (0..256u32).map(|i| (i * 37 % 256) as u8).collect();
    let tensor = Tensor::from_slice(&codes, (1, 256), &Device::Cpu)?;
    let ours = dequantize_int8_convrot(&tensor, &Tensor::new(&[16f32], &Device::Cpu)?, Some(256), DType::F32)?;
    let mut sylvester: Vec<f32> = codes.iter().map(|&q| f32::from(q as i8)).collect();
    for stride in (0..8).map(|i| 1 << i) {
        for block in sylvester.chunks_exact_mut(2 * stride) {
            let (a, b) = block.split_at_mut(stride);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
    }
    let ours: Vec<f32> = ours.flatten_all()?.to_vec1()?;
    let norm = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>();
    assert_eq!(norm(&ours), norm(&sylvester));
    let equal = ours.iter().zip(&sylvester).filter(|(a, b)| a == b).count();
    assert!(equal < 16, "{equal} elements agree");
    Ok(())
}
