//! Tensors as copies of boxes to shared memory take them, on compute capability 9.0: `TensorMap` of attention/pipeline.cuh.

use candle_core::{
    DType,
    cuda_backend::{WrapErr, cudarc::driver::sys},
};

use super::tensor::Address;
use crate::error::{Error, Result, What};

const OP: &str = "description of a tensor";

/// Elements of the 16 bytes that distances are multiples of.
const PACK: usize = 8;

/// A tensor of four axes of elements of two bytes, the innermost first, and the boxes in which it is copied.
#[derive(Debug, Clone, Copy)]
pub struct Boxes {
    /// First element: a multiple of 16 bytes.
    pub address: Address,
    /// f16 or bf16.
    pub dtype: DType,
    /// Extents; what a box covers beyond them becomes zero.
    pub extents: [usize; 4],
    /// Distances in elements along all axes but the innermost, which is packed: multiples of 8. That of an axis of one
    /// element means nothing.
    pub strides: [usize; 3],
    /// Extents of a box, up to 256, the innermost of 64 elements: rows of 128 bytes, in which run c of 16 bytes of row r
    /// lies at c ^ (r % 8).
    pub shape: [u32; 4],
}

/// The driver's encoding of [`Boxes`].
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());

impl TensorMap {
    /// # Errors
    /// [`Error::DType`]; [`Error::Candle`] if the driver refuses extents, distances or the address.
    pub fn new(boxes: &Boxes) -> Result<Self> {
        let dtype = match boxes.dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            got => return Err(Error::DType { op: OP, operand: "tensor", got, expected: "f16 or bf16" }),
        };
        let extents = boxes.extents.map(|extent| extent as u64);
        let strides = byte_strides(boxes);
        let steps = [1u32; 4];
        let mut map = Self([0; 16]);
        // SAFETY: the map has the size and the alignment of the driver's, and is written; the arrays, of four, three, four
        // and four entries, are read during the call. No memory of a device is touched.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                dtype,
                4,
                boxes.address as *mut _,
                extents.as_ptr(),
                strides.as_ptr(),
                boxes.shape.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().w().what(OP)?;
        Ok(map)
    }
}

/// Distances in bytes, of axes that have some.
fn byte_strides(boxes: &Boxes) -> [u64; 3] {
    let [_, extents @ ..] = boxes.extents;
    let mut strides = boxes.strides;
    for (stride, extent) in strides.iter_mut().zip(extents) {
        if extent == 1 {
            *stride = PACK;
        }
    }
    strides.map(|stride| 2 * stride as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_in_bytes_and_those_of_nothing_are_legal() {
        let boxes = Boxes {
            address: 256,
            dtype: DType::BF16,
            extents: [72, 300, 1, 5],
            strides: [80, 3, 24000],
            shape: [64, 128, 1, 1],
        };
        assert_eq!(byte_strides(&boxes), [160, 16, 48000]);
    }
}
