//! Launchers of `group_norm.cu`.

use candle_core::{CudaDevice, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{MAX_BLOCKS, MAX_BLOCKS_Y, THREADS, WIDE, aligned};
use crate::{
    activation::Activation,
    cuda::{
        arena,
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::Result,
    layout::{MemoryOrder, contiguous, in_order, memory_order},
    norm::plan::{Parts, blocks, groups_at_once},
};

const OP: &str = "group_norm";
const MODULE: Module = module!(GROUP_NORM);

/// Bytes of the moments of a part and of the statistics of a group: `Moments` and `Statistics` of the kernels.
const MOMENTS: usize = 24;
const STATISTICS: usize = 16;

/// Parts that all groups together are cut into, about: several blocks for each multiprocessor of the largest devices.
const PARTS: usize = 1024;

/// Elements of a vector of the channels-last moments.
const QUAD: usize = 4;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    weight: Address,
    bias: Address,
    out: Address,
    partials: Address,
    statistics: Address,
    images: u64,
    channels: u64,
    groups: u64,
    extent: u64,
    parts: u64,
    part_len: u64,
    eps: f64,
    weight_type: u32,
    bias_type: u32,
    silu: u32,
    unused: u32,
}

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// The three launches but for the addresses of scratch memory.
struct Plan {
    order: MemoryOrder,
    parts: Parts,
    /// Elements that move at once in the first and in the last kernel.
    moments_width: usize,
    apply_width: usize,
}

impl Plan {
    fn new(order: MemoryOrder, [images, channels, groups, extent]: [usize; 4], wide: usize, aligned: bool) -> Self {
        let group_channels = channels / groups;
        let or_one = |width: usize, run: usize| if aligned && run.is_multiple_of(width) { width } else { 1 };
        match order {
            MemoryOrder::ChannelsLast => Self {
                order,
                parts: Parts::of(extent, PARTS / images.min(PARTS), 16),
                moments_width: or_one(QUAD, group_channels),
                apply_width: or_one(wide, channels),
            },
            MemoryOrder::ChannelsFirst => Self {
                order,
                parts: Parts::of(group_channels * extent, PARTS / (images * groups).min(PARTS), 4096),
                moments_width: or_one(wide, group_channels * extent),
                apply_width: or_one(wide, extent),
            },
        }
    }
}

/// The result has the memory order of x.
pub(in crate::norm) fn group_norm(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    num_groups: usize,
    eps: f64,
    activation: Activation,
) -> Result<Tensor> {
    let device = device_of(OP, x)?;
    // A tensor without positions has one.
    let order = if x.rank() > 2 { memory_order(x) } else { MemoryOrder::ChannelsFirst };
    let x = Operand::new(OP, &in_order(x, order)?)?;
    let (weight, bias) = (Operand::new(OP, &contiguous(weight)?)?, Operand::new(OP, &contiguous(bias)?)?);
    let (dims, dtype) = (x.tensor().dims().to_vec(), x.tensor().dtype());
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let (images, channels, extent) = (dims[0], dims[1], dims[2..].iter().product());
        let wide = WIDE / dtype.size_in_bytes();
        let plan =
            Plan::new(order, [images, channels, num_groups, extent], wide, aligned(&[x.address(), out.address()]));
        let params = Params {
            x: x.address(),
            weight: weight.address(),
            bias: bias.address(),
            out: out.address(),
            partials: 0,
            statistics: 0,
            images: images as u64,
            channels: channels as u64,
            groups: num_groups as u64,
            extent: extent as u64,
            parts: plan.parts.count as u64,
            part_len: plan.parts.len as u64,
            eps,
            weight_type: element_type(OP, "weight", weight.tensor().dtype())?,
            bias_type: element_type(OP, "bias", bias.tensor().dtype())?,
            silu: u32::from(activation == Activation::Silu),
            unused: 0,
        };
        launch(device, &plan, params, kernel_suffix(dtype))?;
    }
    match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(OP, &dims),
        MemoryOrder::ChannelsFirst => out.into_tensor(OP, dims),
    }
}

fn launch(device: &CudaDevice, plan: &Plan, params: Params, suffix: &str) -> Result<()> {
    let [images, channels, groups] = [params.images, params.channels, params.groups].map(|n| n as usize);
    let extent = params.extent as usize;
    let y = |n: usize| n.min(MAX_BLOCKS_Y) as u64;
    let threads = THREADS as usize;
    let (kind, moments_grid, apply_grid) = match plan.order {
        MemoryOrder::ChannelsLast => {
            let at_once = groups_at_once(channels / groups / plan.moments_width, threads);
            let vectors = channels / plan.apply_width;
            let rows = threads / vectors.min(threads);
            (
                "last",
                [params.parts, y(images), groups.div_ceil(at_once) as u64],
                [blocks(extent, rows, MAX_BLOCKS), y(images), vectors.div_ceil(threads) as u64],
            )
        }
        MemoryOrder::ChannelsFirst => (
            "first",
            [params.parts, y(images * groups), 1],
            [blocks(extent, plan.apply_width * threads, MAX_BLOCKS), y(images * channels), 1],
        ),
    };
    let width = |n: usize| match n {
        1 => "1",
        _ if n == QUAD && kind == "last" => "4",
        _ => "wide",
    };
    let apply_width = if plan.apply_width == 1 { "1" } else { "wide" };
    let moments_name = format!("{OP}_moments_{kind}_{}_{suffix}", width(plan.moments_width));
    let moments = Kernel::load(device, &MODULE, &moments_name)?;
    let merge = Kernel::load(device, &MODULE, "group_norm_merge")?;
    let apply = Kernel::load(device, &MODULE, &format!("{OP}_apply_{kind}_{apply_width}_{suffix}"))?;
    let moments_grid = Grid::blocks(OP, moments_grid, THREADS)?;
    let merge_grid = Grid::blocks(OP, [blocks(images * groups, threads / 32, MAX_BLOCKS), 1, 1], THREADS)?;
    let apply_grid = Grid::blocks(OP, apply_grid, THREADS)?;
    let statistics_bytes = images * groups * STATISTICS;
    arena::with(device, statistics_bytes + images * groups * plan.parts.count * MOMENTS, |statistics| {
        let params = Params { statistics, partials: statistics + statistics_bytes as u64, ..params };
        // SAFETY: `Params` mirrors that of group_norm.cu. x is packed in the order that the kernel's name says, with
        // the extents that `Params` names; every block writes one part of each of its groups, for which the scratch
        // memory has room. The name says vectors only where addresses and runs are multiples of them.
        unsafe { moments.launch(moments_grid, &params)? };
        // SAFETY: the parts have been written by the launch before, on the same stream; the statistics lie before them.
        unsafe { merge.launch(merge_grid, &params)? };
        // SAFETY: as for the first launch; weight and bias have `channels` elements, the op has checked that; out is
        // new memory of x's size, and every element of x has one thread that writes it there.
        unsafe { apply.launch(apply_grid, &params) }
    })
}
