//! Products of signed bytes through cuBLASLt, with exact sums of 32 bits.
//!
//! Each thread has a handle for each device, and a plan for each shape: descriptors and the fastest of the algorithms that
//! cuBLASLt proposes, measured when the shape first occurs, because the first proposal is not always the best. Sums are
//! integers, so the choice changes no bit.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr::from_ref,
};

use candle_core::{
    CudaDevice,
    cuda_backend::{
        DeviceId, WrapErr,
        cudarc::{
            cublaslt::{
                result::{self, CublasError},
                sys,
            },
            driver::sys::CUevent_flags,
        },
    },
};

use super::{arena, tensor::Address};
use crate::error::{Error, Result, What};

const OP: &str = "product of bytes";

/// Scratch memory that an algorithm may use. Those for Hopper and later are faster with some.
const WORKSPACE: usize = 32 << 20;

/// Proposals that are compared.
const PROPOSALS: usize = 8;

/// Calls over which each is timed, after one more.
const TIMED_CALLS: usize = 3;

/// Products of fewer multiplications take the first proposal: comparing would cost more than it saves.
const TIMED_WORK: usize = 1 << 30;

/// Extents of a product: rows of x, rows of the weight, columns of both.
pub type Extents = [usize; 3];

/// Whether [`multiply_int8`] takes a product of these extents.
pub fn takes_int8([rows, columns, depth]: Extents) -> bool {
    let int = |n: usize| c_int::try_from(n).is_ok();
    columns.is_multiple_of(4) && depth.is_multiple_of(4) && [rows, columns, depth].iter().all(|&n| n > 0 && int(n))
}

/// Enqueues `sums[r, c] = sum_k x[r, k] weight[c, k]` of packed matrices of signed bytes into one of i32.
///
/// # Errors
/// [`Error::Unsupported`] for extents that [`takes_int8`] denies, or if cuBLASLt has no algorithm; [`Error::Candle`] if it
/// fails.
///
/// # Safety
/// x `[rows, depth]`, weight `[columns, depth]` and sums `[rows, columns]`, at addresses that are multiples of 16, lie in
/// memory of `device` until the enqueued product is done; sums overlap neither.
pub unsafe fn multiply_int8(
    device: &CudaDevice,
    extents: Extents,
    x: Address,
    weight: Address,
    sums: Address,
) -> Result<()> {
    if !takes_int8(extents) || [x, weight, sums].iter().any(|address| !address.is_multiple_of(16)) {
        return Err(unsupported(extents));
    }
    device.cuda_stream().context().bind_to_thread().w().what("CUDA context")?;
    arena::with(device, WORKSPACE, |workspace| {
        let call = Call { device, addresses: [x, weight, sums], workspace };
        STATES.with_borrow_mut(|states| {
            let state = match states.entry(device.id()) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => entry.insert(State::new()?),
            };
            // SAFETY: the caller vouches for the matrices, the arena for the workspace.
            unsafe { state.run(extents, &call) }
        })
    })
}

/// How many shapes this thread has plans for on `device`.
pub fn plans(device: &CudaDevice) -> usize {
    STATES.with_borrow(|states| states.get(&device.id()).map_or(0, |state| state.plans.len()))
}

fn unsupported([rows, columns, depth]: Extents) -> Error {
    Error::Unsupported { op: OP, what: format!("{rows} x {depth} by {columns} x {depth}") }
}

fn failed(what: &'static str) -> impl Fn(CublasError) -> Error {
    move |error| Error::Candle { what, source: Box::new(candle_core::Error::Cuda(Box::new(error))) }
}

thread_local! {
    static STATES: RefCell<HashMap<DeviceId, State>> = RefCell::new(HashMap::new());
}

/// Where a product happens.
struct Call<'a> {
    device: &'a CudaDevice,
    /// x, weight, sums.
    addresses: [Address; 3],
    workspace: Address,
}

/// A handle and its plans, which are dropped before it.
struct State {
    plans: HashMap<Extents, Plan>,
    handle: Handle,
}

impl State {
    fn new() -> Result<Self> {
        let handle = result::create_handle().map_err(failed("cuBLASLt handle"))?;
        Ok(Self { plans: HashMap::new(), handle: Handle(handle) })
    }

    /// # Safety
    /// As [`multiply_int8`], which has checked extents and addresses.
    unsafe fn run(&mut self, extents: Extents, call: &Call<'_>) -> Result<()> {
        if !self.plans.contains_key(&extents) {
            let mut plan = Plan::new(extents)?;
            // SAFETY: passed on to the caller.
            plan.algorithm = unsafe { plan.fastest(&self.handle, extents, call) }?;
            self.plans.insert(extents, plan);
        }
        let plan = self.plans.get(&extents).ok_or_else(|| unsupported(extents))?;
        // SAFETY: passed on to the caller.
        unsafe { plan.enqueue(&self.handle, &plan.algorithm, call) }
    }
}

struct Handle(sys::cublasLtHandle_t);

