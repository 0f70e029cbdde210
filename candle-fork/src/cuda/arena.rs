//! Scratch memory that outlives the calls that use it.
//!
//! A block is kept for each thread and device, and grows to the largest request so far; what it holds is undefined. It is
//! reused in the order of the stream, without waiting: the next use is enqueued behind the last one. Blocks are freed by
//! [`release`] or with their thread.

use std::{cell::RefCell, collections::HashMap};

use candle_core::{
    CudaDevice,
    cuda_backend::{
        DeviceId,
        cudarc::driver::{CudaSlice, DevicePtr},
    },
};

use super::tensor::Address;
use crate::error::{Result, What};

/// Blocks grow in steps of this many bytes.
const STEP: usize = 2 << 20;

thread_local! {
    static BLOCKS: RefCell<HashMap<DeviceId, CudaSlice<u8>>> = RefCell::new(HashMap::new());
}

/// Calls `f` with the address of `bytes` of scratch memory, aligned to 256 bytes, for work that `f` enqueues on the
/// device's stream. A call inside another gets memory of its own.
///
/// # Errors
/// [`crate::Error::Candle`] if there is no memory; whatever `f` returns.
pub fn with<R>(device: &CudaDevice, bytes: usize, f: impl FnOnce(Address) -> Result<R>) -> Result<R> {
    // Taken out, so that a nested call does not get the same block.
    let kept = BLOCKS.with_borrow_mut(|blocks| blocks.remove(&device.id()));
    let block = match kept.filter(|block| block.len() >= bytes.max(1)) {
        Some(block) => block,
        None => {
            let len = bytes.max(1).next_multiple_of(STEP);
            // SAFETY: the memory is scratch; nothing reads it before writing it.
            unsafe { device.alloc::<u8>(len) }.what("scratch memory")?
        }
    };
    let stream = device.cuda_stream();
    let result = f(block.device_ptr(&stream).0);
    BLOCKS.with_borrow_mut(|blocks| {
        // A nested call may have left a block; the larger one is worth more.
        let larger = blocks.remove(&device.id()).filter(|other| other.len() > block.len());
        blocks.insert(device.id(), larger.unwrap_or(block));
    });
    result
}

/// Gives back this thread's scratch memory of a device: [`crate::memory::release_scratch`].
pub fn release(device: &CudaDevice) {
    BLOCKS.with_borrow_mut(|blocks| blocks.remove(&device.id()));
}
