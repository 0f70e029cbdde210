//! Which kind of latents a tensor looks like.

use candle_core::{DType, Tensor};
use candle_fork::What;

use crate::{
    error::{Error, Result},
    latents::Statistics,
};

/// Kinds of latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As the VAE's network makes and takes them.
    Raw,
    /// As a diffusion transformer sees them.
    Normalized,
}

/// How far a tensor's statistics are from those of either kind. Each is the mean over channels of the squared distance of
/// the means, in standard deviations, plus the squared difference of the logarithms of the standard deviations: 0 for
/// exactly the expected statistics, 1 if all means are off by a standard deviation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Likeness {
    /// From the statistics of raw latents.
    pub raw: f64,
    /// From mean 0 and standard deviation 1.
    pub normalized: f64,
}

/// A kind is named if the other is so many times as far away.
const CLEAR: f64 = 3.0;

impl Likeness {
    /// The kind that the latents look like, if the difference is clear. One short clip can deviate a good deal from the
    /// statistics of all clips, so this is for a warning, not for a decision.
    pub fn kind(&self) -> Option<Kind> {
        if self.raw * CLEAR < self.normalized {
            Some(Kind::Raw)
        } else if self.normalized * CLEAR < self.raw {
            Some(Kind::Normalized)
        } else {
            None
        }
    }
}

/// Compares latents `[z, n, h, w]` with the statistics of their VAE. Values that are not finite are left out.
///
/// # Errors
/// [`Error::Channels`] if there are not as many channels as statistics; [`Error::Op`].
pub fn likeness(latents: &Tensor, statistics: &Statistics) -> Result<Likeness> {
    let channels = latents.dims().first().copied().unwrap_or(0);
    if channels != statistics.mean().len() {
        return Err(Error::Channels { got: channels, expected: statistics.mean().len() });
    }
    let rows = latents.to_dtype(DType::F32).and_then(|x| x.flatten_from(1)?.to_vec2::<f32>());
    let rows = rows.what("statistics of latents")?;
    let mut sum = Likeness { raw: 0.0, normalized: 0.0 };
    for ((row, &mean), &std) in rows.iter().zip(statistics.mean()).zip(statistics.std()) {
        let (found_mean, found_std) = moments(row);
        let distance = |mean: f64, std: f64| {
            // A constant channel has no spread; a thousandth keeps the logarithm finite.
            let spread = (found_std.max(1e-3 * std) / std).ln();
            ((found_mean - mean) / std).powi(2) + spread.powi(2)
        };
        sum.raw += distance(mean.into(), std.into());
        sum.normalized += distance(0.0, 1.0);
    }
    let channels = channels as f64;
    Ok(Likeness { raw: sum.raw / channels, normalized: sum.normalized / channels })
}

/// Mean and standard deviation of the finite values, in two passes.
fn moments(values: &[f32]) -> (f64, f64) {
    let finite = || values.iter().filter(|v| v.is_finite()).map(|&v| f64::from(v));
    let count = finite().count().max(1) as f64;
    let mean = finite().sum::<f64>() / count;
    let variance = finite().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt())
}
