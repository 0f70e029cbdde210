//! Matrices in the quantised formats of published checkpoints, kept as they are stored.
//!
//! | format | constructor | files |
//! |---|---|---|
//! | signed bytes, one scale or one for each row, rotated or not | [`QuantWeight::int8`] | Comfy `int8_tensorwise`, ConvRot |
//! | floats of 8 bits, scaled | [`QuantWeight::fp8`] | Comfy and others, DeepSeek's blocks |
//! | ggml blocks | [`QuantWeight::ggml`], [`QuantWeight::iq4`] | GGUF |
//!
//! Two ConvRot formats of 4 bits become signed bytes while they are loaded: [`unpack_w4a4`], [`decode_w4a8`].
//!
//! [`crate::LinearWeight::from_quant`] makes such a matrix the weight of [`crate::linear()`], in one of three [`QuantMode`]s;
//! [`choose`] proposes one.

mod codes;
#[cfg(feature = "cuda")]
mod cuda;
mod fp8;
mod ggml;
mod int8;
mod iq4;
mod mode;
mod packed;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Tensor, quantized::GgmlDType};

pub(crate) use self::int8::Int8;
use self::{fp8::Fp8, ggml::Ggml, iq4::Iq4};
pub use self::{
    fp8::{Fp8Format, Fp8Scales},
    iq4::Iq4Format,
    mode::{DeviceFacts, LinearShape, Memory, Preference, QuantMode, choose},
    packed::{W4a8Scales, decode_w4a8, unpack_w4a4},
};
use crate::{
    element::FLOATS,
    error::{Error, Result, What},
    gemm::WideRows,
    host::HostTensor,
};

const OP: &str = "quantised weight";

/// A quantised matrix `[out_features, in_features]`. Cloning is cheap: the codes are shared.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device};
/// use candle_fork::{HostTensor, quant::QuantWeight};
///
/// // Two rows of four signed bytes, scaled by 1/2 and 2.
/// let bytes = [1i8, -1, 2, -2, 3, 0, 0, -128].map(|q| q as u8).to_vec();
/// let codes = HostTensor::new(Arc::new(bytes), 0..8, DType::U8, (2, 4))?;
/// let weight = QuantWeight::int8(codes, vec![0.5, 2.0], None)?;
/// let wide = weight.dequantize(DType::F32, &Device::Cpu)?;
/// assert_eq!(wide.to_vec2::<f32>()?, [[0.5, -0.5, 1.0, -1.0], [6.0, 0.0, 0.0, -256.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantWeight {
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Int8(Int8),
    Fp8(Fp8),
    Ggml(Ggml),
    Iq4(Iq4),
}

/// Calls `$f` on whatever format it is.
macro_rules! each {
    ($self:expr, $weight:ident => $f:expr) => {
        match &$self.kind {
            Kind::Int8($weight) => Kind::Int8($f),
            Kind::Fp8($weight) => Kind::Fp8($f),
            Kind::Ggml($weight) => Kind::Ggml($f),
            Kind::Iq4($weight) => Kind::Iq4($f),
        }
    };
}

impl QuantWeight {
    /// Signed bytes: `W[r, c] = scales[r] * codes[r, c]`, rotated back over groups of `group` columns if there is one
    /// ([`crate::convrot`]). -128 is a code like any other.
    ///
    /// `codes` are the bytes `[out_features, in_features]` as [`DType::U8`]; `scales` is one, or one for each row.
    ///
    /// # Errors
    /// [`Error::Shape`] for codes that are no matrix or empty, or another number of scales; [`Error::DType`];
    /// [`Error::Argument`] for a scale that is negative or not finite, a group that is not 4, 16, 64, 256 or 1024 or does
    /// not divide the columns.
    pub fn int8(codes: HostTensor, scales: Vec<f32>, group: Option<usize>) -> Result<Self> {
        Ok(Self { kind: Kind::Int8(Int8::new(codes, scales, group)?) })
    }

    /// Floats of 8 bits: `W[r, c] = scale * value(codes[r, c])`. `codes` are the bytes `[out_features, in_features]` as
    /// [`DType::U8`].
    ///
    /// # Errors
    /// As [`QuantWeight::int8`]; [`Error::Argument`] also for blocks without rows or columns.
    pub fn fp8(codes: HostTensor, format: Fp8Format, scales: Fp8Scales) -> Result<Self> {
        Ok(Self { kind: Kind::Fp8(Fp8::new(codes, format, scales)?) })
    }

    /// Blocks of a GGUF file: `blocks` are all bytes of the matrix `dims` = `[out_features, in_features]`, as
    /// [`DType::U8`] of any shape, at any address.
    ///
    /// # Errors
    /// [`Error::Argument`] if a row is not whole blocks; [`Error::HostRange`] for another number of bytes;
    /// [`Error::Shape`] if the matrix is empty.
    pub fn ggml(blocks: HostTensor, dtype: GgmlDType, dims: [usize; 2]) -> Result<Self> {
        Ok(Self { kind: Kind::Ggml(Ggml::new(blocks, dtype, dims)?) })
    }

    /// Blocks of a GGUF file in one of the formats that candle lacks; otherwise as [`QuantWeight::ggml`].
    ///
    /// # Errors
    /// As [`QuantWeight::ggml`].
    pub fn iq4(blocks: HostTensor, format: Iq4Format, dims: [usize; 2]) -> Result<Self> {
        Ok(Self { kind: Kind::Iq4(Iq4::new(blocks, format, dims)?) })
    }

