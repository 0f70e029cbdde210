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
    y: Address,
    gate: Address,
    sum: Address,
    x_rows: RowLayout,
    y_rows: RowLayout,
    rows: u64,
    width: u64,
    rows_per_batch: u64,
    eps: f64,
    lanes: u32,
    scale_type: u32,
    shift_type: u32,
    one: f32,
    gate_type: u32,
    unused: u32,
}

const _: () = assert!(size_of::<Params>() == 160, "as in row_norm.cu");

// SAFETY: `repr(C)`, numbers only, no padding.
unsafe impl DeviceRepr for Params {}

/// What a row is multiplied by and shifted by.
struct Affine<'a> {
    scale: Option<&'a Tensor>,
    shift: Option<&'a Tensor>,
    /// Added to the scale.
    one: f32,
    /// Rows that share one row of these, if not all do.
    rows_per_batch: Option<usize>,
}

/// What a kernel is launched with besides addresses.
struct Call<'a> {
    op: &'static str,
    kernel: &'static str,
    device: &'a CudaDevice,
    dtype: DType,
}

pub(in crate::norm) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    norm("rms_norm", "rms_norm", x, Affine { scale: Some(weight), shift: None, one: 0.0, rows_per_batch: None }, eps)
}

pub(in crate::norm) fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let one = if weight.is_some() { 0.0 } else { 1.0 };
    norm("layer_norm", "layer_norm", x, Affine { scale: weight, shift: bias, one, rows_per_batch: None }, eps)
}

