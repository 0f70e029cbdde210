//! Handles: one per thread, device and stream.

use std::{cell::RefCell, ptr, ptr::NonNull, rc::Rc, sync::Mutex};

use super::{
    library::Library,
    refusal::Failure,
    sys::{RawHandle, RawStream},
};

/// Handles of threads that have ended. Destroying a handle would wait for the whole device, so they wait for the next
/// thread that needs one.
static IDLE: Mutex<Vec<(usize, Handle)>> = Mutex::new(Vec::new());

/// A handle, which only one thread may use at a time.
#[derive(Debug)]
pub(super) struct Handle(NonNull<std::ffi::c_void>);

// SAFETY: a handle belongs to whoever holds it, not to the thread that made it; it is not `Sync`.
unsafe impl Send for Handle {}

impl Handle {
    pub(super) fn as_raw(&self) -> RawHandle {
        self.0.as_ptr()
    }

    fn create(library: &'static Library) -> Result<Self, Failure> {
        let mut raw: RawHandle = ptr::null_mut();
        // SAFETY: writes one pointer to a place for one; the caller has made a context current.
        let code = unsafe { (library.api.create)(&mut raw) };
        library.outcome("cudnnCreate", code)?;
        let missing = || Failure { call: "cudnnCreate", status: code, text: "success, but no handle".to_owned() };
        NonNull::new(raw).map(Self).ok_or_else(missing)
    }
}

/// The handles of a thread, by device and stream.
#[derive(Default)]
struct Held(Vec<(usize, RawStream, Rc<Handle>)>);

impl Drop for Held {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (ordinal, _, handle) in self.0.drain(..) {
            // A handle that is still in use elsewhere in this thread is left to the end of the process.
            idle.extend(Rc::into_inner(handle).map(|handle| (ordinal, handle)));
        }
    }
}

thread_local! {
    static HELD: RefCell<Held> = RefCell::default();
}

/// This thread's handle for a stream of a device, whose context must be current. Made by the first call.
///
/// # Safety
/// `stream` is a live stream of the device.
pub(super) unsafe fn of_thread(
    library: &'static Library,
    ordinal: usize,
    stream: RawStream,
) -> Result<Rc<Handle>, Failure> {
    let held = HELD.with_borrow(|held| {
        held.0.iter().find(|(o, s, _)| (*o, *s) == (ordinal, stream)).map(|(_, _, handle)| handle.clone())
    });
    let handle = match held {
        Some(handle) => handle,
        None => {
            // The lock also keeps the very first creations, which load the library's parts, apart.
            let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let handle = match idle.iter().position(|(o, _)| *o == ordinal) {
                Some(at) => idle.swap_remove(at).1,
                None => Handle::create(library)?,
            };
            drop(idle);
            let handle = Rc::new(handle);
            HELD.with_borrow_mut(|held| held.0.push((ordinal, stream, handle.clone())));
            handle
        }
    };
    // Every time: the address may be that of a new stream in the place of an old one.
    // SAFETY: a live handle of this thread; the caller vouches for the stream.
    let code = unsafe { (library.api.set_stream)(handle.as_raw(), stream) };
    library.outcome("cudnnSetStream", code)?;
    Ok(handle)
}