    fn dims(&self) -> [usize; 2] {
        match &self.kind {
            Kind::Int8(weight) => [weight.codes.rows(), weight.codes.width()],
            Kind::Fp8(weight) => [weight.codes.rows(), weight.codes.width()],
            Kind::Ggml(weight) => weight.dims(),
            Kind::Iq4(weight) => weight.dims(),
        }
    }

    /// Rows.
    pub fn out_features(&self) -> usize {
        self.dims()[0]
    }

    /// Columns.
    pub fn in_features(&self) -> usize {
        self.dims()[1]
    }

    /// Bytes of the codes and scales: what the matrix takes as long as it is kept as it is.
    pub fn stored_bytes(&self) -> usize {
        let [rows, columns] = self.dims();
        match &self.kind {
            Kind::Int8(weight) => rows * columns + 4 * weight.scales.elem_count(),
            Kind::Fp8(weight) => rows * columns + 4 * weight.scales.elem_count(),
            Kind::Ggml(weight) => {
                rows * (columns / weight.dtype().block_size()).saturating_mul(weight.dtype().type_size())
            }
            Kind::Iq4(weight) => rows * weight.codes.width(),
        }
    }

    /// The format in words, such as `int8 convrot 256 with a scale for each row`.
    pub fn describe(&self) -> String {
        match &self.kind {
            Kind::Int8(weight) => {
                let rotation = weight.group.get().map(|size| format!(" convrot {size}")).unwrap_or_default();
                let scales = if weight.per_row() { "a scale for each row" } else { "one scale" };
                format!("int8{rotation} with {scales}")
            }
            Kind::Fp8(weight) => {
                let format = format!("{:?}", weight.format).to_lowercase();
                match weight.scales.elem_count() {
                    1 => format!("fp8 {format} with one scale"),
                    n if n == weight.codes.rows() && weight.grid.across == 1 => {
                        format!("fp8 {format} with a scale for each row")
                    }
                    _ => {
                        let [rows, columns] = weight.grid.block;
                        format!("fp8 {format} with a scale for each {rows}x{columns} block")
                    }
                }
            }
            Kind::Ggml(weight) => format!("gguf {:?}", weight.dtype()).to_lowercase(),
            Kind::Iq4(weight) => match weight.format {
                Iq4Format::NonLinear => "gguf iq4_nl".to_owned(),
                Iq4Format::Super => "gguf iq4_xs".to_owned(),
            },
        }
    }

    /// Rows `start..start + len` (one map of a fused one); on the CPU nothing is copied.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are no such rows, or `len` is 0; [`Error::Candle`] if a device has no memory.
    pub fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let rows = self.out_features();
        if len == 0 || start.checked_add(len).is_none_or(|end| end > rows) {
            let what = format!("rows {start} to {start} + {len} of a matrix of {rows} rows");
            return Err(Error::Argument { op: OP, what });
        }
        Ok(Self { kind: each!(self, weight => weight.narrow(start, len)?) })
    }

    /// The rows named by `ids`, in that order: of an embedding table, only these are ever decoded.
    ///
    /// # Errors
    /// [`Error::Argument`] without ids, or for one beyond the last row.
    pub fn gather(&self, ids: &[u32]) -> Result<Self> {
        let rows = self.out_features();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            return Err(Error::Argument { op: OP, what: format!("row {id} of a matrix of {rows} rows") });
        }
        if ids.is_empty() {
            return Err(Error::Argument { op: OP, what: "no rows to gather".into() });
        }
        Ok(Self { kind: each!(self, weight => weight.gather(ids)?) })
    }

    /// The same matrix with its codes on `device`. On the CPU they stay where they are mapped.
    ///
    /// # Errors
    /// [`Error::Candle`] if the device has no memory.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self { kind: each!(self, weight => weight.to_device(device)?) })
    }

    /// The matrix as a tensor of f32, f16 or bf16 on `device`; decoded there if that is a CUDA device, else on the CPU.
    /// Values are computed in f32 and rounded once.
    ///
    /// # Errors
    /// [`Error::DType`] for other types; [`Error::Argument`] if it does not fit into memory; [`Error::Candle`].
    pub fn dequantize(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::DType { op: OP, operand: "result", got: dtype, expected: FLOATS });
        }
        match &self.kind {
            Kind::Int8(weight) => weight.dequantize(dtype, device),
            Kind::Fp8(weight) => weight.dequantize(dtype, device),
            Kind::Ggml(weight) => weight.dequantize(dtype, device),
            Kind::Iq4(weight) => weight.dequantize(dtype, device),
        }
    }

    /// Signed bytes, the one format that has a product of its own.
    pub(crate) fn as_int8(&self) -> Option<&Int8> {
        match &self.kind {
            Kind::Int8(weight) => Some(weight),
            _ => None,
        }
    }

    /// The rows as they are multiplied on the CPU. Those of a rotated matrix are not rotated back: what they are multiplied
    /// with has to be rotated.
    pub(crate) fn wide_rows(&self) -> Result<Box<dyn WideRows + '_>> {
        Ok(match &self.kind {
            Kind::Int8(weight) => Box::new(weight.view()?),
            Kind::Fp8(weight) => Box::new(weight.view()?),
            Kind::Ggml(weight) => Box::new(weight.view()?),
            Kind::Iq4(weight) => Box::new(weight.view()?),
        })
    }
}

/// Scales as a tensor on the CPU, all of them finite and none negative.
fn scales_tensor(scales: Vec<f32>) -> Result<Tensor> {
    if let Some((i, scale)) = scales.iter().enumerate().find(|(_, s)| !(s.is_finite() && **s >= 0.0)) {
        return Err(Error::Argument { op: OP, what: format!("scale {i} is {scale}") });
    }
    Tensor::new(scales, &Device::Cpu).what("scales of a quantised matrix")
}
