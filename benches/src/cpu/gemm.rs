//! The machine's own matrix product, and ours with bf16 weights.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fork::{HostTensor, LinearWeight};

use crate::{
    record::{Row, Sink},
    timing::{gflops, medians},
};

/// The shape at which the machine is rated: 768 tokens through a projection of klein 4B.
pub const RATED: (usize, usize, usize) = (768, 3072, 9216);

/// Rate of candle's f32 matmul, and of our linear layer over bf16 weights, at [`RATED`].
///
/// # Errors
/// If an op or `sink` fails.
pub fn rows(sink: &mut Sink<'_>) -> Result<()> {
    let (m, k, n) = RATED;
    let x = Tensor::randn(0f32, 1., (m, k), &Device::Cpu)?;
    let w = Tensor::randn(0f32, 0.02, (n, k), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let widened = w.to_dtype(DType::F32)?;
    let weight = LinearWeight::from_host(host(&w)?)?;
    let times = medians(
        9,
        &mut [
            &mut || {
                x.matmul(&widened.t()?)?;
                Ok(())
            },
            &mut || {
                candle_fork::linear(&x, &weight, None)?;
                Ok(())
            },
        ],
    )?;
    let flop = 2.0 * (m * k * n) as f64;
    let candle = gflops(flop, times[0]);
    let error = relative_error(&candle_fork::linear(&x, &weight, None)?, &x.matmul(&widened.t()?)?)?;
    sink(Row { name: "cpu_gemm_f32", value: candle, unit: "GFLOP/s", ..Row::default() })?;
    sink(Row {
        name: "cpu_linear_bf16",
        value: gflops(flop, times[1]),
        unit: "GFLOP/s",
        peer: "candle f32 matmul".into(),
        peer_value: Some(candle),
        error: format!("rel_l2 {error:.1e} against candle f32"),
        ..Row::default()
    })
}

/// candle's f32 rate at [`RATED`] alone, GFLOP/s.
///
/// # Errors
/// If candle fails.
pub fn rate(runs: usize) -> Result<f64> {
    let (m, k, n) = RATED;
    let x = Tensor::randn(0f32, 1., (m, k), &Device::Cpu)?;
    let w = Tensor::randn(0f32, 0.02, (n, k), &Device::Cpu)?;
    let time = crate::timing::median(runs, || Ok(x.matmul(&w.t()?)?))?;
    Ok(gflops(2.0 * (m * k * n) as f64, time))
}

fn host(w: &Tensor) -> Result<HostTensor> {
    let bytes: Vec<u8> = w.flatten_all()?.to_vec1::<half::bf16>()?.iter().flat_map(|v| v.to_le_bytes()).collect();
    let len = bytes.len();
    Ok(HostTensor::new(std::sync::Arc::new(bytes), 0..len, DType::BF16, w.dims())?)
}

/// `|a - b| / |b|` in the Euclidean norm.
///
/// # Errors
/// If candle fails.
pub fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    let norm = |t: &Tensor| -> Result<f64> { Ok(t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()) };
    Ok(norm(&(a - b)?)? / norm(b)?)
}
