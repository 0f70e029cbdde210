//! Joining, keeping and splitting along time: copies.

use candle_core::Tensor;

use super::{extents, from_memory, to_memory};
use crate::{
    error::{Result, What},
    layout::{MemoryOrder, contiguous, memory_order},
    operand::{check, check_dtype, shape_error},
};

/// Frames one after the other: what a convolution over time sees.
///
/// **Shapes**: past `[N, C, P, H, W]` and x `[N, C, T, H, W]` with any strides; result `[N, C, P + T, H, W]` in x's
/// memory order.
/// **Dtypes**: f32, f16 or bf16, the same for both; elements are copied.
/// **Formula**: past, then x, along the third axis.
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 5, or past differs from it in another axis than the third.
/// - [`crate::Error::DType`] for other element types, or if they differ.
/// - [`crate::Error::Argument`] if an operand tracks gradients or is on another device.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let past = Tensor::zeros((1, 8, 2, 4, 4), DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((1, 8, 1, 4, 4), DType::F32, &Device::Cpu)?;
/// assert_eq!(candle_fork::frames::cat_frames(&past, &x)?.dims(), [1, 8, 3, 4, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn cat_frames(past: &Tensor, x: &Tensor) -> Result<Tensor> {
    const OP: &str = "cat_frames";
    check(OP, &[("x", x), ("past", past)])?;
    check_dtype(OP, "past", past, x)?;
    let [n, c, _, h, w] = extents(OP, "x", x)?;
    match *past.dims() {
        [pn, pc, _, ph, pw] if [pn, pc, ph, pw] == [n, c, h, w] => {}
        _ => return Err(shape_error(OP, "past", past, format!("[{n}, {c}, P, {h}, {w}]"))),
    }
    let order = memory_order(x);
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return super::cuda::cat_frames(past, x, order);
    }
    let axis = match order {
        MemoryOrder::ChannelsFirst => 2,
        MemoryOrder::ChannelsLast => 1,
    };
    let parts = [to_memory(past, order)?, to_memory(x, order)?];
    from_memory(Tensor::cat(&parts, axis).what(OP)?, order)
}

/// A copy of the last frames, or of all if there are no more: what a layer remembers. It does not keep the memory of x
/// alive, unless it is all of x.
///
/// **Shapes**: x `[N, C, T, H, W]` with any strides; result `[N, C, min(T, count), H, W]`, packed in x's memory order.
/// **Dtypes**: f32, f16 or bf16; elements are copied.
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 5.
/// - [`crate::Error::DType`] for other element types.
/// - [`crate::Error::Argument`] if x tracks gradients.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// let x = Tensor::arange(0f32, 3.0, &Device::Cpu)?.reshape((1, 1, 3, 1, 1))?;
/// let tail = candle_fork::frames::tail_frames(&x, 2)?;
/// assert_eq!(tail.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn tail_frames(x: &Tensor, count: usize) -> Result<Tensor> {
    const OP: &str = "tail_frames";
    check(OP, &[("x", x)])?;
    let [_, _, frames, ..] = extents(OP, "x", x)?;
    let kept = frames.min(count);
    let order = memory_order(x);
    if kept == frames {
        return from_memory(to_memory(x, order)?, order);
    }
    let tail = x.narrow(2, frames - kept, kept).what(OP)?;
    let axes = match order {
        MemoryOrder::ChannelsFirst => [0, 1, 2, 3, 4],
        MemoryOrder::ChannelsLast => [0, 2, 3, 4, 1],
    };
    let view = tail.permute(axes.as_slice()).what(OP)?;
    // Even where it is packed: it must not share the memory of x.
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return from_memory(crate::cuda::copy::contiguous(&view)?, order);
    }
    from_memory(view.force_contiguous().what(OP)?, order)
}

/// Every frame of twice the channels becomes two frames, the first of the first half: what a convolution that doubles
/// the frame rate gives.
///
/// **Shapes**: x `[N, 2 C, T, H, W]` with any strides; result `[N, C, 2 T, H, W]` in x's memory order.
/// **Dtypes**: f32, f16 or bf16; elements are copied.
/// **Formula**: `y[n, c, 2 t + k, h, w] = x[n, k C + c, t, h, w]` for k in 0..2
/// (`Wan-Video/Wan2.1: wan/modules/vae.py`, `Resample`).
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 5 or has an odd number of channels.
/// - [`crate::Error::DType`] for other element types.
/// - [`crate::Error::Argument`] if x tracks gradients.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// // Two frames of two channels.
/// let x = Tensor::new(&[1f32, 3.0, 2.0, 4.0], &Device::Cpu)?.reshape((1, 2, 2, 1, 1))?;
/// let y = candle_fork::frames::split_pairs(&x)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn split_pairs(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "split_pairs";
    check(OP, &[("x", x)])?;
    let [n, channels, t, h, w] = extents(OP, "x", x)?;
    if !channels.is_multiple_of(2) {
        return Err(shape_error(OP, "x", x, "[N, 2 C, T, H, W]"));
    }
    let c = channels / 2;
    let order = memory_order(x);
    let memory = to_memory(x, order)?;
    let (split, axes, joined) = match order {
        MemoryOrder::ChannelsFirst => ([n, 2, c, t, h * w], [0, 2, 3, 1, 4], [n, c, 2 * t, h, w]),
        MemoryOrder::ChannelsLast => ([n, t, h * w, 2, c], [0, 1, 3, 2, 4], [n, 2 * t, h, w, c]),
    };
    let view = memory.reshape(split.as_slice()).and_then(|x| x.permute(axes.as_slice())).what(OP)?;
    from_memory(contiguous(&view)?.reshape(joined.as_slice()).what(OP)?, order)
}
