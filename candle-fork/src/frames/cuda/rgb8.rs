//! Launcher of `rgb8.cu`.

use candle_core::{DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use crate::{
    cuda::{
        grid::{Divisor, Grid, THREADS},
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of},
    },
    element::kernel_suffix,
    error::{Error, Result},
    frames::{PatchOrder, Rgb8Frames, rgb8::Problem},
};

const OP: &str = "frames_to_rgb8";
const MODULE: Module = module!(RGB8);

/// Most blocks: enough for the largest devices, few enough that their flags are copied in no time.
const MAX_BLOCKS: usize = 2048;

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    out: Address,
    flags: Address,
    strides: [u64; 4],
    frames: u64,
    height: u64,
    width: u64,
    side: Divisor,
    channels: u32,
    rows_first: u32,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceRepr for Params {}

pub(in crate::frames) fn frames_to_rgb8(x: &Tensor, problem: &Problem) -> Result<Rgb8Frames> {
    let device = device_of(OP, x)?;
    let operand = Operand::new(OP, x)?;
    let [frames, height, width, channels] = problem.dims;
    let out = Output::new(OP, device, DType::U8, problem.dims.iter().product())?;
    if width as u64 >= Divisor::LIMIT || height as u64 >= Divisor::LIMIT {
        return Err(Error::Unsupported { op: OP, what: format!("frames of {width} x {height} pixels") });
    }
    let across = width.div_ceil(THREADS as usize).clamp(1, MAX_BLOCKS);
    let down = (frames * height).clamp(1, MAX_BLOCKS / across);
    let flags = Output::new(OP, device, DType::U32, across * down)?;
    let params = Params {
        x: operand.address(),
        out: out.address(),
        flags: flags.address(),
        strides: std::array::from_fn(|axis| operand.strides()[axis + 1] as u64),
        frames: frames as u64,
        height: height as u64,
        width: width as u64,
        side: Divisor::new(OP, problem.side)?,
        channels: channels as u32,
        rows_first: u32::from(problem.order == PatchOrder::RowMajor),
    };
    let kernel = Kernel::load(device, &MODULE, &format!("{OP}_{}", kernel_suffix(x.dtype())))?;
    // SAFETY: `Params` mirrors that of rgb8.cu. The strides are those of x, which has a channel for each place of a
    // square; the op has checked its shape. out and flags are new memory: every pixel has one thread that writes it,
    // every block writes its flag, also of frames without pixels.
    unsafe { kernel.launch(Grid::blocks(OP, [across as u64, down as u64, 1], THREADS)?, &params)? };
    Ok(Rgb8Frames::new(out.into_tensor(OP, problem.dims.as_slice())?, flags.into_tensor(OP, across * down)?))
}
