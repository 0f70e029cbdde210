//! Launchers of `shortcut.cu`.

use candle_core::{Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{MAX_BLOCKS_Y, finish, strides};
use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Error, Result},
    layout::{MemoryOrder, is_channels_last, memory_order},
};

const MODULE: Module = module!(SHORTCUT);

/// Bytes of the widest access.
const WIDE: usize = 16;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    main: Address,
    x: Address,
    out: Address,
    main_strides: [u64; 5],
    x_strides: [u64; 5],
    out_strides: [u64; 5],
    images: u64,
    channels: u64,
    frames: u64,
    height: u64,
    width: u64,
    x_channels: u64,
    skip: u64,
    ft: u32,
    fs: u32,
    cell: u32,
    neighbours: u32,
    by_channels: Divisor,
    by_fs: Divisor,
    by_cell: Divisor,
    by_neighbours: Divisor,
    last: u32,
    unused: u32,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

/// `skipped` frames of the repeated ones are left out at the front.
pub(in crate::frames) fn dup_up_add(main: &Tensor, x: &Tensor, factors: [usize; 2], skipped: usize) -> Result<Tensor> {
    let [ft, fs] = factors;
    let neighbours = main.dims()[1] * ft * fs * fs / x.dims()[1];
    add("dup_up_add", main, x, factors, skipped, neighbours)
}

/// `before` frames of zeros stand before x.
pub(in crate::frames) fn avg_down_add(main: &Tensor, x: &Tensor, factors: [usize; 2], before: usize) -> Result<Tensor> {
    let [ft, fs] = factors;
    let neighbours = x.dims()[1] * ft * fs * fs / main.dims()[1];
    add("avg_down_add", main, x, factors, before, neighbours)
}

fn add(
    op: &'static str,
    main: &Tensor,
    x: &Tensor,
    [ft, fs]: [usize; 2],
    skip: usize,
    neighbours: usize,
) -> Result<Tensor> {
    let (device, dtype, order) = (device_of(op, main)?, main.dtype(), memory_order(main));
    let last = order == MemoryOrder::ChannelsLast;
    let dims: [usize; 5] = std::array::from_fn(|axis| main.dims()[axis]);
    let [images, channels, frames, height, width] = dims;
    let x_channels = x.dims()[1];
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    if out.is_empty() {
        return finish(op, out, &dims, order);
    }
    let cell = ft * fs * fs;
    // The kernels number the elements of a row, and channels times the pixels of a cell, with 31 bits.
    let numbers = [if last { width * channels } else { width }, channels.max(x_channels) * cell, channels * neighbours];
    if numbers.iter().any(|&n| n as u64 >= Divisor::LIMIT) {
        return Err(Error::Unsupported { op, what: format!("rows of {width} pixels of {channels} channels") });
    }
    let (main_operand, x_operand) = (Operand::new(op, main)?, Operand::new(op, x)?);
    let wide_strides = |strides: &[usize]| std::array::from_fn(|axis| strides[axis] as u64);
    let params = Params {
        main: main_operand.address(),
        x: x_operand.address(),
        out: out.address(),
        main_strides: wide_strides(main.stride()),
        x_strides: wide_strides(x.stride()),
        out_strides: wide_strides(&strides(&dims, order)),
        images: images as u64,
        channels: channels as u64,
        frames: frames as u64,
        height: height as u64,
        width: width as u64,
        x_channels: x_channels as u64,
        skip: skip as u64,
        ft: ft as u32,
        fs: fs as u32,
        cell: cell as u32,
        neighbours: neighbours as u32,
        by_channels: Divisor::new(op, channels)?,
        by_fs: Divisor::new(op, fs)?,
        by_cell: Divisor::new(op, cell)?,
        by_neighbours: Divisor::new(op, neighbours)?,
        last: u32::from(last),
        unused: 0,
    };
    let elements = WIDE / dtype.size_in_bytes();
    // Strides of axes of extent 1 may be anything, so x is read by those that it should have.
    let packed = is_channels_last(main) && is_channels_last(x);
    let wide = op == "dup_up_add"
        && last
        && packed
        && [channels, x_channels].iter().all(|n| n.is_multiple_of(elements))
        && [params.main, params.x, params.out].iter().all(|address| address.is_multiple_of(WIDE as u64));
    let params = if wide {
        let x_dims = std::array::from_fn(|axis| x.dims()[axis]);
        Params { x_strides: wide_strides(&strides(&x_dims, order)), ..params }
    } else {
        params
    };
    let kernel = format!("{op}_{}_{}", if wide { "wide" } else { "any" }, kernel_suffix(dtype));
    let kernel = Kernel::load(device, &MODULE, &kernel)?;
    let threads = if wide { numbers[0] / elements } else { numbers[0] };
    let rows = images * if last { 1 } else { channels } * frames * height;
    let grid = [threads.div_ceil(THREADS as usize) as u64, rows.min(MAX_BLOCKS_Y) as u64, 1];
    // SAFETY: `Params` mirrors that of shortcut.cu. The strides are those of main and x, whose shapes the op has
    // checked against each other, factors, skipped frames and neighbours: every index that the formula names exists.
    // out is new memory, all of whose elements are written by the loops over the grid. Wide kernels only for packed
    // channels-last operands whose pixels are whole vectors at aligned addresses.
    unsafe { kernel.launch(Grid::blocks(op, grid, THREADS)?, &params)? };
    finish(op, out, &dims, order)
}
