//! Writing to standard output and standard error without ever panicking.
//!
//! Rust ignores SIGPIPE, so a closed pipe arrives as an error of kind `BrokenPipe`; `println!` would panic on it. Here a
//! reader that went away (`| head`) is no failure, and any other error (a full disk) is one.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;

/// Writes to standard output and flushes.
///
/// # Errors
/// If the text cannot be written, except when the reader closed the pipe.
pub(crate) fn stdout(text: &str) -> anyhow::Result<()> {
    forgive_closed_pipe(write_all(io::stdout().lock(), text)).context("cannot write to standard output")
}

/// Writes a line to standard error. There is nowhere to report a failure of this, so it is ignored.
pub(crate) fn stderr_line(line: &str) {
    let _ = write_all(io::stderr().lock(), &format!("{line}\n"));
}

/// Whether standard error can show a line that is drawn again and again.
pub(crate) fn stderr_is_drawable() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether colours are welcome on a terminal (<https://no-color.org>).
pub(crate) fn colour_is_welcome() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A number of bytes with its unit, exact below one KiB.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

fn write_all(mut to: impl Write, text: &str) -> io::Result<()> {
    to.write_all(text.as_bytes())?;
    to.flush()
}

fn forgive_closed_pipe(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bytes_have_units() {
        let shown = [0, 1023, 1024, 1_048_575, 1_048_576, 7_751_109_744, u64::MAX].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 MiB", "7.2 GiB", "16777216.0 TiB"]);
    }

    #[test]
    fn only_a_closed_pipe_is_forgiven() {
        assert!(forgive_closed_pipe(write_all(Broken(io::ErrorKind::BrokenPipe), "a")).is_ok());
        assert!(forgive_closed_pipe(write_all(Broken(io::ErrorKind::StorageFull), "a")).is_err());
    }
}
