//! Linear maps through cuBLASLt and cuBLAS, with weight, x and result where they lie.
//!
//! A tensor of three axes or more is a batch: its items are products of their own, so that an item's bits do not depend on
//! its neighbours.

use candle_core::{CudaDevice, DType, Device, Tensor};

use super::{LinearWeight, OP, Part};
use crate::{
    cuda::{
        arena,
        blas::{Matrix, Product, multiply},
        copy::{Place, copy_strided},
        epilogue, lt,
        strides::pitch,
        tensor::{Address, Operand, Output, device_of, small_operand},
    },
    error::{Result, What},
    layout,
    target::with_address,
};

/// f32 sums that wait for their bias: few enough to stay in the second-level cache.
const SUMS_BYTES: usize = 32 << 20;

/// Fewest rows of a tile, whatever the sums take: products of fewer fill a device badly.
const MIN_ROWS: usize = 512;

/// See [`super::linear`], which has checked shapes, dtypes and the device of `x`.
///
/// Parts of x's dtype on x's device are read in place. Operands of different dtypes are widened to f32 for the call, which
/// is slow but exact; host memory is uploaded for it; quantised parts are decoded for it, into memory that is freed in the
/// order of the stream.
pub(super) fn linear(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    let (device, dtype) = (device_of(OP, x)?, x.dtype());
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = weight.out_features;
    }
    let elements: usize = dims.iter().product();
    if elements > 0 && weight.in_features == 0 {
        let zeros = Tensor::zeros(dims, dtype, x.device()).what(OP)?;
        return match bias {
            Some(bias) => bias.to_dtype(dtype).and_then(|bias| zeros.broadcast_add(&bias)).what("linear: bias"),
            None => Ok(zeros),
        };
    }
    let output = Output::new(OP, device, dtype, elements)?;
    if elements > 0 {
        Call::new(x, weight, bias)?.run(device, output.address(), Rows::packed(x.dims(), weight.out_features))?;
    }
    output.into_tensor(OP, dims)
}

/// See [`super::linear_into`], which has checked `out` too.
pub(super) fn linear_into(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
    if out.elem_count() == 0 {
        return Ok(());
    }
    let device = device_of(OP, x)?;
    match Rows::of(out) {
        Some(rows) if weight.in_features > 0 && !weight.is_quantised() => {
            let call = Call::new(x, weight, bias)?;
            with_address(OP, out, |address| call.run(device, address, rows))
        }
        // Through a result of its own.
        _ => {
            let result = Operand::new(OP, &super::linear(x, weight, bias)?)?;
            let (dims, size) = (result.tensor().dims(), result.tensor().dtype().size_in_bytes());
            let source = Place { address: result.address(), strides: result.strides() };
            with_address(OP, out, |address| {
                // SAFETY: the result is a tensor of `out`'s shape; `out` reaches each of its elements once, or candle would
                // have refused to write it, and is not the new result.
                unsafe { copy_strided(device, size, dims, source, Place { address, strides: out.stride() }) }
            })
        }
    }
}

/// The rows of a tensor as those of matrices, one for each item of a batch.
#[derive(Debug, Clone, Copy)]
struct Rows {
    items: usize,
    /// Distance of items.
    every: usize,
    /// Rows of an item.
    rows: usize,
    /// Their distance.
    pitch: usize,
}

impl Rows {
    /// `None` if rows are not packed or not one axis.
    fn of(t: &Tensor) -> Option<Self> {
        let (&[ref lead @ .., width], &[ref strides @ .., component]) = (t.dims(), t.stride()) else { return None };
        let (items, every, lead, strides) = match (lead, strides) {
            (&[items, _, ..], &[every, _, ..]) => (items, every, &lead[1..], &strides[1..]),
            _ => (1, 0, lead, strides),
        };
        let packed = component == 1 || width == 1;
        let rows: usize = lead.iter().product();
        let pitch = pitch(lead, strides).filter(|&pitch| packed && (pitch >= width || rows == 1))?;
        Some(Self { items, every, rows, pitch })
    }

    /// Packed rows of `width`, as many as x of extents `dims` has.
    fn packed(dims: &[usize], width: usize) -> Self {
        let lead = &dims[..dims.len().saturating_sub(1)];
        let (items, rest) = if lead.len() > 1 { (lead[0], &lead[1..]) } else { (1, lead) };
        let rows: usize = rest.iter().product();
        Self { items, every: rows * width, rows, pitch: width }
    }
}

/// The operands where they lie.
struct Call {
    x: Operand,
    x_rows: Rows,
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
    fn new(x: &Tensor, weight: &LinearWeight, bias: Option<&Tensor>) -> Result<Self> {
        let dtype = x.dtype();
        let input = if weight.float().is_none_or(|float| float == dtype) { dtype } else { DType::F32 };
        let x = x.to_dtype(input).what("linear: x")?;
        let (x, x_rows) = match Rows::of(&x) {
            Some(rows) => (x, rows),
            None => (layout::contiguous(&x)?, Rows::packed(x.dims(), weight.in_features)),
        };
        Ok(Self {
            x: Operand::new(OP, &x)?,
            x_rows,
            parts: weight.parts.iter().map(|part| Filters::new(part, input, x.device())).collect::<Result<_>>()?,
            bias: bias.map(small_operand).transpose()?,
            input,
            dtype,
            in_features: weight.in_features,
            out_features: weight.out_features,
        })
    }

