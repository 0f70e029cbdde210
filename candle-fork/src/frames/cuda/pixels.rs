//! Launchers of `pixels.cu`.

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
    frames::{ClampedFrames, PatchOrder, Rgb8Frames, rgb8::Problem},
};

const MODULE: Module = module!(PIXELS);

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
    const OP: &str = "frames_to_rgb8";
    let (out, flags) = write(OP, x, problem, DType::U8)?;
    Ok(Rgb8Frames::new(out.into_tensor(OP, problem.dims.as_slice())?, flags))
}

pub(in crate::frames) fn clamped_frames(x: &Tensor, problem: &Problem) -> Result<ClampedFrames> {
    const OP: &str = "clamped_frames";
    let (out, flags) = write(OP, x, problem, DType::F32)?;
    let [frames, height, width, channels] = problem.dims;
    Ok(ClampedFrames { frames: out.into_tensor(OP, (1, channels, frames, height, width))?, flags })
}

/// The pixels of x by the kernel of that name, of one element of `dtype` for each colour, and the flags.
fn write(op: &'static str, x: &Tensor, problem: &Problem, dtype: DType) -> Result<(Output, Tensor)> {
    let device = device_of(op, x)?;
    let operand = Operand::new(op, x)?;
    let [frames, height, width, channels] = problem.dims;
    let out = Output::new(op, device, dtype, problem.dims.iter().product())?;
    if width as u64 >= Divisor::LIMIT || height as u64 >= Divisor::LIMIT {
        return Err(Error::Unsupported { op, what: format!("frames of {width} x {height} pixels") });
    }
    let across = width.div_ceil(THREADS as usize).clamp(1, MAX_BLOCKS);
    let down = (frames * height).clamp(1, MAX_BLOCKS / across);
    let flags = Output::new(op, device, DType::U32, across * down)?;
    let params = Params {
        x: operand.address(),
        out: out.address(),
        flags: flags.address(),
        strides: std::array::from_fn(|axis| operand.strides()[axis + 1] as u64),
        frames: frames as u64,
        height: height as u64,
        width: width as u64,
        side: Divisor::new(op, problem.side)?,
        channels: channels as u32,
        rows_first: u32::from(problem.order == PatchOrder::RowMajor),
    };
    let kernel = Kernel::load(device, &MODULE, &format!("{op}_{}", kernel_suffix(x.dtype())))?;
    // SAFETY: `Params` mirrors that of pixels.cu. The strides are those of x, which has a channel for each place of a
    // square; the op has checked its shape. out, of the kernel's element type, and flags are new memory: every pixel has one
    // thread that writes it, every block writes its flag, also of frames without pixels.
    unsafe { kernel.launch(Grid::blocks(op, [across as u64, down as u64, 1], THREADS)?, &params)? };
    Ok((out, flags.into_tensor(op, across * down)?))
}
