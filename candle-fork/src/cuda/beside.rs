//! Kernels beside other kernels of a device, on a stream of their own.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use candle_core::{
    CudaDevice,
    cuda_backend::{DeviceId, WrapErr, cudarc::driver::CudaStream},
};

use crate::error::{Result, What};

const WHAT: &str = "work beside other work";

thread_local! {
    /// The second stream of each device.
    static STREAMS: RefCell<HashMap<DeviceId, Arc<CudaStream>>> = RefCell::new(HashMap::new());
    /// Where kernels go now, if not to their device's stream.
    static CURRENT: RefCell<Option<Arc<CudaStream>>> = const { RefCell::new(None) };
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Where kernels of this thread go.
pub(super) fn stream(device: &CudaDevice) -> Arc<CudaStream> {
    CURRENT.with_borrow(|current| current.clone()).unwrap_or_else(|| device.cuda_stream())
}

/// How often this thread has enqueued work beside other work.
pub fn count() -> u64 {
    COUNT.get()
}

/// Enqueues what `first` enqueues, and beside it the kernels of `second`; what is enqueued later comes behind both.
///
/// `second` begins when `first` does, and so gets the multiprocessors that `first` leaves idle. One comes behind the other on
/// a device whose tensors are tracked by events ([`crate::stream::cuda_device`] makes one without).
///
/// # Errors
/// Those of both; [`crate::Error::Candle`] if the driver refuses.
///
/// # Safety
/// `second` launches kernels and nothing else: it neither allocates nor frees memory of the device. They write nothing that
/// `first` uses, and read nothing that it writes.
pub(crate) unsafe fn beside(
    device: &CudaDevice,
    first: impl FnOnce() -> Result<()>,
    second: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let main = device.cuda_stream();
    if main.context().is_event_tracking() {
        first()?;
        return second();
    }
    let side = STREAMS.with_borrow_mut(|streams| match streams.entry(device.id()) {
        Entry::Occupied(entry) => Ok(entry.get().clone()),
        Entry::Vacant(entry) => main.context().new_stream().w().what(WHAT).map(|side| entry.insert(side).clone()),
    })?;
    let before = main.record_event(None).w().what(WHAT)?;
    first()?;
    side.wait(&before).w().what(WHAT)?;
    let worked = on(&side, second);
    // Behind a failure as well: something may have been enqueued.
    main.join(&side).w().what(WHAT)?;
    COUNT.set(COUNT.get() + 1);
    worked
}

/// Calls `f`, whose kernels go to `side`.
fn on<R>(side: &Arc<CudaStream>, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Arc<CudaStream>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _restore = Restore(CURRENT.replace(Some(side.clone())));
    f()
}
