//! Tables whose rows are looked up by number.

use candle_core::{DType, Device, Tensor};
use candle_fork::{Error, HostTensor, Result, What, quant::QuantWeight};

/// A table `[rows, width]` on the host, as it is stored: of a quantised one only the rows that are asked for are decoded.
#[derive(Debug, Clone)]
pub struct Embedding(Table);

#[derive(Debug, Clone)]
enum Table {
    Plain(HostTensor),
    Quantised(QuantWeight),
}

impl Embedding {
    pub(super) fn plain(table: HostTensor) -> Self {
        Self(Table::Plain(table))
    }

    pub(super) fn quantised(table: QuantWeight) -> Self {
        Self(Table::Quantised(table))
    }

    /// Rows and width.
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            // A loader makes tables of matrices only.
            Table::Plain(table) => [table.dims()[0], table.dims()[1]],
            Table::Quantised(table) => [table.out_features(), table.in_features()],
        }
    }

    /// The rows named by `ids` as `[ids, width]`, in `dtype` on `device`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a row that the table does not have; [`Error::Candle`].
    pub fn gather(&self, ids: &[u32], dtype: DType, device: &Device) -> Result<Tensor> {
        let [rows, width] = self.dims();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            return Err(Error::Argument { op: "embedding", what: format!("row {id} of a table of {rows} rows") });
        }
        if ids.is_empty() {
            return Tensor::zeros((0, width), dtype, device).what("embedding");
        }
        match &self.0 {
            Table::Plain(table) => {
                let row = width * table.dtype().size_in_bytes();
                let mut bytes = Vec::with_capacity(ids.len() * row);
                for &id in ids {
                    bytes.extend_from_slice(&table.bytes()[id as usize * row..][..row]);
                }
                let rows = Tensor::from_raw_buffer(&bytes, table.dtype(), &[ids.len(), width], &Device::Cpu);
                rows.and_then(|rows| rows.to_dtype(dtype)?.to_device(device)).what("embedding")
            }
            Table::Quantised(table) => {
                let rows = table.gather(ids)?.dequantize(dtype, &Device::Cpu)?;
                rows.to_device(device).what("embedding")
            }
        }
    }
}
