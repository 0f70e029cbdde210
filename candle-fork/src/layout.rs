//! Memory orders of tensors with channels.
//!
//! A tensor `[N, C, ..]` (rank 3 or more) is *channels-last* if its memory is packed in the order `[N, .., C]`: what half
//! precision on CUDA runs in, from the first convolution to the last. Its shape is the same as ever; only the strides
//! differ, so a tensor of either order is accepted everywhere and gives the same values.

use candle_core::{DType, Device, Tensor};

use crate::{
    error::{Error, Result, What},
    target::{check_target, store},
};

/// In which order the elements of a tensor `[N, C, ..]` follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryOrder {
    /// `[N, C, ..]`, or nothing in particular: results are contiguous.
    ChannelsFirst,
    /// `[N, .., C]`: results are channels-last.
    ChannelsLast,
}

/// The order in which an op that keeps its input's order stores its result.
///
/// A tensor whose memory is both (one channel, or one position) counts as channels-last in half precision on CUDA, where
/// its neighbours are, and as channels-first elsewhere.
pub fn memory_order(tensor: &Tensor) -> MemoryOrder {
    let native = native_order(tensor.device(), tensor.dtype()) == MemoryOrder::ChannelsLast;
    let ambiguous = tensor.is_contiguous() && !native;
    if is_channels_last(tensor) && !ambiguous { MemoryOrder::ChannelsLast } else { MemoryOrder::ChannelsFirst }
}

/// Whether the memory of `[N, C, ..]` is packed in the order `[N, .., C]`. Axes of extent 1 may have any stride.
pub fn is_channels_last(tensor: &Tensor) -> bool {
    strides_are_channels_last(tensor.dims(), tensor.stride())
}

/// [`is_channels_last`] of a layout.
pub(crate) fn strides_are_channels_last(dims: &[usize], strides: &[usize]) -> bool {
    if dims.len() < 3 {
        return false;
    }
    let mut packed = 1;
    let inwards = std::iter::once(1).chain((2..dims.len()).rev()).chain([0]);
    inwards.into_iter().all(|axis| {
        let fits = dims[axis] == 1 || strides[axis] == packed;
        packed *= dims[axis];
        fits
    })
}

/// The same values in the order `[N, .., C]`; the shape stays `[N, C, ..]`. A tensor that is channels-last already is
/// returned as it is, so weights repacked once (`[K, C, T, R, S]` to `[K, T, R, S, C]`) cost nothing afterwards.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::layout::{channels_last, is_channels_last};
///
/// let x = Tensor::zeros((1, 8, 4, 4), DType::BF16, &Device::Cpu)?;
/// let y = channels_last(&x)?;
/// assert_eq!((y.dims(), y.stride()), (x.dims(), &[128, 1, 32, 8][..]));
/// assert!(is_channels_last(&y) && !is_channels_last(&x));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] for a rank below 3; [`Error::Candle`] if the copy fails.
pub fn channels_last(tensor: &Tensor) -> Result<Tensor> {
    if tensor.rank() < 3 {
        let expected = "[N, C, ..] of rank 3 or more".into();
        return Err(Error::Shape { op: "channels_last", operand: "x", got: tensor.dims().to_vec(), expected });
    }
    if is_channels_last(tensor) {
        return Ok(tensor.clone());
    }
    let mut axes: Vec<usize> = (0..tensor.rank()).collect();
    axes[1..].rotate_left(1);
    let stored = tensor.permute(axes).what("channels_last")?;
    from_stored(&contiguous(&stored)?)
}

/// The same values in row-major order; a contiguous tensor is returned as it is.
///
/// # Errors
/// [`Error::Candle`] if the copy fails.
pub fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    if tensor.is_contiguous() {
        return Ok(tensor.clone());
    }
    #[cfg(feature = "cuda")]
    if tensor.device().is_cuda() && matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return crate::cuda::copy::contiguous(tensor);
    }
    tensor.contiguous().what("copy to row-major order")
}

/// Copies `source` into `target`, a tensor of its shape whose memory is part of a tensor that exists: whoever shares it sees
/// the values. Strides of either are free, but for a packed last axis of the target.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::layout::copy_into;
///
/// let all = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// let column = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?.t()?;
/// copy_into(&column, &all.narrow(1, 1, 1)?)?;
/// assert_eq!(all.to_vec2::<f32>()?, [[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] and [`Error::DType`] if the two differ; [`Error::Argument`] if they share memory, are on two devices or
/// the target tracks gradients; [`Error::Unsupported`] on other devices than CPU and CUDA; [`Error::Candle`] if the copy
/// fails.
pub fn copy_into(source: &Tensor, target: &Tensor) -> Result<()> {
    const OP: &str = "copy_into";
    check_target(OP, target, source.dims(), source, &[source])?;
    #[cfg(feature = "cuda")]
    if source.device().is_cuda() {
        return crate::cuda::copy::into(OP, source, target);
    }
    store(OP, target, &contiguous(source)?)
}

