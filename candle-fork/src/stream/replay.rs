//! Work that is recorded once and replayed.

use std::cell::Cell;

use candle_core::Device;

use crate::error::{Error, Result};

/// Work of a CUDA device that was recorded, as a graph of the driver: to replay it costs the host one call.
///
/// The work runs on the same addresses each time. So it reads and writes tensors that exist before it is recorded and are
/// kept as long as the recording: inputs are copied into them before [`Replay::run`], results out of them behind it.
#[derive(Debug)]
pub struct Replay {
    #[cfg(feature = "cuda")]
    graph: super::cuda::Graph,
}

thread_local! {
    static REPLAYS: Cell<usize> = const { Cell::new(0) };
}

/// How many recordings this thread has enqueued.
pub fn replays() -> usize {
    REPLAYS.get()
}

impl Replay {
    /// Records what `work` enqueues on `device`'s stream; nothing of it is done. The work has been done before in the same
    /// way, so that kernels are loaded and plans are made; it keeps none of the tensors that it makes, drops no others,
    /// and neither waits for the device nor takes anything from host memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on other devices, and on those that were not made by [`cuda_device`](super::cuda_device);
    /// [`Error::Candle`] and what `work` fails with, if the work is none that can be recorded. The device can be used as
    /// before in each case.
    pub fn record(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = device {
            return Ok(Self { graph: super::cuda::Graph::record(cuda, work)? });
        }
        let _ = work;
        Err(Error::Unsupported { op: "recording of work", what: format!("{:?}", device.location()) })
    }

    /// Enqueues the work.
    ///
    /// # Errors
    /// [`Error::Candle`] if the driver refuses.
    pub fn run(&mut self) -> Result<()> {
        #[cfg(feature = "cuda")]
        {
            self.graph.run()?;
            REPLAYS.set(REPLAYS.get() + 1);
            Ok(())
        }
        #[cfg(not(feature = "cuda"))]
        {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_records_nothing() {
        let refused = Replay::record(&Device::Cpu, || unreachable!("there is nothing to record on"));
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
    }
}
