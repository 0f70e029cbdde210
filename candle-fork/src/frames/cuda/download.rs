//! Page-locked memory that frames are copied to without the host waiting.

use std::sync::Arc;

use candle_core::{
    Storage, Tensor,
    cuda_backend::{
        CudaStorageSlice, WrapErr,
        cudarc::driver::{CudaEvent, CudaStream, CudaView, DeviceRepr, PinnedHostSlice, ValidAsZeroBits},
    },
};

use crate::{
    cuda::tensor::device_of,
    error::{Error, Result, What},
};

const OP: &str = "download of frames";

/// Host memory of a batch of frames. Kept for the next batch: to lock pages stops the device for a moment.
#[derive(Debug)]
pub(in crate::frames) struct Buffers {
    pixels: PinnedHostSlice<u8>,
    flags: PinnedHostSlice<u32>,
    flag_count: usize,
    /// Behind the copies. The buffers' own events are recorded only where tensors are tracked by events.
    done: CudaEvent,
}

impl Buffers {
    /// Enqueues the copy of both tensors, which are contiguous, into `spare` if it is large enough.
    pub(in crate::frames) fn fill(spare: Option<Self>, pixels: &Tensor, flags: &Tensor) -> Result<Self> {
        let device = device_of(OP, pixels)?;
        let stream = device.cuda_stream();
        let (pixel_count, flag_count) = (pixels.elem_count(), flags.elem_count());
        let fits = |b: &Self| b.pixels.len() >= pixel_count && b.flags.len() >= flag_count;
        let mut buffers = match spare.filter(fits) {
            Some(buffers) => buffers,
            None => {
                let context = stream.context();
                // Plain flags: write-combined memory is read back at a tenth of the speed.
                // SAFETY: nothing reads the memory before a copy has filled it: `wait` reads what `fill` asked for.
                let pixels = unsafe { context.alloc_pinned_with_flags(pixel_count.max(1), 0) }.w().what(OP)?;
                // SAFETY: as above.
                let flags = unsafe { context.alloc_pinned_with_flags(flag_count.max(1), 0) }.w().what(OP)?;
                Self { pixels, flags, flag_count, done: context.new_event(None).w().what(OP)? }
            }
        };
        buffers.flag_count = flag_count;
        let unexpected = || Error::Argument { op: OP, what: "frames are not bytes on a CUDA device".to_owned() };
        {
            let (storage, _) = pixels.storage_and_layout();
            let Storage::Cuda(storage) = &*storage else { return Err(unexpected()) };
            let CudaStorageSlice::U8(bytes) = &storage.slice else { return Err(unexpected()) };
            copy(&stream, &bytes.slice(..pixel_count), &mut buffers.pixels)?;
        }
        let (storage, _) = flags.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { return Err(unexpected()) };
        let CudaStorageSlice::U32(words) = &storage.slice else { return Err(unexpected()) };
        copy(&stream, &words.slice(..flag_count), &mut buffers.flags)?;
        buffers.done.record(&stream).w().what(OP)?;
        Ok(buffers)
    }

    /// The first `count` bytes and whether no flag is set, once the copies are done.
    pub(in crate::frames) fn wait(&self, count: usize) -> Result<(Vec<u8>, bool)> {
        self.done.synchronize().w().what(OP)?;
        let flags = self.flags.as_slice().w().what(OP)?;
        let finite = flags.iter().take(self.flag_count).all(|&flag| flag == 0);
        let pixels = self.pixels.as_slice().w().what(OP)?;
        Ok((pixels.get(..count).unwrap_or(pixels).to_vec(), finite))
    }
}

/// Enqueues the copy of a slice to the beginning of a buffer that is no shorter. The driver's copy is as long as its
/// destination, so that is cut.
fn copy<T: DeviceRepr + ValidAsZeroBits>(
    stream: &Arc<CudaStream>,
    from: &CudaView<'_, T>,
    to: &mut PinnedHostSlice<T>,
) -> Result<()> {
    let to = to.as_mut_slice().w().what(OP)?;
    let to =
        to.get_mut(..from.len()).ok_or_else(|| Error::Argument { op: OP, what: "a buffer is too short".to_owned() })?;
    stream.memcpy_dtoh(from, to).w().what(OP)
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // A device that failed writes nothing any more.
        let _ = self.done.synchronize();
    }
}
