//! The algorithm of a product: the first, or the fastest of several that give the same bits.

use candle_core::{
    CudaDevice,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, sys::CUevent_flags},
    },
};

use super::{
    Plan, Product,
    descriptor::{Algorithm, Handle, Layout, Operation, algorithms, run},
};
use crate::{
    cuda::{
        arena,
        grid::{Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::Address,
    },
    cudnn_policy::PlanChoice,
    error::{Result, What},
};

const MODULE: Module = module!(SAME_ROWS);
const OP: &str = "matrix product";
const WHAT: &str = "timing of matrix products";

/// The plan of a product; `None` if cuBLASLt has no algorithm.
///
/// # Safety
/// As for [`super::multiply`]: timing runs the product.
pub(super) unsafe fn plan(
    device: &CudaDevice,
    handle: &Handle,
    product: &Product,
    choice: PlanChoice,
) -> Result<Option<Plan>> {
    let &Product { rows, cols, depth, left, right, out, dtype, .. } = product;
    let operation = Operation::new(product)?;
    let left = Layout::of(&left, dtype, rows, depth)?;
    let right = Layout::of(&right, dtype, depth, cols)?;
    let out = Layout::of(&out, dtype, rows, cols)?;
    let (count, runs) = match choice {
        PlanChoice::Heuristic => (1, 0),
        PlanChoice::Timed { max_plans, runs } => (max_plans, runs),
    };
    let found = algorithms(handle, product, &operation, [&left, &right, &out], count)?;
    let Some(&first) = found.first() else { return Ok(None) };
    let mut plan = Plan { operation, left, right, out, algorithm: first };
    if found.len() > 1 && runs > 0 {
        let trial = Trial { device, handle, plan: &plan, product, runs };
        // SAFETY: the caller's promise.
        let times = unsafe { trial.times(&found) }?;
        plan.algorithm = found[fastest(&times)];
    }
    Ok(Some(plan))
}

/// Index of the shortest time, the first of equal ones; 0 if there is none.
fn fastest(times: &[Option<f32>]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (i, &time) in times.iter().enumerate() {
        if let Some(time) = time
            && best.is_none_or(|(_, least)| time < least)
        {
            best = Some((i, time));
        }
    }
    best.map_or(0, |(i, _)| i)
}

/// Algorithms that compete for a product.
struct Trial<'a> {
    device: &'a CudaDevice,
    handle: &'a Handle,
    plan: &'a Plan,
    product: &'a Product,
    runs: usize,
}

impl Trial<'_> {
    /// Least milliseconds of each; `None` for one that fails or does not give the bits of the first.
    ///
    /// # Safety
    /// As for [`plan`].
    unsafe fn times(&self, found: &[Algorithm]) -> Result<Vec<Option<f32>>> {
        let Product { rows, cols, out, dtype, .. } = *self.product;
        let bytes = rows * out.pitch.max(cols) * dtype.size_in_bytes();
        // SAFETY: memory that the first algorithm fills before the others are compared with it; what lies between its rows is
        // never read.
        let expected = unsafe { self.device.alloc::<u8>(bytes) }.what(WHAT)?;
        let stream = self.device.cuda_stream();
        let (expected_at, _recorded) = expected.device_ptr(&stream);
        let flag = self.device.alloc_zeros::<u32>(1).what(WHAT)?;
        let mut usable = Vec::with_capacity(found.len());
        for (i, algorithm) in found.iter().enumerate() {
            if i == 0 {
                // SAFETY: the new memory lies as the result does, and is aligned better.
                unsafe { self.run(algorithm, expected_at) }?;
            }
            // SAFETY: the caller's promise.
            if unsafe { self.serves(algorithm, expected_at, &flag) }? {
                usable.push((i, algorithm));
            }
        }
        // In turns: a clock that slows down on the way slows down all of them.
        let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w().what(WHAT);
        let mut marks = Vec::with_capacity(self.runs * usable.len());
        for _ in 0..self.runs {
            for &(i, algorithm) in &usable {
                let start = event()?;
                // SAFETY: the caller's promise.
                unsafe { self.run(algorithm, out.address) }?;
                marks.push((i, start, event()?));
            }
        }
        let mut times: Vec<Option<f32>> = vec![None; found.len()];
        for (i, start, end) in marks {
            let time = start.elapsed_ms(&end).w().what(WHAT)?;
            if let Some(least) = times.get_mut(i) {
                *least = Some(least.map_or(time, |least| least.min(time)));
            }
        }
        Ok(times)
    }

    unsafe fn run(&self, algorithm: &Algorithm, out: Address) -> Result<()> {
        arena::with(self.device, algorithm.workspace(), |workspace| {
            // SAFETY: the workspace has the size that is asked for; the caller vouches for the rest.
            unsafe { run(self.device, self.handle, self.plan, algorithm, self.product, out, workspace) }
        })
    }

    /// Whether the algorithm runs and gives the bits of the first.
    unsafe fn serves(&self, algorithm: &Algorithm, expected: Address, flag: &CudaSlice<u32>) -> Result<bool> {
        // SAFETY: the caller's promise. An algorithm that refuses is out of the race.
        if unsafe { self.run(algorithm, self.product.out.address) }.is_err() {
            return Ok(false);
        }
        // SAFETY: both places have the rows of the result; the flag is one u32.
        unsafe { self.same(expected, flag) }
    }

    /// Whether the result has the bits of `expected`.
    unsafe fn same(&self, expected: Address, flag: &CudaSlice<u32>) -> Result<bool> {
        let stream = self.device.cuda_stream();
        let (flag_at, _recorded) = flag.device_ptr(&stream);
        let Product { rows, cols, out, .. } = *self.product;
        let params = Params {
            a: out.address,
            b: expected,
            differ: flag_at,
            rows: rows as u64,
            cols: cols as u64,
            pitch: out.pitch as u64,
        };
        let blocks = [cols.div_ceil(THREADS as usize) as u64, (rows as u64).min(65535), 1];
        let kernel = Kernel::load(self.device, &MODULE, "same_rows_2")?;
        // SAFETY: `Params` mirrors that of same_rows.cu; the caller vouches for the memory. The flag stays up once it is,
        // and is taken down below.
        unsafe { kernel.launch(Grid::blocks(OP, blocks, THREADS)?, &params) }?;
        let differ = self.device.clone_dtoh(flag).what(WHAT)?;
        if differ.first() == Some(&0) {
            return Ok(true);
        }
        // SAFETY: one u32 of memory that is alive.
        let cleared = unsafe {
            candle_core::cuda_backend::cudarc::driver::result::memset_d8_async(
                flag_at,
                0,
                size_of::<u32>(),
                stream.cu_stream(),
            )
        };
        cleared.w().what(WHAT)?;
        Ok(false)
    }
}

/// `Params` of `same_rows_2`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    a: Address,
    b: Address,
    differ: Address,
    rows: u64,
    cols: u64,
    pitch: u64,
}

// SAFETY: `repr(C)`, 64-bit integers only.
unsafe impl DeviceRepr for Params {}
