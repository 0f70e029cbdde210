//! ConvRot: matrices of signed bytes whose rows were rotated group by group before they were quantised, which spreads
//! outliers over a group.
//!
//! A rotated matrix serves in two ways, because the rotation H is symmetric and its own inverse: rotated back, or
//! multiplied with arguments that are rotated too, `(x H)(W H)^T = x W^T`. The second is also the way of products of
//! integers: [`crate::quant::QuantMode::W8A8`].
//!
//! | file | what |
//! |---|---|
//! | `group.rs` | the matrix and its fast transform |
//! | `cpu.rs`, `cuda.rs`, `convrot.cu` | decoding, rotation, quantisation |
//! | `w8a8/` | products of integers |
//!
//! "ConvRot: Rotation-Based Plug-and-Play 4-bit Quantization for Diffusion Transformers", arXiv 2512.03673. Files and
//! rules: `Comfy-Org/comfy-kitchen`.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod group;
#[cfg(test)]
mod tests;
pub(crate) mod w8a8;

use candle_core::{DType, Tensor};

pub(crate) use self::group::Group;
pub use self::w8a8::{W8a8Counters, take_counters};
use crate::{
    element::{FLOATS, with_element},
    error::{Error, Result, What},
    operand::{check, on_cpu, read, shape_error},
};

const DEQUANTIZE: &str = "dequantize_int8_convrot";
const QUANTIZE: &str = "quantize_int8_convrot";

/// The floats that codes of a rotated matrix stand for.
///
/// **Shapes**: codes `[N, K]`, scales `[1]`, `[N]`, `[N, 1]` or a scalar, contiguous or not; K a multiple of `group`, which
/// is 4, 16, 64, 256 or 1024, or `None` for a matrix that is not rotated; result `[N, K]`, contiguous. Empty matrices are
/// allowed.
/// **Dtypes**: codes u8, which hold signed bytes (candle has no type for them); scales f32; result `dtype`: f32, f16 or
/// bf16.
/// **Formula**: with `p` the logarithm of the group size to base 4 and S = 2^p H the integer form of the group matrix, `n =
/// S codes` over each group and `W = n (scale 2^-p)` ("ConvRot", arXiv 2512.03673).
/// **Numerics**: n is exact, so there are two roundings, of the product to f32 and of that to `dtype`, and the CPU and
/// CUDA give the same bits.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if codes are no matrix or there are neither 1 nor N scales.
/// - [`Error::DType`] for other element types.
/// - [`Error::Argument`] for other groups, one that does not divide K, or operands on two devices.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// // The third unit vector: a row of the matrix, halved.
/// let codes = Tensor::new(&[[0u8, 0, 1, 0]], &Device::Cpu)?;
/// let scales = Tensor::new(&[1f32], &Device::Cpu)?;
/// let w = candle_fork::dequantize_int8_convrot(&codes, &scales, Some(4), DType::F32)?;
/// assert_eq!(w.to_vec2::<f32>()?, [[0.5, -0.5, 0.5, 0.5]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dequantize_int8_convrot(codes: &Tensor, scales: &Tensor, group: Option<usize>, dtype: DType) -> Result<Tensor> {
    let &[rows, columns] = codes.dims() else {
        return Err(shape_error(DEQUANTIZE, "codes", codes, "[N, K]"));
    };
    if codes.dtype() != DType::U8 {
        let (got, expected) = (codes.dtype(), "u8, which holds signed bytes");
        return Err(Error::DType { op: DEQUANTIZE, operand: "codes", got, expected });
    }
    check(DEQUANTIZE, &[("scales", scales)])?;
    if scales.dtype() != DType::F32 {
        let got = scales.dtype();
        return Err(Error::DType { op: DEQUANTIZE, operand: "scales", got, expected: "f32" });
    }
    if !scales.device().same_device(codes.device()) {
        let what = "scales are on another device than codes".to_owned();
        return Err(Error::Argument { op: DEQUANTIZE, what });
    }
    if !matches!(scales.dims(), [] | [1] | [1, 1]) && scales.dims() != [rows] && scales.dims() != [rows, 1] {
        let expected = format!("a scalar, [1], [{rows}] or [{rows}, 1]");
        return Err(shape_error(DEQUANTIZE, "scales", scales, expected));
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::DType { op: DEQUANTIZE, operand: "result", got: dtype, expected: FLOATS });
    }
    let group = Group::new(DEQUANTIZE, group, columns)?;
    if rows == 0 || columns == 0 {
        return Tensor::zeros((rows, columns), dtype, codes.device()).what(DEQUANTIZE);
    }
    let scales = scales.flatten_all().what(DEQUANTIZE)?;
    dequantize(codes, &scales, group, dtype)
}

