//! Shortcuts without parameters around the stages of the Wan 2.2 family's networks, added to what the stage gives.

use candle_core::{DType, Tensor};

use super::{argument, extents};
use crate::{
    activation::residual,
    error::{Result, What},
    layout::{contiguous, in_order, memory_order},
    operand::{check, check_dtype, shape_error},
};

/// Adds frames, pixels and channels of x, repeated, to what a stage made of x.
///
/// **Shapes**: x `[N, a, T, H, W]` and main `[N, b, T ft - s, H fs, W fs]` with any strides, where s is 0, or ft - 1 at
/// the start of a stream, whose first frame stays one; result of main's shape, in its memory order. a divides b ft fs
/// fs.
/// **Dtypes**: f32, f16 or bf16, the same for both; added in f32, rounded once.
/// **Formula**: `y[n, o, t ft + u - s, h fs + q, w fs + r] = main[..] + x[n, k / R, t, h, w]` with
/// `k = ((o ft + u) fs + q) fs + r`, `R = b ft fs fs / a` and the division rounding down
/// (`Wan-Video/Wan2.2: wan/modules/vae2_2.py`, `DupUp3D`).
/// **Numerics**: one rounding.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if an operand is not of rank 5 or the shapes do not fit.
/// - [`crate::Error::Argument`] if a factor is 0, or an operand tracks gradients or is on another device.
/// - [`crate::Error::DType`] for other element types, or if they differ.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let main = Tensor::zeros((1, 1, 1, 2, 2), DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?.reshape((1, 2, 1, 1, 1))?;
/// // Rows of the result take turns between the channels.
/// let y = candle_fork::frames::dup_up_add(&main, &x, 1, 2)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0, 2.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dup_up_add(main: &Tensor, x: &Tensor, ft: usize, fs: usize) -> Result<Tensor> {
    const OP: &str = "dup_up_add";
    check(OP, &[("main", main), ("x", x)])?;
    check_dtype(OP, "x", x, main)?;
    let [n, a, t, h, w] = extents(OP, "x", x)?;
    let [_, b, frames, ..] = extents(OP, "main", main)?;
    if ft == 0 || fs == 0 {
        return Err(argument(OP, format!("factors are {ft} and {fs}, expected at least 1")));
    }
    let skipped = (t * ft).saturating_sub(frames);
    if *main.dims() != [n, b, t * ft - skipped, h * fs, w * fs] || !(skipped == 0 || skipped == ft - 1) {
        return Err(shape_error(
            OP,
            "main",
            main,
            format!("[{n}, b, {} or {}, {}, {}]", t * ft, t * ft + 1 - ft, h * fs, w * fs),
        ));
    }
    if a == 0 || !(b * ft * fs * fs).is_multiple_of(a) {
        return Err(shape_error(OP, "x", x, format!("[N, a, T, H, W] where a divides {}", b * ft * fs * fs)));
    }
    #[cfg(feature = "cuda")]
    if main.device().is_cuda() {
        return super::cuda::dup_up_add(main, x, [ft, fs], skipped);
    }
    let order = memory_order(main);
    let repeated = repeat(x, b, ft, fs).and_then(|x| x.narrow(2, skipped, frames)).what(OP)?;
    in_order(&residual(&contiguous(main)?, &repeated)?, order)
}

/// x `[N, a, T, H, W]` as `[N, b, T ft, H fs, W fs]`.
fn repeat(x: &Tensor, b: usize, ft: usize, fs: usize) -> candle_core::Result<Tensor> {
    let (n, a, t, h, w) = x.dims5()?;
    let repeats = b * ft * fs * fs / a;
    let index: Vec<u32> = (0..b * ft * fs * fs).map(|i| (i / repeats) as u32).collect();
    let index = Tensor::new(index, x.device())?;
    let cells = x.contiguous()?.index_select(&index, 1)?.reshape(vec![n, b, ft, fs, fs, t, h, w])?;
    cells.permute(vec![0, 1, 5, 2, 6, 3, 7, 4])?.reshape(vec![n, b, t * ft, h * fs, w * fs])
}

