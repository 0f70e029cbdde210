//! Blocks of GGUF files whose codes of 4 bits name the values of a table: IQ4_NL and IQ4_XS, which candle does not decode.
//!
//! Formats: `ggml-org/ggml`, src/ggml-common.h (block_iq4_nl, block_iq4_xs, kvalues_iq4nl) and src/ggml-quants.c.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::{OP, codes::Codes};
use crate::{
    element::{Element, with_element},
    error::{Error, Result, What},
    gemm::{WideRows, zeros},
    host::HostTensor,
    operand::{RowKernel, for_each_row},
};

/// Elements that share a scale: 16 bytes, the first half of them in the low nibbles.
const RUN: usize = 32;

/// What the codes stand for.
const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The two formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Iq4Format {
    /// IQ4_NL: blocks of 32 with a half-precision scale.
    NonLinear,
    /// IQ4_XS: blocks of 256 with a half-precision scale and one of 6 bits for each 32.
    Super,
}

impl Iq4Format {
    /// Elements of a block.
    pub fn block(self) -> usize {
        match self {
            Self::NonLinear => RUN,
            Self::Super => 8 * RUN,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::NonLinear => 2 + RUN / 2,
            Self::Super => 2 + 2 + 4 + 4 * RUN,
        }
    }

    /// Scale and bytes of 32 elements: the `index`th of a block.
    #[inline(always)]
    fn run(self, block: &[u8], index: usize) -> (f32, &[u8]) {
        let scale = half::f16::from_le_bytes([block[0], block[1]]).widen();
        match self {
            Self::NonLinear => (scale, &block[2..]),
            Self::Super => {
                // Four bits in their half of a byte, two above them in a word; less 32.
                let low = block[4 + index / 2] >> (4 * (index % 2)) & 0xf;
                let high = u16::from_le_bytes([block[2], block[3]]) >> (2 * index) & 3;
                let factor = i32::from(high << 4 | u16::from(low)) - 32;
                (scale * factor as f32, &block[8 + RUN / 2 * index..][..RUN / 2])
            }
        }
    }
}

/// `W[r, c] = scale[run of (r, c)] VALUES[code[r, c]]`, in f32, rounded once.
#[derive(Debug, Clone)]
pub(crate) struct Iq4 {
    pub(crate) codes: Codes,
    pub(crate) format: Iq4Format,
    pub(crate) columns: usize,
}

impl Iq4 {
    pub(super) fn new(blocks: HostTensor, format: Iq4Format, [rows, columns]: [usize; 2]) -> Result<Self> {
        if !columns.is_multiple_of(format.block()) {
            let what = format!("{columns} columns are not whole {format:?} blocks of {}", format.block());
            return Err(Error::Argument { op: OP, what });
        }
        let width = columns / format.block() * format.block_bytes();
        Ok(Self { codes: Codes::new(OP, blocks.reshape((rows, width))?)?, format, columns })
    }

    pub(super) fn dims(&self) -> [usize; 2] {
        [self.codes.rows(), self.columns]
    }

    pub(super) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        Ok(Self { codes: self.codes.narrow(start, len)?, ..*self })
    }

    pub(super) fn gather(&self, ids: &[u32]) -> Result<Self> {
        Ok(Self { codes: self.codes.gather(ids)?, ..*self })
    }

    pub(super) fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self { codes: self.codes.to_device(device)?, ..*self })
    }

    pub(super) fn dequantize(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            return super::cuda::dequantize_iq4(&self.to_device(device)?, dtype, device);
        }
        let here = self.to_device(&Device::Cpu)?;
        let view = here.view()?;
        let [rows, columns] = self.dims();
        let wide = with_element!(OP, "result", dtype, T => {
            let mut out = zeros::<T>(OP, rows * columns)?;
            for_each_row(&mut out, columns, &view);
            Tensor::from_vec(out, (rows, columns), &Device::Cpu).what(OP)
        })?;
        wide.to_device(device).what(OP)
    }

    /// The matrix row by row, on the CPU.
    pub(crate) fn view(&self) -> Result<Iq4View<'_>> {
        let (bytes, rows, width) = (self.codes.bytes(OP)?, self.codes.rows(), self.codes.width());
        Ok(Iq4View { bytes, rows, width, format: self.format, values: VALUES.map(f32::from) })
    }
}

/// See [`Iq4::view`].
#[derive(Debug)]
pub(crate) struct Iq4View<'a> {
    bytes: &'a [u8],
    rows: usize,
    /// Bytes of a row.
    width: usize,
    format: Iq4Format,
    values: [f32; 16],
}

impl Iq4View<'_> {
    /// Writes the elements of a row from column `first` on.
    #[inline(always)]
    fn elements<T>(&self, row: usize, first: usize, out: &mut [T], round: impl Fn(f32) -> T) {
        let bytes = &self.bytes[row * self.width..][..self.width];
        let (block, size) = (self.format.block(), self.format.block_bytes());
        let (mut column, mut left) = (first, out);
        while !left.is_empty() {
            let (scale, codes) = self.format.run(&bytes[column / block * size..][..size], column % block / RUN);
            let start = column % RUN;
            let (now, later) = left.split_at_mut(left.len().min(RUN - start));
            for (i, y) in (start..).zip(now.iter_mut()) {
                let code = codes[i % (RUN / 2)] >> (4 * (i / (RUN / 2))) & 0xf;
                *y = round(scale * self.values[usize::from(code)]);
            }
            column += now.len();
            left = later;
        }
    }
}

impl WideRows for Iq4View<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]) {
        self.elements(row, k.start, dst, |value| value);
    }
}

impl<T: Element> RowKernel<T> for Iq4View<'_> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [T]) {
        self.elements(index, 0, out, T::round);
    }
}
