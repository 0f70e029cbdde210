//! The forms of latents: cells, 2x2 patches of cells, tokens; and their normalisation.

use candle_core::{DType, Tensor};
use candle_fork::What;
use weights::Loader;

use crate::error::{Error, Result};

/// Gathers patches: `[B, c, p h, q w]` to `[B, c p q, h, w]`; channel `(c p + y) q + x` of a cell is its pixel (y, x).
///
/// # Errors
/// [`Error::Shape`] if x has another rank or extents that the patch does not divide.
pub fn patchify(x: &Tensor, [p, q]: [usize; 2]) -> Result<Tensor> {
    let (b, c, h, w) = match *x.dims() {
        [b, c, h, w] if p * q > 0 && h.is_multiple_of(p) && w.is_multiple_of(q) => (b, c, h / p, w / q),
        _ => return Err(shape("latents", x, format!("[B, c, {p} h, {q} w]"))),
    };
    let split = x.reshape((b, c, h, p, w, q)).and_then(|x| x.permute((0, 1, 3, 5, 2, 4)));
    Ok(split.and_then(|x| x.reshape((b, c * p * q, h, w))).what("patchify")?)
}

/// The inverse of [`patchify`]: `[B, c p q, h, w]` to `[B, c, p h, q w]`.
///
/// # Errors
/// [`Error::Shape`] if x has another rank or channels that the patch does not divide.
pub fn unpatchify(x: &Tensor, [p, q]: [usize; 2]) -> Result<Tensor> {
    let (b, c, h, w) = match *x.dims() {
        [b, c, h, w] if p * q > 0 && c.is_multiple_of(p * q) => (b, c / (p * q), h, w),
        _ => return Err(shape("packed latents", x, format!("[B, {} c, h, w]", p * q))),
    };
    let split = x.reshape((b, c, p, q, h, w)).and_then(|x| x.permute((0, 1, 4, 2, 5, 3)));
    Ok(split.and_then(|x| x.reshape((b, c, h * p, w * q))).what("unpatchify")?)
}

/// Latents as tokens, row by row: `[B, C, h, w]` to `[B, h w, C]`.
///
/// # Errors
/// [`Error::Shape`] if x has another rank.
pub fn to_tokens(x: &Tensor) -> Result<Tensor> {
    if x.rank() != 4 {
        return Err(shape("packed latents", x, "[B, C, h, w]".to_owned()));
    }
    Ok(x.flatten(2, 3).and_then(|x| x.transpose(1, 2)).and_then(|x| x.contiguous()).what("latents to tokens")?)
}

/// The inverse of [`to_tokens`] for a grid of (rows, columns): `[B, h w, C]` to `[B, C, h, w]`.
///
/// # Errors
/// [`Error::Shape`] if x has another rank or number of tokens.
pub fn from_tokens(x: &Tensor, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let (batch, channels) = match *x.dims() {
        [batch, tokens, channels] if rows.checked_mul(columns) == Some(tokens) => (batch, channels),
        _ => return Err(shape("latent tokens", x, format!("[B, {rows} x {columns}, C]"))),
    };
    Ok(x.transpose(1, 2).and_then(|x| x.reshape((batch, channels, rows, columns))).what("latents from tokens")?)
}

/// Mean and standard deviation of every channel of the packed latents, in f32.
#[derive(Debug)]
pub(super) struct Statistics {
    mean: Tensor,
    std: Tensor,
}

impl Statistics {
    /// Tensors of a checkpoint: mean and variance.
    pub(super) const NAMES: [&'static str; 2] = ["bn.running_mean", "bn.running_var"];

    /// `std = sqrt(running_var + eps)`.
    pub(super) fn load(loader: &mut Loader, eps: f64) -> Result<Self> {
        let [mean, variance] = Self::NAMES;
        Self::new(&loader.tensor(mean)?, &loader.tensor(variance)?, eps)
    }

    /// # Errors
    /// [`Error::LatentVariance`] if a variance and eps have no positive sum.
    fn new(mean: &Tensor, variance: &Tensor, eps: f64) -> Result<Self> {
        let variance = variance.to_dtype(DType::F32).what("running_var")?;
        for (channel, value) in variance.to_vec1::<f32>().what("running_var")?.into_iter().enumerate() {
            let sum = f64::from(value) + eps;
            if sum.is_nan() || sum <= 0.0 {
                return Err(Error::LatentVariance { channel, value });
            }
        }
        let per_channel = |x: &Tensor| x.reshape((1, (), 1, 1)).what("latent statistics");
        let std = (variance + eps).and_then(|x| x.sqrt()).what("latent deviation")?;
        let mean = mean.to_dtype(DType::F32).what("running_mean")?;
        Ok(Self { mean: per_channel(&mean)?, std: per_channel(&std)? })
    }

    /// `(x - mean) / std` of packed latents, in f32.
    pub(super) fn normalise(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::F32).and_then(|x| x.broadcast_sub(&self.mean));
        Ok(x.and_then(|x| x.broadcast_div(&self.std)).what("normalised latents")?)
    }

