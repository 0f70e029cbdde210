//! The reference: rows over threads, the transform in integers for decoding and in f32 for quantising.

use candle_core::{DType, Device, Tensor};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

use super::group::{Group, transform};
use crate::{
    element::{Element, with_element},
    error::{Error, Result, What},
    gemm::zeros,
    operand::{RowKernel, for_each_row},
};

const OP: &str = "convrot";

/// Scale of a row of zeros.
pub(crate) const LEAST_SCALE: f32 = 1e-30;

/// Largest code.
const LIMIT: f32 = 127.0;

/// Largest group.
const MOST: usize = 1024;

/// See [`super::dequantize_int8_convrot`]; `scales` are 1 or one for each row of `columns`.
pub(crate) fn dequantize(codes: &[u8], scales: &[f32], columns: usize, group: Group, dtype: DType) -> Result<Tensor> {
    let rows = codes.len() / columns;
    with_element!(OP, "result", dtype, T => {
        let mut out = zeros::<T>(OP, codes.len())?;
        let decode = Decode { codes: bytemuck::cast_slice(codes), scales, columns, group };
        for_each_row(&mut out, columns, &decode);
        Tensor::from_vec(out, (rows, columns), &Device::Cpu).what(OP)
    })
}

struct Decode<'a> {
    codes: &'a [i8],
    scales: &'a [f32],
    columns: usize,
    group: Group,
}

impl<T: Element> RowKernel<T> for Decode<'_> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        let codes = &self.codes[index * self.columns..][..self.columns];
        let factor = self.scales[index % self.scales.len()] * self.group.factor();
        if !self.group.rotates() {
            for (y, &q) in out.iter_mut().zip(codes) {
                *y = T::round(f32::from(q) * factor);
            }
            return;
        }
        let mut sums = [0i32; MOST];
        let size = self.group.size();
        let sums = &mut sums[..size];
        for (out, codes) in out.chunks_exact_mut(size).zip(codes.chunks_exact(size)) {
            sums.iter_mut().zip(codes).for_each(|(n, &q)| *n = i32::from(q));
            transform(sums);
            for (y, &n) in out.iter_mut().zip(&*sums) {
                *y = T::round(n as f32 * factor);
            }
        }
    }
}

/// Rows of signed bytes, each with its scale.
#[derive(Debug)]
pub(crate) struct QuantizedRows {
    /// `[rows, columns]`.
    pub(crate) codes: Vec<i8>,
    /// `[rows]`.
    pub(crate) scales: Vec<f32>,
}

/// See [`super::quantize_int8_convrot`].
pub(crate) fn quantize<T: Element>(x: &[T], columns: usize, group: Group) -> Result<QuantizedRows> {
    let too_large = |_| Error::Argument { op: OP, what: format!("{} codes do not fit into memory", x.len()) };
    let mut codes: Vec<i8> = Vec::new();
    codes.try_reserve_exact(x.len()).map_err(too_large)?;
    codes.resize(x.len(), 0);
    let mut scales = vec![0.0; x.len() / columns];
    let rows = codes.par_chunks_mut(columns).zip(&mut scales).zip(x.par_chunks(columns));
    rows.for_each_init(Vec::new, |wide, ((codes, scale), x)| {
        wide.resize(columns, 0.0);
        Arch::new().dispatch(QuantizeRow { x, group, wide, codes, scale });
    });
    Ok(QuantizedRows { codes, scales })
}

struct QuantizeRow<'a, T> {
    x: &'a [T],
    group: Group,
    /// As many elements as x has.
    wide: &'a mut [f32],
    codes: &'a mut [i8],
    scale: &'a mut f32,
}

impl<T: Element> NullaryFnOnce for QuantizeRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        T::widen_slice(self.x, self.wide);
        rotate_row(self.wide, self.group);
        // Bits of magnitudes are in the order of their values, with NaN above all.
        let most = self.wide.iter().fold(0, |most, v| (v.to_bits() & 0x7fff_ffff).max(most));
        let scale = f32::from_bits(most) / LIMIT;
        // Not `max`, which would drop a NaN.
        *self.scale = if scale < LEAST_SCALE { LEAST_SCALE } else { scale };
        if !scale.is_finite() {
            self.codes.fill(0);
            return;
        }
        for (q, v) in self.codes.iter_mut().zip(&*self.wide) {
            *q = (v / *self.scale).round_ties_even().clamp(-LIMIT, LIMIT) as i8;
        }
    }
}

/// `row H`, in f32: the transform, then one exact factor.
#[inline(always)]
fn rotate_row(row: &mut [f32], group: Group) {
    if group.rotates() {
        for values in row.chunks_exact_mut(group.size()) {
            transform(values);
            values.iter_mut().for_each(|v| *v *= group.factor());
        }
    }
}

/// `x H` for rows of `columns`, in place.
pub(crate) fn rotate(x: &mut [f32], columns: usize, group: Group) {
    struct Rotate<'a>(&'a mut [f32], Group);

    impl NullaryFnOnce for Rotate<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            rotate_row(self.0, self.1);
        }
    }

    if columns > 0 && group.rotates() {
        x.par_chunks_mut(columns).for_each(|row| Arch::new().dispatch(Rotate(row, group)));
    }
}
