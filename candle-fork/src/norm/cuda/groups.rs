//! Launchers of `group_norm.cu`.

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

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
    error::{Error, Result},
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

/// Positions that a thread norms at least, if there are as many: its first ones cost as much again to get ready.
const POSITIONS: usize = 16;

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

/// How memory is read, and how it is dealt out.
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
    apply(x, num_groups, [weight, bias], activation, |call| {
        let bytes = call.statistics_bytes();
        arena::with(call.device, bytes + call.partials_bytes(), |statistics| {
            call.take(statistics, statistics + bytes as u64, eps)?;
            call.apply(statistics)
        })
    })
}

/// Statistics of a tensor that is not empty: `[N, G, 4]`, f32.
pub(in crate::norm) fn group_statistics(x: &Tensor, num_groups: usize, eps: f64) -> Result<Tensor> {
    let device = device_of(OP, x)?;
    let order = order_of(x);
    let x = Operand::new(OP, &in_order(x, order)?)?;
    let dims = x.tensor().dims();
    let call = Call::new(device, &x, order, num_groups, true)?;
    let statistics = Output::new(OP, device, DType::F32, dims[0] * num_groups * 4)?;
    arena::with(device, call.partials_bytes(), |partials| call.take(statistics.address(), partials, eps))?;
    statistics.into_tensor(OP, (dims[0], num_groups, 4))
}

/// By statistics that [`group_statistics`] gave.
pub(in crate::norm) fn group_norm_part(
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let statistics = Operand::new(OP, statistics)?;
    apply(x, statistics.tensor().dims()[1], [weight, bias], activation, |call| call.apply(statistics.address()))
}

/// A tensor without positions has one order.
fn order_of(x: &Tensor) -> MemoryOrder {
    if x.rank() > 2 { memory_order(x) } else { MemoryOrder::ChannelsFirst }
}

/// A result of x's shape and order, which `run` fills if there is anything to fill.
fn apply(
    x: &Tensor,
    num_groups: usize,
    [weight, bias]: [&Tensor; 2],
    activation: Activation,
    run: impl FnOnce(&Call<'_>) -> Result<()>,
) -> Result<Tensor> {
    let device = device_of(OP, x)?;
    let order = order_of(x);
    let x = Operand::new(OP, &in_order(x, order)?)?;
    let (weight, bias) = (Operand::new(OP, &contiguous(weight)?)?, Operand::new(OP, &contiguous(bias)?)?);
    let (dims, dtype) = (x.tensor().dims().to_vec(), x.tensor().dtype());
    let out = Output::new(OP, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let mut call = Call::new(device, &x, order, num_groups, aligned(&[out.address()]))?;
        call.params = Params {
            weight: weight.address(),
            bias: bias.address(),
            out: out.address(),
            weight_type: element_type(OP, "weight", weight.tensor().dtype())?,
            bias_type: element_type(OP, "bias", bias.tensor().dtype())?,
            silu: u32::from(activation == Activation::Silu),
            ..call.params
        };
        run(&call)?;
    }
    match order {
        MemoryOrder::ChannelsLast => out.into_channels_last(OP, &dims),
        MemoryOrder::ChannelsFirst => out.into_tensor(OP, dims),
    }
}

/// The kernels with all of their parameters but the addresses of moments and statistics.
struct Call<'a> {
    device: &'a CudaDevice,
    plan: Plan,
    params: Params,
    suffix: &'static str,
}

impl<'a> Call<'a> {
    /// For x, packed in `order` and not empty. Nothing is said of weight, bias and result.
    fn new(
        device: &'a CudaDevice,
        x: &Operand,
        order: MemoryOrder,
        num_groups: usize,
        out_is_aligned: bool,
    ) -> Result<Self> {
        let (dims, dtype) = (x.tensor().dims(), x.tensor().dtype());
        let (images, channels, extent) = (dims[0], dims[1], dims[2..].iter().product());
        if u32::try_from(channels).is_err() {
            return Err(Error::Unsupported { op: OP, what: format!("{channels} channels") });
        }
        let aligned = out_is_aligned && aligned(&[x.address()]);
        let wide = WIDE / dtype.size_in_bytes();
        let plan = Plan::new(order, [images, channels, num_groups, extent], wide, aligned);
        let params = Params {
            x: x.address(),
            weight: 0,
            bias: 0,
            out: 0,
            partials: 0,
            statistics: 0,
            images: images as u64,
            channels: channels as u64,
            groups: num_groups as u64,
            extent: extent as u64,
            parts: plan.parts.count as u64,
            part_len: plan.parts.len as u64,
            eps: 0.0,
            weight_type: 0,
            bias_type: 0,
            silu: 0,
            unused: 0,
        };
        Ok(Self { device, plan, params, suffix: kernel_suffix(dtype) })
    }

