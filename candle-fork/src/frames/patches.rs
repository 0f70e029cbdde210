//! Squares of pixels as channels, and back: copies.

use candle_core::Tensor;

use super::{argument, extents, from_memory, to_memory};
use crate::{
    error::{Result, What},
    layout::{MemoryOrder, contiguous, memory_order},
    operand::{check, shape_error},
};

/// Which coordinate inside of a square is the slower one among its channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PatchOrder {
    /// The column: the pixel in row q and column r of a square of side p is channel `(c p + r) p + q`. What the Wan 2.2
    /// VAE does.
    ColumnMajor,
    /// The row: channel `(c p + q) p + r`, the order of pixel shuffles.
    RowMajor,
}

/// Squares of pixels become channels.
///
/// **Shapes**: x `[N, C, T, H, W]` with any strides, height and width multiples of the side p; result
/// `[N, C p p, T, H / p, W / p]` in x's memory order.
/// **Dtypes**: f32, f16 or bf16; elements are copied.
/// **Formula**: [`PatchOrder`] (`Wan-Video/Wan2.2: wan/modules/vae2_2.py`, `patchify`).
/// **Numerics**: exact.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 5 or does not divide into squares.
/// - [`crate::Error::Argument`] if the side is 0 or x tracks gradients.
/// - [`crate::Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::frames::{PatchOrder, patchify};
/// let x = Tensor::arange(0f32, 4.0, &Device::Cpu)?.reshape((1, 1, 1, 2, 2))?;
/// let y = patchify(&x, 2, PatchOrder::ColumnMajor)?;
/// assert_eq!(y.dims(), [1, 4, 1, 1, 1]);
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [0.0, 2.0, 1.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn patchify(x: &Tensor, side: usize, patch_order: PatchOrder) -> Result<Tensor> {
    const OP: &str = "patchify";
    check(OP, &[("x", x)])?;
    let [n, c, t, h, w] = extents(OP, "x", x)?;
    check_side(OP, side)?;
    if !h.is_multiple_of(side) || !w.is_multiple_of(side) {
        return Err(shape_error(OP, "x", x, format!("[N, C, T, H, W] with H and W multiples of {side}")));
    }
    if side == 1 {
        return Ok(x.clone());
    }
    let (rows, columns, channels) = (h / side, w / side, c * side * side);
    let order = memory_order(x);
    let memory = to_memory(x, order)?;
    let (split, axes, joined) = match order {
        MemoryOrder::ChannelsFirst => {
            ([n, c, t, rows, side, columns, side], [0, 1, 6, 4, 2, 3, 5], [n, channels, t, rows, columns])
        }
        MemoryOrder::ChannelsLast => {
            ([n, t, rows, side, columns, side, c], [0, 1, 2, 4, 6, 5, 3], [n, t, rows, columns, channels])
        }
    };
    let axes = swapped(axes, patch_order, order == MemoryOrder::ChannelsFirst);
    let view = memory.reshape(split.to_vec()).and_then(|x| x.permute(axes.to_vec())).what(OP)?;
    from_memory(contiguous(&view)?.reshape(joined.as_slice()).what(OP)?, order)
}

/// Swaps the axes of the column and of the row of a square, which stand column first.
fn swapped(mut axes: [usize; 7], patch_order: PatchOrder, channels_first: bool) -> [usize; 7] {
    if patch_order == PatchOrder::RowMajor {
        if channels_first { axes.swap(2, 3) } else { axes.swap(5, 6) }
    }
    axes
}

/// Channels become squares of pixels: the reverse of [`patchify`].
///
/// **Shapes**: x `[N, C p p, T, H, W]` with any strides; result `[N, C, T, H p, W p]` in x's memory order.
/// **Dtypes**, **Formula**, **Numerics**, **Policy**: as [`patchify`].
///
/// # Errors
/// - [`crate::Error::Shape`] if x is not of rank 5, or p p does not divide its channels.
/// - [`crate::Error::Argument`] if the side is 0 or x tracks gradients.
/// - [`crate::Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::frames::{PatchOrder, unpatchify};
/// let x = Tensor::arange(0f32, 4.0, &Device::Cpu)?.reshape((1, 4, 1, 1, 1))?;
/// let y = unpatchify(&x, 2, PatchOrder::RowMajor)?;
/// assert_eq!(y.squeeze(0)?.squeeze(0)?.squeeze(0)?.to_vec2::<f32>()?, [[0.0, 1.0], [2.0, 3.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn unpatchify(x: &Tensor, side: usize, patch_order: PatchOrder) -> Result<Tensor> {
    const OP: &str = "unpatchify";
    check(OP, &[("x", x)])?;
    let [n, channels, t, rows, columns] = extents(OP, "x", x)?;
    check_side(OP, side)?;
    let cell = side * side;
    if !channels.is_multiple_of(cell) {
        return Err(shape_error(OP, "x", x, format!("[N, {cell} C, T, H, W]")));
    }
    if side == 1 {
        return Ok(x.clone());
    }
    let c = channels / cell;
    let order = memory_order(x);
    let memory = to_memory(x, order)?;
    // Axes a and b of a square: column and row, or row and column.
    let (a, b) = match patch_order {
        PatchOrder::ColumnMajor => (1, 0),
        PatchOrder::RowMajor => (0, 1),
    };
    let (split, axes, joined) = match order {
        MemoryOrder::ChannelsFirst => (
            [n, c, side, side, t, rows, columns],
            [0, 1, 4, 5, 2 + a, 6, 2 + b],
            [n, c, t, rows * side, columns * side],
        ),
        MemoryOrder::ChannelsLast => (
            [n, t, rows, columns, c, side, side],
            [0, 1, 2, 5 + a, 3, 5 + b, 4],
            [n, t, rows * side, columns * side, c],
        ),
    };
    let view = memory.reshape(split.to_vec()).and_then(|x| x.permute(axes.to_vec())).what(OP)?;
    from_memory(contiguous(&view)?.reshape(joined.as_slice()).what(OP)?, order)
}

fn check_side(op: &'static str, side: usize) -> Result<()> {
    if side == 0 { Err(argument(op, "the side of a square is 0".to_owned())) } else { Ok(()) }
}