/// Adds means over frames, pixels and neighbouring channels of x to what a stage made of x.
///
/// **Shapes**: x `[N, a, T, H, W]`, H and W multiples of fs, and main `[N, b, T / ft rounded up, H / fs, W / fs]` with
/// any strides; result of main's shape, in its memory order. b divides a ft fs fs.
/// **Dtypes**: f32, f16 or bf16, the same for both; summed and added in f32, rounded once.
/// **Formula**: with zeros before x to whole groups of ft frames, channel `((c ft + u) fs + q) fs + r` of a position is
/// pixel (u, q, r) of its cell of channel c of x; each channel of the result is the mean of a ft fs fs / b neighbouring
/// ones, plus main (`Wan-Video/Wan2.2: wan/modules/vae2_2.py`, `AvgDown3D`). The zeros count.
/// **Numerics**: within 1e-6 of the exact value, relative to the largest term.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if an operand is not of rank 5 or the shapes do not fit.
/// - [`crate::Error::Argument`] if a factor is 0, or an operand tracks gradients or is on another device.
/// - [`crate::Error::DType`] for other element types, or if they differ.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let main = Tensor::ones((1, 1, 1, 1, 1), DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[1f32, 2.0, 3.0, 6.0], &Device::Cpu)?.reshape((1, 1, 1, 2, 2))?;
/// let y = candle_fork::frames::avg_down_add(&main, &x, 1, 2)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn avg_down_add(main: &Tensor, x: &Tensor, ft: usize, fs: usize) -> Result<Tensor> {
    const OP: &str = "avg_down_add";
    check(OP, &[("main", main), ("x", x)])?;
    check_dtype(OP, "x", x, main)?;
    let [n, a, t, h, w] = extents(OP, "x", x)?;
    let [_, b, ..] = extents(OP, "main", main)?;
    if ft == 0 || fs == 0 {
        return Err(argument(OP, format!("factors are {ft} and {fs}, expected at least 1")));
    }
    if !h.is_multiple_of(fs) || !w.is_multiple_of(fs) || b == 0 || !(a * ft * fs * fs).is_multiple_of(b) {
        let expected = format!("[N, a, T, H, W] with H and W multiples of {fs} and {b} dividing a {}", ft * fs * fs);
        return Err(shape_error(OP, "x", x, expected));
    }
    let fitting = [n, b, t.div_ceil(ft), h / fs, w / fs];
    if *main.dims() != fitting {
        return Err(shape_error(OP, "main", main, format!("{fitting:?}")));
    }
    let before = t.next_multiple_of(ft) - t;
    #[cfg(feature = "cuda")]
    if main.device().is_cuda() {
        return super::cuda::avg_down_add(main, x, [ft, fs], before);
    }
    let order = memory_order(main);
    let mean = mean(x, b, [ft, fs], before).what(OP)?;
    let sum = residual(&contiguous(main)?.to_dtype(DType::F32).what(OP)?, &mean)?;
    in_order(&sum.to_dtype(main.dtype()).what(OP)?, order)
}

/// The means of x, f32.
fn mean(x: &Tensor, b: usize, [ft, fs]: [usize; 2], before: usize) -> candle_core::Result<Tensor> {
    let mut x = x.to_dtype(DType::F32)?;
    if before > 0 {
        x = x.pad_with_zeros(2, before, 0)?;
    }
    let (n, a, t, h, w) = x.dims5()?;
    let (t, h, w) = (t / ft, h / fs, w / fs);
    let cells = x.reshape(vec![n, a, t, ft, h, fs, w, fs])?.permute(vec![0, 1, 3, 5, 7, 2, 4, 6])?;
    cells.reshape(vec![n, b, a * ft * fs * fs / b, t, h, w])?.mean(2)
}
