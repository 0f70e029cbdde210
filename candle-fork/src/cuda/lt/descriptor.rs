//! cuBLASLt's objects, owned.

use std::{mem::MaybeUninit, ptr::from_ref};

use candle_core::{
    CudaDevice, DType,
    cuda_backend::{
        WrapErr,
        cudarc::{
            cublas::sys::cublasOperation_t,
            cublaslt::{
                result::{self, CublasError},
                sys,
            },
        },
    },
};

use super::{Plan, Product, WORKSPACE, alignment};
use crate::{
    cuda::{blas::Matrix, tensor::Address},
    error::{Error, Result, What},
};

const OP: &str = "matrix product";
const WHAT: &str = "matrix product by cuBLASLt";

/// What cuBLASLt says, as an error of this crate.
fn checked<R>(result: std::result::Result<R, CublasError>) -> Result<R> {
    result.map_err(candle_core::Error::wrap).what(WHAT)
}

/// Makes the device's context that of this thread, which cuBLASLt takes it from.
pub(super) fn bind(device: &CudaDevice) -> Result<()> {
    device.cuda_stream().context().bind_to_thread().w().what("CUDA context")
}

/// The library, initialised for the current context.
pub(super) struct Handle(sys::cublasLtHandle_t);

impl Handle {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(checked(result::create_handle())?))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `create_handle` and destroyed nowhere else. An error is no reason to stop a thread that ends.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// A matrix by columns, as cuBLASLt counts.
pub(super) struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: DType, rows: usize, cols: usize, pitch: usize) -> Result<Self> {
        let pitch = i64::try_from(pitch)
            .map_err(|_| Error::Unsupported { op: OP, what: format!("rows at a distance of {pitch}") })?;
        let layout = result::create_matrix_layout(data_type(dtype)?, rows as u64, cols as u64, pitch);
        Ok(Self(checked(layout)?))
    }

    /// `matrix` of `rows` by `cols`: its rows, or those of its transpose, are the columns.
    pub(super) fn of(matrix: &Matrix, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let (packed, others) = if matrix.transposed { (rows, cols) } else { (cols, rows) };
        // The distance of a single row means nothing.
        let pitch = if others == 1 { packed } else { matrix.pitch };
        if pitch < packed {
            return Err(Error::Unsupported { op: OP, what: format!("rows of {packed} at a distance of {pitch}") });
        }
        Self::new(dtype, packed, others, pitch)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `create_matrix_layout` and destroyed nowhere else.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// What is computed: f32 sums, which operand is transposed.
pub(super) struct Operation {
    operation: sys::cublasLtMatmulDesc_t,
}

impl Operation {
    pub(super) fn new(product: &Product) -> Result<Self> {
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        let operation = checked(result::create_matmul_desc(compute, scale))?;
        let operation = Self { operation };
        if product.right.transposed {
            let transposed = cublasOperation_t::CUBLAS_OP_T;
            operation.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
        }
        Ok(operation)
    }

    fn set<V>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &V) -> Result<()> {
        // SAFETY: the operation is alive; the value has the type of the attribute, 4 bytes or an address.
        let set = unsafe {
            result::set_matmul_desc_attribute(self.operation, attribute, from_ref(value).cast(), size_of::<V>())
        };
        checked(set)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_desc` and destroyed nowhere else.
        let _ = unsafe { result::destroy_matmul_desc(self.operation) };
    }
}

/// What an algorithm has to keep to.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(product: &Product) -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(checked(result::create_matmul_pref())?);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE)?;
        // Parts of a sum are added up in f32, in workspace, and not in the type of the result.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        let [left, right, out] = [product.left, product.right, product.out].map(|matrix| alignment(matrix.address));
        for (attribute, bytes) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ] {
            preference.set(attribute, &bytes)?;
        }
        Ok(preference)
    }

    fn set<V>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &V) -> Result<()> {
        // SAFETY: the preference is alive; the value has the type of the attribute, 4 bytes or a size.
        let set =
            unsafe { result::set_matmul_pref_attribute(self.0, attribute, from_ref(value).cast(), size_of::<V>()) };
        checked(set)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_pref` and destroyed nowhere else.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// An algorithm for one product.
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

impl Algorithm {
    /// Bytes of workspace.
    pub(super) fn workspace(&self) -> usize {
        self.workspace
    }
}

/// At most `count` algorithms in cuBLASLt's order, none if it has none.
pub(super) fn algorithms(
    handle: &Handle,
    product: &Product,
    operation: &Operation,
    [left, right, out]: [&Layout; 3],
    count: usize,
) -> Result<Vec<Algorithm>> {
    let preference = Preference::new(product)?;
    let mut found = vec![MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(); count.clamp(1, 64)];
    let mut len = 0;
    // SAFETY: all objects are alive; there is room for as many results as are asked for.
    let status = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle.0,
            operation.operation,
            right.0,
            left.0,
            out.0,
            out.0,
            preference.0,
            // At most 64.
            found.len() as i32,
            found.as_mut_ptr().cast(),
            &mut len,
        )
    };
    match status.result() {
        Ok(()) => {}
        Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => return Ok(Vec::new()),
        Err(error) => return checked(Err(error)),
    }
    let found = found.iter().take(usize::try_from(len).unwrap_or(0)).map(|result| {
        // SAFETY: cuBLASLt has written the first `len` results.
        unsafe { result.assume_init_read() }
    });
    let served = found.filter(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    Ok(served.map(|result| Algorithm { algorithm: result.algo, workspace: result.workspaceSize }).collect())
}

/// Enqueues `product` with its result at `out`.
///
/// # Safety
/// `plan` and `algorithm` were made for these extents, distances and alignments; the matrices of `product` and `out`, which
/// lies as its result does, are memory of `device` until the work is done, as is `workspace`, of the size that the algorithm
/// asks for.
pub(super) unsafe fn run(
    device: &CudaDevice,
    handle: &Handle,
    plan: &Plan,
    algorithm: &Algorithm,
    product: &Product,
    out: Address,
    workspace: Address,
) -> Result<()> {
    let (alpha, beta) = (1f32, 0f32);
    // SAFETY: all objects are alive; the factors are read before the call returns; the caller vouches for the memory.
    let enqueued = unsafe {
        result::matmul(
            handle.0,
            plan.operation.operation,
            from_ref(&alpha).cast(),
            from_ref(&beta).cast(),
            product.right.address as *const _,
            plan.right.0,
            product.left.address as *const _,
            plan.left.0,
            out as *const _,
            plan.out.0,
            out as *mut _,
            plan.out.0,
            &algorithm.algorithm,
            workspace as *mut _,
            algorithm.workspace,
            device.cuda_stream().cu_stream().cast(),
        )
    };
    checked(enqueued)
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        got => Err(Error::DType { op: OP, operand: "operand", got, expected: "f16 or bf16" }),
    }
}
