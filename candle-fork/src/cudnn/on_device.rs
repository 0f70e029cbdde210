//! Sessions on candle's devices, and what happens on their streams around a plan.

use std::{marker::PhantomData, ops::Deref};

use candle_core::{
    CudaDevice,
    cuda_backend::{
        WrapErr,
        cudarc::driver::{CudaStream, DriverError, sys},
    },
};

use super::{device::DeviceInfo, refusal::Refusal, session::Session};
use crate::{
    cudnn_policy::{FallbackReason, PlanChoice},
    error::{Result, What},
};

/// A session on the stream of a device.
pub(crate) struct OnDevice<'a> {
    session: Session,
    device: PhantomData<&'a CudaDevice>,
}

impl Deref for OnDevice<'_> {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl<'a> OnDevice<'a> {
    /// Makes the device's context current. The inner result says why cuDNN does not serve here.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if the context cannot be made current.
    pub(crate) fn open(device: &'a CudaDevice) -> Result<Result<Self, Refusal>> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w().what("binding of the CUDA context")?;
        let info = match DeviceInfo::of(stream.context().ordinal()) {
            Ok(info) => info,
            Err(error) => {
                let text = format!("the driver does not describe the device: {error}");
                return Ok(Err(Refusal::lasting(FallbackReason::Unavailable, text)));
            }
        };
        // SAFETY: the stream is the device's, which lives for 'a; its context is current on this thread from here on.
        let session = unsafe { Session::open(info, stream.cu_stream().cast()) };
        Ok(session.map(|session| Self { session, device: PhantomData }))
    }
}

/// Whether plans may be built now: not while the stream is being captured.
pub(crate) fn may_build(device: &CudaDevice) -> bool {
    let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    device.cuda_stream().capture_status().is_ok_and(|status| status == none)
}

/// Milliseconds of what `run` enqueues: the least of as many runs as `choice` says, after one that does not count. What is
/// far above `limit` once is not tried again.
pub(crate) fn time(
    stream: &CudaStream,
    choice: PlanChoice,
    limit: f64,
    run: impl Fn() -> Result<(), Refusal>,
) -> Result<f64, Refusal> {
    let driver =
        |error: DriverError| Refusal::passing(FallbackReason::Failed, format!("a plan was not timed: {error}"));
    let runs = match choice {
        PlanChoice::Timed { runs, .. } => runs.max(1),
        PlanChoice::Heuristic => 1,
    };
    run()?;
    let mut least = f64::INFINITY;
    for _ in 0..runs {
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = stream.record_event(timed).map_err(driver)?;
        run()?;
        let end = stream.record_event(timed).map_err(driver)?;
        least = least.min(f64::from(start.elapsed_ms(&end).map_err(driver)?));
        if least > 1.2 * limit {
            break;
        }
    }
    Ok(least)
}
