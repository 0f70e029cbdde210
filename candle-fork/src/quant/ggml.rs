//! Blocks of GGUF files, decoded by candle.

use std::{borrow::Cow, ops::Range, sync::Arc};

use candle_core::{
    CpuStorage, DType, Device, Tensor,
    quantized::{GgmlDType, QStorage, QTensor},
};

use super::{OP, codes::Codes};
use crate::{
    error::{Error, Result, What},
    gemm::{WideRows, gather as widen_slice, zeros},
    host::HostTensor,
};

/// A matrix of blocks: rows are whole blocks one after another.
#[derive(Clone)]
pub(crate) struct Ggml {
    /// On the host, also after an upload: candle's device form cannot be cut.
    codes: Codes,
    dtype: GgmlDType,
    columns: usize,
    uploaded: Option<Arc<QTensor>>,
}

impl std::fmt::Debug for Ggml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ggml").field("dtype", &self.dtype).field("dims", &self.dims()).finish()
    }
}

impl Ggml {
    pub(super) fn new(blocks: HostTensor, dtype: GgmlDType, [rows, columns]: [usize; 2]) -> Result<Self> {
        if !columns.is_multiple_of(dtype.block_size()) {
            let what = format!("{columns} columns are not whole {dtype:?} blocks of {}", dtype.block_size());
            return Err(Error::Argument { op: OP, what });
        }
        let width = columns / dtype.block_size() * dtype.type_size();
        let codes = Codes::new(OP, blocks.reshape((rows, width))?)?;
        Ok(Self { codes, dtype, columns, uploaded: None })
    }

    pub(super) fn dims(&self) -> [usize; 2] {
        [self.codes.rows(), self.columns]
    }

    pub(super) fn dtype(&self) -> GgmlDType {
        self.dtype
    }

    pub(super) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let whole = [start, len] == [0, self.codes.rows()];
        let uploaded = self.uploaded.clone().filter(|_| whole);
        let cut = Self { codes: self.codes.narrow(start, len)?, uploaded, ..self.clone() };
        match &self.uploaded {
            Some(tensor) if !whole => cut.to_device(&tensor.device()),
            _ => Ok(cut),
        }
    }

    pub(super) fn gather(&self, ids: &[u32]) -> Result<Self> {
        Ok(Self { codes: self.codes.gather(ids)?, uploaded: None, ..self.clone() })
    }

    pub(super) fn to_device(&self, device: &Device) -> Result<Self> {
        let there = self.uploaded.as_ref().is_some_and(|t| t.device().same_device(device));
        if device.is_cpu() || there {
            return Ok(self.clone());
        }
        let bytes = self.codes.bytes(OP)?;
        let storage = QStorage::from_data(Cow::Borrowed(&Aligned::new(bytes)), device, self.dtype);
        let tensor = storage.and_then(|storage| QTensor::new(storage, (self.codes.rows(), self.columns)));
        let uploaded = Some(Arc::new(tensor.what("upload of a quantised matrix")?));
        Ok(Self { uploaded, ..self.clone() })
    }

    /// Rounded twice, to f32 by candle and then to `dtype`: block scales have few digits, so the first is exact or nearly.
    pub(super) fn dequantize(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        const WHAT: &str = "decoding of a quantised matrix";
        let [rows, columns] = self.dims();
        if !device.is_cpu() {
            let here = self.to_device(device)?;
            if let Some(tensor) = &here.uploaded {
                return tensor.dequantize(device).and_then(|t| t.to_dtype(dtype)).what(WHAT);
            }
        }
        let mut wide = zeros::<f32>(OP, rows * columns)?;
        let view = self.view()?;
        crate::operand::for_each_row(&mut wide, columns, &view);
        Tensor::from_vec(wide, (rows, columns), device).and_then(|t| t.to_dtype(dtype)).what(WHAT)
    }

    /// The matrix row by row, on the CPU.
    pub(crate) fn view(&self) -> Result<GgmlView<'_>> {
        let bytes = self.codes.bytes(OP)?;
        Ok(GgmlView { bytes, dtype: self.dtype, rows: self.codes.rows(), width: self.codes.width() })
    }
}

/// See [`Ggml::view`].
#[derive(Debug)]
pub(crate) struct GgmlView<'a> {
    bytes: &'a [u8],
    dtype: GgmlDType,
    rows: usize,
    /// Bytes of a row.
    width: usize,
}

impl WideRows for GgmlView<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    /// Decodes the blocks that overlap `k`: those at its ends are decoded again for the neighbours.
    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]) {
        let (elements, bytes) = (self.dtype.block_size(), self.dtype.type_size());
        let blocks = k.start / elements..k.end.div_ceil(elements);
        let stored = &self.bytes[row * self.width + blocks.start * bytes..][..blocks.len() * bytes];
        let decoded = self.dtype.from_data(Cow::Borrowed(&Aligned::new(stored))).dequantize(blocks.len() * elements);
        // candle's decoders give f32 and cannot fail; a row of NaN would show if that changed.
        match decoded {
            Ok(CpuStorage::F32(values)) => widen_slice(&values, k.start - blocks.start * elements, 1, dst),
            _ => dst.fill(f32::NAN),
        }
    }
}

impl crate::operand::RowKernel<f32> for GgmlView<'_> {
    #[inline(always)]
    fn row(&self, index: usize, out: &mut [f32]) {
        self.widen(index, 0..out.len(), out);
    }
}

/// Bytes at an address that is aligned for every kind of block, as candle demands: copied if need be.
enum Aligned<'a> {
    InPlace(&'a [u8]),
    Copied { words: Vec<u64>, len: usize },
}

impl<'a> Aligned<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        if bytes.as_ptr().align_offset(align_of::<u64>()) == 0 {
            return Self::InPlace(bytes);
        }
        let mut words = vec![0u64; bytes.len().div_ceil(size_of::<u64>())];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self::Copied { words, len: bytes.len() }
    }
}

impl std::ops::Deref for Aligned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::InPlace(bytes) => bytes,
            Self::Copied { words, len } => &bytemuck::cast_slice(words)[..*len],
        }
    }
}
