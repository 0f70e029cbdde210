//! Floats of 8 bits with scales: one, one for each row, or one for each block.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::{OP, codes::Codes, scales_tensor};
use crate::{
    element::{Element, with_element},
    error::{Error, Result, What},
    gemm::{WideRows, zeros},
    host::HostTensor,
    operand::{RowKernel, for_each_row},
};

/// The two formats of "FP8 Formats for Deep Learning" (Micikevicius et al.).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// 4 bits of exponent, 3 of mantissa, no infinities: up to 448.
    E4M3,
    /// 5 bits of exponent, 2 of mantissa, with infinities: up to 57344. The upper half of an f16.
    E5M2,
}

impl Fp8Format {
    /// The value of a byte, exact.
    pub fn widen(self, bits: u8) -> f32 {
        let half = match self {
            Self::E5M2 => u16::from(bits) << 8,
            Self::E4M3 if bits & 0x7f == 0x7f => 0x7e00,
            // Exponent and mantissa in the place of an f16's: 2^8 too small, because the biases are 7 and 15.
            Self::E4M3 => u16::from(bits & 0x80) << 8 | u16::from(bits & 0x7f) << 7,
        };
        let value = half::f16::from_bits(half).widen();
        if self == Self::E4M3 { value * 256.0 } else { value }
    }

    /// [`Self::widen`] of every byte.
    pub(crate) fn table(self) -> [f32; 256] {
        std::array::from_fn(|bits| self.widen(bits as u8))
    }
}

/// What the bytes of an [`Fp8Format`] are multiplied by.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fp8Scales {
    /// One for all.
    Tensor(f32),
    /// One for each row.
    Rows(Vec<f32>),
    /// One for each block of `rows` by `columns`, row-major over the blocks; those at the ends may be cut off.
    Blocks {
        /// The scales.
        scales: Vec<f32>,
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        columns: usize,
    },
}

/// `W[r, c] = scale[block of (r, c)] value(codes[r, c])`.
#[derive(Debug, Clone)]
pub(crate) struct Fp8 {
    pub(crate) codes: Codes,
    pub(crate) format: Fp8Format,
    /// f32, where the codes are.
    pub(crate) scales: Tensor,
    pub(crate) grid: ScaleGrid,
}

/// Which scale belongs to an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScaleGrid {
    /// Row of the first row in the whole matrix, of which this may be a part.
    pub(crate) first_row: usize,
    /// Rows and columns of a block.
    pub(crate) block: [usize; 2],
    /// Blocks in a row.
    pub(crate) across: usize,
}

impl ScaleGrid {
    fn row(&self, row: usize) -> usize {
        (self.first_row + row) / self.block[0] * self.across
    }
}

impl Fp8 {
    pub(super) fn new(codes: HostTensor, format: Fp8Format, scales: Fp8Scales) -> Result<Self> {
        let codes = Codes::new(OP, codes)?;
        let (rows, columns) = (codes.rows(), codes.width());
        let (scales, block) = match scales {
            Fp8Scales::Tensor(scale) => (vec![scale], [rows, columns]),
            Fp8Scales::Rows(scales) => (scales, [1, columns]),
            Fp8Scales::Blocks { scales, rows, columns } => (scales, [rows, columns]),
        };
        if block.contains(&0) {
            return Err(Error::Argument { op: OP, what: format!("scales for blocks of {} x {}", block[0], block[1]) });
        }
        let blocks = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        if Some(scales.len()) != blocks[0].checked_mul(blocks[1]) {
            let expected = format!("{} x {} for blocks of {} x {}", blocks[0], blocks[1], block[0], block[1]);
            return Err(Error::Shape { op: OP, operand: "scales", got: vec![scales.len()], expected });
        }
        let grid = ScaleGrid { first_row: 0, block, across: blocks[1] };
        Ok(Self { codes, format, scales: scales_tensor(scales)?, grid })
    }

    pub(super) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let grid = ScaleGrid { first_row: self.grid.first_row + start, ..self.grid };
        Ok(Self { codes: self.codes.narrow(start, len)?, grid, ..self.clone() })
    }

    pub(super) fn gather(&self, ids: &[u32]) -> Result<Self> {
        // A scale for each row that is taken, whatever the blocks were along the rows.
        let all = self.scales()?;
        let across = self.grid.across;
        let scales: Vec<f32> =
            ids.iter().flat_map(|&id| &all[self.grid.row(id as usize)..][..across]).copied().collect();
        let scales = Tensor::new(scales, self.scales.device()).what("rows of a quantised matrix")?;
        let grid = ScaleGrid { first_row: 0, block: [1, self.grid.block[1]], across };
        Ok(Self { codes: self.codes.gather(ids)?, format: self.format, scales, grid })
    }

    pub(super) fn to_device(&self, device: &Device) -> Result<Self> {
        let scales = self.scales.to_device(device).what("upload of a quantised matrix")?;
        Ok(Self { codes: self.codes.to_device(device)?, scales, ..*self })
    }

    pub(super) fn dequantize(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            return super::cuda::dequantize_fp8(&self.to_device(device)?, dtype, device);
        }
        let here = self.to_device(&Device::Cpu)?;
        let view = here.view()?;
        let (rows, columns) = (self.codes.rows(), self.codes.width());
        let wide = with_element!(OP, "result", dtype, T => {
            let mut out = zeros::<T>(OP, rows * columns)?;
            for_each_row(&mut out, columns, &view);
            Tensor::from_vec(out, (rows, columns), &Device::Cpu).what(OP)
        })?;
        wide.to_device(device).what(OP)
    }

    fn scales(&self) -> Result<Vec<f32>> {
        self.scales.to_vec1().what("scales of a quantised matrix")
    }

    /// The matrix row by row, on the CPU.
    pub(crate) fn view(&self) -> Result<Fp8View<'_>> {
        Ok(Fp8View {
            codes: self.codes.bytes(OP)?,
            rows: self.codes.rows(),
            width: self.codes.width(),
            values: self.format.table(),
            scales: self.scales()?,
            grid: self.grid,
        })
    }
}

/// See [`Fp8::view`].
#[derive(Debug)]
pub(crate) struct Fp8View<'a> {
    codes: &'a [u8],
    rows: usize,
    width: usize,
    values: [f32; 256],
    scales: Vec<f32>,
    grid: ScaleGrid,
}

impl Fp8View<'_> {
    /// Calls `each` with the elements of a row from column `first` on.
    #[inline(always)]
    fn elements<T>(&self, row: usize, first: usize, out: &mut [T], round: impl Fn(f32) -> T) {
        let codes = &self.codes[row * self.width + first..][..out.len()];
        let scales = &self.scales[self.grid.row(row)..][..self.grid.across];
        for (column, (y, &code)) in (first..).zip(out.iter_mut().zip(codes)) {
            *y = round(self.values[usize::from(code)] * scales[column / self.grid.block[1]]);
        }
    }
}

impl WideRows for Fp8View<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]) {
        self.elements(row, k.start, dst, |value| value);
    }
}

impl<T: Element> RowKernel<T> for Fp8View<'_> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        self.elements(index, 0, out, T::round);
    }
}
