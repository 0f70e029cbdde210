//! The same ops composed of candle's, in f32, for devices without kernels of their own.

use candle_core::{DType, Result, Tensor};

use super::reference::Pairing;

pub(super) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, pairing: Pairing) -> Result<Tensor> {
    let (batch, rows, heads, width) = x.dims4()?;
    let n = width / 2;
    // The axis that holds the two components of a pair.
    let (shape, axis) = match pairing {
        Pairing::Interleaved => ((batch, rows, heads, n, 2), 4),
        Pairing::Half => ((batch, rows, heads, 2, n), 3),
    };
    let wide = x.to_dtype(DType::F32)?.reshape(shape)?;
    let (a, b) = (wide.narrow(axis, 0, 1)?.squeeze(axis)?, wide.narrow(axis, 1, 1)?.squeeze(axis)?);
    let (cos, sin) = (cos.reshape((1, rows, 1, n))?, sin.reshape((1, rows, 1, n))?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::stack(&[first, second], axis)?.reshape(x.dims())?.to_dtype(x.dtype())
}
