//! Stopping a run from another thread.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Event, Observer};

/// A flag that stops a run. Clones share it: keep one where the wish to stop arises (a signal handler, a request that
/// went away), give the other to the run as its [`Observer`], or join it with another observer by
/// [`CancelToken::watching`].
///
/// A run looks at the flag between units of work (steps, layers, tiles), so it ends after the unit that is under way.
///
/// ```
/// use policy::{CancelToken, Cancelled, Event, Observer, Silent};
///
/// let token = CancelToken::new();
/// let observer = token.watching(&Silent);
/// assert_eq!(observer.notify(Event::Progress { done: 1, total: 4 }), Ok(()));
///
/// let elsewhere = token.clone();
/// std::thread::spawn(move || elsewhere.cancel()).join().unwrap();
/// assert_eq!(observer.notify(Event::Progress { done: 2, total: 4 }), Err(Cancelled));
/// ```
#[derive(Debug, Clone, Default)]
pub struct CancelToken {
    cancelled: Arc<AtomicBool>,
}

impl CancelToken {
    /// A token that is not cancelled.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks every run that watches this token, or a clone of it, to stop. There is no way back: a further run takes a
    /// new token. Does not block and does not allocate, so a signal handler may call it.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Whether [`CancelToken::cancel`] was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// An observer that passes every event on to `observer` and stops the run if either wants to.
    #[must_use]
    pub fn watching<'a>(&self, observer: &'a dyn Observer) -> Cancellable<'a> {
        Cancellable { token: self.clone(), observer }
    }
}

impl Observer for CancelToken {
    fn on_event(&self, _: &Event<'_>) -> ControlFlow<()> {
        if self.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// A [`CancelToken`] and another observer as one; made by [`CancelToken::watching`].
#[derive(Clone)]
pub struct Cancellable<'a> {
    token: CancelToken,
    observer: &'a dyn Observer,
}

impl Observer for Cancellable<'_> {
    /// The other observer hears the event first, so that what it shows is complete up to the stop, and so that a
    /// cancellation from inside it counts at once.
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()> {
        self.observer.on_event(event)?;
        self.token.on_event(event)
    }
}

impl fmt::Debug for Cancellable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancellable").field("token", &self.token).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::Cancelled;

    const STEP: Event<'static> = Event::Progress { done: 1, total: 4 };

    #[test]
    fn clones_share_the_flag_and_new_tokens_do_not() {
        let token = CancelToken::new();
        let clone = token.clone();
        assert_eq!(clone.notify(STEP), Ok(()));
        token.cancel();
        assert!(clone.is_cancelled());
        assert_eq!(clone.notify(STEP), Err(Cancelled));
        assert!(!CancelToken::new().is_cancelled());
    }

    #[test]
    fn a_token_crosses_threads() {
        fn is_send_and_sync<T: Send + Sync + 'static>() {}
        is_send_and_sync::<CancelToken>();
    }

    #[test]
    fn the_watched_observer_hears_every_event_and_either_stops_the_run() {
        let heard = RefCell::new(Vec::new());
        let stop_at_decode = |event: &Event<'_>| {
            heard.borrow_mut().push(format!("{event:?}"));
            match event {
                Event::Stage { name: "vae decode" } => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        };
        let token = CancelToken::new();
        let observer = token.watching(&stop_at_decode);
        assert_eq!(observer.notify(STEP), Ok(()));
        assert_eq!(observer.notify(Event::Stage { name: "vae decode" }), Err(Cancelled));
        assert_eq!(observer.notify(STEP), Ok(()));
        token.cancel();
        assert_eq!(observer.notify(STEP), Err(Cancelled));
        assert_eq!(heard.borrow().len(), 4);
    }

    #[test]
    fn cancelling_from_inside_the_watched_observer_counts_at_once() {
        let token = CancelToken::new();
        let inner = token.clone();
        let cancel = move |_: &Event<'_>| {
            inner.cancel();
            ControlFlow::Continue(())
        };
        assert_eq!(token.watching(&cancel).notify(STEP), Err(Cancelled));
    }
}
