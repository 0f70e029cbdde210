//! Half-precision convolutions of many channels into at most [`FEW_FILTERS`] filters, by the kernel of `few_filters.cu`: cuDNN and
//! the product over patches take five times as long there.

use candle_core::DType;
#[cfg(feature = "cuda")]
use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{ConvProblem, FEW_FILTERS};
#[cfg(feature = "cuda")]
use super::{
    OP,
    cuda::{pixel_axes, strides, wide_strides},
    cudnn::ready,
};
#[cfg(feature = "cuda")]
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type, small_operand},
    },
    error::Result,
    layout,
};

#[cfg(feature = "cuda")]
const MODULE: Module = module!(FEW_FILTERS);

/// Channels and taps over frames that it is built for.
const CHANNELS: [usize; 2] = [96, 128];
const TAPS: [usize; 2] = [1, 3];
/// Rows and columns of the result that a block makes.
#[cfg(feature = "cuda")]
const TILE: [usize; 2] = [8, 32];

/// Whether the kernel does this convolution without a residual.
pub(super) fn serves(problem: &ConvProblem, dtype: DType) -> bool {
    let &ConvProblem { n, c, k, groups, input, filter, output, stride, dilation, padding } = problem;
    let built = dtype != DType::F32 && k <= FEW_FILTERS && CHANNELS.contains(&c) && TAPS.contains(&filter[0]);
    let plain = groups == 1 && filter[1..] == [3, 3] && stride == [1; 3] && dilation == [1; 3];
    // Frames and their pixels are 32-bit numbers, and so are distances within a frame of x, whose rows need not be packed:
    // `forward` copies what lies wider apart.
    let small = |n: usize| n < 1 << 30;
    let fits = n < 1 << 16 && small(input[0]) && small(output[0]) && small(input[1].saturating_mul(input[2]) * c);
    built && plain && fits && padding[0] < filter[0] && padding[1..].iter().all(|&p| small(p))
}

/// See [`super::conv_nd_add`]; [`serves`] holds. x in any order is copied to channels-last first, unless it is.
#[cfg(feature = "cuda")]
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    problem: &ConvProblem,
    output_dims: &[usize],
) -> Result<Tensor> {
    let device = device_of(OP, x)?;
    let weight = Operand::new(OP, &layout::channels_last(weight)?)?;
    let bias = bias.map(small_operand).transpose()?;
    let [_, h, w] = problem.input;
    let near = |x: &Tensor| {
        let [_, _, _, row, column] = strides(x);
        wide_strides(x) && (h - 1).saturating_mul(row).saturating_add((w - 1).saturating_mul(column)) < 1 << 30
    };
    let x = if near(x) { x.clone() } else { layout::channels_last(x)? };
    let x = ready(&x)?;
    let output = Output::new(OP, device, x.tensor().dtype(), output_dims.iter().product())?;
    let (_, strides) = pixel_axes(problem, strides(x.tensor()));
    let [_, p, q] = problem.output;
    let across = q.div_ceil(TILE[1]);
    let params = Params {
        input: x.address(),
        weight: weight.address(),
        bias: bias.as_ref().map_or(0, Operand::address),
        output: output.address(),
        strides: strides.map(|s| s as u64),
        // Below 2^30, as checked by `serves`.
        input_extents: problem.input.map(|n| n as i32),
        output_extents: problem.output.map(|n| n as i32),
        padding: problem.padding.map(|n| n as i32),
        filters: problem.k as i32,
        bias_type: bias.as_ref().map_or(Ok(0), |b| element_type(OP, "bias", b.tensor().dtype()))?,
        tiles_across: across as u32,
    };
    let suffix = if x.tensor().dtype() == DType::BF16 { "bf16" } else { "f16" };
    let name = format!("few_filters_c{}_t{}_{suffix}", problem.c, problem.filter[0]);
    let tiles = p.div_ceil(TILE[0]) * across;
    let grid = Grid::blocks(OP, [tiles as u64, problem.n as u64, 1], (TILE[0] * TILE[1]) as u32)?;
    // SAFETY: `Params` mirrors `FewFilters`; the kernel reads x only within its extents, by its own strides, in aligned 16
    // bytes; the packed weight has these taps and channels; the result is new memory of these extents.
    unsafe { Kernel::load(device, &MODULE, &name)?.launch(grid, &params) }?;
    output.into_channels_last(OP, output_dims)
}

/// `FewFilters` of the kernel.
#[cfg(feature = "cuda")]
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    input: Address,
    weight: Address,
    bias: Address,
    output: Address,
    strides: [u64; 4],
    input_extents: [i32; 3],
    output_extents: [i32; 3],
    padding: [i32; 3],
    filters: i32,
    bias_type: u32,
    tiles_across: u32,
}

#[cfg(feature = "cuda")]
const _: () = assert!(size_of::<Params>() == 112, "as in few_filters.cu");

#[cfg(feature = "cuda")]
// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

#[cfg(test)]
mod tests {
    use super::{super::ConvParams, *};

    fn problem(x: &[usize], weight: &[usize], params: &ConvParams<3>) -> ConvProblem {
        ConvProblem::new(x, weight, params).unwrap()
    }

    #[test]
    fn the_ends_of_decoders_are_served_and_nothing_that_the_kernel_does_not_know() {
        let padded = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..Default::default() };
        let wan = problem(&[1, 96, 6, 480, 832], &[3, 96, 3, 3, 3], &padded);
        assert!(serves(&wan, DType::BF16) && serves(&wan, DType::F16) && !serves(&wan, DType::F32));
        let still = problem(&[2, 128, 1, 1024, 1024], &[3, 128, 1, 3, 3], &padded);
        assert!(serves(&still, DType::BF16));
        let pairs: [(&[usize], &[usize]); 5] = [
            (&[1, 96, 6, 9, 9], &[4, 96, 3, 3, 3]),
            (&[1, 64, 6, 9, 9], &[3, 64, 3, 3, 3]),
            (&[1, 96, 6, 9, 9], &[3, 96, 2, 3, 3]),
            (&[1, 96, 6, 9, 9], &[3, 96, 3, 3, 1]),
            (&[1, 96, 6, 1 << 12, 1 << 12], &[3, 96, 3, 3, 3]),
        ];
        for (x, weight) in pairs {
            assert!(!serves(&problem(x, weight, &padded), DType::BF16), "{x:?} {weight:?}");
        }
        let x = [1, 96, 6, 9, 9];
        for params in [
            ConvParams { stride: [1, 2, 1], ..padded },
            ConvParams { dilation: [1, 1, 2], ..padded },
            ConvParams { padding: [(3, 0), (1, 1), (1, 1)], ..padded },
        ] {
            assert!(!serves(&problem(&x, &[3, 96, 3, 3, 3], &params), DType::BF16), "{params:?}");
        }
        let grouped = ConvParams { groups: 3, ..padded };
        assert!(!serves(&problem(&x, &[3, 32, 3, 3, 3], &grouped), DType::BF16));
    }
}
