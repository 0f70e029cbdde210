//! Launcher of `implicit_gemm.cu`: convolutions in half precision without a buffer of patches.

use candle_core::{CudaDevice, DType, cuda_backend::cudarc::driver::DeviceRepr};

use super::{ConvProblem, OP, tiles::Window};
use crate::{
    cuda::{
        grid::{Divisor, Grid},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, element_type},
    },
    element::kernel_suffix,
    error::{Error, Result},
};

const MODULE: Module = module!(IMPLICIT_GEMM);

/// Threads of a block, pixels and filters of its tile, products of a step, and steps on their way, as in the kernel.
const THREADS: u32 = 128;
const PIXELS: usize = 128;
const FILTERS: usize = 128;
const DEPTH: usize = 64;
const STAGES: usize = 3;

/// Channels that move at once.
const CHUNK: usize = 8;

/// Bytes of a pixel's entry in the table of a block, and of a tap's.
const PIXEL_BYTES: usize = 16;
const TAP_BYTES: usize = 8;

/// Most taps, one for each bit of a pixel's mask.
const MAX_TAPS: usize = 32;

/// Shared memory of a block in bytes.
const SHARED: usize = STAGES * (PIXELS + FILTERS) * DEPTH * 2 + PIXELS * PIXEL_BYTES + MAX_TAPS * TAP_BYTES;

// All devices since compute capability 8.0 have at least 99 KiB.
const _: () = assert!(SHARED <= 99 << 10 && PIXELS * (FILTERS + 8) * 4 <= STAGES * (PIXELS + FILTERS) * DEPTH * 2);

/// Parameters of `implicit_gemm_*`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    input: Address,
    weight: Address,
    bias: Address,
    residual: Address,
    out: Address,
    strides: [u64; 4],
    out_strides: [u64; 4],
    pixels: u32,
    filters: u32,
    taps: u32,
    bias_type: u32,
    taps_inside: u32,
    packed: u32,
    window: Window,
    filter_tiles: Divisor,
}

const _: () = assert!(size_of::<Params>() == 256, "as in implicit_gemm.cu");

// SAFETY: `repr(C)`, integers only, no padding: the 32-bit fields come in pairs.
unsafe impl DeviceRepr for Params {}

/// Tiles of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    pixels: usize,
    filters: usize,
}

impl Tiles {
    /// `None` for a problem that the kernel does not serve.
    fn of(problem: &ConvProblem) -> Option<Self> {
        let taps: usize = problem.filter.iter().product();
        let pixels = problem.n.checked_mul(problem.pixels())?;
        let tiles = Self { pixels: pixels.div_ceil(PIXELS), filters: problem.k.div_ceil(FILTERS) };
        let few = |n: usize| (n as u64) < Divisor::LIMIT;
        let numbered = few(tiles.pixels.checked_mul(PIXELS)?) && few(tiles.pixels.checked_mul(tiles.filters)?);
        let served = problem.groups == 1 && problem.c.is_multiple_of(CHUNK) && taps <= MAX_TAPS && few(problem.k);
        (served && numbered).then_some(tiles)
    }
}

/// Whether the kernel serves a problem whose operands lie as it wants them.
pub(super) fn serves(problem: &ConvProblem) -> bool {
    Tiles::of(problem).is_some()
}

/// Where the result goes, with packed filters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Address of the first element.
    pub(super) address: Address,
    /// Distances along N, Z, P, Q, in elements.
    pub(super) strides: [usize; 4],
}

impl Place {
    /// Packed pixels.
    pub(super) fn packed(address: Address, problem: &ConvProblem) -> Self {
        let [z, p, q] = problem.output;
        let k = problem.k;
        Self { address, strides: [z * p * q * k, p * q * k, q * k, k] }
    }
}

/// A convolution with its operands where they lie.
pub(super) struct Convolution<'a> {
    pub(super) device: &'a CudaDevice,
    /// f16 or bf16.
    pub(super) dtype: DType,
    pub(super) problem: &'a ConvProblem,
    pub(super) window: Window,
    pub(super) x: &'a Operand,
    /// Distances of x along N, D, H, W, in elements.
    pub(super) strides: [usize; 4],
    /// `[K, taps, C]`.
    pub(super) weight: &'a Operand,
    pub(super) bias: Option<&'a Operand>,
    /// Address; 0 for none.
    pub(super) residual: Address,
    pub(super) out: Place,
}

