//! Linear maps through cuBLAS, with the weight where it lies.

use candle_core::{CudaDevice, DType, Device, Tensor};

use super::{LinearWeight, OP, Part};
use crate::{
    cuda::{
        arena,
        blas::{Matrix, Product, multiply},
        epilogue,
        strides::pitch,
        tensor::{Address, Operand, Output, device_of, small_operand},
    },
    error::{Result, What},
    layout,
};

/// f32 sums that wait for their bias: few enough to stay in the second-level cache.
const SUMS_BYTES: usize = 32 << 20;

/// Fewest rows of a tile, whatever the sums take: products of fewer fill a device badly.
const MIN_ROWS: usize = 512;

/// See [`super::linear`], which has checked shapes, dtypes and the device of `x`.
///
/// Parts of x's dtype on x's device are read in place. Operands of different dtypes are widened to f32 for the call, which
/// is slow but exact; host memory is uploaded for it.
pub(super) fn linear(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    let (device, dtype) = (device_of(OP, x)?, x.dtype());
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = weight.out_features;
    }
    if rows == 0 || weight.out_features == 0 {
        return Output::new(OP, device, dtype, 0)?.into_tensor(OP, dims);
    }
    if weight.in_features == 0 {
        let zeros = Tensor::zeros(dims, dtype, x.device()).what(OP)?;
        return match bias {
            Some(bias) => bias.to_dtype(dtype).and_then(|bias| zeros.broadcast_add(&bias)).what("linear: bias"),
            None => Ok(zeros),
        };
    }
    let input = if weight.dtype == dtype { dtype } else { DType::F32 };
    let x = x.to_dtype(input).what("linear: x")?;
    let (x, pitch) = match row_pitch(&x) {
        Some(pitch) => (x, pitch),
        None => (layout::contiguous(&x)?, weight.in_features),
    };
    let output = Output::new(OP, device, dtype, rows * weight.out_features)?;
    let call = Call {
        x: Operand::new(OP, &x)?,
        pitch,
        parts: weight.parts.iter().map(|part| Filters::new(part, input, x.device())).collect::<Result<_>>()?,
        bias: bias.map(small_operand).transpose()?,
        input,
        dtype,
        in_features: weight.in_features,
        out_features: weight.out_features,
    };
    // What has to be rounded after the product goes through f32 sums, a tile at a time.
    let through_sums = dtype != DType::F32 && (call.bias.is_some() || input != dtype);
    let result = |first: usize| output.address() + (first * weight.out_features * dtype.size_in_bytes()) as u64;
    if through_sums {
        let step = tile_rows(rows, weight.out_features);
        arena::with(device, step * weight.out_features * 4, |sums| {
            (0..rows).step_by(step).try_for_each(|first| {
                let rows = step.min(rows - first);
                call.product(device, [first, rows], sums, DType::F32)?;
                call.epilogue(device, rows, sums, result(first))
            })
        })?;
    } else {
        call.product(device, [0, rows], result(0), dtype)?;
        if call.bias.is_some() {
            call.epilogue(device, rows, result(0), result(0))?;
        }
    }
    output.into_tensor(OP, dims)
}

/// The operands where they lie.
struct Call {
    x: Operand,
    /// Distance of x's rows.
    pitch: usize,
    parts: Vec<Filters>,
    bias: Option<Operand>,
    /// Type of x and the weight.
    input: DType,
    /// Type of the result.
    dtype: DType,
    in_features: usize,
    out_features: usize,
}

impl Call {
    /// Enqueues the products of `rows` rows of x from `first` on.
    fn product(&self, device: &CudaDevice, [first, rows]: [usize; 2], out: Address, output: DType) -> Result<()> {
        let mut column = 0;
        for part in &self.parts {
            let x = self.x.address() + (first * self.pitch * self.input.size_in_bytes()) as u64;
            let product = Product {
                rows,
                cols: part.count,
                depth: self.in_features,
                batch: 1,
                alpha: 1.0,
                left: Matrix::rows(x, self.pitch),
                right: part.matrix,
                out: Matrix::rows(out + (column * output.size_in_bytes()) as u64, self.out_features),
                input: self.input,
                output,
            };
            column += part.count;
            // SAFETY: the operands are tensors with these rows; out is new memory or scratch of these rows, of which each
            // part writes its own columns.
            unsafe { multiply(device, &product) }?;
        }
        Ok(())
    }

    /// Enqueues bias and rounding of `rows` rows of sums.
    fn epilogue(&self, device: &CudaDevice, rows: usize, sums: Address, result: Address) -> Result<()> {
        let shape = [rows, self.out_features];
        // SAFETY: sums and result have these rows; they are the same memory in f32 only.
        unsafe { epilogue::columns(device, self.dtype, shape, sums, self.bias.as_ref(), 0, result) }
    }
}

fn tile_rows(rows: usize, out_features: usize) -> usize {
    (SUMS_BYTES / (out_features * 4)).next_multiple_of(128).max(MIN_ROWS).min(rows)
}

/// The distance of rows of x, if their elements are packed and they are one axis.
fn row_pitch(x: &Tensor) -> Option<usize> {
    let (&[ref lead @ .., width], &[ref strides @ .., component]) = (x.dims(), x.stride()) else { return None };
    let packed = component == 1 || width == 1;
    let rows: usize = lead.iter().product();
    pitch(lead, strides).filter(|&pitch| packed && (pitch >= width || rows == 1))
}

/// A part of the weight as the right operand of a product.
struct Filters {
    matrix: Matrix,
    count: usize,
    /// Keeps the elements.
    _operand: Operand,
}

impl Filters {
    fn new(part: &Part, dtype: DType, device: &Device) -> Result<Self> {
        let weight = match part {
            Part::Tensor(t) => t.to_device(device).and_then(|t| t.to_dtype(dtype)).what("linear: weight")?,
            Part::Host(t) => t.to_tensor(dtype, device)?,
        };
        let (count, features) = weight.dims2().what("linear: weight")?;
        let described = |weight: &Tensor| match *weight.stride() {
            [pitch, step] if (step == 1 || features == 1) && (pitch >= features || count == 1) => Some((pitch, true)),
            [step, pitch] if (step == 1 || count == 1) && (pitch >= count || features == 1) => Some((pitch, false)),
            _ => None,
        };
        let (weight, (pitch, transposed)) = match described(&weight) {
            Some(description) => (weight, description),
            None => (layout::contiguous(&weight)?, (features, true)),
        };
        let operand = Operand::new(OP, &weight)?;
        let matrix = Matrix { address: operand.address(), pitch, transposed, batch_stride: 0 };
        Ok(Self { matrix, count, _operand: operand })
    }
}
