//! The packed product on the CPU.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Shape, Storage, Tensor, op::BackpropOp};
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};

use super::{LinearWeight, OP, Part, Recipe};
use crate::{
    convrot::{self, Group},
    element::Element,
    error::{Error, Result, What},
    gemm::{ColSource, FEW, KC, Matrix, Stack, few, transposed, zeros},
    operand::to_f32_vec,
};

/// See [`super::linear`], which has checked shapes, dtypes and the device of `x`.
pub(super) fn linear(x: &Tensor, weight: &LinearWeight, recipe: Recipe, bias: Option<&Tensor>) -> Result<Tensor> {
    let rotation = match recipe {
        Recipe::Rotated(group) => Some(group),
        Recipe::Plain | Recipe::W8A8(_) => None,
    };
    match x.dtype() {
        DType::F16 => typed::<f16>(x, weight, rotation, bias),
        DType::BF16 => typed::<bf16>(x, weight, rotation, bias),
        _ => typed::<f32>(x, weight, rotation, bias),
    }
}

fn typed<T: Element>(
    x: &Tensor,
    weight: &LinearWeight,
    rotation: Option<Group>,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (m, k) = (weight.out_features, weight.in_features);
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = m;
    }
    let n = dims[..dims.len() - 1].iter().product();
    let len = m.checked_mul(n).ok_or_else(|| Error::Argument {
        op: OP,
        what: format!("a result of {n} rows of {m} exceeds the address space"),
    })?;
    let bias = bias.map(to_f32_vec).transpose()?;

    // Lock every storage once, then look at the elements in place.
    let guards: Vec<_> = weight
        .parts
        .iter()
        .map(|part| match part {
            Part::Tensor(t) => Some(t.storage_and_layout()),
            Part::Host(_) | Part::Quant { .. } => None,
        })
        .collect();
    let decoders = weight.parts.iter().map(|part| match part {
        Part::Quant { weight, .. } => weight.wide_rows().map(Some),
        Part::Tensor(_) | Part::Host(_) => Ok(None),
    });
    let decoders = decoders.collect::<Result<Vec<_>>>()?;
    let matrices =
        weight.parts.iter().zip(&guards).zip(&decoders).map(|((part, guard), decoder)| match (part, guard, decoder) {
            (_, _, Some(decoder)) => Ok(Matrix::of_rows(&**decoder)),
            (Part::Host(host), ..) => Matrix::of_host(OP, host),
            (_, Some((storage, layout)), _) => match &**storage {
                Storage::Cpu(storage) => Matrix::of_storage(OP, storage, layout),
                _ => Err(Error::Argument { op: OP, what: "x is on the CPU, the weight is not".into() }),
            },
            (_, None, None) => Err(Error::Argument { op: OP, what: "weight without storage".into() }),
        });
    let stack = Stack::new(matrices.collect::<Result<_>>()?);

    let mut out = zeros(OP, len)?;
    if n <= FEW || rotation.is_some() {
        let mut x = to_f32_vec(x)?;
        if let Some(group) = rotation {
            convrot::cpu::rotate(&mut x, k, group);
        }
        if n <= FEW {
            few((m, n, k), &stack, &x, bias.as_deref(), &mut out);
        } else {
            transposed((m, n, k), &stack, &Tokens { rows: &x, k }, bias.as_deref(), &mut out);
        }
    } else {
        let x = x.contiguous().what("linear: x")?;
        let (storage, layout) = x.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(Error::Argument { op: OP, what: "x is not on the CPU".into() });
        };
        let rows = &storage.as_slice::<T>().what("linear: x")?[layout.start_offset()..][..n * k];
        transposed((m, n, k), &stack, &Tokens { rows, k }, bias.as_deref(), &mut out);
    }
    let storage: CpuStorage = T::to_cpu_storage_owned(out);
    Ok(Tensor::from_storage(Storage::Cpu(storage), Shape::from(dims), BackpropOp::none(), false))
}

/// Rows of x as columns of the right operand.
struct Tokens<'a, T> {
    rows: &'a [T],
    k: usize,
}

impl<T: Element> ColSource for Tokens<'_, T> {
    fn pack(&self, k: Range<usize>, cols: Range<usize>, nr: usize, panels: &mut [f32]) {
        for (p, panel) in panels.chunks_exact_mut(k.len() * nr).enumerate() {
            let first = cols.start + p * nr;
            let cols = first..cols.end.min(first + nr);
            Arch::new().dispatch(PackTokens { tokens: self, k: k.clone(), cols, nr, panel });
        }
    }
}

struct PackTokens<'a, 'b, T> {
    tokens: &'a Tokens<'b, T>,
    k: Range<usize>,
    cols: Range<usize>,
    nr: usize,
    panel: &'a mut [f32],
}

impl<T: Element> WithSimd for PackTokens<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { tokens, k, cols, nr, panel } = self;
        if cols.len() < nr {
            panel.fill(0.0);
        }
        // Eight tokens at a time: one store fills half a cache line of the panel.
        let mut lines = [[0.0; KC]; 8];
        for j0 in (0..cols.len()).step_by(8) {
            let width = 8.min(cols.len() - j0);
            for (j, line) in lines[..width].iter_mut().enumerate() {
                let start = (cols.start + j0 + j) * tokens.k + k.start;
                T::widen_slice(&tokens.rows[start..][..k.len()], &mut line[..k.len()]);
            }
            for (i, row) in panel.chunks_exact_mut(nr).enumerate().take(KC) {
                let row = &mut row[j0..];
                if let Some(row) = row.first_chunk_mut::<8>()
                    && width == 8
                {
                    *row = std::array::from_fn(|j| lines[j][i]);
                } else {
                    row.iter_mut().zip(&lines[..width]).for_each(|(y, line)| *y = line[i]);
                }
            }
        }
    }
}
