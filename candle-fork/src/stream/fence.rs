//! A point in a device's work that the host can wait for.

use candle_core::Device;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{WrapErr, cudarc::driver::CudaEvent};

use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::error::What;

/// The end of all that a device had been given to do when the fence was made.
///
/// ```
/// use candle_core::Device;
/// use candle_fork::stream::Fence;
///
/// let fence = Fence::new(&Device::Cpu)?;
/// fence.wait()?;
/// # Ok::<(), candle_fork::Error>(())
/// ```
#[derive(Debug)]
pub struct Fence {
    #[cfg(feature = "cuda")]
    event: Option<CudaEvent>,
}

impl Fence {
    /// Behind the work that has been enqueued on `device` so far.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if the driver refuses.
    pub fn new(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            let event = match device {
                Device::Cuda(cuda) => Some(cuda.cuda_stream().record_event(None).w().what("fence")?),
                _ => None,
            };
            Ok(Self { event })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Ok(Self {})
        }
    }

    /// Waits until that work is done.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if it failed.
    pub fn wait(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(event) = &self.event {
            event.synchronize().w().what("work of a device")?;
        }
        Ok(())
    }
}
