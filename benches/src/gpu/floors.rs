//! What the card can do at best, measured in the same run: matrix products and copies.

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::Gpu;

/// Ceilings of a card.
#[derive(Debug, Clone, Copy)]
pub struct Floors {
    /// TFLOP/s of a bf16 matrix product of side 8192, random values.
    pub bf16: f64,
    /// TFLOP/s of an f32 matrix product of side 8192, without TF32.
    pub f32: f64,
    /// GB/s of a copy on the device, reads and writes counted.
    pub copy: f64,
}

const SIDE: usize = 8192;
const COPIED: usize = 2 << 30;

impl Floors {
    /// Measures them.
    ///
    /// # Errors
    /// If an op fails.
    pub fn measure(gpu: &Gpu) -> Result<Self> {
        let product = |dtype, runs| -> Result<f64> {
            let (a, b) = (gpu.noise(1.0, &[SIDE, SIDE], dtype)?, gpu.noise(1.0, &[SIDE, SIDE], dtype)?);
            let ms = gpu.time(3, runs, |_| Ok(a.matmul(&b).map(drop)?))?;
            Ok(2.0 * (SIDE as f64).powi(3) / ms / 1e9)
        };
        let bytes = Tensor::zeros(COPIED, DType::U8, &gpu.device)?;
        let ms = gpu.time(3, 20, |_| Ok(bytes.copy().map(drop)?))?;
        let floors = Self {
            bf16: product(DType::BF16, 20)?,
            f32: product(DType::F32, 5)?,
            copy: 2.0 * COPIED as f64 / ms / 1e6,
        };
        println!(
            "ceilings: bf16 {:.0} TFLOP/s, f32 {:.1} TFLOP/s, copy {:.0} GB/s",
            floors.bf16, floors.f32, floors.copy
        );
        Ok(floors)
    }
}