    /// `x std + mean` of packed latents, in f32.
    pub(super) fn denormalise(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.to_dtype(DType::F32).and_then(|x| x.broadcast_mul(&self.std));
        Ok(x.and_then(|x| x.broadcast_add(&self.mean)).what("denormalised latents")?)
    }
}

fn shape(what: &'static str, x: &Tensor, expected: String) -> Error {
    Error::Shape { what, got: x.dims().to_vec(), expected }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The values 0, 1, 2 ... in row-major order.
    fn ramp(dims: [usize; 4]) -> Tensor {
        Tensor::arange(0f32, dims.iter().product::<usize>() as f32, &Device::Cpu)
            .unwrap()
            .reshape(dims.to_vec())
            .unwrap()
    }

    fn values(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn patch_channels_are_channel_then_row_then_column() {
        let (b, c, h, w, [p, q]) = (2, 3, 2, 4, [2, 3]);
        let x = ramp([b, c, h * p, w * q]);
        let packed = patchify(&x, [p, q]).unwrap();
        assert_eq!(packed.dims(), [b, c * p * q, h, w]);
        let packed_values = values(&packed);
        for n in 0..b {
            for channel in 0..c * p * q {
                let (source, y, dx) = (channel / (p * q), channel / q % p, channel % q);
                for row in 0..h {
                    for column in 0..w {
                        let want = ((n * c + source) * h * p + row * p + y) * w * q + column * q + dx;
                        let got = packed_values[((n * c * p * q + channel) * h + row) * w + column];
                        assert_eq!(got, want as f32, "{n} {channel} {row} {column}");
                    }
                }
            }
        }
        assert_eq!(values(&unpatchify(&packed, [p, q]).unwrap()), values(&x));
    }

    #[test]
    fn tokens_go_row_by_row() {
        let x = ramp([2, 3, 2, 2]);
        let tokens = to_tokens(&x).unwrap();
        assert_eq!(tokens.dims(), [2, 4, 3]);
        assert_eq!(values(&tokens)[..6], [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]);
        assert_eq!(values(&from_tokens(&tokens, (2, 2)).unwrap()), values(&x));
    }

    #[test]
    fn misfits_are_refused() {
        let x = ramp([1, 6, 3, 4]);
        assert!(matches!(patchify(&x, [2, 2]), Err(Error::Shape { .. })));
        assert!(matches!(unpatchify(&x, [2, 2]), Err(Error::Shape { .. })));
        assert!(matches!(patchify(&x.flatten_all().unwrap(), [2, 2]), Err(Error::Shape { .. })));
        assert!(matches!(to_tokens(&x.flatten_all().unwrap()), Err(Error::Shape { .. })));
        assert!(matches!(from_tokens(&x.flatten(2, 3).unwrap(), (2, 2)), Err(Error::Shape { .. })));
    }

    #[test]
    fn statistics_undo_themselves() {
        let vector = |v: &[f32]| Tensor::from_slice(v, v.len(), &Device::Cpu).unwrap();
        let statistics = Statistics::new(&vector(&[0.5, -2.0]), &vector(&[3.0, 0.0]), 1.0).unwrap();
        let x = ramp([1, 2, 1, 2]);
        let raw = statistics.denormalise(&x).unwrap();
        assert_eq!(values(&raw), [0.5, 2.5, 0.0, 1.0]);
        assert_eq!(values(&statistics.normalise(&raw).unwrap()), values(&x));
        for bad in [-1.0, f32::NAN] {
            let refused = Statistics::new(&vector(&[0.0, 0.0]), &vector(&[1.0, bad]), 1.0);
            assert!(matches!(refused, Err(Error::LatentVariance { channel: 1, .. })), "{bad}");
        }
    }
}
