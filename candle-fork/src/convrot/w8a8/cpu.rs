//! The reference: one dot product of bytes after another.

use candle_core::{CpuStorage, Shape, Storage, Tensor, op::BackpropOp};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

use super::{OP, result_dims};
use crate::{
    convrot::{Group, cpu::quantize},
    element::Element,
    error::{Result, What},
    gemm::zeros,
    operand::{read, to_f32_vec},
    quant::Int8,
};

/// Outputs of a task: enough that handing it over costs nothing.
const STRIPE: usize = 64;

/// See [`super::linear`].
pub(super) fn linear<T: Element>(x: &Tensor, parts: &[&Int8], group: Group, bias: Option<&Tensor>) -> Result<Tensor> {
    let (dims, rows, columns) = result_dims(x, parts);
    let depth = x.dims().last().copied().unwrap_or(0);
    let bias = bias.map(to_f32_vec).transpose()?;
    let weights = parts.iter().map(|part| Weight::new(part)).collect::<Result<Vec<_>>>()?;
    // One address for each row of the stack.
    let weight_rows: Vec<(&[i8], f32)> = weights.iter().flat_map(|weight| weight.rows(depth)).collect();

    let mut out = zeros::<T>(OP, rows.saturating_mul(columns))?;
    if rows > 0 {
        let x = x.contiguous().what(OP)?;
        let quantized = read(OP, [&x], |[x]| quantize(x.contiguous::<T>()?, depth, group))?;
        out.par_chunks_mut(columns).enumerate().for_each(|(row, out)| {
            let x = (&quantized.codes[row * depth..][..depth], quantized.scales[row]);
            out.par_chunks_mut(STRIPE).enumerate().for_each(|(stripe, out)| {
                let first = stripe * STRIPE;
                let weights = &weight_rows[first..first + out.len()];
                let bias = bias.as_deref().map(|bias| &bias[first..first + out.len()]);
                Arch::new().dispatch(Stripe { x, weights, bias, out });
            });
        });
    }
    let storage: CpuStorage = T::to_cpu_storage_owned(out);
    Ok(Tensor::from_storage(Storage::Cpu(storage), Shape::from(dims), BackpropOp::none(), false))
}

/// A part of the weight on the host.
struct Weight<'a> {
    codes: &'a [i8],
    scales: Vec<f32>,
}

impl<'a> Weight<'a> {
    fn new(part: &'a Int8) -> Result<Self> {
        Ok(Self { codes: bytemuck::cast_slice(part.codes.bytes(OP)?), scales: part.scales()? })
    }

    fn rows(&self, depth: usize) -> impl Iterator<Item = (&[i8], f32)> {
        self.codes.chunks_exact(depth).zip(self.scales.iter().copied().cycle())
    }
}

/// Neighbouring outputs of one row of x.
struct Stripe<'a, T> {
    x: (&'a [i8], f32),
    weights: &'a [(&'a [i8], f32)],
    bias: Option<&'a [f32]>,
    out: &'a mut [T],
}

impl<T: Element> NullaryFnOnce for Stripe<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (x, x_scale) = self.x;
        for (o, (y, (weight, weight_scale))) in self.out.iter_mut().zip(self.weights).enumerate() {
            let sum: i32 = x.iter().zip(*weight).map(|(&x, &w)| i32::from(x) * i32::from(w)).sum();
            let scaled = sum as f32 * (x_scale * weight_scale);
            *y = T::round(self.bias.map_or(scaled, |bias| scaled + bias[o]));
        }
    }
}