    /// Enqueues the products of all items; `out` has their rows.
    fn run(&self, device: &CudaDevice, out: Address, out_rows: Rows) -> Result<()> {
        let Rows { items, rows, .. } = self.x_rows;
        for item in 0..items {
            let x = self.x.address() + (item * self.x_rows.every * self.input.size_in_bytes()) as u64;
            let out = out + (item * out_rows.every * self.dtype.size_in_bytes()) as u64;
            self.item(device, x, rows, out, out_rows.pitch)?;
        }
        Ok(())
    }

    /// Enqueues the products of one item.
    fn item(&self, device: &CudaDevice, x: Address, rows: usize, out: Address, pitch: usize) -> Result<()> {
        let half = self.dtype != DType::F32;
        // With a bias it rounds before the bias as well.
        if self.input == self.dtype && half && self.bias.is_none() && self.by_lt(device, x, rows, out, pitch)? {
            return Ok(());
        }
        let packed = pitch == self.out_features || rows == 1;
        if half && (self.bias.is_some() || self.input != self.dtype) || self.bias.is_some() && !packed {
            return self.through_sums(device, x, rows, out, pitch);
        }
        self.product(device, x, rows, out, pitch, self.dtype)?;
        if self.bias.is_some() { self.epilogue(device, rows, out, out) } else { Ok(()) }
    }

    /// Products to f32 sums, a tile of rows at a time; then bias and rounding, and the way to rows that are not packed.
    fn through_sums(&self, device: &CudaDevice, x: Address, rows: usize, out: Address, pitch: usize) -> Result<()> {
        let (n, size) = (self.out_features, self.dtype.size_in_bytes());
        let packed = pitch == n || rows == 1;
        let step = tile_rows(rows, n);
        let sums_bytes = (step * n * 4).next_multiple_of(256);
        arena::with(device, sums_bytes + if packed { 0 } else { step * n * size }, |sums| {
            (0..rows).step_by(step).try_for_each(|first| {
                let rows = step.min(rows - first);
                let x = x + (first * self.x_rows.pitch * self.input.size_in_bytes()) as u64;
                self.product(device, x, rows, sums, n, DType::F32)?;
                if packed {
                    return self.epilogue(device, rows, sums, out + (first * n * size) as u64);
                }
                let rounded = sums + sums_bytes as u64;
                self.epilogue(device, rows, sums, rounded)?;
                let source = Place { address: rounded, strides: &[n, 1] };
                let destination = Place { address: out + (first * pitch * size) as u64, strides: &[pitch, 1] };
                // SAFETY: scratch memory and the result have these rows; the result is no scratch memory.
                unsafe { copy_strided(device, size, &[rows, n], source, destination) }
            })
        })
    }

    /// Enqueues the products through cuBLASLt; `false`, and nothing that counts, if it does not serve one of them.
    fn by_lt(&self, device: &CudaDevice, x: Address, rows: usize, out: Address, pitch: usize) -> Result<bool> {
        let (size, mut column) = (self.dtype.size_in_bytes() as u64, 0);
        for part in &self.parts {
            let at = |address: Address| address + column as u64 * size;
            let product = lt::Product {
                rows,
                cols: part.count,
                depth: self.in_features,
                left: Matrix::rows(x, self.x_rows.pitch),
                right: part.matrix,
                out: Matrix::rows(at(out), pitch),
                dtype: self.dtype,
            };
            column += part.count;
            // SAFETY: the operands are tensors with these rows; out has these rows, of which each part writes its own columns.
            if part.count > 0 && !unsafe { lt::multiply(device, &product) }? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Enqueues the products of `rows` rows of x.
    fn product(
        &self,
        device: &CudaDevice,
        x: Address,
        rows: usize,
        out: Address,
        pitch: usize,
        output: DType,
    ) -> Result<()> {
        let mut column = 0;
        for part in &self.parts {
            let product = Product {
                rows,
                cols: part.count,
                depth: self.in_features,
                batch: 1,
                alpha: 1.0,
                left: Matrix::rows(x, self.x_rows.pitch),
                right: part.matrix,
                out: Matrix::rows(out + (column * output.size_in_bytes()) as u64, pitch),
                input: self.input,
                output,
            };
            column += part.count;
            // SAFETY: the operands are tensors with these rows; out is memory or scratch of these rows, of which each part
            // writes its own columns.
            unsafe { multiply(device, &product) }?;
        }
        Ok(())
    }

    /// Enqueues bias and rounding of `rows` packed rows of sums.
    fn epilogue(&self, device: &CudaDevice, rows: usize, sums: Address, result: Address) -> Result<()> {
        let shape = [rows, self.out_features];
        // SAFETY: sums and result have these rows; they are the same memory in f32 only.
        unsafe { epilogue::columns(device, self.dtype, shape, sums, self.bias.as_ref(), 0, result) }
    }
}

fn tile_rows(rows: usize, out_features: usize) -> usize {
    (SUMS_BYTES / (out_features * 4)).next_multiple_of(128).max(MIN_ROWS).min(rows)
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
            Part::Quant { weight, .. } => weight.dequantize(dtype, device)?,
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
