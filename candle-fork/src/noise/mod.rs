//! Noise that is drawn where it is needed.

use candle_core::{DType, Device, Shape, Tensor};

use crate::error::{Error, Result};

#[cfg(feature = "cuda")]
mod cuda;

const OP: &str = "philox_normal";

/// Standard normal values of the stream of `seed`, drawn on a CUDA device: hundreds of millions in milliseconds.
///
/// **Shapes**: the result has `shape`; value i of the stream is element i in row-major order.
/// **Dtypes**: f32, f16 or bf16; made in f64, rounded to f32 and then to `dtype`.
/// **Formula**: `sqrt(-2 log u0) sin(2 pi u1)` with u0 and u1 the first two words of Philox4x32-10 under the key `seed` at the
/// counter i, as middles of 2^32 parts of the unit interval ("Parallel Random Numbers: As Easy as 1, 2, 3", Salmon et al.).
/// **Numerics**: the values of the generator `philox` of the crate `sampling`, up to the last place of a logarithm or sine in
/// f64: one value in some millions differs, by one unit in the last place of f32.
/// **Policy**: none.
///
/// # Errors
/// - [`Error::Unsupported`] on other devices.
/// - [`Error::DType`] for other element types.
///
/// # Example
/// ```
/// use candle_core::{DType, Device};
/// use candle_fork::noise::philox_normal;
/// // Elsewhere noise is drawn on the host.
/// assert!(philox_normal(7, (2, 3), DType::F32, &Device::Cpu).is_err());
/// ```
pub fn philox_normal(seed: u64, shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::DType { op: OP, operand: "dtype", got: dtype, expected: "f32, f16 or bf16" });
    }
    let shape = shape.into();
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return cuda::philox_normal(seed, &shape, dtype, device);
    }
    let _ = (seed, device);
    Err(Error::Unsupported { op: OP, what: format!("noise {:?} on this device", shape.dims()) })
}
