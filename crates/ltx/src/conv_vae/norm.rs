//! The norm over channels, which has no weights, and SiLU behind it.

use candle_core::Tensor;
use candle_fork::{
    Activation, What,
    frames::{PixelNorm, Surround, surround},
    layout::from_stored,
    silu,
};

use super::layout::to_stored;
use crate::error::Result;

/// `silu(x / sqrt(mean over channels of x^2 + 1e-8))`.
const NORM_SILU: PixelNorm = PixelNorm { eps: 1e-8, activation: Activation::Silu };

/// Scale and shift of every channel, `[C]`; 1 is added to the scale.
pub(super) struct Modulation {
    pub(super) shift: Tensor,
    pub(super) scale: Tensor,
}

/// Frames `[B, C, T, H, W]` before a convolution, which may write their norm on its way.
pub(super) struct Input {
    pub(super) x: Tensor,
    pub(super) norm: Option<PixelNorm>,
}

impl Input {
    /// As they are.
    pub(super) fn plain(x: Tensor) -> Self {
        Self { x, norm: None }
    }

    /// Normalised, scaled and shifted if the network is conditioned, then SiLU.
    pub(super) fn normed(x: Tensor, modulation: Option<&Modulation>) -> Result<Self> {
        let Some(Modulation { shift, scale }) = modulation else { return Ok(Self { x, norm: Some(NORM_SILU) }) };
        let norm = PixelNorm { activation: Activation::None, ..NORM_SILU };
        let y = to_stored(&surround(None, &x, Some(norm), Surround::default())?)?;
        let y = (scale + 1.0).and_then(|scale| y.broadcast_mul(&scale)?.broadcast_add(shift));
        Ok(Self::plain(silu(&from_stored(&y.what("modulation by the timestep")?)?)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn the_epsilon_is_inside_of_the_root() {
        // The mean of squares is epsilon itself, so that the norm divides by sqrt(2e-8); SiLU of y is y / (1 + exp(-y)).
        let x = Tensor::new(&[1e-4f32, -1e-4], &Device::Cpu).unwrap().reshape((1, 2, 1, 1, 1)).unwrap();
        let zero = Tensor::zeros(2, x.dtype(), &Device::Cpu).unwrap();
        let none = Modulation { shift: zero.clone(), scale: zero };
        for modulation in [None, Some(&none)] {
            let Input { x, norm } = Input::normed(x.clone(), modulation).unwrap();
            let y = surround(None, &x, norm, Surround::default()).unwrap();
            let got = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (got, y) in got.into_iter().zip([0.5f64.sqrt(), -(0.5f64.sqrt())]) {
                let want = y / (1.0 + (-y).exp());
                assert!((f64::from(got) - want).abs() < 1e-6, "{got}, expected {want}");
            }
        }
    }
}