/// Enqueues a convolution.
///
/// # Errors
/// [`Error::Unsupported`] for a problem that the kernel does not [serve](serves); [`Error::Candle`] if the driver refuses.
///
/// # Safety
/// x has packed channels, at distances and an address that are multiples of 16 bytes; the weight is packed, at such an
/// address; the bias has K elements; residual and `out` cover the result, until the work is done; `out` overlaps nothing
/// else.
pub(super) unsafe fn enqueue(convolution: &Convolution<'_>) -> Result<()> {
    let &Convolution { device, dtype, problem, window, x, strides, weight, bias, residual, out } = convolution;
    let tiles = Tiles::of(problem)
        .ok_or_else(|| Error::Unsupported { op: OP, what: format!("tiles of {problem:?} on a device") })?;
    let (bias, bias_type) =
        bias.map_or(Ok((0, 0)), |b| Ok((b.address(), element_type(OP, "bias", b.tensor().dtype())?)))?;
    let whole = out.strides.iter().all(|stride| stride.is_multiple_of(CHUNK)) && problem.k.is_multiple_of(CHUNK);
    let packed = whole && [residual, out.address].iter().all(|address| address.is_multiple_of(16));
    let params = Params {
        input: x.address(),
        weight: weight.address(),
        bias,
        residual,
        out: out.address,
        strides: strides.map(|n| n as u64),
        out_strides: out.strides.map(|n| n as u64),
        // All below 2^31.
        pixels: (problem.n * problem.pixels()) as u32,
        filters: problem.k as u32,
        taps: problem.filter.iter().product::<usize>() as u32,
        bias_type,
        taps_inside: u32::from(problem.c.is_multiple_of(DEPTH)),
        packed: u32::from(packed),
        window,
        filter_tiles: Divisor::new(OP, tiles.filters)?,
    };
    let grid = Grid::blocks(OP, [(tiles.pixels * tiles.filters) as u64, 1, 1], THREADS)?;
    let kernel = Kernel::load(device, &MODULE, &format!("implicit_gemm_{}", kernel_suffix(dtype)))?;
    // SAFETY: `Params` mirrors that of implicit_gemm.cu, with as much shared memory as its tiles take. x is read only where a
    // tap lies within its extents, the weight within K rows of all taps and channels; the caller vouches for the memory and
    // its alignment. Accesses of 16 bytes to the result only where all of its rows allow them.
    unsafe { kernel.launch(Grid { shared_bytes: SHARED as u32, ..grid }, &params) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::ConvParams;

    fn tiles(x: [usize; 4], weight: [usize; 4], groups: usize) -> Option<Tiles> {
        let padding = [(weight[2] / 2, weight[2] / 2), (weight[3] / 2, weight[3] / 2)];
        Tiles::of(&ConvProblem::new(&x, &weight, &ConvParams { padding, groups, ..Default::default() }).unwrap())
    }

    #[test]
    fn tiles_cover_pixels_and_filters() {
        assert_eq!(tiles([1, 128, 1024, 1024], [128, 128, 3, 3], 1), Some(Tiles { pixels: 8192, filters: 1 }));
        assert_eq!(tiles([3, 512, 5, 9], [129, 512, 1, 1], 1), Some(Tiles { pixels: 2, filters: 2 }));
        assert_eq!(tiles([1, 96, 480, 832], [3, 96, 3, 3], 1), Some(Tiles { pixels: 3120, filters: 1 }));
    }

    #[test]
    fn what_the_kernel_does_not_serve_is_left_to_others() {
        assert_eq!(tiles([1, 12, 8, 8], [8, 12, 3, 3], 1), None, "channels are not chunks");
        assert_eq!(tiles([1, 16, 8, 8], [16, 8, 3, 3], 2), None, "groups");
        assert_eq!(tiles([1, 8, 9, 9], [8, 8, 7, 7], 1), None, "49 taps");
        assert_eq!(tiles([1, 8, 1 << 16, 1 << 15], [8, 8, 1, 1], 1), None, "2^31 pixels");
    }
}
