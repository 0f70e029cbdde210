//! `tallow`: pictures from sentences, and videos of latents and back, on this machine.
//!
//! Standard output carries only what was asked for: the paths of written files, or a report. Everything else goes to
//! standard error. Exit codes: 0 success, 1 the run failed, 2 the command line cannot work, 130 interrupted.

#![forbid(unsafe_code)]

mod cli;
mod demo;
mod device;
mod doctor;
mod execution;
mod failure;
mod generate;
mod inspect;
mod interrupt;
mod logging;
mod machine;
mod metadata;
mod model;
mod output;
mod progress;
mod quantize;
mod terminal;
mod verify;
mod video;

use std::process::ExitCode;

use clap::{Parser, error::ErrorKind};

use crate::{
    cli::{Cli, Command},
    failure::Failure,
};

fn main() -> ExitCode {
    let outcome = match Cli::try_parse() {
        Ok(cli) => run(&cli),
        // A bare `tallow` is a question, not a mistake in a long line: it gets the whole page.
        Err(page) if page.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            terminal::stderr_line(page.render().to_string().trim_end());
            return ExitCode::from(2);
        }
        Err(error) if error.use_stderr() => Err(Failure::from_clap(&error)),
        // `--help` and `--version` arrive as errors that belong on standard output.
        Err(help) => terminal::stdout(&help.render().to_string()).map_err(Failure::Run),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            terminal::stderr_line(&format!("error: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        Command::Generate(args) => generate::run(args),
        Command::Decode(args) => video::decode::run(args),
        Command::Encode(args) => video::encode::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Doctor(args) => doctor::run(args),
    }
}
