//! Ctrl-C: the first stops the run between two units of work, the second ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use policy::CancelToken;

use crate::{failure::Failure, terminal};

/// Makes SIGINT (and SIGTERM, SIGHUP) cancel the token that is returned.
///
/// # Errors
/// If the handler cannot be installed.
pub(crate) fn install(quiet: bool) -> anyhow::Result<CancelToken> {
    let token = CancelToken::new();
    let cancelled = token.clone();
    let seen = AtomicBool::new(false);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(Failure::Interrupted.exit_code()));
        }
        cancelled.cancel();
        if !quiet && terminal::stderr_is_drawable() {
            terminal::stderr_line("\nstopping (Ctrl-C again to stop at once)");
        }
    })
    .context("cannot watch for Ctrl-C")?;
    Ok(token)
}

/// Ends the run if the token is cancelled.
///
/// # Errors
/// [`Failure::Interrupted`].
pub(crate) fn check(stop: &CancelToken) -> Result<(), Failure> {
    if stop.is_cancelled() { Err(Failure::Interrupted) } else { Ok(()) }
}
