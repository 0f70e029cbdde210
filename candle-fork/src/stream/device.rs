//! A CUDA device with one stream.

use candle_core::Device;

use crate::error::Result;

/// CUDA device number `ordinal` as this crate runs best on it: all threads enqueue on one stream of the device's own, so
/// work is done in the order in which it was enqueued, and tensors may go from one thread to another.
///
/// With one stream nobody has to wait for another, so tensors carry no events: each op costs fewer calls of the driver.
/// **Streams that a caller adds to the device's context (through `CudaDevice::cuda_stream`) must be joined by hand.**
///
/// # Errors
/// [`Error::NotCompiled`](crate::Error::NotCompiled) without feature `cuda`; [`Error::Candle`](crate::Error::Candle) if
/// there is no such device.
pub fn cuda_device(ordinal: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    {
        super::cuda::device(ordinal)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = ordinal;
        Err(crate::Error::NotCompiled { op: "CUDA device", feature: "cuda" })
    }
}
