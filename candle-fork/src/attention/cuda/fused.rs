//! Attention as one kernel; see `fused_attention.cu`, and for groups of warps `groups.rs`.

use candle_core::{CudaDevice, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    super::{AttentionMask, OP, Problem},
    Target, aligned, distinct, groups,
};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand},
    },
    cudnn_policy::{self, count},
    error::{Error, Result},
};

const MODULE: Module = module!(FUSED_ATTENTION);

/// Queries of a block, as in all kernels.
pub(super) const QUERIES: usize = 128;
/// Keys of a step.
const KEYS: usize = 64;
/// Threads of a block.
const THREADS: u32 = 128;
/// Components of the kernel for narrow heads, and of that for others.
const NARROW: usize = 64;
const WIDE: usize = 128;

/// Parameters of `fused_attention_*`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Params {
    q: Rows,
    k: Rows,
    v: Rows,
    out: Rows,
    q_len: u32,
    k_len: u32,
    heads: u32,
    heads_per_kv: u32,
    width: u32,
    tiles: u32,
    causal: u32,
    vector_out: u32,
    factor: f32,
    ahead: u32,
}

/// `[B, S, H, D]` with a packed last axis.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    address: Address,
    batch: u64,
    position: u64,
    head: u64,
}

const _: () = assert!(size_of::<Params>() == 168, "as in fused_attention.cuh");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// Enqueues attention, whose scores enter as powers of two after a multiplication by `factor`.
pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, factor: f32, target: Target) -> Result<()> {
    let extents = problem.extents;
    let by_groups = extents.width > NARROW && cudnn_policy::warp_groups() && groups::serves(device);
    let operand = |t| if by_groups { aligned(&distinct(t)?) } else { aligned(t) };
    let [q, k, v] = [operand(problem.q)?, operand(problem.k)?, operand(problem.v)?];
    let tiles = extents.q_len.div_ceil(QUERIES);
    // Causal attention has a key for each query at least.
    let ahead = if problem.mask == AttentionMask::Causal { extents.k_len - extents.q_len } else { 0 };
    // Sums of two extents fit.
    let int = |n: usize| match u32::try_from(n) {
        Ok(n) if n < 1 << 30 => Ok(n),
        _ => Err(Error::Unsupported { op: OP, what: format!("an extent of {n}") }),
    };
    let [out_batch, out_position, out_head] = target.strides.map(|stride| stride as u64);
    let params = Params {
        q: rows(&q),
        k: rows(&k),
        v: rows(&v),
        out: Rows { address: target.address, batch: out_batch, position: out_position, head: out_head },
        q_len: int(extents.q_len)?,
        k_len: int(extents.k_len)?,
        heads: int(extents.heads)?,
        heads_per_kv: int(extents.heads / extents.kv_heads)?,
        width: int(extents.width)?,
        tiles: int(tiles)?,
        causal: u32::from(problem.mask != AttentionMask::Full),
        vector_out: u32::from(target.is_aligned()),
        factor,
        ahead: int(ahead)?,
    };
    let blocks = tiles as u64 * extents.heads as u64 * extents.batch as u64;
    if by_groups {
        groups::run(device, problem.q.dtype(), [&q, &k, &v], params, blocks)?;
        count(|c| c.attention.warp_groups += 1);
        return Ok(());
    }
    let width = if extents.width <= NARROW { NARROW } else { WIDE };
    // The queries, and two steps of keys and values, in two bytes for each component.
    let shared_bytes = ((QUERIES + 2 * 2 * KEYS) * width * 2) as u32;
    let grid = Grid { shared_bytes, ..Grid::blocks(OP, [blocks, 1, 1], THREADS)? };
    let kernel = Kernel::load(device, &MODULE, &format!("fused_attention_{width}_{}", problem.q.dtype().as_str()))?;
    // SAFETY: `Params` mirrors `FusedAttention`; q, k and v are tensors of these extents and strides whose heads begin at
    // multiples of 16 bytes, out is memory of the result's extents and strides that overlaps none of them; blocks and
    // threads are those that the kernel is written for, with its shared memory.
    unsafe { kernel.launch(grid, &params) }
}

fn rows(operand: &Operand) -> Rows {
    let stride = |axis: usize| operand.strides().get(axis).map_or(0, |&stride| stride as u64);
    Rows { address: operand.address(), batch: stride(0), position: stride(1), head: stride(2) }
}
