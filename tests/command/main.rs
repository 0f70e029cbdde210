//! End-to-end tests of the command `tallow`: its files, its words and its exit codes.

#![forbid(unsafe_code)]

mod bad_input;
mod checkpoint;
mod generate;
#[cfg(unix)]
mod interrupt;
mod report;
mod support;
