//! Nearest doubling and a 3 x 3 convolution behind it as four 2 x 2 convolutions of the small image, one for each parity of
//! row and column of the result: taps that fall on the same pixel are added once and for all. 4/9 of the work, and the large
//! image is never made.

use candle_core::{DType, Tensor};

use super::{ConvParams, OP, conv_nd};
use crate::{
    error::{Error, Result, What},
    layout,
    resample::interleave2d,
};

/// Zeros before and after an axis for the outputs of even and of odd index: rows `y - 1, y` and `y, y + 1`.
const PADDING: [(usize, usize); 2] = [(1, 0), (0, 1)];

/// Filters of [`upsample_conv2d`], made once of those of the 3 x 3 convolution.
#[derive(Debug, Clone)]
pub struct ParityFilters([Tensor; 4]);

impl ParityFilters {
    /// From `[K, C, 3, 3]`. Sums of taps are made in f32, and kept so on the CPU; elsewhere they are rounded to the weight's
    /// dtype, and lie as convolutions there read them.
    ///
    /// # Errors
    /// [`Error::Shape`] for another shape; [`Error::Candle`] if candle fails.
    pub fn new(weight: &Tensor) -> Result<Self> {
        const WHAT: &str = "taps of an upsampling convolution";
        if !matches!(weight.dims(), [_, _, 3, 3]) {
            let (got, expected) = (weight.dims().to_vec(), "[K, C, 3, 3]".into());
            return Err(Error::Shape { op: OP, operand: "weight", got, expected });
        }
        let dtype = if weight.device().is_cpu() { DType::F32 } else { weight.dtype() };
        let weight = weight.to_dtype(DType::F32).what(WHAT)?;
        let along = |w: &Tensor, axis: usize, parity: usize| {
            let tap = |i: usize| w.narrow(axis, i, 1);
            let pair = match parity {
                0 => [tap(0)?, (tap(1)? + tap(2)?)?],
                _ => [(tap(0)? + tap(1)?)?, tap(2)?],
            };
            Tensor::cat(&pair, axis)
        };
        let part = |parity: usize| -> Result<Tensor> {
            let part = along(&weight, 2, parity / 2).and_then(|rows| along(&rows, 3, parity % 2));
            layout::native(&part.and_then(|part| part.to_dtype(dtype)).what(WHAT)?)
        };
        Ok(Self([part(0)?, part(1)?, part(2)?, part(3)?]))
    }

    /// The filters for outputs (even, even), (even, odd), (odd, even), (odd, odd), each `[K, C, 2, 2]`.
    pub fn filters(&self) -> &[Tensor; 4] {
        &self.0
    }
}

/// The convolution of one parity.
pub(super) fn params(parity: usize) -> ConvParams<2> {
    ConvParams { padding: [PADDING[parity / 2], PADDING[parity % 2]], ..ConvParams::default() }
}

/// Nearest doubling of x, then a 3 x 3 convolution with one zero around.
///
/// **Shapes**: x `[N, C, H, W]` with any strides, filters of `[K, C, 3, 3]`, bias `[K]`; result `[N, K, 2 H, 2 W]`.
/// **Dtypes**, **Numerics**, **Policy**: as [`conv_nd`]; the filters' taps have been added up before.
/// **Formula**: `conv2d(upsample_nearest2d(x, 2), weight, padding 1) + bias`.
///
/// # Errors
/// As [`conv_nd`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::conv::{ParityFilters, upsample_conv2d};
/// // One pixel becomes four; each has all four of them around it, and zeros outside.
/// let filters = ParityFilters::new(&Tensor::ones((1, 1, 3, 3), DType::F32, &Device::Cpu)?)?;
/// let y = upsample_conv2d(&Tensor::ones((1, 1, 1, 1), DType::F32, &Device::Cpu)?, &filters, None)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4.0; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn upsample_conv2d(x: &Tensor, filters: &ParityFilters, bias: Option<&Tensor>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(y) = super::cuda::upsample(x, filters, bias)? {
        return Ok(y);
    }
    let [p0, p1, p2, p3] = filters.filters();
    let part = |weight: &Tensor, parity: usize| conv_nd(x, weight, bias, &params(parity));
    interleave2d(&[part(p0, 0)?, part(p1, 1)?, part(p2, 2)?, part(p3, 3)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        resample::upsample_nearest2d,
        testing::{Data, tensor, to_f64},
    };

    #[test]
    fn four_parities_are_the_convolution_of_the_doubled_image() {
        for [n, c, k, h, w] in [[1, 1, 1, 1, 1], [2, 3, 5, 4, 7], [1, 16, 24, 9, 8]] {
            let x = tensor(&[n, c, h, w], DType::F32, Data::Normal, 1);
            let weight = tensor(&[k, c, 3, 3], DType::F32, Data::Normal, 2);
            let bias = tensor(&[k], DType::F32, Data::Normal, 3);
            let padding = [(1, 1); 2];
            let large = upsample_nearest2d(&x, 2).unwrap();
            let want = conv_nd(&large, &weight, Some(&bias), &ConvParams { padding, ..Default::default() }).unwrap();
            let got = upsample_conv2d(&x, &ParityFilters::new(&weight).unwrap(), Some(&bias)).unwrap();
            assert_eq!(got.dims(), want.dims());
            let largest = to_f64(&want).iter().fold(1.0, |m: f64, y| m.max(y.abs()));
            for (got, want) in to_f64(&got).iter().zip(to_f64(&want)) {
                assert!((got - want).abs() <= 1e-5 * largest, "{n} {c} {k} {h} {w}: {got} {want}");
            }
        }
    }

    #[test]
    fn other_filters_are_refused() {
        let weight = tensor(&[2, 3, 3, 2], DType::F32, Data::Normal, 1);
        assert!(matches!(ParityFilters::new(&weight), Err(Error::Shape { operand: "weight", .. })));
    }
}
