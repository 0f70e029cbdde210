//! Pixels as f32 within their range.

use candle_core::{D, DType, Tensor};

use super::{PatchOrder, argument, extents, rgb8::no_flag_is_set, unpatchify};
use crate::{
    error::{Result, What},
    operand::{check, shape_error},
};

/// Frames within -1..=1, and whether they were sound.
#[derive(Debug, Clone)]
pub struct ClampedFrames {
    pub(super) frames: Tensor,
    /// Not 0 where something was not finite, for any partition of the frames.
    pub(super) flags: Tensor,
}

impl ClampedFrames {
    /// The frames, f32 `[1, C, T, H, W]`, contiguous.
    pub fn frames(&self) -> &Tensor {
        &self.frames
    }

    /// Whether all values were finite. If not, the frames may hide it. Waits for the device.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the device fails.
    pub fn all_finite(&self) -> Result<bool> {
        no_flag_is_set(&self.flags)
    }
}

/// What a decoder gives as frames: squares of pixels unpacked, widened and clamped in one pass.
///
/// **Shapes**: x `[1, C p p, T, H, W]` with any strides and C of 1 to 4; frames `[1, C, T, H p, W p]`.
/// **Dtypes**: x f32, f16 or bf16; frames f32.
/// **Formula**: `clamp(y, -1, 1)` of what [`unpatchify`] puts at a pixel.
/// **Numerics**: exact; the same on every device, of finite values.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not such a tensor.
/// - [`crate::Error::Argument`] if the side is 0 or x tracks gradients.
/// - [`crate::Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::frames::{PatchOrder, clamped_frames};
/// let x = Tensor::new(&[-7f32, 0.25, 3.0], &Device::Cpu)?.reshape((1, 3, 1, 1, 1))?;
/// let clamped = clamped_frames(&x, 1, PatchOrder::RowMajor)?;
/// assert_eq!(clamped.frames().flatten_all()?.to_vec1::<f32>()?, [-1.0, 0.25, 1.0]);
/// assert!(clamped.all_finite()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn clamped_frames(x: &Tensor, side: usize, order: PatchOrder) -> Result<ClampedFrames> {
    const OP: &str = "clamped_frames";
    check(OP, &[("x", x)])?;
    if side == 0 {
        return Err(argument(OP, "the side of a square is 0".to_owned()));
    }
    let [n, packed, ..] = extents(OP, "x", x)?;
    let channels = packed / (side * side);
    if n != 1 || !(1..=4).contains(&channels) || packed != channels * side * side {
        return Err(shape_error(OP, "x", x, format!("[1, {} C, T, H, W] with C of 1 to 4", side * side)));
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return super::cuda::clamped_frames(x, &super::rgb8::Problem::new(x, side, order));
    }
    let wide = unpatchify(x, side, order)?.to_dtype(DType::F32).what(OP)?;
    // Zero times what is finite is zero.
    let zeros = wide.affine(0.0, 0.0).and_then(|zeros| zeros.sum(D::Minus1)?.flatten_all()?.ne(0f32)).what(OP)?;
    let flags = zeros.to_dtype(DType::U32).what(OP)?;
    Ok(ClampedFrames { frames: wide.clamp(-1f32, 1f32).and_then(|y| y.contiguous()).what(OP)?, flags })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{
        error::Error,
        testing::{DTYPES, Data, tensor, to_f64, views},
    };

    #[test]
    fn frames_are_unpacked_and_clamped() {
        for dtype in DTYPES {
            for (channels, side) in [(3, 1), (3, 4), (1, 2), (4, 2)] {
                let x = tensor(&[1, channels * side * side, 3, 2, 5], dtype, Data::Scaled(0.8), 1);
                for order in [PatchOrder::ColumnMajor, PatchOrder::RowMajor] {
                    let want: Vec<f64> =
                        to_f64(&unpatchify(&x, side, order).unwrap()).iter().map(|v| v.clamp(-1.0, 1.0)).collect();
                    for x in views(&x) {
                        let got = clamped_frames(&x, side, order).unwrap();
                        assert_eq!(got.frames().dims(), [1, channels, 3, 2 * side, 5 * side]);
                        assert!(got.frames().is_contiguous() && got.frames().dtype() == DType::F32);
                        assert!(
                            to_f64(got.frames()) == want && got.all_finite().unwrap(),
                            "{dtype:?} {channels} {side}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_told_and_what_does_not_fit_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let x = Tensor::new(&[0.5f32, 0.5, bad, 0.5, 0.5, 0.5], &Device::Cpu)
                .unwrap()
                .reshape((1, 3, 2, 1, 1))
                .unwrap();
            assert!(!clamped_frames(&x, 1, PatchOrder::RowMajor).unwrap().all_finite().unwrap(), "{bad}");
        }
        let x = |dims: &[usize]| tensor(dims, DType::F32, Data::Normal, 1);
        for dims in [&[2, 3, 1, 2, 2][..], &[1, 5, 1, 2, 2], &[1, 6, 1, 2, 2], &[3, 1, 2, 2]] {
            let refused = clamped_frames(&x(dims), 1, PatchOrder::RowMajor);
            assert!(matches!(refused, Err(Error::Shape { operand: "x", .. })), "{dims:?}");
        }
        assert!(matches!(clamped_frames(&x(&[1, 3, 1, 1, 1]), 0, PatchOrder::RowMajor), Err(Error::Argument { .. })));
    }
}
