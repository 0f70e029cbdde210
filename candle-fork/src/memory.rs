//! Memory that a device keeps between calls.

use candle_core::Device;

use crate::error::Result;

/// Lets a CUDA `device` keep up to `bytes` of freed memory for later results, instead of giving all of it back to the
/// driver whenever somebody waits for the device; `u64::MAX` keeps everything. Does nothing on other devices.
///
/// A loop that waits once per step, as a decoder does that hands out every frame, otherwise pays for mapping its memory
/// anew in every step. The setting belongs to the device and lasts as long as the process; other processes cannot use what
/// is kept. No result depends on it.
///
/// # Errors
/// [`crate::Error::Candle`] if the driver refuses, as it does for devices without memory pools.
pub fn keep_freed(device: &Device, bytes: u64) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::keep_freed(device, bytes),
        _ => {
            let _ = bytes;
            Ok(())
        }
    }
}

/// Bytes that can be allocated on a CUDA `device` now: what its driver has left, and what was freed and kept. `None` on other
/// devices.
///
/// # Errors
/// [`crate::Error::Candle`] if the driver refuses, as it does for devices without memory pools.
pub fn available(device: &Device) -> Result<Option<u64>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::available(device).map(Some),
        _ => Ok(None),
    }
}

/// Most bytes that tensors and scratch memory of a CUDA `device` have held at a time since [`reset_peak`] (or ever): what the
/// allocations came to, without what the driver keeps for itself or for later. `None` on other devices.
///
/// # Errors
/// [`crate::Error::Candle`] if the driver refuses, as it does for devices without memory pools.
pub fn peak(device: &Device) -> Result<Option<u64>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::peak(device).map(Some),
        _ => Ok(None),
    }
}

/// Begins anew to count what [`peak`] gives. Does nothing on other devices than CUDA ones.
///
/// # Errors
/// As [`peak`].
pub fn reset_peak(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::reset_peak(device),
        _ => Ok(()),
    }
}

/// Gives back the scratch memory that this thread's calls on `device` have grown, some hundred MiB after large
/// convolutions. The next call that needs some takes it anew. Does nothing on other devices than CUDA ones.
pub fn release_scratch(device: &Device) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        crate::cuda::arena::release(device);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

/// Gives memory that was freed and kept ([`keep_freed`]) back to the system, once the work of `device` is done: before a model
/// is loaded in place of another, whose pieces would not fit into the holes. Does nothing on other devices than CUDA ones.
///
/// # Errors
/// [`crate::Error::Candle`] if the driver refuses, as it does for devices without memory pools.
pub fn give_back(device: &Device) -> Result<()> {
    release_scratch(device);
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => on_cuda::give_back(device),
        _ => Ok(()),
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use candle_core::{
        CudaDevice,
        cuda_backend::{
            WrapErr,
            cudarc::driver::{result, sys},
        },
    };

    use crate::error::{Result, What};

    const WHAT: &str = "memory pool of a device";

    pub(super) fn keep_freed(device: &CudaDevice, bytes: u64) -> Result<()> {
        set(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, bytes)
    }

    pub(super) fn available(device: &CudaDevice) -> Result<u64> {
        let reserved = get(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = get(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        // Of the device whose pool that is: its context is bound to the thread.
        let (free, _) = result::mem_get_info().w().what(WHAT)?;
        Ok(free as u64 + reserved.saturating_sub(used))
    }

    pub(super) fn give_back(device: &CudaDevice) -> Result<()> {
        let pool = pool(device)?;
        // What is being used by enqueued work is not free yet.
        device.cuda_stream().synchronize().w().what(WHAT)?;
        // SAFETY: the pool is the device's own and never destroyed.
        unsafe { result::mem_pool::trim_to(pool, 0) }.w().what(WHAT)
    }

    pub(super) fn peak(device: &CudaDevice) -> Result<u64> {
        get(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)
    }

    fn get(device: &CudaDevice, attribute: sys::CUmemPool_attribute) -> Result<u64> {
        let pool = pool(device)?;
        let mut bytes = 0u64;
        // SAFETY: the pool is the device's own and never destroyed; the attribute is a 64-bit integer, which the call writes.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast()) }.w().what(WHAT)?;
        Ok(bytes)
    }

    pub(super) fn reset_peak(device: &CudaDevice) -> Result<()> {
        set(device, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
    }

    fn set(device: &CudaDevice, attribute: sys::CUmemPool_attribute, mut value: u64) -> Result<()> {
        let pool = pool(device)?;
        // SAFETY: the pool is the device's own and never destroyed; the attribute is a 64-bit integer, which the call reads.
        unsafe { result::mem_pool::set_attribute(pool, attribute, (&raw mut value).cast()) }.w().what(WHAT)
    }

    /// The pool that the device's allocations come from.
    fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool> {
        let stream = device.cuda_stream();
        let context = stream.context();
        context.bind_to_thread().w().what(WHAT)?;
        // SAFETY: the handle is that of the context's device.
        unsafe { result::device::get_default_mem_pool(context.cu_device()) }.w().what(WHAT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_nothing_to_keep() {
        keep_freed(&Device::Cpu, u64::MAX).unwrap();
        release_scratch(&Device::Cpu);
        give_back(&Device::Cpu).unwrap();
        reset_peak(&Device::Cpu).unwrap();
        assert_eq!(peak(&Device::Cpu).unwrap(), None);
        assert_eq!(available(&Device::Cpu).unwrap(), None);
    }
}
