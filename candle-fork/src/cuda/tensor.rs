//! Tensors as kernels see them: addresses of operands, uninitialised outputs.

use candle_core::{
    CudaDevice, CudaStorage, DType, Device, Shape, Storage, Tensor,
    backend::BackendStorage,
    cuda_backend::{
        CudaStorageSlice,
        cudarc::driver::{DevicePtr, DevicePtrMut},
    },
    op::BackpropOp,
};

use crate::{
    element::FLOATS,
    error::{Error, Result, What},
    layout,
};

/// An address in device memory.
pub type Address = u64;

/// Calls `$f` with the typed slice of a storage, whatever its type.
macro_rules! with_slice {
    ($storage:expr, $slice:ident => $f:expr) => {
        match $storage {
            CudaStorageSlice::U8($slice) => $f,
            CudaStorageSlice::U32($slice) => $f,
            CudaStorageSlice::I16($slice) => $f,
            CudaStorageSlice::I32($slice) => $f,
            CudaStorageSlice::I64($slice) => $f,
            CudaStorageSlice::BF16($slice) => $f,
            CudaStorageSlice::F16($slice) => $f,
            CudaStorageSlice::F32($slice) => $f,
            CudaStorageSlice::F64($slice) => $f,
            CudaStorageSlice::F8E4M3($slice) => $f,
            CudaStorageSlice::F6E2M3($slice) => $f,
            CudaStorageSlice::F6E3M2($slice) => $f,
            CudaStorageSlice::F4($slice) => $f,
            CudaStorageSlice::F8E8M0($slice) => $f,
        }
    };
}

/// The CUDA device of a tensor.
///
/// # Errors
/// [`Error::Argument`] if it is elsewhere.
pub fn device_of<'a>(op: &'static str, tensor: &'a Tensor) -> Result<&'a CudaDevice> {
    match tensor.device() {
        Device::Cuda(device) => Ok(device),
        _ => Err(Error::Argument { op, what: "an operand is not on a CUDA device".into() }),
    }
}

/// A tensor that enqueued work reads. Keep it until the work is enqueued.
///
/// If the device has several streams, the device's stream waits for the last write of the tensor when this is made, and
/// the read is recorded when this is dropped, so that other streams can wait for it. It holds the tensor but no lock:
/// two operands may be parts of one storage.
#[derive(Debug)]
pub struct Operand {
    tensor: Tensor,
    address: Address,
}

impl Operand {
    /// # Errors
    /// [`Error::Argument`] if the tensor is not on a CUDA device.
    pub fn new(op: &'static str, tensor: &Tensor) -> Result<Self> {
        let base =
            touch(tensor).ok_or_else(|| Error::Argument { op, what: "an operand is not on a CUDA device".into() })?;
        let offset = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
        Ok(Self { tensor: tensor.clone(), address: base + offset as u64 })
    }

    /// Address of the first element.
    pub fn address(&self) -> Address {
        self.address
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Distances of neighbours along each axis, in elements.
    pub fn strides(&self) -> &[usize] {
        self.tensor.stride()
    }
}

impl Drop for Operand {
    fn drop(&mut self) {
        touch(&self.tensor);
    }
}

/// Lets the stream of the tensor's device wait for the last write and records a read. The address of the storage.
fn touch(tensor: &Tensor) -> Option<Address> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return None };
    let stream = storage.device.cuda_stream();
    // The guard that records the read is dropped at once.
    Some(with_slice!(&storage.slice, slice => slice.device_ptr(&stream).0))
}

/// Calls `f` with the address of element `offset` of a storage that enqueued work writes; the write is recorded for other
/// streams when `f` has enqueued it.
///
/// # Errors
/// Whatever `f` returns.
pub fn written<R>(storage: &mut CudaStorage, offset: usize, f: impl FnOnce(Address) -> Result<R>) -> Result<R> {
    let stream = storage.device.cuda_stream();
    let bytes = (offset * storage.dtype().size_in_bytes()) as u64;
    let (base, _recorded) = with_slice!(&mut storage.slice, slice => slice.device_ptr_mut(&stream));
    f(base + bytes)
}

