//! Launchers of `token_project_sm90.cu` and `token_mlp_sm90.cu`.

use candle_core::{CudaDevice, DType, Device, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{CHANNELS, OP, TokenAngles, TokenBlock, TokenEntries};
use crate::{
    cuda::{
        copy::copy_into,
        grid::{Divisor, Grid},
        launch::Kernel,
        module::{Module, module},
        paths,
        tensor::{Address, Operand, Output, device_of},
    },
    cudnn::DeviceInfo,
    error::{Error, Result},
    operand::shape_error,
    target::{check_target, with_address},
};

const PROJECT: Module = module!(TOKEN_PROJECT_SM90);
const MLP: Module = module!(TOKEN_MLP_SM90);

/// As in `stream.cuh`: tokens of a block, its threads and its shared memory.
const TILE: u64 = 128;
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 1024 + 2 * 32_768 + 5 * (32_768 + 16);

/// `TokenProject` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProjectParams {
    x: Address,
    context: Address,
    weights: Address,
    context_bias: Address,
    norm: Address,
    qkv_bias: Address,
    head_norms: Address,
    tables: [Address; 3],
    out: Address,
    tokens: u64,
    position: u32,
    eps: f32,
    plane: Divisor,
    row: Divisor,
}

const _: () = assert!(size_of::<ProjectParams>() == 136, "as in token_project_sm90.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for ProjectParams {}

/// `TokenMlp` of the kernel.
#[repr(C)]
#[derive(Clone, Copy)]
struct MlpParams {
    x: Address,
    attended: Address,
    weights: Address,
    out_bias: Address,
    norm: Address,
    hidden_bias: Address,
    tokens: u64,
    chunks: u32,
    eps: f32,
}

const _: () = assert!(size_of::<MlpParams>() == 64, "as in token_mlp_sm90.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for MlpParams {}

/// Whether a device has the instructions of the kernels.
pub(super) fn serves(device: &Device) -> Result<bool> {
    let Device::Cuda(device) = device else { return Ok(false) };
    Ok(info(device).is_some_and(|info| info.capability == 900))
}

fn info(device: &CudaDevice) -> Option<std::sync::Arc<DeviceInfo>> {
    DeviceInfo::of(device.cuda_stream().context().ordinal()).ok()
}

/// Blocks for `tokens`: as many as run at a time.
fn grid(device: &CudaDevice, tokens: u64) -> Result<Grid> {
    let most = info(device).map_or(1, |info| u64::from(info.multiprocessors).max(1));
    let grid = Grid::blocks(OP, [tokens.div_ceil(TILE).min(most), 1, 1], THREADS)?;
    Ok(Grid { shared_bytes: SHARED_BYTES, ..grid })
}

/// Tokens `[S, 256]` in bf16, one behind the other; S.
fn tokens(operand: &'static str, t: &Tensor) -> Result<u64> {
    match *t.dims() {
        [tokens, CHANNELS] if t.is_contiguous() && t.dtype() == DType::BF16 => Ok(tokens as u64),
        _ => Err(shape_error(OP, operand, t, "[S, 256], contiguous, in bf16")),
    }
}

/// See [`TokenBlock::project`].
pub(super) fn project(
    block: &TokenBlock,
    x: &Tensor,
    context: Option<&Tensor>,
    entries: &TokenEntries,
    angles: &TokenAngles,
    position: usize,
    carried: Option<&Tensor>,
) -> Result<Tensor> {
    let device = device_of(OP, x)?;
    let count = tokens("x", x)?;
    if context.is_some() != block.context_bias.is_some() {
        let what = if context.is_some() { "the block takes no context" } else { "the block takes a context" };
        return Err(Error::Argument { op: OP, what: what.into() });
    }
    if let Some(context) = context {
        tokens("context", context)?;
    }
    check_target(OP, x, x.dims(), context.unwrap_or(x), context.as_slice())?;
    let before = match carried.map(|carried| (carried, carried.dims())) {
        None => 0,
        Some((_, &[before, columns])) if columns == 3 * CHANNELS => before,
        Some((carried, _)) => return Err(shape_error(OP, "carried", carried, "[P, 768]")),
    };
    let [t, h, w] = angles.grid;
    let end = position.saturating_add(x.dims()[0]);
    if end > t.saturating_mul(h * w) || end as u64 >= Divisor::LIMIT {
        let what = format!("tokens {position} to {end} of a grid of {:?}", angles.grid);
        return Err(Error::Argument { op: OP, what });
    }
    let out = Output::new(OP, device, DType::BF16, (before + x.dims()[0]) * 3 * CHANNELS)?;
    if let Some(carried) = carried.filter(|_| before > 0) {
        copy_into(carried, &out, 0, &[3 * CHANNELS, 1])?;
    }
    if count > 0 {
        let operand = |t: &Tensor| Operand::new(OP, t);
        let context = context.map(operand).transpose()?;
        let context_bias = block.context_bias.as_ref().map(operand).transpose()?;
        let (weights, norm) = (operand(&block.project)?, operand(&entries.norms[0])?);
        let (qkv_bias, head_norms) = (operand(&entries.qkv_bias)?, operand(&block.head_norms)?);
        let [along_t, along_h, along_w] = &angles.along;
        let tables = [operand(along_t)?, operand(along_h)?, operand(along_w)?];
        let params = ProjectParams {
            x: 0,
            context: context.as_ref().map_or(0, Operand::address),
            weights: weights.address(),
            context_bias: context_bias.as_ref().map_or(0, Operand::address),
            norm: norm.address(),
            qkv_bias: qkv_bias.address(),
            head_norms: head_norms.address(),
            tables: tables.each_ref().map(Operand::address),
            out: out.address() + (before * 3 * CHANNELS * 2) as u64,
            tokens: count,
            // Below the limit.
            position: position as u32,
            eps: block.eps,
            plane: Divisor::new(OP, h * w)?,
            row: Divisor::new(OP, w)?,
        };
        let kernel = Kernel::load(device, &PROJECT, "token_project")?;
        let grid = grid(device, count)?;
        with_address(OP, x, |x| {
            // SAFETY: `ProjectParams` mirrors `TokenProject`; x and context are `tokens` packed rows of 256, at multiples of
            // 16 bytes as all rows of 512 bytes in memory that candle allocates; out has room for as many of 768 behind the
            // carried ones; biases, norms and tables were made with these extents, the positions lie in the grid of the
            // tables; the stages are those of a block with or without context, as the address says. Blocks, threads and
            // shared memory are those that the kernel is written for.
            unsafe { kernel.launch(grid, &ProjectParams { x, ..params }) }
        })?;
        paths::count(paths::Path::TokenBlock);
    }
    out.into_tensor(OP, (before + x.dims()[0], 3 * CHANNELS))
}

/// See [`TokenBlock::finish`].
pub(super) fn finish(block: &TokenBlock, x: &Tensor, attended: &Tensor, entries: &TokenEntries) -> Result<()> {
    let device = device_of(OP, x)?;
    let count = tokens("x", x)?;
    tokens("attended", attended)?;
    check_target(OP, x, attended.dims(), attended, &[attended])?;
    if count == 0 {
        return Ok(());
    }
    let operand = |t: &Tensor| Operand::new(OP, t);
    let (attended, weights, out_bias) = (operand(attended)?, operand(&block.mlp)?, operand(&block.out_bias)?);
    let (norm, hidden_bias) = (operand(&entries.norms[1])?, operand(&entries.hidden_bias)?);
    let chunks = u32::try_from(block.chunks);
    let chunks =
        chunks.map_err(|_| Error::Unsupported { op: OP, what: format!("{} hidden values", 64 * block.chunks) })?;
    let params = MlpParams {
        x: 0,
        attended: attended.address(),
        weights: weights.address(),
        out_bias: out_bias.address(),
        norm: norm.address(),
        hidden_bias: hidden_bias.address(),
        tokens: count,
        chunks,
        eps: block.eps,
    };
    let kernel = Kernel::load(device, &MLP, "token_mlp")?;
    let grid = grid(device, count)?;
    with_address(OP, x, |x| {
        // SAFETY: `MlpParams` mirrors `TokenMlp`; x and attended are `tokens` packed rows of 256, at multiples of 16 bytes as
        // in `project`, and different memory; biases and norms were made with these extents; the stages are those of
        // `chunks`. Blocks, threads and shared memory are those that the kernel is written for.
        unsafe { kernel.launch(grid, &MlpParams { x, ..params }) }
    })?;
    paths::count(paths::Path::TokenBlock);
    Ok(())
}
