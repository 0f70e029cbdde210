//! Page-locked memory between pages of a file and a device.

use candle_core::{
    CudaDevice, DType, Tensor,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{CudaEvent, PinnedHostSlice, result},
    },
};
use rayon::prelude::*;

use crate::{
    cuda::tensor::Output,
    error::{Result, What},
    host::HostTensor,
};

const OP: &str = "upload of a host tensor";

/// Bytes of a block: few calls of the driver, and the first copy begins soon.
const BLOCK: usize = 32 << 20;

/// Fewest bytes of a tensor for which the detour pays.
const WORTH: usize = 4 << 20;

/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 20;

/// Two blocks that take turns.
#[derive(Debug)]
pub(in crate::stream) struct Blocks {
    cuda: CudaDevice,
    blocks: [Block; 2],
}

#[derive(Debug)]
struct Block {
    bytes: PinnedHostSlice<u8>,
    /// Behind the last copy from it.
    last: Option<CudaEvent>,
}

impl Block {
    fn new(cuda: &CudaDevice) -> Option<Self> {
        // SAFETY: bytes are written before the device reads them, and nobody else does.
        let bytes = unsafe { cuda.cuda_stream().context().alloc_pinned::<u8>(BLOCK) };
        Some(Self { bytes: bytes.ok()?, last: None })
    }

    /// Waits until the device has read it.
    fn wait(&mut self) -> Result<()> {
        self.last.take().map_or(Ok(()), |event| event.synchronize().w().what(OP))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // A device that failed reads nothing any more.
        let _ = self.wait();
    }
}

impl Blocks {
    /// Whether a tensor is to go this way.
    pub(in crate::stream) fn serve(host: &HostTensor) -> bool {
        let known = matches!(host.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::U8 | DType::U32);
        known && host.bytes().len() >= WORTH
    }

    /// `None` if the system has no pages to lock.
    pub(in crate::stream) fn new(cuda: &CudaDevice) -> Option<Self> {
        let blocks = Block::new(cuda).zip(Block::new(cuda));
        if blocks.is_none() {
            tracing::warn!(bytes = 2 * BLOCK, "no page-locked memory: uploads are slow");
        }
        blocks.map(|(first, second)| Self { cuda: cuda.clone(), blocks: [first, second] })
    }

    /// The tensor on the device, in its own dtype.
    pub(in crate::stream) fn upload(&mut self, host: &HostTensor) -> Result<Tensor> {
        let bytes = host.bytes();
        let out = Output::new(OP, &self.cuda, host.dtype(), host.dims().iter().product())?;
        let stream = self.cuda.cuda_stream();
        let mut address = out.address();
        for part in bytes.chunks(BLOCK) {
            // The one that has waited longer.
            let [block, other] = &mut self.blocks;
            block.wait()?;
            let to = &mut block.bytes.as_mut_slice().w().what(OP)?[..part.len()];
            to.par_chunks_mut(PIECE).zip(part.par_chunks(PIECE)).for_each(|(to, from)| to.copy_from_slice(from));
            // SAFETY: the parts are as long together as the new output, which nothing else uses before this stream comes to
            // it; the block stays as it is until the event behind the copy.
            unsafe { result::memcpy_htod_async(address, to, stream.cu_stream()) }.w().what(OP)?;
            block.last = Some(stream.record_event(None).w().what(OP)?);
            std::mem::swap(block, other);
            address += part.len() as u64;
        }
        out.into_tensor(OP, host.dims())
    }
}
