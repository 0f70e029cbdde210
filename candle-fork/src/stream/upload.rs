//! Host memory that is copied to a device beside the work.

use candle_core::{Device, Tensor};

use crate::{
    error::{Error, Result},
    layout,
    operand::{check_dtype, check_shape},
    target::store,
};

const OP: &str = "upload";

/// What is uploaded again and again: a flat tensor on the host, for CUDA in page-locked memory where pages can be locked.
#[derive(Debug)]
pub struct HostBlock {
    pub(super) tensor: Option<Tensor>,
    #[cfg(feature = "cuda")]
    pub(super) pinned: Option<super::cuda::Pinned>,
}

impl HostBlock {
    /// A copy of `block` `[n]`, f32, f16 or bf16 on the CPU, for uploads to `device`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another rank or no elements; [`Error::Argument`] for a tensor that is not on the CPU;
    /// [`Error::Candle`] if it cannot be copied.
    pub fn new(block: &Tensor, device: &Device) -> Result<Self> {
        if block.rank() != 1 || block.elem_count() == 0 {
            let expected = "[n] with n at least 1".into();
            return Err(Error::Shape { op: OP, operand: "block", got: block.dims().to_vec(), expected });
        }
        if !block.device().is_cpu() {
            return Err(Error::Argument { op: OP, what: "a block for uploads is not on the cpu".into() });
        }
        let block = layout::contiguous(block)?;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = device {
            let pinned = super::cuda::Pinned::new(cuda, &block)?;
            let tensor = if pinned.is_some() { None } else { Some(block) };
            return Ok(Self { tensor, pinned });
        }
        let _ = device;
        Ok(Self {
            tensor: Some(block),
            #[cfg(feature = "cuda")]
            pinned: None,
        })
    }
}

/// Copies to a device that run beside its work: on a stream of their own, ordered with the device's.
#[derive(Debug)]
pub struct Uploads {
    #[cfg(feature = "cuda")]
    side: Option<super::cuda::Side>,
}

impl Uploads {
    /// For uploads to `device`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the driver gives no stream.
    pub fn new(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            let side = match device {
                Device::Cuda(cuda) => Some(super::cuda::Side::new(cuda)?),
                _ => None,
            };
            Ok(Self { side })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Ok(Self {})
        }
    }

    /// Starts to copy `block` into `slot`, once the work that the device has been given so far is done. Work that is
    /// enqueued afterwards may use the slot behind [`Upload::wait`]; every view of the slot's memory then has the new
    /// elements.
    ///
    /// **Shapes**: slot `[n]`, contiguous, of the block's length, dtype, and on the device of the uploads.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Argument`] if the slot does not fit; [`Error::Candle`] if the driver
    /// refuses.
    pub fn start(&self, block: &HostBlock, slot: &Tensor) -> Result<Upload> {
        if !slot.is_contiguous() {
            return Err(Error::Argument { op: OP, what: "the slot of an upload is not contiguous".into() });
        }
        #[cfg(feature = "cuda")]
        if let Some(side) = &self.side {
            return Ok(Upload { flight: Some(side.start(block, slot)?) });
        }
        let Some(tensor) = &block.tensor else {
            return Err(Error::Argument { op: OP, what: "a block for CUDA is uploaded to another device".into() });
        };
        check_shape(OP, "slot", slot, tensor.dims())?;
        check_dtype(OP, "slot", slot, tensor)?;
        store(OP, slot, tensor)?;
        Ok(Upload {
            #[cfg(feature = "cuda")]
            flight: None,
        })
    }
}

/// An upload that has been started. If it is dropped, the device waits for it all the same.
#[derive(Debug)]
#[must_use = "a slot must not be used before its upload was waited for"]
pub struct Upload {
    #[cfg(feature = "cuda")]
    flight: Option<super::cuda::Flight>,
}

impl Upload {
    /// Lets the device, not the host, wait until the slot holds the block.
    ///
    /// # Errors
    /// [`Error::Candle`] if the driver refuses.
    pub fn wait(self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(flight) = &self.flight {
            return flight.wait();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[test]
    fn every_view_of_a_slot_sees_the_upload() {
        for dtype in [DType::F32, DType::BF16] {
            let block = |first: f32| {
                let values = Tensor::arange(first, first + 12.0, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                HostBlock::new(&values, &Device::Cpu).unwrap()
            };
            let slot = Tensor::zeros(12, dtype, &Device::Cpu).unwrap();
            let view = slot.narrow(0, 4, 6).unwrap().reshape((2, 3)).unwrap();
            let values = || view.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
            let uploads = Uploads::new(&Device::Cpu).unwrap();
            for first in [0f32, 100.0] {
                uploads.start(&block(first), &slot).unwrap().wait().unwrap();
                assert_eq!(
                    values(),
                    [[first + 4.0, first + 5.0, first + 6.0], [first + 7.0, first + 8.0, first + 9.0]]
                );
            }
        }
    }

    #[test]
    fn misfits_are_refused() {
        let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
        assert!(matches!(HostBlock::new(&zeros(&[2, 2], DType::F32), &Device::Cpu), Err(Error::Shape { .. })));
        assert!(matches!(HostBlock::new(&zeros(&[0], DType::F32), &Device::Cpu), Err(Error::Shape { .. })));
        let block = HostBlock::new(&zeros(&[4], DType::F32), &Device::Cpu).unwrap();
        let uploads = Uploads::new(&Device::Cpu).unwrap();
        let start = |slot: &Tensor| uploads.start(&block, slot).map(drop);
        assert!(matches!(start(&zeros(&[5], DType::F32)), Err(Error::Shape { .. })));
        assert!(matches!(start(&zeros(&[4], DType::BF16)), Err(Error::DType { .. })));
        let spread = zeros(&[4, 2], DType::F32).narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
        assert!(matches!(start(&spread), Err(Error::Argument { .. })));
    }
}
