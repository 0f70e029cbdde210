//! Conditioning on a timestep.

use candle_core::{DType, Device, Tensor};
use candle_fork::{What, nn::Linear, silu};

use super::{builder::Builder, norm::Modulation};
use crate::error::Result;

/// Length of a timestep's sinusoid.
pub(super) const FREQUENCIES: usize = 256;

/// The sinusoid of `scale * timestep` through two linear maps with SiLU between them.
#[derive(Debug)]
pub(super) struct TimeEmbedder {
    first: Linear,
    second: Linear,
    scale: f64,
    dtype: DType,
    device: Device,
}

impl TimeEmbedder {
    /// The embedder at `PREFIX.timestep_embedder`.
    pub(super) fn load(builder: &mut Builder<'_>, prefix: &str, scale: f64, at: (DType, &Device)) -> Result<Self> {
        let prefix = format!("{prefix}.timestep_embedder");
        Ok(Self {
            first: builder.linear(&format!("{prefix}.linear_1"))?,
            second: builder.linear(&format!("{prefix}.linear_2"))?,
            scale,
            dtype: at.0,
            device: at.1.clone(),
        })
    }

    /// `[rows, C]` of the embedding `[rows C]`.
    pub(super) fn forward(&self, timestep: f64, rows: usize) -> Result<Tensor> {
        let sinusoid = Tensor::from_vec(sinusoid(self.scale * timestep), (1, FREQUENCIES), &self.device);
        let sinusoid = sinusoid.and_then(|s| s.to_dtype(self.dtype)).what("sinusoid of a timestep")?;
        let embedding = self.second.forward(&silu(&self.first.forward(&sinusoid)?)?)?;
        Ok(embedding.reshape((rows, ())).what("embedding of a timestep")?)
    }
}

/// Cosines, then sines, of the angle times `10000^(-i / 128)`.
fn sinusoid(angle: f64) -> Vec<f32> {
    let half = FREQUENCIES / 2;
    let angles = (0..half).map(|i| angle * 10_000f64.powf(-(i as f64) / half as f64));
    angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|v| v as f32).collect()
}

/// Rows of shift and scale, in turn: those of the table plus those of the embedding, `[2 n, C]` each.
pub(super) fn modulations(table: &Tensor, embedding: &Tensor) -> Result<Vec<Modulation>> {
    const WHAT: &str = "modulation by the timestep";
    let rows = (table + embedding).what(WHAT)?;
    let count = rows.dim(0).what(WHAT)?;
    let row = |index: usize| rows.get(index).what(WHAT);
    (0..count / 2).map(|half| Ok(Modulation { shift: row(2 * half)?, scale: row(2 * half + 1)? })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines_come_first() {
        let s = sinusoid(50.0);
        assert_eq!(s.len(), 256);
        assert!((f64::from(s[0]) - 50f64.cos()).abs() < 1e-7 && (f64::from(s[128]) - 50f64.sin()).abs() < 1e-7);
        // The 64th frequency of 128 is 10000^(-1/2).
        assert!((f64::from(s[64]) - 0.5f64.cos()).abs() < 1e-7 && (f64::from(s[192]) - 0.5f64.sin()).abs() < 1e-7);
    }
}
