//! `tallow inspect`: what a checkpoint file, a model folder or a file of latents is.

mod ltx;
mod treatment;
mod wan;

use std::fmt::Write;

use anyhow::Context;
use serde::Serialize;
use weights::inspect::{Part, Report};

use crate::{cli::InspectArgs, failure::Failure, failure::one_line, terminal};

/// The report with its sums, for machines.
#[derive(Serialize)]
struct WithTotals<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    wan: Option<&'a wan::Facts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ltx: Option<&'a ltx::Facts>,
    tensors: usize,
    elements: u64,
    bytes: u64,
}

/// Prints the report.
///
/// # Errors
/// If the path cannot be read, holds a damaged checkpoint, or the report cannot be written.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let report = weights::inspect(&args.path).map_err(anyhow::Error::from)?;
    let wan = wan::Facts::of(&args.path, &report);
    let ltx = ltx::Facts::of(&args.path, &report);
    let text = if args.json {
        let (tensors, elements, bytes) = (report.tensors(), report.elements(), report.bytes());
        let with_totals =
            WithTotals { report: &report, wan: wan.as_ref(), ltx: ltx.as_ref(), tensors, elements, bytes };
        serde_json::to_string_pretty(&with_totals).context("cannot write the report")? + "\n"
    } else {
        let wan = wan.as_ref().map(wan::Facts::rows);
        let ltx = ltx.as_ref().map(ltx::Facts::rows);
        table(&report, wan.into_iter().chain(ltx).flatten())
    };
    Ok(terminal::stdout(&text)?)
}

/// The report for people. Names come from files, so they are kept from driving the terminal.
fn table(report: &Report, facts: impl Iterator<Item = (&'static str, String)>) -> String {
    let mut table = Table::default();
    table.row("path", &report.path);
    table.row("kind", &report.description);
    for part in &report.parts {
        let name = if part.component.is_empty() { "content" } else { &part.component };
        let looks_like = part.model.as_ref().map_or_else(|| "unknown".to_owned(), |model| model.describe());
        table.row(
            name,
            &match &part.class {
                Some(class) => format!("{looks_like}, class {class}"),
                None => looks_like,
            },
        );
        table.row("", &amounts(part.tensors.len(), part.elements, part.bytes));
        table.row("", &dtypes(part));
        for file in &part.files {
            table.row("", &format!("file {}, {}", file.name, terminal::bytes(file.bytes as u64)));
        }
        if !part.metadata.is_empty() {
            let keys: Vec<_> = part.metadata.keys().map(String::as_str).collect();
            table.row("", &format!("metadata {}", keys.join(", ")));
        }
        for (name, value) in treatment::rows(part) {
            table.row(name, &value);
        }
    }
    for (name, value) in facts {
        table.row(name, &value);
    }
    if report.parts.len() > 1 {
        table.row("total", &amounts(report.tensors(), report.elements(), report.bytes()));
    }
    table.text
}

fn amounts(tensors: usize, elements: u64, bytes: u64) -> String {
    format!("{tensors} tensors, {elements} elements, {bytes} bytes ({})", terminal::bytes(bytes))
}

fn dtypes(part: &Part) -> String {
    let counts = part.dtypes.iter().map(|(dtype, count)| {
        format!("{dtype}: {} tensors, {} elements, {}", count.tensors, count.elements, terminal::bytes(count.bytes))
    });
    counts.collect::<Vec<_>>().join("; ")
}

/// Two columns.
#[derive(Default)]
struct Table {
    text: String,
}

impl Table {
    fn row(&mut self, name: &str, value: &str) {
        if !value.is_empty() {
            let _ = writeln!(self.text, "{:<13} {}", one_line(name), one_line(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo;

    #[test]
    fn the_built_in_model_is_recognised() {
        let report = weights::inspect::inspect_folder(&demo::model()).unwrap();
        let table = table(&report, std::iter::empty());
        for words in ["Flux2KleinPipeline", "FLUX.2 transformer", "FLUX.2 VAE", "Qwen3 language model", "total "] {
            assert!(table.contains(words), "no {words:?} in\n{table}");
        }
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        let mut table = Table::default();
        table.row("a\x1b[2J", "b\nc");
        assert_eq!(table.text, "a\\u{1b}[2J    b; c\n");
    }
}
