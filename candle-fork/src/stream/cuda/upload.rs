//! Copies on a stream beside the device's.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CpuStorage, CudaDevice, DType, Storage, Tensor,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{CudaEvent, CudaStream, PinnedHostSlice, result},
    },
};

use crate::{
    error::{Error, Result, What},
    stream::HostBlock,
    target::with_address,
};

const OP: &str = "upload";

/// A block in page-locked memory, which is not freed before the last copy from it is done.
#[derive(Debug)]
pub(in crate::stream) struct Pinned {
    bytes: PinnedHostSlice<u8>,
    len: usize,
    dtype: DType,
    last: Mutex<Option<Arc<CudaEvent>>>,
}

impl Pinned {
    /// A copy of a contiguous tensor; `None` if the system has no pages to lock.
    pub(in crate::stream) fn new(cuda: &CudaDevice, block: &Tensor) -> Result<Option<Self>> {
        let len = block.elem_count() * block.dtype().size_in_bytes();
        let stream = cuda.cuda_stream();
        // SAFETY: the first `len` bytes are written below, and nothing reads further.
        let allocated = unsafe { stream.context().alloc_pinned::<u8>(len) };
        let Ok(mut bytes) = allocated else {
            tracing::warn!(bytes = len, "no page-locked memory: uploads take the host's time");
            return Ok(None);
        };
        let to = bytes.as_mut_slice().w().what("page-locked memory")?;
        with_bytes(block, |from| {
            to[..len].copy_from_slice(from);
            Ok(())
        })?;
        Ok(Some(Self { bytes, len, dtype: block.dtype(), last: Mutex::default() }))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(event) = self.last.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            // A device that failed reads nothing any more.
            let _ = event.synchronize();
        }
    }
}

/// The stream of the copies.
#[derive(Debug)]
pub(in crate::stream) struct Side {
    main: Arc<CudaStream>,
    side: Arc<CudaStream>,
}

impl Side {
    pub(in crate::stream) fn new(cuda: &CudaDevice) -> Result<Self> {
        let main = cuda.cuda_stream();
        let side = main.context().new_stream().w().what("stream for uploads")?;
        Ok(Self { main, side })
    }

    pub(in crate::stream) fn start(&self, block: &HostBlock, slot: &Tensor) -> Result<Flight> {
        let event = self.main.record_event(None).w().what("event before an upload")?;
        self.side.wait(&event).w().what("order of an upload")?;
        match (&block.pinned, &block.tensor) {
            (Some(pinned), _) => {
                let bytes = pinned.bytes.as_slice().w().what("page-locked memory")?;
                self.copy(&bytes[..pinned.len], pinned.dtype, slot)?;
            }
            (None, Some(tensor)) => with_bytes(tensor, |bytes| self.copy(bytes, tensor.dtype(), slot))?,
            (None, None) => return Err(Error::Argument { op: OP, what: "the block is empty".into() }),
        }
        let done = Arc::new(self.side.record_event(None).w().what("event behind an upload")?);
        if let Some(pinned) = &block.pinned {
            *pinned.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(done.clone());
        }
        Ok(Flight { done, main: self.main.clone(), _slot: slot.clone() })
    }

    fn copy(&self, bytes: &[u8], dtype: DType, slot: &Tensor) -> Result<()> {
        if slot.rank() != 1 || slot.elem_count() * dtype.size_in_bytes() != bytes.len() {
            let expected = format!("[{}]", bytes.len() / dtype.size_in_bytes());
            return Err(Error::Shape { op: OP, operand: "slot", got: slot.dims().to_vec(), expected });
        }
        if slot.dtype() != dtype {
            return Err(Error::DType { op: OP, operand: "slot", got: slot.dtype(), expected: "the block's dtype" });
        }
        with_address(OP, slot, |address| {
            // SAFETY: the slot is contiguous and has as many bytes, and lives until the device's stream waits for the
            // copy (`Flight`); its earlier uses are done when the copy begins. Page-locked bytes live until the copy is
            // done (`Pinned`), others are read before the call returns.
            unsafe { result::memcpy_htod_async(address, bytes, self.side.cu_stream()) }.w().what("upload")
        })
    }
}

/// A copy that has been enqueued.
#[derive(Debug)]
pub(in crate::stream) struct Flight {
    done: Arc<CudaEvent>,
    main: Arc<CudaStream>,
    /// Freed behind the wait for the copy.
    _slot: Tensor,
}

impl Flight {
    pub(in crate::stream) fn wait(&self) -> Result<()> {
        self.main.wait(&self.done).w().what("wait for an upload")
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // To wait twice costs nothing; a failure has been reported by the first wait or is by the next call.
        let _ = self.main.wait(&self.done);
    }
}

/// Calls `f` with the bytes of a contiguous tensor on the CPU.
fn with_bytes<R>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let unsupported = || Error::Unsupported { op: OP, what: format!("a block of {:?}", tensor.dtype()) };
    let Storage::Cpu(storage) = &*storage else { return Err(unsupported()) };
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match storage {
        CpuStorage::F32(values) => f(bytemuck::cast_slice(&values[range])),
        CpuStorage::F16(values) => f(bytemuck::cast_slice(&values[range])),
        CpuStorage::BF16(values) => f(bytemuck::cast_slice(&values[range])),
        _ => Err(unsupported()),
    }
}
