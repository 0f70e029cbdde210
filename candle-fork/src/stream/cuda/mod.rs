//! Streams, page-locked memory and graphs of the driver.

mod replay;
mod staging;
mod upload;

use candle_core::Device;

pub(super) use self::{
    replay::Graph,
    staging::Blocks,
    upload::{Flight, Pinned, Side},
};
use crate::error::{Result, What};

/// See [`super::cuda_device`].
pub(super) fn device(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal).what("CUDA device")?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: the device is new, so all of its tensors lie on its one stream, which orders all of their uses; this
        // crate joins its streams for copies by events of its own, and callers are told to join theirs.
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}