/// Memory for a result, uninitialised: kernels must write all of it.
#[derive(Debug)]
pub struct Output {
    storage: CudaStorage,
    address: Address,
    len: usize,
}

impl Output {
    /// `len` elements of f32, f16, bf16, u8 or u32.
    ///
    /// # Errors
    /// [`Error::DType`] for other types; [`Error::Candle`] if there is no memory.
    pub fn new(op: &'static str, device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        macro_rules! alloc {
            ($variant:ident) => {{
                // SAFETY: only kernels that write all of it are given this memory before it becomes a tensor. An empty
                // result gets one element, since the driver refuses to allocate nothing.
                let slice = unsafe { device.alloc(len.max(1)) };
                CudaStorageSlice::$variant(slice.what("memory for a result")?)
            }};
        }
        let slice = match dtype {
            DType::F32 => alloc!(F32),
            DType::F16 => alloc!(F16),
            DType::BF16 => alloc!(BF16),
            DType::U8 => alloc!(U8),
            DType::U32 => alloc!(U32),
            got => return Err(Error::DType { op, operand: "result", got, expected: FLOATS }),
        };
        let stream = device.cuda_stream();
        let address = with_slice!(&slice, slice => slice.device_ptr(&stream).0);
        Ok(Self { storage: CudaStorage { slice, device: device.clone() }, address, len })
    }

    /// Address of the first element.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none: then nothing has to be launched.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of an element.
    pub fn element_size(&self) -> usize {
        self.storage.dtype().size_in_bytes()
    }

    /// The device.
    pub fn device(&self) -> &CudaDevice {
        &self.storage.device
    }

    /// The memory as a row-major tensor, after the work that fills it has been enqueued.
    ///
    /// # Errors
    /// [`Error::Argument`] if the shape has another number of elements.
    pub fn into_tensor(self, op: &'static str, dims: impl Into<Shape>) -> Result<Tensor> {
        let (shape, len) = (dims.into(), self.len);
        if shape.elem_count() != len {
            return Err(Error::Argument { op, what: format!("{len} elements do not fill {:?}", shape.dims()) });
        }
        let Self { mut storage, .. } = self;
        let stream = storage.device.cuda_stream();
        // Records the write for other streams.
        with_slice!(&mut storage.slice, slice => drop(slice.device_ptr_mut(&stream)));
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// The memory, filled in the order `[N, .., C]`, as a tensor of shape `dims` = `[N, C, ..]`.
    ///
    /// # Errors
    /// As [`Self::into_tensor`].
    pub fn into_channels_last(self, op: &'static str, dims: &[usize]) -> Result<Tensor> {
        let stored = layout::to_stored(dims);
        layout::from_stored(&self.into_tensor(op, stored)?)
    }
}

/// A bias or the like as kernels read it through [`element_type`]: contiguous, and f32 if it was f64.
///
/// # Errors
/// [`Error::Candle`] if it has to be copied and that fails; [`Error::Argument`] if it is not on a CUDA device.
pub fn small_operand(tensor: &Tensor) -> Result<Operand> {
    const OP: &str = "bias";
    let narrowed = if tensor.dtype() == DType::F64 { tensor.to_dtype(DType::F32) } else { Ok(tensor.clone()) };
    Operand::new(OP, &narrowed.and_then(|t| t.contiguous()).what(OP)?)
}

/// How kernels are told the type of a small operand (`ElementType` of `common.cuh`).
///
/// # Errors
/// [`Error::DType`] for other types than f32, f16 and bf16.
pub fn element_type(op: &'static str, operand: &'static str, dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        got => Err(Error::DType { op, operand, got, expected: FLOATS }),
    }
}
