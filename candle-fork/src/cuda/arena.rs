//! Scratch memory that outlives the calls that use it.
//!
//! For each thread and device as many blocks are kept as calls were nested, grown to the largest requests so far; what they
//! hold is undefined. They are reused in the order of the stream, without waiting: the next use is enqueued behind the last
//! one. Blocks are freed by [`release`] or with their thread.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
};

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
    static BLOCKS: RefCell<HashMap<DeviceId, Vec<CudaSlice<u8>>>> = RefCell::new(HashMap::new());
    static FRESH: Cell<bool> = const { Cell::new(false) };
}

/// Calls `f`, in which every [`with`] gets memory that is freed behind it: work that is recorded must not keep the address
/// of a block that may be gone when it is replayed.
pub fn fresh<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            FRESH.set(self.0);
        }
    }
    let _restore = Restore(FRESH.replace(true));
    f()
}

/// Calls `f` with the address of `bytes` of scratch memory, aligned to 256 bytes, for work that `f` enqueues on the
/// device's stream. A call inside another gets memory of its own.
///
/// # Errors
/// [`crate::Error::Candle`] if there is no memory; whatever `f` returns.
pub fn with<R>(device: &CudaDevice, bytes: usize, f: impl FnOnce(Address) -> Result<R>) -> Result<R> {
    let fresh = FRESH.get();
    // Taken out, so that a nested call does not get the same block.
    let kept =
        if fresh { None } else { BLOCKS.with_borrow_mut(|blocks| take(blocks.entry(device.id()).or_default(), bytes)) };
    let block = match kept {
        Some(block) => block,
        None => {
            let len = bytes.max(1).next_multiple_of(STEP);
            // SAFETY: the memory is scratch; nothing reads it before writing it.
            unsafe { device.alloc::<u8>(len) }.what("scratch memory")?
        }
    };
    let stream = device.cuda_stream();
    let result = f(block.device_ptr(&stream).0);
    if !fresh {
        BLOCKS.with_borrow_mut(|blocks| blocks.entry(device.id()).or_default().push(block));
    }
    result
}

/// The smallest block that is large enough. If there is none, the largest is given up for the one that will be made.
fn take(blocks: &mut Vec<CudaSlice<u8>>, bytes: usize) -> Option<CudaSlice<u8>> {
    let fits = |i: &usize| blocks[*i].len() >= bytes;
    if let Some(i) = (0..blocks.len()).filter(fits).min_by_key(|&i| blocks[i].len()) {
        return Some(blocks.swap_remove(i));
    }
    if let Some(i) = (0..blocks.len()).max_by_key(|&i| blocks[i].len()) {
        blocks.swap_remove(i);
    }
    None
}

/// Gives back this thread's scratch memory of a device: [`crate::memory::release_scratch`].
pub fn release(device: &CudaDevice) {
    BLOCKS.with_borrow_mut(|blocks| blocks.remove(&device.id()));
}
