//! The same ops composed of candle's, in f32, for devices without kernels of their own.

use candle_core::{D, DType, Result, Tensor};

use super::Activation;

pub(crate) fn activate(activation: Activation, x: Tensor) -> Result<Tensor> {
    match activation {
        Activation::None => Ok(x),
        Activation::Silu => x.silu(),
    }
}

pub(super) fn silu(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.silu()?.to_dtype(x.dtype())
}

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let n = x.dim(D::Minus1)? / 2;
    let wide = x.to_dtype(DType::F32)?;
    let (gate, up) = (wide.narrow(D::Minus1, 0, n)?, wide.narrow(D::Minus1, n, n)?);
    gate.silu()?.mul(&up)?.to_dtype(x.dtype())
}

pub(super) fn gate_residual(x: &Tensor, gate: &Tensor, y: &Tensor) -> Result<Tensor> {
    let gate = gate.to_dtype(DType::F32)?.unsqueeze(1)?;
    let scaled = y.to_dtype(DType::F32)?.broadcast_mul(&gate)?;
    x.to_dtype(DType::F32)?.add(&scaled)?.to_dtype(x.dtype())
}

pub(super) fn residual(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.add(&y.to_dtype(DType::F32)?)?.to_dtype(x.dtype())
}
