//! Arguments of every command that runs a model.

use anyhow::Context;
use clap::Args;

use super::integer;
use crate::terminal;

/// Most threads of one run.
const MAX_THREADS: u64 = 1024;

/// How a run goes about its work and what it says.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    pub(crate) threads: Option<usize>,

    /// Say nothing but errors
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Say more; twice says much more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl RunArgs {
    /// Says a line about the run on standard error, unless nothing is to be said.
    pub(crate) fn say(&self, line: &str) {
        if !self.quiet {
            terminal::stderr_line(line);
        }
    }

    /// Starts the threads that were asked for.
    ///
    /// # Errors
    /// If the machine does not give them.
    pub(crate) fn start_threads(&self) -> anyhow::Result<()> {
        let Some(threads) = self.threads else { return Ok(()) };
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the threads")
    }
}

fn threads(text: &str) -> Result<usize, String> {
    integer(text, 1, MAX_THREADS)
}