    fn extents(&self) -> [usize; 4] {
        let Params { images, channels, groups, extent, .. } = self.params;
        [images, channels, groups, extent].map(|n| n as usize)
    }

    fn statistics_bytes(&self) -> usize {
        let [images, _, groups, _] = self.extents();
        images * groups * STATISTICS
    }

    fn partials_bytes(&self) -> usize {
        let [images, _, groups, _] = self.extents();
        images * groups * self.plan.parts.count * MOMENTS
    }

    /// Enqueues the statistics of x into memory of [`Self::statistics_bytes`], by way of [`Self::partials_bytes`].
    fn take(&self, statistics: Address, partials: Address, eps: f64) -> Result<()> {
        let [images, channels, groups, _] = self.extents();
        let (parts, threads) = (self.params.parts, THREADS as usize);
        let (kind, grid) = match self.plan.order {
            MemoryOrder::ChannelsLast => {
                let at_once = groups_at_once(channels / groups / self.plan.moments_width, threads);
                ("last", [parts, along_y(images), groups.div_ceil(at_once) as u64])
            }
            MemoryOrder::ChannelsFirst => ("first", [parts, along_y(images * groups), 1]),
        };
        let width = match self.plan.moments_width {
            1 => "1",
            QUAD if kind == "last" => "4",
            _ => "wide",
        };
        let moments = Kernel::load(self.device, &MODULE, &format!("{OP}_moments_{kind}_{width}_{}", self.suffix))?;
        let merge = Kernel::load(self.device, &MODULE, "group_norm_merge")?;
        let merge_grid = Grid::blocks(OP, [blocks(images * groups, threads / 32, MAX_BLOCKS), 1, 1], THREADS)?;
        let params = Params { statistics, partials, eps, ..self.params };
        // SAFETY: `Params` mirrors that of group_norm.cu. x is packed in the order that the kernel's name says, with
        // the extents that `Params` names; every block writes one part of each of its groups, for which the scratch
        // memory has room. The name says vectors only where addresses and runs are multiples of them.
        unsafe { moments.launch(Grid::blocks(OP, grid, THREADS)?, &params)? };
        // SAFETY: the parts have been written by the launch before, on the same stream; the statistics do not overlap them.
        unsafe { merge.launch(merge_grid, &params) }
    }

    /// Enqueues the norm by `statistics` of all groups of all images, which are written before on the same stream.
    fn apply(&self, statistics: Address) -> Result<()> {
        let [images, channels, _, extent] = self.extents();
        let (threads, apply_width) = (THREADS as usize, self.plan.apply_width);
        let (kind, grid) = match self.plan.order {
            MemoryOrder::ChannelsLast => {
                let vectors = channels / apply_width;
                let rows = threads / vectors.min(threads);
                let along_x = blocks(extent, rows * POSITIONS, MAX_BLOCKS);
                let grid = [along_x, along_y(images), vectors.div_ceil(threads) as u64];
                ("last", grid)
            }
            MemoryOrder::ChannelsFirst => {
                ("first", [blocks(extent, apply_width * threads, MAX_BLOCKS), along_y(images * channels), 1])
            }
        };
        let width = if apply_width == 1 { "1" } else { "wide" };
        let kernel = Kernel::load(self.device, &MODULE, &format!("{OP}_apply_{kind}_{width}_{}", self.suffix))?;
        let params = Params { statistics, ..self.params };
        // SAFETY: as for the moments; weight and bias have `channels` elements, the op has checked that; out is
        // new memory of x's size, and every element of x has one thread that writes it there.
        unsafe { kernel.launch(Grid::blocks(OP, grid, THREADS)?, &params) }
    }
}

/// Blocks along y, in which kernels loop over what is left.
fn along_y(n: usize) -> u64 {
    n.min(MAX_BLOCKS_Y) as u64
}