pub(in crate::norm) fn layer_norm_modulate(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> Result<Tensor> {
    norm("layer_norm_modulate", "layer_norm", x, modulation(x, shift, scale), eps)
}

/// The affine map of an adaptive norm of x `[B, S, H]`.
fn modulation<'a>(x: &Tensor, shift: &'a Tensor, scale: &'a Tensor) -> Affine<'a> {
    Affine { scale: Some(scale), shift: Some(shift), one: 1.0, rows_per_batch: Some(x.dims()[1].max(1)) }
}

fn norm(op: &'static str, kernel: &'static str, x: &Tensor, affine: Affine<'_>, eps: f64) -> Result<Tensor> {
    let call = Call { op, kernel, device: device_of(op, x)?, dtype: x.dtype() };
    let (x, x_rows) = rows_of(op, "x", x)?;
    let dims = x.tensor().dims().to_vec();
    let out = Output::new(op, call.device, call.dtype, dims.iter().product())?;
    if !out.is_empty() {
        call.norm(&affine, &out, Params { x: x.address(), x_rows, y_rows: x_rows, ..call.params(&dims, eps) })?;
    }
    out.into_tensor(op, dims)
}

pub(in crate::norm) fn gate_residual_modulate(
    x: &Tensor,
    gate: &Tensor,
    y: &Tensor,
    shift: &Tensor,
    scale: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "gate_residual_modulate";
    let call = Call { op: OP, kernel: "gated_norm", device: device_of(OP, x)?, dtype: x.dtype() };
    let gate = Operand::new(OP, &contiguous(gate)?)?;
    call.sum_and_norm([x, y], Some(&gate), &modulation(x, shift, scale), eps)
}

pub(in crate::norm) fn residual_rms_norm(
    x: &Tensor,
    y: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "residual_rms_norm";
    let call = Call { op: OP, kernel: "added_norm", device: device_of(OP, x)?, dtype: x.dtype() };
    call.sum_and_norm([x, y], None, &Affine { scale: Some(weight), shift: None, one: 0.0, rows_per_batch: None }, eps)
}

impl Call<'_> {
    /// `x + gate * y`, or `x + y` without a gate, and its norm.
    fn sum_and_norm(
        &self,
        [x, y]: [&Tensor; 2],
        gate: Option<&Operand>,
        affine: &Affine<'_>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        let op = self.op;
        let ((x, x_rows), (y, y_rows)) = (rows_of(op, "x", x)?, rows_of(op, "y", y)?);
        let dims = x.tensor().dims().to_vec();
        let output = || Output::new(op, self.device, self.dtype, dims.iter().product());
        let (sum, out) = (output()?, output()?);
        if !out.is_empty() {
            let gate_type = gate.map(|gate| element_type(op, "gate", gate.tensor().dtype())).transpose()?;
            let params = Params {
                x: x.address(),
                y: y.address(),
                gate: gate.map_or(0, Operand::address),
                sum: sum.address(),
                x_rows,
                y_rows,
                gate_type: gate_type.unwrap_or(0),
                ..self.params(&dims, eps)
            };
            self.norm(affine, &out, params)?;
        }
        Ok((sum.into_tensor(op, dims.as_slice())?, out.into_tensor(op, dims)?))
    }

    /// The parameters that depend on nothing but the shape of the result.
    fn params(&self, dims: &[usize], eps: f64) -> Params {
        let width = dims.last().copied().unwrap_or(1);
        let packed = RowLayout::packed(width);
        Params {
            x: 0,
            scale: 0,
            shift: 0,
            out: 0,
            y: 0,
            gate: 0,
            sum: 0,
            x_rows: packed,
            y_rows: packed,
            rows: dims.iter().product::<usize>().checked_div(width).unwrap_or(0) as u64,
            width: width as u64,
            rows_per_batch: 1,
            eps,
            lanes: 0,
            scale_type: 0,
            shift_type: 0,
            one: 0.0,
            gate_type: 0,
            unused: 0,
        }
    }

    /// Adds scale and shift to `params` and launches the kernel; `out` is not empty.
    fn norm(&self, affine: &Affine<'_>, out: &Output, params: Params) -> Result<()> {
        let operand = |t: Option<&Tensor>| t.map(|t| Operand::new(self.op, &contiguous(t)?)).transpose();
        let (scale, shift) = (operand(affine.scale)?, operand(affine.shift)?);
        let parts = |t: &Option<Operand>| match t {
            Some(t) => Ok((t.address(), element_type(self.op, "scale or shift", t.tensor().dtype())?)),
            None => Ok((0, 0)),
        };
        let ((scale_address, scale_type), (shift_address, shift_type)) = (parts(&scale)?, parts(&shift)?);
        let params = Params {
            scale: scale_address,
            shift: shift_address,
            scale_type,
            shift_type,
            one: affine.one,
            out: out.address(),
            rows_per_batch: affine.rows_per_batch.map_or(params.rows, |rows| rows as u64),
            ..params
        };
        let (elements, width) = (WIDE / self.dtype.size_in_bytes(), params.width as usize);
        let whole = width.is_multiple_of(elements)
            && params.x_rows.is_multiple_of(elements)
            && params.y_rows.is_multiple_of(elements);
        let addresses = [params.x, params.y, params.gate, params.sum, params.scale, params.shift, params.out];
        let share = if whole && aligned(&addresses) { Share::of(width / elements, THREADS as usize) } else { None };
        let (held, lanes) = share.map_or_else(|| ("any".to_owned(), THREADS), |s| (s.held.to_string(), s.lanes));
        let threads = block_threads(lanes, THREADS);
        let grid = [blocks(params.rows as usize, (threads / lanes) as usize, MAX_BLOCKS), 1, 1];
        let name = format!("{}_{held}_{}", self.kernel, kernel_suffix(self.dtype));
        let kernel = Kernel::load(self.device, &MODULE, &name)?;
        // SAFETY: `Params` mirrors that of row_norm.cu. The row layouts are those of x and y, gate, scale and shift are null
        // or have `width` elements for each batch: the op has checked the shapes. `lanes`, the threads of a block and the
        // name come from one share, made only for rows of whole vectors at aligned places. out and sum are new memory, all
        // of whose rows are written.
        unsafe { kernel.launch(Grid::blocks(self.op, grid, threads)?, &Params { lanes, ..params }) }
    }
}
