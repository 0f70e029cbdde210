//! Attention as one kernel; see `fused_attention.cu` and `fused_attention_sm90.cu`.

use candle_core::{CudaDevice, DType, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    super::{AttentionMask, OP, Problem},
    Target, aligned,
};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand},
    },
    cudnn::DeviceInfo,
    cudnn_policy::{self, count},
    error::{Error, Result},
};

const MODULE: Module = module!(FUSED_ATTENTION);
const MODULE_SM90: Module = module!(FUSED_ATTENTION_SM90);

/// Queries of a block, as in the kernels.
const QUERIES: usize = 128;
/// Keys of a step.
const KEYS: usize = 64;

/// Parameters of `fused_attention_*`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
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
    unused: u32,
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
    let [q, k, v] = [aligned(problem.q)?, aligned(problem.k)?, aligned(problem.v)?];
    let tiles = extents.q_len.div_ceil(QUERIES);
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
        causal: u32::from(problem.mask == AttentionMask::Causal),
        vector_out: u32::from(target.is_aligned()),
        factor,
        unused: 0,
    };
    let form = Form::of(device, extents.width);
    let blocks = tiles as u64 * extents.heads as u64 * extents.batch as u64;
    let grid = Grid { shared_bytes: form.shared_bytes(), ..Grid::blocks(OP, [blocks, 1, 1], form.threads())? };
    let kernel = form.load(device, problem.q.dtype())?;
    if form == Form::WarpGroups {
        count(|c| c.attention.warp_groups += 1);
    }
    // SAFETY: `Params` mirrors `FusedAttention`; q, k and v are tensors of these extents and strides whose heads begin at
    // multiples of 16 bytes, out is memory of the result's extents and strides that overlaps none of them; blocks and
    // threads are those that the kernel is written for, with its shared memory.
    unsafe { kernel.launch(grid, &params) }
}

fn rows(operand: &Operand) -> Rows {
    let stride = |axis: usize| operand.strides().get(axis).map_or(0, |&stride| stride as u64);
    Rows { address: operand.address(), batch: stride(0), position: stride(1), head: stride(2) }
}

/// Which kernel, with its width of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `fused_attention_64_*`.
    Narrow,
    /// `fused_attention_128_*`.
    Wide,
    /// `fused_attention_sm90_*`.
    WarpGroups,
}

impl Form {
    fn of(device: &CudaDevice, width: usize) -> Self {
        let hopper = || DeviceInfo::of(device.cuda_stream().context().ordinal()).is_ok_and(|i| i.capability == 900);
        if width <= 64 {
            Form::Narrow
        } else if cudnn_policy::warp_groups() && hopper() {
            Form::WarpGroups
        } else {
            Form::Wide
        }
    }

    fn load(self, device: &CudaDevice, dtype: DType) -> Result<Kernel> {
        let (module, form) = match self {
            Form::Narrow => (&MODULE, "64"),
            Form::Wide => (&MODULE, "128"),
            Form::WarpGroups => (&MODULE_SM90, "sm90"),
        };
        Kernel::load(device, module, &format!("fused_attention_{form}_{}", dtype.as_str()))
    }

    fn threads(self) -> u32 {
        if self == Form::WarpGroups { 256 } else { 128 }
    }

    /// The queries, and two steps of keys and values, in two bytes for each component; room to align them.
    fn shared_bytes(self) -> u32 {
        let (width, alignment) = match self {
            Form::Narrow => (64, 0),
            Form::Wide => (128, 0),
            Form::WarpGroups => (128, 1024),
        };
        ((QUERIES + 2 * 2 * KEYS) * width * 2 + alignment) as u32
    }
}
