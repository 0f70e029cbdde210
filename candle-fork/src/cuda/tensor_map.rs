//! Tensors as copies of boxes to shared memory take them, on compute capability 9.0: `TensorMap` of attention/pipeline.cuh.
//! What a description may hold is checked here, without a device.

#[cfg(feature = "cuda")]
mod driver;

use candle_core::DType;
#[cfg(feature = "cuda")]
pub use driver::TensorMap;

use crate::error::{Error, Result};

const OP: &str = "description of a tensor";

/// Bytes of an element.
const ELEMENT: u64 = 2;
/// Bytes that the address and distances are multiples of.
const RUN: u64 = 16;
/// Elements of a row of a box.
const ROW: u32 = 64;
/// Longest side of a box.
const SIDE: u32 = 256;
/// Largest extent.
const EXTENT: u64 = 1 << 32;
/// What distances in bytes are less than.
const DISTANCE: u64 = 1 << 40;

/// A tensor of one to five axes of elements of two bytes, the innermost first, and the boxes in which it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boxes<const AXES: usize> {
    /// Address of the first element: a multiple of 16 bytes.
    pub address: u64,
    /// f16 or bf16.
    pub dtype: DType,
    /// Extents, up to 2^32; what a box covers beyond them becomes zero.
    pub extents: [usize; AXES],
    /// Distances in elements along the axes: 1, for the innermost is packed, then multiples of 8. That of an axis of one
    /// element means nothing.
    pub strides: [usize; AXES],
    /// Extents of a box, up to 256, the innermost of 64 elements: rows of 128 bytes, in which run c of 16 bytes of row r
    /// lies at c ^ (r % 8).
    pub shape: [u32; AXES],
}

/// Extents, and distances in bytes from the second axis on: the last of these means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a driver takes these"))]
struct Encoding<const AXES: usize> {
    extents: [u64; AXES],
    distances: [u64; AXES],
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a driver takes these"))]
impl<const AXES: usize> Boxes<AXES> {
    /// What the driver takes, within its limits.
    ///
    /// # Errors
    /// [`Error::DType`]; [`Error::Unsupported`] for anything beyond what the fields say.
    fn encoding(&self) -> Result<Encoding<AXES>> {
        const { assert!(1 <= AXES && AXES <= 5, "axes that a description has") };
        if !matches!(self.dtype, DType::F16 | DType::BF16) {
            return Err(Error::DType { op: OP, operand: "tensor", got: self.dtype, expected: "f16 or bf16" });
        }
        let extents = self.extents.map(|extent| extent as u64);
        let distances = self.distances();
        let packed = self.strides.first() == Some(&1) || self.extents.first() == Some(&1);
        let refused = if !self.address.is_multiple_of(RUN) {
            format!("address {:#x}, no multiple of {RUN}", self.address)
        } else if !extents.iter().all(|extent| (1..=EXTENT).contains(extent)) {
            format!("extents {extents:?}, not of 1 to 2^32")
        } else if !packed {
            format!("strides {:?}, the innermost not packed", self.strides)
        } else if !distances.iter().all(|&distance| distance.is_multiple_of(RUN) && distance < DISTANCE) {
            format!("strides {:?}, not multiples of 8 less than 2^39", self.strides)
        } else if self.shape.first() != Some(&ROW) || !self.shape.iter().all(|side| (1..=SIDE).contains(side)) {
            format!("boxes of {:?}, not of {ROW} elements by sides of 1 to {SIDE}", self.shape)
        } else {
            return Ok(Encoding { extents, distances });
        };
        Err(Error::Unsupported { op: OP, what: refused })
    }

    /// Distances in bytes from the second axis on; along an axis of one element any will do that is legal.
    fn distances(&self) -> [u64; AXES] {
        let mut distances = [RUN; AXES];
        let axes = self.strides.iter().zip(&self.extents).skip(1);
        for (distance, (&stride, &extent)) in distances.iter_mut().zip(axes) {
            if extent != 1 {
                *distance = ELEMENT.saturating_mul(stride as u64);
            }
        }
        distances
    }

    /// Whether rows of the tensor go on behind those of a box.
    fn is_wider_than_a_box(&self) -> bool {
        self.extents.first().is_some_and(|&row| row > ROW as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Heads of 72 components by positions, heads, items.
    const HEADS: Boxes<4> = Boxes {
        address: 256,
        dtype: DType::BF16,
        extents: [72, 300, 1, 5],
        strides: [1, 80, 3, 24000],
        shape: [64, 128, 1, 1],
    };

    #[test]
    fn distances_are_in_bytes_and_those_of_nothing_are_legal() {
        let encoding = HEADS.encoding().unwrap();
        assert_eq!(encoding.extents, [72, 300, 1, 5]);
        assert_eq!(encoding.distances[..3], [160, 16, 48000]);
        assert!(HEADS.is_wider_than_a_box() && !Boxes { extents: [64, 300, 1, 5], ..HEADS }.is_wider_than_a_box());
    }

    #[test]
    fn any_number_of_axes() {
        let row = Boxes { address: 0, dtype: DType::F16, extents: [1 << 32], strides: [1], shape: [64] };
        assert_eq!(row.encoding().unwrap().extents, [1 << 32]);
        let one = Boxes { extents: [1], strides: [7], ..row };
        assert!(one.encoding().is_ok(), "the stride of one element means nothing");
        let matrix =
            Boxes { address: 16, dtype: DType::BF16, extents: [3072, 9], strides: [1, 3072], shape: [64, 256] };
        assert_eq!(matrix.encoding().unwrap().distances[..1], [6144]);
        let video = Boxes {
            address: 32,
            dtype: DType::F16,
            extents: [64, 8, 30, 20, 14],
            strides: [1, 64, 512, 15360, 307_200],
            shape: [64, 1, 16, 13, 1],
        };
        assert_eq!(video.encoding().unwrap().distances[..4], [128, 1024, 30720, 614_400]);
    }

    #[test]
    fn what_no_description_holds_is_refused() {
        let refused = [
            ("address 0x108", Boxes { address: 264, ..HEADS }),
            ("extents", Boxes { extents: [72, 0, 1, 5], ..HEADS }),
            ("extents", Boxes { extents: [72, (1 << 32) + 1, 1, 5], ..HEADS }),
            ("the innermost", Boxes { strides: [2, 80, 3, 24000], ..HEADS }),
            ("multiples of 8", Boxes { strides: [1, 80, 3, 24004], ..HEADS }),
            ("multiples of 8", Boxes { strides: [1, 1 << 39, 3, 24000], ..HEADS }),
            ("multiples of 8", Boxes { strides: [1, 80, 3, usize::MAX], ..HEADS }),
            ("boxes", Boxes { shape: [32, 128, 1, 1], ..HEADS }),
            ("boxes", Boxes { shape: [64, 257, 1, 1], ..HEADS }),
            ("boxes", Boxes { shape: [64, 128, 0, 1], ..HEADS }),
        ];
        for (why, boxes) in refused {
            match boxes.encoding() {
                Err(Error::Unsupported { what, .. }) => assert!(what.contains(why), "{what} of {boxes:?}"),
                other => panic!("{other:?} of {boxes:?}"),
            }
        }
        let floats = Boxes { dtype: DType::F32, ..HEADS };
        assert!(matches!(floats.encoding(), Err(Error::DType { got: DType::F32, .. })));
        let last = Boxes { strides: [1, (1 << 39) - 8, 3, 24000], ..HEADS };
        assert!(last.encoding().is_ok(), "the largest distance");
    }
}
