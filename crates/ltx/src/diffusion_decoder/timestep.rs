//! From a timestep to what it gives to every block.

use candle_core::{DType, Device, Tensor};
use candle_fork::{What, silu};

use super::{
    block::{BlockModulation, DiffusionBlock},
    names::{CHUNKS, SINUSOID},
    parts::{Linear, Parts},
};
use crate::error::Result;

/// `proj(silu(linear_2(silu(linear_1(sinusoid)))))`, in f32 throughout: modulations are large, and a step has one.
#[derive(Debug)]
pub(super) struct Timestep {
    linear_1: Linear,
    linear_2: Linear,
    proj: Linear,
    multiplier: f64,
}

impl Timestep {
    pub(super) fn load(parts: &mut Parts<'_>, multiplier: f64) -> Result<Self> {
        Ok(Self {
            linear_1: parts.linear("decoder.t_embedder.timestep_embedder.linear_1")?,
            linear_2: parts.linear("decoder.t_embedder.timestep_embedder.linear_2")?,
            proj: parts.linear("decoder.shared_adaln.proj")?,
            multiplier,
        })
    }

    /// The chunks that all blocks share at `t` in 0..=1, `[7, C]` f32.
    pub(super) fn chunks(&self, t: f32, device: &Device) -> Result<Tensor> {
        let row = sinusoid(self.multiplier as f32 * t);
        let x = Tensor::from_vec(row, (1, SINUSOID), device).what("sinusoid")?;
        let embedding = self.linear_2.forward(&silu(&self.linear_1.forward(&x)?)?)?;
        let chunks = self.proj.forward(&silu(&embedding)?)?;
        let width = chunks.elem_count() / CHUNKS;
        Ok(chunks.reshape((CHUNKS, width)).and_then(|chunks| chunks.to_dtype(DType::F32)).what("modulation")?)
    }

    /// The modulation of each block at `t`.
    pub(super) fn modulations(
        &self,
        t: f32,
        blocks: &[DiffusionBlock],
        device: &Device,
    ) -> Result<Vec<BlockModulation>> {
        let chunks = self.chunks(t, device)?;
        blocks.iter().map(|block| block.modulation(&chunks)).collect()
    }
}

/// Cosines of `value` times the frequencies `10000^(-i/128)`, then sines; in f32 like the reference, whose rounding of the
/// frequencies is part of its results.
fn sinusoid(value: f32) -> Vec<f32> {
    let half = SINUSOID / 2;
    let angle = |i: usize| value * (-(10_000f32.ln()) * i as f32 / half as f32).exp();
    (0..half).map(|i| angle(i).cos()).chain((0..half).map(|i| angle(i).sin())).collect()
}

/// The timesteps of a run: from 1 down in equal steps, 0 is where the last one arrives.
pub(super) fn timesteps(steps: usize) -> Vec<f32> {
    let n = steps as f64;
    (0..steps).map(|i| ((n - i as f64) / n) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timesteps_end_one_step_above_nothing() {
        assert_eq!(timesteps(1), [1.0]);
        assert_eq!(timesteps(4), [1.0, 0.75, 0.5, 0.25]);
    }

    #[test]
    fn cosines_come_first() {
        let row = sinusoid(1000.0);
        assert_eq!(row.len(), SINUSOID);
        assert!((row[0] - 1000f32.cos()).abs() < 1e-6 && (row[128] - 1000f32.sin()).abs() < 1e-6);
        // 10000^(-64/128) is a hundredth.
        assert!((f64::from(row[64]) - 10f64.cos()).abs() < 2e-5, "{}", row[64]);
    }
}