/// [`dequantize_int8_convrot`] of operands that have been checked: a matrix that is not empty, scales `[1]` or `[N]`.
pub(crate) fn dequantize(codes: &Tensor, scales: &Tensor, group: Group, dtype: DType) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if codes.device().is_cuda() {
        return cuda::dequantize(codes, scales, group, dtype);
    }
    let columns = codes.dims()[1];
    let here = codes.to_device(&candle_core::Device::Cpu).and_then(|t| t.contiguous()).what(DEQUANTIZE)?;
    let scales = scales.to_vec1::<f32>().what(DEQUANTIZE)?;
    let wide = read(DEQUANTIZE, [&here], |[codes]| {
        cpu::dequantize(codes.contiguous::<u8>()?, &scales, columns, group, dtype)
    })?;
    wide.to_device(codes.device()).what(DEQUANTIZE)
}

/// Codes and scales of a matrix: what [`dequantize_int8_convrot`] takes back. Also how the rows of an argument are quantised
/// for a product of integers.
///
/// **Shapes**: weight `[N, K]`, any strides; group as for [`dequantize_int8_convrot`]; results `[N, K]` and `[N]`.
/// **Dtypes**: weight f32, f16 or bf16; codes u8, which hold signed bytes from -127 to 127; scales f32.
/// **Formula**: `r = W H` over each group of columns; `scale = max(max |r| / 127, 1e-30)` for each row; `codes = round(r /
/// scale)`, ties to even (`Comfy-Org/comfy-kitchen: tensor/int8_utils.py`, with everything in f32).
/// **Numerics**: f32, in a fixed order; the CPU and CUDA give the same bits. Kitchen's codes of matrices in half precision
/// differ from these by one unit in about a tenth of the elements, because it rounds to that type in between.
/// A row with an infinity or a NaN has all codes 0 and a scale that is not finite, so it stays visible.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Shape`] if weight is no matrix.
/// - [`Error::DType`] for other element types.
/// - [`Error::Argument`] for other groups, one that does not divide K, or a weight that tracks gradients.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fork::{dequantize_int8_convrot, quantize_int8_convrot};
/// let w = Tensor::new(&[[1f32, 2.0, 3.0, 4.0]], &Device::Cpu)?;
/// let (codes, scales) = quantize_int8_convrot(&w, Some(4))?;
/// let back = dequantize_int8_convrot(&codes, &scales, Some(4), DType::F32)?;
/// let error = (w - back)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(error < 0.04);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn quantize_int8_convrot(weight: &Tensor, group: Option<usize>) -> Result<(Tensor, Tensor)> {
    check(QUANTIZE, &[("weight", weight)])?;
    let &[rows, columns] = weight.dims() else {
        return Err(shape_error(QUANTIZE, "weight", weight, "[N, K]"));
    };
    let group = Group::new(QUANTIZE, group, columns)?;
    let device = weight.device();
    if rows == 0 || columns == 0 {
        let codes = Tensor::zeros((rows, columns), DType::U8, device).what(QUANTIZE)?;
        return Ok((codes, Tensor::full(cpu::LEAST_SCALE, rows, device).what(QUANTIZE)?));
    }
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return cuda::quantize(weight, group);
    }
    if !on_cpu(weight) {
        let here = weight.to_device(&candle_core::Device::Cpu).what(QUANTIZE)?;
        let (codes, scales) = quantize_int8_convrot(&here, group.get())?;
        return Ok((codes.to_device(device).what(QUANTIZE)?, scales.to_device(device).what(QUANTIZE)?));
    }
    let weight = weight.contiguous().what(QUANTIZE)?;
    let rows_of = read(QUANTIZE, [&weight], |[view]| {
        with_element!(QUANTIZE, "weight", weight.dtype(), T => {
            cpu::quantize(view.contiguous::<T>()?, columns, group)
        })
    })?;
    let codes = Tensor::from_vec(bytemuck::cast_vec::<i8, u8>(rows_of.codes), (rows, columns), device);
    let scales = Tensor::from_vec(rows_of.scales, rows, device);
    Ok((codes.what(QUANTIZE)?, scales.what(QUANTIZE)?))
}
