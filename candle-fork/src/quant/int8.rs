//! Signed bytes with one scale, or one for each row, possibly of a rotated matrix (ConvRot).

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use pulp::Arch;

use super::{OP, codes::Codes, scales_tensor};
use crate::{
    convrot::{self, Group},
    error::{Error, Result, What},
    gemm::WideRows,
    host::HostTensor,
};

/// `W[r, c] = scale[r] sum_j H[c, j] codes[r, j]` with H over groups of columns.
#[derive(Debug, Clone)]
pub(crate) struct Int8 {
    pub(crate) codes: Codes,
    /// f32 `[1]` or `[rows]`, where the codes are.
    pub(crate) scales: Tensor,
    pub(crate) group: Group,
}

impl Int8 {
    pub(super) fn new(codes: HostTensor, scales: Vec<f32>, group: Option<usize>) -> Result<Self> {
        let codes = Codes::new(OP, codes)?;
        if scales.len() != 1 && scales.len() != codes.rows() {
            let expected = format!("[1] or [{}]", codes.rows());
            return Err(Error::Shape { op: OP, operand: "scales", got: vec![scales.len()], expected });
        }
        let group = Group::new(OP, group, codes.width())?;
        Ok(Self { codes, scales: scales_tensor(scales)?, group })
    }

    pub(super) fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let scales = if self.per_row() {
            self.scales.narrow(0, start, len).what("rows of a quantised matrix")?
        } else {
            self.scales.clone()
        };
        Ok(Self { codes: self.codes.narrow(start, len)?, scales, group: self.group })
    }

    pub(super) fn gather(&self, ids: &[u32]) -> Result<Self> {
        let scales = if self.per_row() {
            let ids = Tensor::new(ids, self.scales.device());
            ids.and_then(|ids| self.scales.index_select(&ids, 0)).what("rows of a quantised matrix")?
        } else {
            self.scales.clone()
        };
        Ok(Self { codes: self.codes.gather(ids)?, scales, group: self.group })
    }

    pub(super) fn to_device(&self, device: &Device) -> Result<Self> {
        let scales = self.scales.to_device(device).what("upload of a quantised matrix")?;
        Ok(Self { codes: self.codes.to_device(device)?, scales, group: self.group })
    }

    pub(super) fn dequantize(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        match &self.codes {
            Codes::Host(host) if device.is_cpu() => {
                convrot::cpu::dequantize(host.bytes(), &self.scales()?, self.codes.width(), self.group, dtype)
            }
            _ => {
                let here = self.to_device(device)?;
                match here.codes {
                    Codes::Device(codes) => convrot::dequantize(&codes, &here.scales, self.group, dtype),
                    Codes::Host(_) => here.dequantize(dtype, device),
                }
            }
        }
    }

    /// Whether each row has a scale of its own.
    pub(crate) fn per_row(&self) -> bool {
        self.scales.elem_count() == self.codes.rows() && self.codes.rows() != 1
    }

    /// The scales on the host: 1 or as many as rows.
    pub(crate) fn scales(&self) -> Result<Vec<f32>> {
        self.scales.to_vec1().what("scales of a quantised matrix")
    }

    /// The rotated matrix, row by row, on the CPU: the caller rotates what it is multiplied with.
    pub(crate) fn view(&self) -> Result<Int8View<'_>> {
        let scales = self.scales()?;
        let scales = if self.per_row() { scales } else { scales.repeat(self.codes.rows()) };
        Ok(Int8View { codes: bytemuck::cast_slice(self.codes.bytes(OP)?), width: self.codes.width(), scales })
    }
}

/// See [`Int8::view`].
#[derive(Debug)]
pub(crate) struct Int8View<'a> {
    codes: &'a [i8],
    width: usize,
    scales: Vec<f32>,
}

impl WideRows for Int8View<'_> {
    fn rows(&self) -> usize {
        self.scales.len()
    }

    fn widen(&self, row: usize, k: Range<usize>, dst: &mut [f32]) {
        let codes = &self.codes[row * self.width..][k];
        Arch::new().dispatch(Scaled { codes, scale: self.scales[row], dst });
    }
}

struct Scaled<'a> {
    codes: &'a [i8],
    scale: f32,
    dst: &'a mut [f32],
}

impl pulp::NullaryFnOnce for Scaled<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (y, &q) in self.dst.iter_mut().zip(self.codes) {
            *y = f32::from(q) * self.scale;
        }
    }
}
