//! Where the libraries' spans and events go: to standard error.

use tracing_subscriber::{EnvFilter, filter::LevelFilter, fmt::format::FmtSpan};

/// Shows warnings; with `verbose` also information (1) and details (2); with `quiet` errors only. `RUST_LOG` refines it.
pub(crate) fn install(quiet: bool, verbose: u8) {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, _) => LevelFilter::DEBUG,
    };
    let filter = EnvFilter::builder().with_default_directive(level.into()).from_env_lossy();
    // Fails only if a subscriber is installed already, which then serves as well.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // The spans are the stages of a run; their ends say how long they took.
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(crate::terminal::stderr_is_drawable() && crate::terminal::colour_is_welcome())
        // On a closed pipe it would panic.
        .log_internal_errors(false)
        .try_init();
}
