//! The driver's encoding.

use candle_core::{DType, cuda_backend::cudarc::driver::sys};

use super::{Boxes, OP};
use crate::error::{Error, Result};

/// The driver's encoding of [`Boxes`].
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());

impl TensorMap {
    /// # Errors
    /// [`Error::DType`]; [`Error::Unsupported`] for what a description does not hold, or what the driver refuses.
    pub fn new<const AXES: usize>(boxes: &Boxes<AXES>) -> Result<Self> {
        let encoding = boxes.encoding()?;
        let dtype = match boxes.dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        // How much the L2 cache fetches at once: no more than what the next box will want.
        let promotion = if boxes.is_wider_than_a_box() {
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        } else {
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        };
        let steps = [1u32; AXES];
        let mut map = Self([0; 16]);
        // SAFETY: the map has the size and the alignment of the driver's, and is written; the arrays, of an entry for each
        // axis (one less of the distances is read), are read during the call. No memory of a device is touched.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                dtype,
                AXES as u32,
                boxes.address as *mut _,
                encoding.extents.as_ptr(),
                encoding.distances.as_ptr(),
                boxes.shape.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                promotion,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded.result().map_err(|error| Error::Unsupported { op: OP, what: format!("{boxes:?}: {error:?}") })?;
        Ok(map)
    }
}
