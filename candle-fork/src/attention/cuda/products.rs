//! Attention as matrix products over tiles of queries: scores of a tile, softmax in f32, weights times values. For every
//! type and width.
//!
//! ```text
//! for tile of queries Q of some heads:
//!     S = softmax_scale Q K^T          f32 sums and f32 scores
//!     P = softmax(S)                   f32 arithmetic, rounded to the operands' type
//!     out = P V                        f32 sums, rounded once
//! ```
//!
//! q, k and v are read where they lie while their last axis is packed: rows of a head are the rows of a product, at the
//! distance of positions.

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{
    super::{
        AttentionMask, Problem,
        tiles::{Axis, Tile, Tiles},
    },
    OP, Target,
};
use crate::{
    cuda::{
        arena,
        blas::{Matrix, Product, multiply},
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand},
    },
    error::Result,
    layout,
};

const MODULE: Module = module!(SOFTMAX);

/// Rows of scores begin at multiples of this many elements, which products and vector accesses like.
const ALIGNMENT: usize = 8;

pub(super) fn run(device: &CudaDevice, problem: &Problem<'_>, target: Target) -> Result<()> {
    let &Problem { q, k, v, extents, softmax_scale, mask } = problem;
    let Target { address: out, strides: [out_batch, out_row, out_head] } = target;
    let (k_len, heads, width, dtype) = (extents.k_len, extents.heads, extents.width, q.dtype());
    let [q, k, v] = [Operand::new(OP, &rows(q)?)?, Operand::new(OP, &rows(k)?)?, Operand::new(OP, &rows(v)?)?];

    let size = dtype.size_in_bytes();
    let pitch = k_len.next_multiple_of(ALIGNMENT);
    // f32 weights take the place of their scores.
    let weight_bytes = if size == 4 { 0 } else { pitch * size };
    let tiles = Tiles::new(extents, pitch * 4 + weight_bytes);
    let scores_bytes = tiles.largest() * pitch * 4;
    arena::with(device, scores_bytes + tiles.largest() * weight_bytes, |scores| {
        let weights = if size == 4 { scores } else { scores + scores_bytes as u64 };
        for tile in tiles.iter() {
            let Tile { matrices, queries, .. } = tile;
            let kv_head = tile.head / (heads / extents.kv_heads);
            let places = |address: Address| Matrix::rows(address, pitch).every(queries * pitch);
            let query_scores = Product {
                rows: queries,
                cols: k_len,
                depth: width,
                batch: matrices,
                alpha: softmax_scale,
                left: matrix(&q, tile.axis, true, [tile.batch, tile.query, tile.head]),
                right: Matrix { transposed: true, ..matrix(&k, tile.axis, false, [tile.batch, 0, kv_head]) },
                out: places(scores),
                input: dtype,
                output: DType::F32,
            };
            // SAFETY: the operands are tensors and hold these queries and keys of these heads; the scores are scratch
            // memory of the size of the largest tile.
            unsafe { multiply(device, &query_scores) }?;

            let causal = u64::from(mask != AttentionMask::Full);
            let params = Params {
                scores,
                weights,
                rows: (matrices * queries) as u64,
                queries: queries as u64,
                keys: k_len as u64,
                pitch: pitch as u64,
                visible: extents.visible(mask, tile.query) as u64,
                causal,
            };
            softmax(device, dtype, &params)?;

            let start = tile.batch * out_batch + tile.query * out_row + tile.head * out_head;
            let values = Product {
                rows: queries,
                cols: width,
                depth: k_len,
                batch: matrices,
                alpha: 1.0,
                left: places(weights),
                right: matrix(&v, tile.axis, false, [tile.batch, 0, kv_head]),
                out: Matrix::rows(out + (start * size) as u64, out_row).every(out_head),
                input: dtype,
                output: dtype,
            };
            // SAFETY: as above; the result has these rows of these heads, which no other tile writes.
            unsafe { multiply(device, &values) }?;
        }
        Ok(())
    })
}

/// The tensor, or a contiguous copy if its rows `[.., D]` cannot be those of a matrix.
fn rows(t: &Tensor) -> Result<Tensor> {
    let (&[_, positions, _, width], &[_, pitch, _, component]) = (t.dims(), t.stride()) else {
        return layout::contiguous(t);
    };
    let matrix = (component == 1 || width == 1) && (pitch >= width || positions == 1);
    if matrix { Ok(t.clone()) } else { layout::contiguous(t) }
}

/// Positions of one head, from `[batch item, position, head]` on; the next of a batch of matrices lies along `axis`.
/// `own` says whether the tensor has a head for every query head.
fn matrix(t: &Operand, axis: Axis, own: bool, index: [usize; 3]) -> Matrix {
    let strides = t.strides();
    let offset: usize = index.iter().zip(strides).map(|(&i, &stride)| i * stride).sum();
    let address = t.address() + (offset * t.tensor().dtype().size_in_bytes()) as u64;
    let every = match axis {
        Axis::SharedHeads if !own => 0,
        Axis::Heads | Axis::SharedHeads => strides[2],
    };
    Matrix::rows(address, strides[1]).every(every)
}

/// Parameters of `softmax_*`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    scores: Address,
    weights: Address,
    rows: u64,
    queries: u64,
    keys: u64,
    pitch: u64,
    visible: u64,
    causal: u64,
}

const _: () = assert!(size_of::<Params>() == 64, "as in softmax.cu");

// SAFETY: `repr(C)`, 64-bit integers only.
unsafe impl DeviceRepr for Params {}

fn softmax(device: &CudaDevice, dtype: DType, params: &Params) -> Result<()> {
    // A thread takes four keys at a time.
    let threads = if params.keys <= 512 { 128 } else { 256 };
    let grid = Grid::blocks(OP, [params.rows.min(1 << 20), 1, 1], threads)?;
    let kernel = Kernel::load(device, &MODULE, &format!("softmax_{}", dtype.as_str()))?;
    // SAFETY: `Params` mirrors `Softmax`; scores and weights have `rows` rows of `pitch` elements, in scratch memory that
    // is aligned to 256 bytes; f32 weights may be the scores, others lie behind them.
    unsafe { kernel.launch(grid, params) }
}