impl Drop for Handle {
    fn drop(&mut self) {
        // The driver may be going away with the thread; then there is nothing left to free.
        // SAFETY: created by `State::new`, destroyed only here, after all that was made for it.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created by `Plan::new`, destroyed only here.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Packed columns.
    fn new(dtype: sys::cudaDataType, rows: usize, columns: usize) -> Result<Self> {
        let layout = result::create_matrix_layout(dtype, rows as u64, columns as u64, rows as i64);
        layout.map(Self).map_err(failed("cuBLASLt layout"))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `Layout::new`, destroyed only here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `Plan::proposals`, destroyed only here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// All about the products of one shape. cuBLASLt counts by columns: the weight comes first, transposed, then x, and the sums
/// have the weight's rows as theirs.
struct Plan {
    description: Description,
    weight: Layout,
    x: Layout,
    sums: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new([rows, columns, depth]: Extents) -> Result<Self> {
        let description =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32I, sys::cudaDataType::CUDA_R_32I);
        let description = Description(description.map_err(failed("cuBLASLt description"))?);
        // What the library calls CUBLAS_OP_T.
        let transposed: c_int = 1;
        // SAFETY: the descriptor is alive; the attribute is an integer of this size, read during the call.
        let set = unsafe {
            result::set_matmul_desc_attribute(
                description.0,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&transposed).cast(),
                size_of::<c_int>(),
            )
        };
        set.map_err(failed("cuBLASLt description"))?;
        Ok(Self {
            description,
            weight: Layout::new(sys::cudaDataType::CUDA_R_8I, depth, columns)?,
            x: Layout::new(sys::cudaDataType::CUDA_R_8I, depth, rows)?,
            sums: Layout::new(sys::cudaDataType::CUDA_R_32I, columns, rows)?,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }

    /// The fastest proposal.
    ///
    /// # Safety
    /// As [`Plan::enqueue`].
    unsafe fn fastest(&self, handle: &Handle, extents: Extents, call: &Call<'_>) -> Result<sys::cublasLtMatmulAlgo_t> {
        let proposals = self.proposals(handle)?;
        let first = *proposals.first().ok_or_else(|| unsupported(extents))?;
        if proposals.len() == 1 || extents.iter().fold(1, |n: usize, &e| n.saturating_mul(e)) < TIMED_WORK {
            return Ok(first);
        }
        let mut best = (f32::INFINITY, first);
        for algorithm in proposals {
            // A proposal that does not run is none.
            // SAFETY: passed on to the caller.
            if let Ok(time) = unsafe { self.time(handle, &algorithm, call) }
                && time < best.0
            {
                best = (time, algorithm);
            }
        }
        Ok(best.1)
    }

    /// Milliseconds of a few calls.
    ///
    /// # Safety
    /// As [`Plan::enqueue`].
    unsafe fn time(&self, handle: &Handle, algorithm: &sys::cublasLtMatmulAlgo_t, call: &Call<'_>) -> Result<f32> {
        const WHAT: &str = "timing of a product";
        let event = || call.device.cuda_stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w().what(WHAT);
        // SAFETY: passed on to the caller.
        unsafe { self.enqueue(handle, algorithm, call) }?;
        let start = event()?;
        for _ in 0..TIMED_CALLS {
            // SAFETY: passed on to the caller.
            unsafe { self.enqueue(handle, algorithm, call) }?;
        }
        start.elapsed_ms(&event()?).w().what(WHAT)
    }

    fn proposals(&self, handle: &Handle) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let preference = Preference(result::create_matmul_pref().map_err(failed("cuBLASLt preference"))?);
        let workspace: u64 = WORKSPACE as u64;
        // SAFETY: the preference is alive; the attribute is a 64-bit integer, read during the call.
        let set = unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&workspace).cast(),
                size_of::<u64>(),
            )
        };
        set.map_err(failed("cuBLASLt preference"))?;
        let nothing = sys::cublasLtMatmulHeuristicResult_t {
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut found = [nothing; PROPOSALS];
        let mut count: c_int = 0;
        // SAFETY: all descriptors are alive; the array has room for as many results as are asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.description.0,
                self.weight.0,
                self.x.0,
                self.sums.0,
                self.sums.0,
                preference.0,
                PROPOSALS as c_int,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        status.result().map_err(failed("cuBLASLt algorithms"))?;
        let count = usize::try_from(count).unwrap_or(0).min(PROPOSALS);
        let works = |r: &&sys::cublasLtMatmulHeuristicResult_t| {
            r.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && r.workspaceSize <= WORKSPACE
        };
        Ok(found[..count].iter().filter(works).map(|r| r.algo).collect())
    }

    /// # Safety
    /// The matrices are those of the plan, in memory of the device until the enqueued product is done; the workspace has
    /// [`WORKSPACE`] bytes; the algorithm is one of the plan's proposals.
    unsafe fn enqueue(&self, handle: &Handle, algorithm: &sys::cublasLtMatmulAlgo_t, call: &Call<'_>) -> Result<()> {
        let (alpha, beta): (i32, i32) = (1, 0);
        let [x, weight, sums] = call.addresses;
        // SAFETY: handle and descriptors are alive, the factors are read before the call returns; the caller vouches for
        // the rest.
        let status = unsafe {
            result::matmul(
                handle.0,
                self.description.0,
                from_ref(&alpha).cast::<c_void>(),
                from_ref(&beta).cast::<c_void>(),
                weight as *const c_void,
                self.weight.0,
                x as *const c_void,
                self.x.0,
                sums as *const c_void,
                self.sums.0,
                sums as *mut c_void,
                self.sums.0,
                from_ref(algorithm),
                call.workspace as *mut c_void,
                WORKSPACE,
                call.device.cuda_stream().cu_stream().cast(),
            )
        };
        status.map_err(failed("product of bytes by cuBLASLt"))
    }
}
