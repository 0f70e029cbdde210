//! Launchers of `row_norm.cu`.

use candle_core::{CudaDevice, DType, Tensor, cuda_backend::cudarc::driver::DeviceRepr};

use super::{MAX_BLOCKS, THREADS, WIDE, aligned};
use crate::{
    cuda::{
        grid::Grid,
        launch::Kernel,
        module::{Module, module},
        tensor::{Address, Operand, Output, device_of, element_type},
    },
    element::kernel_suffix,
    error::Result,
    layout::contiguous,
    norm::plan::{Share, block_threads, blocks},
    row_layout::{RowLayout, rows_of},
};

const MODULE: Module = module!(ROW_NORM);

/// `Params` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    x: Address,
    scale: Address,
    shift: Address,
    out: Address,
    x_rows: RowLayout,
    rows: u64,
    width: u64,
    rows_per_batch: u64,
    eps: f64,
    lanes: u32,
    scale_type: u32,
    shift_type: u32,
    one: f32,
}

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// What a row is multiplied by and shifted by.
struct Affine<'a> {
    scale: Option<&'a Tensor>,
    shift: Option<&'a Tensor>,
    /// Added to the scale.
    one: f32,
    /// Rows that share one row of these.
    rows_per_batch: u64,
}

pub(in crate::norm) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    norm(
        "rms_norm",
        "rms_norm",
        x,
        Affine { scale: Some(weight), shift: None, one: 0.0, rows_per_batch: u64::MAX },
        eps,
    )
}

pub(in crate::norm) fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let one = if weight.is_some() { 0.0 } else { 1.0 };
    norm("layer_norm", "layer_norm", x, Affine { scale: weight, shift: bias, one, rows_per_batch: u64::MAX }, eps)
}

pub(in crate::norm) fn layer_norm_modulate(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    let rows_per_batch = x.dims()[1].max(1) as u64;
    let affine = Affine { scale: Some(scale), shift: Some(shift), one: 1.0, rows_per_batch };
    norm("layer_norm_modulate", "layer_norm", x, affine, eps)
}

fn norm(op: &'static str, kernel: &str, x: &Tensor, affine: Affine<'_>, eps: f64) -> Result<Tensor> {
    let device = device_of(op, x)?;
    let (x, x_rows) = rows_of(op, "x", x)?;
    let operand = |t: Option<&Tensor>| t.map(|t| Operand::new(op, &contiguous(t)?)).transpose();
    let (scale, shift) = (operand(affine.scale)?, operand(affine.shift)?);
    let parts = |t: &Option<Operand>| match t {
        Some(t) => Ok((t.address(), element_type(op, "scale or shift", t.tensor().dtype())?)),
        None => Ok((0, 0)),
    };
    let ((scale_address, scale_type), (shift_address, shift_type)) = (parts(&scale)?, parts(&shift)?);
    let (dims, dtype) = (x.tensor().dims().to_vec(), x.tensor().dtype());
    let out = Output::new(op, device, dtype, dims.iter().product())?;
    if !out.is_empty() {
        let width = dims.last().copied().unwrap_or(1);
        let params = Params {
            x: x.address(),
            scale: scale_address,
            shift: shift_address,
            out: out.address(),
            x_rows,
            rows: (out.len() / width) as u64,
            width: width as u64,
            rows_per_batch: affine.rows_per_batch,
            eps,
            lanes: 0,
            scale_type,
            shift_type,
            one: affine.one,
        };
        launch(op, device, kernel, params, dtype)?;
    }
    out.into_tensor(op, dims)
}

fn launch(op: &'static str, device: &CudaDevice, kernel: &str, params: Params, dtype: DType) -> Result<()> {
    let (elements, width) = (WIDE / dtype.size_in_bytes(), params.width as usize);
    let whole = width.is_multiple_of(elements) && params.x_rows.is_multiple_of(elements);
    let share =
        if whole && aligned(&[params.x, params.out]) { Share::of(width / elements, THREADS as usize) } else { None };
    let (held, lanes) = share.map_or_else(|| ("any".to_owned(), THREADS), |s| (s.held.to_string(), s.lanes));
    let threads = block_threads(lanes, THREADS);
    let grid = [blocks(params.rows as usize, (threads / lanes) as usize, MAX_BLOCKS), 1, 1];
    let kernel = Kernel::load(device, &MODULE, &format!("{kernel}_{held}_{}", kernel_suffix(dtype)))?;
    // SAFETY: `Params` mirrors that of row_norm.cu. The row layout is that of x, scale and shift are null or have
    // `width` elements for each batch: the op has checked the shapes. `lanes`, the threads of a block and the name come
    // from one share, made only for rows of whole vectors at aligned places. out is new memory, all of whose rows are
    // written.
    unsafe { kernel.launch(Grid::blocks(op, grid, threads)?, &Params { lanes, ..params }) }
}
