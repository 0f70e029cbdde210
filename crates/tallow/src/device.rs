//! The device that a command computes on.

use candle_core::Device;

use crate::{cli::DeviceName, failure::Failure};

/// Opens the device that was asked for; never another one.
///
/// # Errors
/// Usage if this build cannot have it, a failed run if this machine does not.
pub(crate) fn open(name: DeviceName) -> Result<Device, Failure> {
    match name {
        DeviceName::Cpu => Ok(Device::Cpu),
        DeviceName::Cuda(number) => cuda(number),
    }
}

#[cfg(feature = "cuda")]
fn cuda(number: usize) -> Result<Device, Failure> {
    use anyhow::Context;
    let what = || format!("cannot use CUDA device {number}");
    let device = candle_fork::stream::cuda_device(number).with_context(what)?;
    // Nobody else in this process wants it back.
    candle_fork::memory::keep_freed(&device, u64::MAX).with_context(what)?;
    Ok(device)
}

#[cfg(not(feature = "cuda"))]
fn cuda(number: usize) -> Result<Device, Failure> {
    Err(Failure::Usage(anyhow::anyhow!(
        "--device cuda:{number}: this build is without CUDA (feature `cuda`), expected cpu"
    )))
}