/// The same values in the given order.
///
/// # Errors
/// Those of [`channels_last`] and [`contiguous`].
pub fn in_order(tensor: &Tensor, order: MemoryOrder) -> Result<Tensor> {
    match order {
        MemoryOrder::ChannelsFirst => contiguous(tensor),
        MemoryOrder::ChannelsLast => channels_last(tensor),
    }
}

/// The order that convolutions on `device` read and write in `dtype`: channels-last for half precision on CUDA.
pub fn native_order(device: &Device, dtype: DType) -> MemoryOrder {
    match (device, dtype) {
        (Device::Cuda(_), DType::F16 | DType::BF16) => MemoryOrder::ChannelsLast,
        _ => MemoryOrder::ChannelsFirst,
    }
}

/// The same values in the [native](native_order) order of their device and dtype: what weights of convolutions are brought
/// into once, when they are loaded.
///
/// # Errors
/// Those of [`channels_last`] and [`contiguous`].
pub fn native(tensor: &Tensor) -> Result<Tensor> {
    in_order(tensor, native_order(tensor.device(), tensor.dtype()))
}

/// Extents in the order of memory of a channels-last tensor: `[N, C, ..]` to `[N, .., C]`.
pub fn to_stored(dims: &[usize]) -> Vec<usize> {
    let mut stored = dims.to_vec();
    if let Some(axes) = stored.get_mut(1..) {
        axes.rotate_left(1.min(axes.len()));
    }
    stored
}

/// A contiguous tensor `[N, .., C]` seen as the channels-last tensor `[N, C, ..]`. Nothing is copied.
///
/// # Errors
/// [`Error::Shape`] for a rank below 2.
pub fn from_stored(stored: &Tensor) -> Result<Tensor> {
    if stored.rank() < 2 {
        let expected = "[N, .., C]".into();
        return Err(Error::Shape { op: "channels_last", operand: "x", got: stored.dims().to_vec(), expected });
    }
    let mut axes: Vec<usize> = (0..stored.rank()).collect();
    axes[1..].rotate_right(1);
    stored.permute(axes).what("channels_last")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Data, tensor, to_f64};

    #[test]
    fn channels_last_keeps_shape_and_values() {
        for dims in [&[2, 3, 4][..], &[2, 5, 3, 4], &[2, 3, 2, 3, 4], &[1, 6, 1, 1], &[3, 1, 2, 2], &[2, 0, 3]] {
            let x = tensor(dims, DType::F32, Data::Normal, 1);
            let y = channels_last(&x).unwrap();
            assert!(is_channels_last(&y), "{dims:?}");
            assert_eq!((y.dims(), to_f64(&y)), (dims, to_f64(&x)), "{dims:?}");
            // Idempotent, and without a copy: strides of length-1 axes stay too.
            assert_eq!(channels_last(&y).unwrap().stride(), y.stride());
            let back = in_order(&y, MemoryOrder::ChannelsFirst).unwrap();
            assert!(back.is_contiguous());
            assert_eq!(to_f64(&back), to_f64(&x));
            assert_eq!(from_stored(&x).unwrap().dims()[1], dims[dims.len() - 1]);
            assert_eq!(to_stored(y.dims()).last(), Some(&dims[1]));
        }
        assert!(matches!(channels_last(&tensor(&[2, 3], DType::F32, Data::Normal, 1)), Err(Error::Shape { .. })));
    }

    #[test]
    fn other_orders_are_not_channels_last() {
        let x = channels_last(&tensor(&[2, 6, 4, 5], DType::F32, Data::Normal, 1)).unwrap();
        assert!(!is_channels_last(&x.transpose(2, 3).unwrap()));
        assert!(!is_channels_last(&x.narrow(1, 0, 3).unwrap()), "a part of the channels has gaps");
        assert!(!is_channels_last(&x.narrow(2, 0, 3).unwrap()), "so has a part of every image");
        assert!(is_channels_last(&x.narrow(0, 1, 1).unwrap().narrow(2, 0, 3).unwrap()), "a part of one image has none");
        assert!(!is_channels_last(&x.flatten_all().unwrap()));
    }

    #[test]
    fn what_is_both_orders_is_channels_first_on_the_cpu() {
        let x = tensor(&[2, 6, 1, 1], DType::BF16, Data::Normal, 1);
        assert!(is_channels_last(&x));
        assert_eq!(memory_order(&x), MemoryOrder::ChannelsFirst);
        let y = channels_last(&tensor(&[2, 6, 2, 1], DType::BF16, Data::Normal, 1)).unwrap();
        assert_eq!(memory_order(&y), MemoryOrder::ChannelsLast);
    }
}
