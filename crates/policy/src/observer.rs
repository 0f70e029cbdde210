//! Progress and cancellation.

use std::ops::ControlFlow;

/// Something that happened during a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A stage begins: `"text encoder"`, `"denoise"`, `"vae decode"`.
    Stage {
        /// Name of the stage.
        name: &'a str,
    },
    /// `done` of `total` units of the current stage (steps, layers, tiles, chunks) are finished.
    Progress {
        /// Units finished.
        done: usize,
        /// Units in all.
        total: usize,
    },
}

/// Watches a run. Called on the thread that runs the model, between units of work.
///
/// A closure is an observer, and so is a [`CancelToken`](crate::CancelToken):
///
/// ```
/// use std::ops::ControlFlow;
/// use policy::{Event, Observer};
///
/// let observer = |event: &Event<'_>| {
///     if let Event::Progress { done, total } = event {
///         eprintln!("{done}/{total}");
///     }
///     ControlFlow::Continue(())
/// };
/// assert!(observer.notify(Event::Stage { name: "denoise" }).is_ok());
/// ```
pub trait Observer {
    /// Receives an event; `Break` stops the run before its next unit of work.
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()>;

    /// [`Observer::on_event`] as a `Result`, for `?`.
    ///
    /// # Errors
    /// [`Cancelled`] if the observer asked to stop.
    fn notify(&self, event: Event<'_>) -> Result<(), Cancelled> {
        match self.on_event(&event) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Cancelled),
        }
    }
}

/// The run was stopped by its observer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cancelled")]
pub struct Cancelled;

/// Watches nothing and never stops a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn on_event(&self, _: &Event<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl<F: Fn(&Event<'_>) -> ControlFlow<()>> Observer for F {
    fn on_event(&self, event: &Event<'_>) -> ControlFlow<()> {
        self(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn break_becomes_the_error_and_continue_does_not() {
        let until_two = |event: &Event<'_>| match event {
            Event::Progress { done, .. } if *done >= 2 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        let run = || -> Result<usize, Cancelled> {
            for done in 0..4 {
                until_two.notify(Event::Progress { done, total: 4 })?;
            }
            Ok(4)
        };
        assert_eq!(run(), Err(Cancelled));
        assert_eq!(Cancelled.to_string(), "cancelled");
        assert_eq!(Silent.notify(Event::Stage { name: "denoise" }), Ok(()));
    }

    #[test]
    fn an_observer_is_usable_behind_a_reference_to_dyn() {
        let silent: &dyn Observer = &Silent;
        assert_eq!(silent.notify(Event::Progress { done: 0, total: 0 }), Ok(()));
    }
}
