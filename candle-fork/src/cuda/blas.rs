//! Matrix products through cuBLAS: f32 sums of f32, f16 or bf16 operands.
//!
//! Each thread has a handle of its own for each device: cuBLAS handles are not safe to share between threads that compute,
//! and candle's may be set to reduced precision by others. f32 never runs as TF32, and half-precision sums that cuBLAS
//! splits are added up in f32. On one device and one stream the same product gives the same bits.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{c_int, c_longlong},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::from_ref,
};

use candle_core::{
    CudaDevice, DType,
    cuda_backend::{
        DeviceId, WrapErr,
        cudarc::cublas::{CudaBlas, result, sys},
    },
};

use super::tensor::Address;
use crate::{
    element::FLOATS,
    error::{Error, Result, What},
};

const OP: &str = "matrix product";

/// Most products of one call.
const MAX_BATCH: usize = 65535;

/// A matrix in device memory, or a batch of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Address of the first element of the first matrix.
    pub address: Address,
    /// Distance of rows in elements; of columns, if `transposed`.
    pub pitch: usize,
    /// Whether columns and not rows are packed: element (i, j) lies at `i + j * pitch`, not at `i * pitch + j`.
    pub transposed: bool,
    /// Distance of matrices of a batch, in elements; 0 for the same one each time.
    pub batch_stride: usize,
}

impl Matrix {
    /// A matrix of packed rows.
    pub fn rows(address: Address, pitch: usize) -> Self {
        Self { address, pitch, transposed: false, batch_stride: 0 }
    }

    /// The transpose of a matrix of packed rows: a weight `[out, in]` as the right operand.
    pub fn columns(address: Address, pitch: usize) -> Self {
        Self { address, pitch, transposed: true, batch_stride: 0 }
    }

    /// As a batch.
    pub fn every(self, batch_stride: usize) -> Self {
        Self { batch_stride, ..self }
    }
}

/// `out = alpha * left * right` for each of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Rows of `left` and `out`.
    pub rows: usize,
    /// Columns of `right` and `out`.
    pub cols: usize,
    /// Columns of `left`, rows of `right`: at least 1.
    pub depth: usize,
    /// Products.
    pub batch: usize,
    /// Factor, applied in f32 before rounding.
    pub alpha: f32,
    /// `[rows, depth]`.
    pub left: Matrix,
    /// `[depth, cols]`.
    pub right: Matrix,
    /// `[rows, cols]`, packed rows.
    pub out: Matrix,
    /// Type of `left` and `right`: f32, f16 or bf16.
    pub input: DType,
    /// Type of `out`: that of the operands, or f32.
    pub output: DType,
}

/// Enqueues a product. Nothing is done for a result without elements.
///
/// # Errors
/// [`Error::Unsupported`] for extents or pitches beyond 2^31 - 1, pitches that overlap rows, or a depth of zero;
/// [`Error::DType`]; [`Error::Candle`] if cuBLAS refuses.
///
/// # Safety
/// All matrices lie in memory of `device` until the enqueued product is done; `out` overlaps no operand, and its matrices
/// not one another.
pub unsafe fn multiply(device: &CudaDevice, product: &Product) -> Result<()> {
    let &Product { rows, cols, depth, batch, alpha, left, right, out, input, output } = product;
    if rows == 0 || cols == 0 || batch == 0 {
        return Ok(());
    }
    let int = |n: usize| {
        c_int::try_from(n).ok().filter(|&n| n > 0).ok_or_else(|| Error::Unsupported {
            op: OP,
            what: format!("{rows} x {depth} by {depth} x {cols} with pitches {left:?}, {right:?}, {out:?}"),
        })
    };
    // cuBLAS counts by columns, so it computes the transposed product: `right` comes first, rows are its columns.
    let side = |matrix: Matrix, rows: usize, cols: usize| {
        let (operation, packed, others) = match matrix.transposed {
            false => (sys::cublasOperation_t::CUBLAS_OP_N, cols, rows),
            true => (sys::cublasOperation_t::CUBLAS_OP_T, rows, cols),
        };
        // The pitch of a single row means nothing.
        let pitch = if others == 1 { packed } else { matrix.pitch };
        Ok((operation, int(if pitch < packed { 0 } else { pitch })?))
    };
    let ((left_op, left_pitch), (right_op, right_pitch)) = (side(left, rows, depth)?, side(right, depth, cols)?);
    let (_, out_pitch) = side(out, rows, cols)?;
    let (m, n, k) = (int(cols)?, int(rows)?, int(depth)?);
    let (input_type, output_type) = (data_type(input)?, data_type(output)?);
    let (left_size, right_size) = (input.size_in_bytes(), input.size_in_bytes());
    let beta = 0f32;
    with_handle(device, |blas| {
        for first in (0..batch).step_by(MAX_BATCH) {
            let count = MAX_BATCH.min(batch - first);
            let at = |matrix: Matrix, size: usize| matrix.address + (first * matrix.batch_stride * size) as u64;
            let stride = |matrix: Matrix| matrix.batch_stride as c_longlong;
            // SAFETY: the handle is alive and of this thread; the factors are read before the call returns; the caller
            // vouches for the matrices, whose extents and pitches have been checked.
            let status = unsafe {
                result::gemm_strided_batched_ex(
                    *blas.handle(),
                    right_op,
                    left_op,
                    m,
                    n,
                    k,
                    from_ref(&alpha).cast(),
                    at(right, right_size) as *const _,
                    input_type,
                    right_pitch,
                    stride(right),
                    at(left, left_size) as *const _,
                    input_type,
                    left_pitch,
                    stride(left),
                    from_ref(&beta).cast(),
                    at(out, output.size_in_bytes()) as *mut _,
                    output_type,
                    out_pitch,
                    stride(out),
                    // At most `MAX_BATCH`.
                    count as c_int,
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                )
            };
            status.w().what("matrix product by cuBLAS")?;
        }
        Ok(())
    })
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        got => Err(Error::DType { op: OP, operand: "operand", got, expected: FLOATS }),
    }
}

thread_local! {
    static HANDLES: RefCell<HashMap<DeviceId, Handle>> = RefCell::new(HashMap::new());
}

/// A handle that may be dropped while the driver is going away.
struct Handle(Option<CudaBlas>);

impl Drop for Handle {
    fn drop(&mut self) {
        // cudarc panics if cuBLAS cannot destroy the handle, which is no reason to abort a thread that ends.
        let blas = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(blas)));
    }
}

fn with_handle<R>(device: &CudaDevice, f: impl FnOnce(&CudaBlas) -> Result<R>) -> Result<R> {
    device.cuda_stream().context().bind_to_thread().w().what("CUDA context")?;
    HANDLES.with_borrow_mut(|handles| {
        let handle = match handles.entry(device.id()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let blas = CudaBlas::new(device.cuda_stream()).w().what("cuBLAS handle")?;
                let exact = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
                // SAFETY: the handle has just been created and belongs to this thread.
                let status = unsafe { sys::cublasSetMathMode(*blas.handle(), exact) };
                status.result().w().what("cuBLAS math mode")?;
                entry.insert(Handle(Some(blas)))
            }
        };
        match &handle.0 {
            Some(blas) => f(blas),
            None => Err(Error::Unsupported { op: OP, what: "a handle that is being dropped".into() }),
        }
    })
}
