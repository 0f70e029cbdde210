//! Pixels as bytes.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Device, Tensor};

use super::{PatchOrder, argument, extents};
use crate::{
    element::{Element, with_element},
    error::{Result, What},
    operand::{RowKernel, check, for_each_row, read, shape_error},
};

/// Frames as bytes, and whether they were sound.
#[derive(Debug, Clone)]
pub struct Rgb8Frames {
    pub(super) pixels: Tensor,
    /// Not 0 where something was not finite, for any partition of the frames.
    pub(super) flags: Tensor,
}

impl Rgb8Frames {
    #[cfg(feature = "cuda")]
    pub(super) fn new(pixels: Tensor, flags: Tensor) -> Self {
        Self { pixels, flags }
    }

    /// The bytes, u8 `[T, H, W, C]`, contiguous, on the device of the frames.
    pub fn pixels(&self) -> &Tensor {
        &self.pixels
    }

    /// Whether all values were finite. If not, the bytes hide that the run is broken: NaN became 0, an infinity an end
    /// of the range. Waits for the device.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the device fails.
    pub fn all_finite(&self) -> Result<bool> {
        no_flag_is_set(&self.flags)
    }
}

/// Whether all flags, u32, are 0. Waits for the device.
pub(super) fn no_flag_is_set(flags: &Tensor) -> Result<bool> {
    let flags = flags.flatten_all().and_then(|flags| flags.to_vec1::<u32>()).what("flags of frames")?;
    Ok(flags.iter().all(|&flag| flag == 0))
}

/// What a decoder gives, values in -1..=1, as interleaved bytes: squares of pixels unpacked, clamped, scaled and
/// rounded in one pass.
///
/// **Shapes**: x `[1, C p p, T, H, W]` with any strides and C of 1 to 4 (3 for red, green and blue); pixels
/// `[T, H p, W p, C]`.
/// **Dtypes**: x f32, f16 or bf16; u8.
/// **Formula**: `round(255 clamp(x / 2 + 1 / 2, 0, 1))` in f32, ties to even, of the values that
/// [`unpatchify`](super::unpatchify) puts at a pixel. The same bytes as diffusers' `VaeImageProcessor` makes of f32.
/// **Numerics**: the same bytes on every device.
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
/// use candle_fork::frames::{PatchOrder, frames_to_rgb8};
/// let x = Tensor::new(&[-1f32, 0.2, 3.0], &Device::Cpu)?.reshape((1, 3, 1, 1, 1))?;
/// let frames = frames_to_rgb8(&x, 1, PatchOrder::RowMajor)?;
/// assert_eq!(frames.pixels().flatten_all()?.to_vec1::<u8>()?, [0, 153, 255]);
/// assert!(frames.all_finite()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn frames_to_rgb8(x: &Tensor, side: usize, order: PatchOrder) -> Result<Rgb8Frames> {
    const OP: &str = "frames_to_rgb8";
    check(OP, &[("x", x)])?;
    if side == 0 {
        return Err(argument(OP, "the side of a square is 0".to_owned()));
    }
    let [n, packed, ..] = extents(OP, "x", x)?;
    let channels = packed / (side * side);
    if n != 1 || !(1..=4).contains(&channels) || packed != channels * side * side {
        return Err(shape_error(OP, "x", x, format!("[1, {} C, T, H, W] with C of 1 to 4", side * side)));
    }
    let problem = Problem::new(x, side, order);
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return super::cuda::frames_to_rgb8(x, &problem);
    }
    let x = if x.device().is_cpu() { x.clone() } else { x.to_device(&Device::Cpu).what(OP)? };
    with_element!(OP, "x", x.dtype(), T => on_cpu::<T>(&x, &problem))
}

/// Everything but the values.
pub(super) struct Problem {
    pub(super) channels: usize,
    pub(super) side: usize,
    pub(super) order: PatchOrder,
    /// Frames, rows and columns of pixels, and colours.
    pub(super) dims: [usize; 4],
}

impl Problem {
    /// Of x `[1, C p p, T, H, W]`.
    pub(super) fn new(x: &Tensor, side: usize, order: PatchOrder) -> Self {
        let [channels, frames, rows, columns] = std::array::from_fn(|axis| x.dims()[axis + 1]);
        let channels = channels / (side * side);
        Self { channels, side, order, dims: [frames, rows * side, columns * side, channels] }
    }

    /// Channel of x for channel `c` of the pixel in row `q` and column `r` of its square.
    fn channel(&self, c: usize, q: usize, r: usize) -> usize {
        let (slow, fast) = match self.order {
            PatchOrder::ColumnMajor => (r, q),
            PatchOrder::RowMajor => (q, r),
        };
        (c * self.side + slow) * self.side + fast
    }
}

struct Bytes<'a, T> {
    x: &'a [T],
    start: usize,
    strides: &'a [usize],
    problem: &'a Problem,
    broken: &'a AtomicBool,
}

impl<T: Element> RowKernel<u8> for Bytes<'_, T> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [u8]) {
        let &Self { x, start, strides, problem, broken } = self;
        let (frame, y) = (index / problem.dims[1], index % problem.dims[1]);
        let row = start + frame * strides[2] + y / problem.side * strides[3];
        let mut finite = true;
        for (column, pixel) in out.chunks_exact_mut(problem.channels).enumerate() {
            let place = row + column / problem.side * strides[4];
            for (c, byte) in pixel.iter_mut().enumerate() {
                let channel = problem.channel(c, y % problem.side, column % problem.side);
                let value = x[place + channel * strides[1]].widen();
                finite &= value.is_finite();
                *byte = (255.0 * (value * 0.5 + 0.5).clamp(0.0, 1.0)).round_ties_even() as u8;
            }
        }
        if !finite {
            broken.store(true, Ordering::Relaxed);
        }
    }
}

fn on_cpu<T: Element>(x: &Tensor, problem: &Problem) -> Result<Rgb8Frames> {
    const WHAT: &str = "result of frames_to_rgb8";
    let mut out = vec![0; problem.dims.iter().product()];
    let broken = AtomicBool::new(false);
    read("frames_to_rgb8", [x], |[view]| {
        let kernel = Bytes::<T> {
            x: view.storage()?,
            start: view.layout.start_offset(),
            strides: view.layout.stride(),
            problem,
            broken: &broken,
        };
        for_each_row(&mut out, problem.dims[2] * problem.channels, &kernel);
        Ok(())
    })?;
    let flag = u32::from(broken.into_inner());
    Ok(Rgb8Frames {
        pixels: Tensor::from_vec(out, problem.dims.as_slice(), &Device::Cpu).what(WHAT)?,
        flags: Tensor::new(&[flag], &Device::Cpu).what(WHAT)?,
    })
}
