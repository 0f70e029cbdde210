//! Launcher of `norm_rope.cu`. All arguments have been checked by the ops.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{Pairing, Problem};
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::{Error, Result},
    layout::contiguous,
};

const MODULE: Module = module!(NORM_ROPE);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// Threads of a warp.
const WARP: usize = 32;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    cos: Address,
    sin: Address,
    weights: [Address; 2],
    out: Address,
    /// Distances of batch items, tokens and heads.
    strides: [u64; 3],
    items: u64,
    first_token: u64,
    tokens: u64,
    all_heads: Divisor,
    run_tokens: Divisor,
    weight_types: [u32; 2],
    heads: u32,
    width: u32,
    eps: f32,
    unused: u32,
}

const _: () = assert!(size_of::<Params>() == 152, "as in norm_rope.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// Whether a head is dealt to threads in pairs of vectors: their number is a power of two and fits a warp.
fn is_wide(width: usize, elements: usize) -> bool {
    let lanes = width / (2 * elements);
    width.is_multiple_of(2 * elements) && lanes.is_power_of_two() && lanes <= WARP
}

/// One launch for each run of tokens; `[B, S, G, D]`.
pub(super) fn norm_rope(problem: &Problem<'_>) -> Result<Tensor> {
    let Problem { op, x, ref layout, heads, ref runs, cos, sin, eps, pairing } = *problem;
    let device = device_of(op, x)?;
    let [batch, tokens, all_heads, width] = problem.dims();
    let x = Operand::new(op, x)?;
    let (cos, sin) = (Operand::new(op, &contiguous(cos)?)?, Operand::new(op, &contiguous(sin)?)?);
    let dtype = x.tensor().dtype();
    let out = Output::new(op, device, dtype, batch * tokens * all_heads * width)?;
    let dims = (batch, tokens, all_heads, width);
    if out.is_empty() {
        return out.into_tensor(op, dims);
    }
    // A head's width and a number of heads, which `out` has room for.
    let small = |n: usize| u32::try_from(n).map_err(|_| Error::Unsupported { op, what: format!("an extent of {n}") });
    let strides: [u64; 3] = std::array::from_fn(|axis| layout.stride().get(axis).copied().unwrap_or(0) as u64);
    let elements = WIDE / dtype.size_in_bytes();
    let aligned =
        [x.address(), cos.address(), sin.address(), out.address()].iter().all(|a| a.is_multiple_of(WIDE as u64));
    let extents = [batch, tokens, all_heads];
    let whole = (0..3).all(|axis| extents[axis] == 1 || strides[axis].is_multiple_of(elements as u64));
    let wide = aligned && whole && is_wide(width, elements);
    let kind = match pairing {
        Pairing::Interleaved => "interleaved",
        Pairing::Half => "half",
    };
    let name = format!("norm_rope_{kind}_{}_{}", if wide { "wide" } else { "any" }, kernel_suffix(dtype));
    let kernel = Kernel::load(device, &MODULE, &name)?;
    let lanes = if wide { width / (2 * elements) } else { WARP };
    let mut first_token = 0;
    for run in runs.iter().filter(|run| run.tokens > 0) {
        let weights = run.weights.iter().map(|weight| Operand::new(op, &contiguous(weight)?));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let (Some(first), Some(last)) = (weights.first(), weights.last()) else { continue };
        let items = batch * run.tokens * all_heads;
        if items as u64 >= Divisor::LIMIT {
            return Err(Error::Unsupported { op, what: format!("{items} heads") });
        }
        let weight_type = |weight: &Operand| element_type(op, "weight", weight.tensor().dtype());
        let params = Params {
            x: x.address(),
            cos: cos.address(),
            sin: sin.address(),
            weights: [first.address(), last.address()],
            out: out.address(),
            strides,
            items: items as u64,
            first_token: first_token as u64,
            tokens: tokens as u64,
            all_heads: Divisor::new(op, all_heads)?,
            run_tokens: Divisor::new(op, run.tokens)?,
            weight_types: [weight_type(first)?, weight_type(last)?],
            heads: small(heads)?,
            width: small(width)?,
            eps: eps as f32,
            unused: 0,
        };
        first_token += run.tokens;
        let grid = Grid::over_with((items * lanes) as u64, THREADS);
        // SAFETY: `Params` mirrors that of norm_rope.cu. Every head of the run is a row of `width` packed elements at the
        // strides of the layout, which the op made from x's own; cos and sin have width / 2 elements for each token, the
        // weights `width`; the op has checked that. Wide only for heads of whole vectors at aligned places. out is new
        // memory, of which the runs together write every head.
        unsafe { kernel.launch(grid, &params)? };
    }
    out.into_tensor(op, dims)
}
