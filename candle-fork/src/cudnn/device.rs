//! What cuDNN wants to know of a device.

#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};

use super::{
    library::{Library, Unavailable},
    refusal::Refusal,
};
use crate::cudnn_policy::FallbackReason;

/// A device, as far as plans depend on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct DeviceInfo {
    /// Number of the device in the process.
    pub(crate) ordinal: usize,
    /// Name, as the driver gives it.
    pub(crate) name: String,
    /// Compute capability: 900 is 9.0.
    pub(crate) capability: u32,
    /// Multiprocessors, which differ between the variants of a chip.
    pub(crate) multiprocessors: u32,
    /// CUDA version of the driver: 13000 is 13.0.
    pub(crate) driver: u32,
}

impl DeviceInfo {
    /// The device of this number. The driver is asked once.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(ordinal: usize) -> Result<Arc<Self>, DriverError> {
        static KNOWN: Mutex<Vec<Arc<DeviceInfo>>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(info) = known.iter().find(|info| info.ordinal == ordinal) {
            return Ok(info.clone());
        }
        result::init()?;
        // A number beyond the range is one of no device, which the driver says.
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        let attribute = |which| {
            // SAFETY: the device comes from the driver.
            unsafe { result::device::get_attribute(device, which) }.map(i32::unsigned_abs)
        };
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let mut driver = 0;
        // SAFETY: writes one int to a place for one.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result()?;
        let info = Arc::new(Self {
            ordinal,
            name: result::device::get_name(device)?,
            capability: attribute(MAJOR)? * 100 + attribute(MINOR)? * 10,
            multiprocessors: attribute(MULTIPROCESSORS)?,
            driver: driver.unsigned_abs(),
        });
        known.push(info.clone());
        Ok(info)
    }

    /// The compute capability as people write it: `9.0`.
    pub(crate) fn compute_capability(&self) -> String {
        format!("{}.{}", self.capability / 100, self.capability % 100 / 10)
    }

    /// Whether `library` serves this device under this driver.
    pub(crate) fn admit(&self, library: &Library) -> Result<(), Refusal> {
        let refuse = |text: String| Err(Refusal::lasting(FallbackReason::Unavailable, text));
        let needed = library.cudart_version() / 1000 * 1000;
        if self.driver < needed {
            return refuse(format!(
                "cudnn {} is built for CUDA {}, the driver is for {}.{}",
                library.version(),
                needed / 1000,
                self.driver / 1000,
                self.driver % 1000 / 10
            ));
        }
        if self.capability > library.max_device_version() {
            return refuse(format!(
                "cudnn {} knows devices up to compute capability {}.{}, {} has {}",
                library.version(),
                library.max_device_version() / 100,
                library.max_device_version() % 100 / 10,
                self.name,
                self.compute_capability()
            ));
        }
        Ok(())
    }
}

impl From<&Unavailable> for Refusal {
    fn from(unavailable: &Unavailable) -> Self {
        Self::lasting(FallbackReason::Unavailable, unavailable.to_string())
    }
}
