//! The bytes of a quantised matrix where they lie: in mapped memory, or on a device.

use candle_core::{DType, Device, Tensor};

use crate::{
    error::{Error, Result, What},
    host::HostTensor,
};

/// Bytes `[rows, bytes of a row]`. On the CPU always host memory, so that they can be read without a lock.
#[derive(Debug, Clone)]
pub(crate) enum Codes {
    Host(HostTensor),
    Device(Tensor),
}

impl Codes {
    /// Takes `host`, which must be a matrix of bytes, with at least one.
    pub(crate) fn new(op: &'static str, host: HostTensor) -> Result<Self> {
        if host.dtype() != DType::U8 {
            return Err(Error::DType { op, operand: "codes", got: host.dtype(), expected: "bytes (u8)" });
        }
        if host.dims().len() != 2 || host.dims().contains(&0) {
            let expected = "[out_features, in_features], none of them 0".into();
            return Err(Error::Shape { op, operand: "codes", got: host.dims().to_vec(), expected });
        }
        Ok(Self::Host(host))
    }

    fn dims(&self) -> &[usize] {
        match self {
            Self::Host(host) => host.dims(),
            Self::Device(tensor) => tensor.dims(),
        }
    }

    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.dims()[0]
    }

    /// Bytes of a row.
    pub(crate) fn width(&self) -> usize {
        self.dims()[1]
    }

    /// Rows `start..start + len`, which the caller has checked; nothing is copied.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        Ok(match self {
            Self::Host(host) => Self::Host(host.rows(start, len)?),
            Self::Device(tensor) => Self::Device(tensor.narrow(0, start, len).what("rows of a quantised matrix")?),
        })
    }

    /// The rows named by `ids`, copied into memory of their own.
    pub(crate) fn gather(&self, ids: &[u32]) -> Result<Self> {
        match self {
            Self::Host(host) => {
                let (bytes, width) = (host.bytes(), self.width());
                let rows: Vec<u8> =
                    ids.iter().flat_map(|&id| &bytes[id as usize * width..][..width]).copied().collect();
                let range = 0..rows.len();
                Ok(Self::Host(HostTensor::new(std::sync::Arc::new(rows), range, DType::U8, (ids.len(), width))?))
            }
            Self::Device(tensor) => {
                let ids = Tensor::new(ids, tensor.device());
                Ok(Self::Device(ids.and_then(|ids| tensor.index_select(&ids, 0)).what("rows of a quantised matrix")?))
            }
        }
    }

    /// The same bytes on `device`: uploaded once, or left where they are mapped if that is the CPU.
    pub(crate) fn to_device(&self, device: &Device) -> Result<Self> {
        const WHAT: &str = "upload of a quantised matrix";
        Ok(match self {
            Self::Host(_) if device.is_cpu() => self.clone(),
            Self::Host(host) => Self::Device(host.to_tensor(DType::U8, device)?),
            Self::Device(tensor) if device.is_cpu() => {
                let dims = (self.rows(), self.width());
                let bytes = tensor.flatten_all().and_then(|t| t.to_vec1::<u8>()).what(WHAT)?;
                let range = 0..bytes.len();
                Self::Host(HostTensor::new(std::sync::Arc::new(bytes), range, DType::U8, dims)?)
            }
            Self::Device(tensor) => Self::Device(tensor.to_device(device).what(WHAT)?),
        })
    }

    /// The bytes of a matrix on the CPU.
    pub(crate) fn bytes(&self, op: &'static str) -> Result<&[u8]> {
        match self {
            Self::Host(host) => Ok(host.bytes()),
            Self::Device(_) => Err(Error::Argument { op, what: "a quantised matrix is not on the cpu".into() }),
        }
    }

    /// The tensor of a matrix on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensor(&self, device: &Device) -> Result<Tensor> {
        match self.to_device(device)? {
            Self::Device(tensor) => Ok(tensor),
            Self::Host(_) => Err(Error::Argument { op: "quantised matrix", what: "not on a device".into() }),
        }
    }
}
