//! Matrix products through cuBLASLt: half precision with f32 sums, rows of the result at any distance. Without a bias:
//! cuBLASLt's own epilogue adds it to sums that it has rounded already.
//!
//! | file | what |
//! |---|---|
//! | `descriptor.rs` | cuBLASLt's objects, owned |
//! | `choose.rs`, `same_rows.cu` | the algorithm of a product |
//!
//! Each thread has a handle of its own for each device, and remembers what it found for a product: shape, distances, types
//! and the alignment of addresses. By default that is the first algorithm of cuBLASLt's own order, which is the same in
//! every process on the same device and library. Where the thread's [policy](crate::cudnn_policy) times plans, it is the
//! fastest of those that give the *same bits* as the first, so that a choice by the clock never changes a result.
//! Sums of a product cut along its depth are added up in f32.

mod choose;
mod descriptor;

use std::{cell::RefCell, collections::HashMap};

use candle_core::{CudaDevice, DType, cuda_backend::DeviceId};

use self::descriptor::{Algorithm, Handle, Layout, Operation};
use super::{
    arena,
    blas::Matrix,
    paths::{self, Path},
    tensor::Address,
};
use crate::{
    cudnn_policy::{self, PlanChoice},
    error::Result,
};

/// Most workspace of a product, in bytes.
const WORKSPACE: usize = 32 << 20;

/// `out = left * right`.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Rows of `left` and `out`.
    pub rows: usize,
    /// Columns of `right` and `out`.
    pub cols: usize,
    /// Columns of `left`, rows of `right`: at least 1.
    pub depth: usize,
    /// `[rows, depth]`, packed rows.
    pub left: Matrix,
    /// `[depth, cols]`.
    pub right: Matrix,
    /// `[rows, cols]`, packed rows.
    pub out: Matrix,
    /// Type of all matrices: f16 or bf16.
    pub dtype: DType,
}

/// What decides which algorithm serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    extents: [usize; 3],
    pitches: [usize; 3],
    transposed: bool,
    dtype: DType,
    /// Largest powers of two that divide the addresses of left, right and out.
    alignments: [u32; 3],
    choice: PlanChoice,
}

impl Key {
    fn new(product: &Product, choice: PlanChoice) -> Self {
        let &Product { rows, cols, depth, left, right, out, dtype } = product;
        Self {
            extents: [rows, cols, depth],
            pitches: [left.pitch, right.pitch, out.pitch],
            transposed: right.transposed,
            dtype,
            alignments: [left.address, right.address, out.address].map(alignment),
            choice,
        }
    }
}

/// The largest power of two up to 256 that divides an address; 0 for none.
fn alignment(address: Address) -> u32 {
    if address == 0 { 0 } else { 1 << address.trailing_zeros().min(8) }
}

/// A product ready to be run.
struct Plan {
    operation: Operation,
    left: Layout,
    right: Layout,
    out: Layout,
    algorithm: Algorithm,
}

/// What a thread keeps for a device.
struct Session {
    /// Before the handle, which has to outlive them. `None` where cuBLASLt has no algorithm.
    plans: HashMap<Key, Option<Plan>>,
    handle: Handle,
}

thread_local! {
    static SESSIONS: RefCell<HashMap<DeviceId, Session>> = RefCell::new(HashMap::new());
}

/// Enqueues a product of at least one row and column; `false` if cuBLASLt has no algorithm for it, and nothing was enqueued.
///
/// # Errors
/// [`crate::Error::Candle`] if cuBLASLt or the driver refuses; [`crate::Error::DType`] for other types.
///
/// # Safety
/// All matrices lie in memory of `device` until the enqueued product is done; `out` overlaps no operand, and
/// may be written several times.
pub unsafe fn multiply(device: &CudaDevice, product: &Product) -> Result<bool> {
    descriptor::bind(device)?;
    let choice = cudnn_policy::current().choice;
    SESSIONS.with_borrow_mut(|sessions| {
        let session = match sessions.entry(device.id()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Session { plans: HashMap::new(), handle: Handle::new()? })
            }
        };
        let Session { plans, handle } = session;
        let plan = match plans.entry(Key::new(product, choice)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                // SAFETY: the caller's promise.
                entry.insert(unsafe { choose::plan(device, handle, product, choice) }?)
            }
        };
        let Some(plan) = plan else { return Ok(false) };
        arena::with(device, plan.algorithm.workspace(), |workspace| {
            // SAFETY: the plan was made for a product of these extents, distances and alignments; the workspace has the size
            // that the algorithm asks for; the caller vouches for the matrices.
            unsafe { descriptor::run(device, handle, plan, &plan.algorithm, product, product.out.address, workspace) }
        })?;
        paths::count(Path::LtProduct);
        Ok(true)
    })
}
