//! Attention by groups of warps, on compute capability 9.0; see `fused_attention_sm90.cu`.

use candle_core::{
    CudaDevice, DType,
    cuda_backend::cudarc::driver::{CudaContext, DeviceRepr},
};

use super::{
    super::OP,
    fused::{Params, QUERIES},
};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::Operand,
        tensor_map::{Boxes, TensorMap},
    },
    cudnn::DeviceInfo,
    error::{Error, Result},
};

const MODULE: Module = module!(FUSED_ATTENTION_SM90);

/// One group that has tiles copied, two that compute.
const THREADS: u32 = 384;
/// Bytes of 128 positions of a head of 128 components.
const TILE: usize = 128 * 128 * 2;
/// Queries, three steps of keys and of values; barriers and room for the alignment.
const SHARED_BYTES: u32 = (7 * TILE + 2048) as u32;

/// Parameters of `fused_attention_sm90_*`.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct GroupParams {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    all: Params,
    blocks: u32,
    unused: [u32; 21],
}

const _: () = assert!(size_of::<GroupParams>() == 640, "as in fused_attention_sm90.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for GroupParams {}

/// What is known of the device.
fn info(device: &CudaDevice) -> Option<std::sync::Arc<DeviceInfo>> {
    let stream = device.cuda_stream();
    let context: &CudaContext = stream.context();
    DeviceInfo::of(context.ordinal()).ok()
}

/// Whether the device has groups of warps of this kind.
pub(super) fn serves(device: &CudaDevice) -> bool {
    info(device).is_some_and(|info| info.capability == 900)
}

/// Enqueues attention of q, k and v, aligned and without repeated elements, in `blocks` parts of 128 queries of one head.
pub(super) fn run(device: &CudaDevice, dtype: DType, [q, k, v]: [&Operand; 3], all: Params, blocks: u64) -> Result<()> {
    let count = u32::try_from(blocks).ok().filter(|&count| count < 1 << 31);
    let count =
        count.ok_or_else(|| Error::Unsupported { op: OP, what: format!("{blocks} parts of {QUERIES} queries") })?;
    // A block of each multiprocessor takes one part after another.
    let resident = info(device).map_or(1, |info| u64::from(info.multiprocessors));
    let grid = Grid::blocks(OP, [blocks.min(resident.max(1)), 1, 1], THREADS)?;
    let kernel = Kernel::load(device, &MODULE, &format!("fused_attention_sm90_{}", dtype.as_str()))?;
    let params =
        GroupParams { q: map(q, dtype)?, k: map(k, dtype)?, v: map(v, dtype)?, all, blocks: count, unused: [0; 21] };
    // SAFETY: `GroupParams` mirrors `GroupAttention`; the maps are those of tensors of these extents, out is memory of the
    // result's extents and strides that overlaps none of them; threads and shared memory are those that the kernel is written
    // for, which serves any number of blocks.
    unsafe { kernel.launch(Grid { shared_bytes: SHARED_BYTES, ..grid }, &params) }
}

/// Boxes of 64 components of 128 positions of a head, from `[B, S, H, D]`.
fn map(operand: &Operand, dtype: DType) -> Result<TensorMap> {
    match (operand.tensor().dims(), operand.strides()) {
        (&[batch, positions, heads, width], &[item, position, head, component]) => TensorMap::new(&Boxes {
            address: operand.address(),
            dtype,
            extents: [width, positions, heads, batch],
            strides: [component, position, head, item],
            shape: [64, QUERIES as u32, 1, 1],
        }),
        (dims, _) => {
            Err(Error::Shape { op: OP, operand: "operand", got: dims.to_vec(), expected: "[B, S, H, D]".into() })
        }
    }
}
