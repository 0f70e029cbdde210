//! The record: one csv file per device class, one row per figure, the newest measurement only.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::machine;

const HEADER: &str = "name,value,unit,peer,peer_value,floor,error,versions,commit,date";

/// One figure. `value`, `peer_value` and `floor` share `unit`.
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// Name of the figure.
    pub name: &'static str,
    /// Median.
    pub value: f64,
    /// Unit: `ms`, `s`, `GFLOP/s`, `GiB`, `-`.
    pub unit: &'static str,
    /// Public program timed in the same run, with its version.
    pub peer: String,
    /// The peer's median.
    pub peer_value: Option<f64>,
    /// Arithmetic or bandwidth limit.
    pub floor: Option<f64>,
    /// Accuracy measured in the same run: metric and value.
    pub error: String,
    /// GPU, driver and libraries; empty for a figure of the CPU.
    pub versions: String,
}

impl Row {
    fn to_csv(&self) -> String {
        let number = |v: Option<f64>| v.map(figure).unwrap_or_default();
        let text = |s: &str| s.replace([',', '\n'], ";");
        [
            self.name.to_owned(),
            figure(self.value),
            self.unit.to_owned(),
            text(&self.peer),
            number(self.peer_value),
            number(self.floor),
            text(&self.error),
            text(&format!("{} {}", self.place(), env!("CARGO_PKG_VERSION"))),
            machine::commit(),
            machine::date(),
        ]
        .join(",")
    }

    /// What it was measured on.
    fn place(&self) -> String {
        if self.versions.is_empty() { machine::processor() } else { self.versions.clone() }
    }

    /// One line for a person: name, value, and the ratio to the peer (value over peer).
    pub fn summary(&self) -> String {
        let mut line = format!("{:<36} {:>10} {}", self.name, figure(self.value), self.unit);
        if let Some(peer) = self.peer_value {
            line += &format!("   {} {} (ratio {:.3})", self.peer, figure(peer), self.value / peer);
        }
        if !self.error.is_empty() {
            line += &format!("   {}", self.error);
        }
        line
    }
}

/// Four significant digits.
fn figure(v: f64) -> String {
    let digits = if v == 0.0 { 0 } else { (3 - v.abs().log10().floor() as i32).clamp(0, 9) };
    format!("{v:.*}", digits as usize)
}

/// Takes a figure as soon as it is measured; a later one of the same name takes its place.
pub type Sink<'a> = dyn FnMut(Row) -> Result<()> + 'a;

/// Writes `row` into the csv at `path`, replacing the row of the same name and keeping the others. The file is replaced as
/// a whole, so an interruption leaves the old or the new one.
///
/// # Errors
/// If the file is not such a record, or cannot be written.
pub fn save(path: &Path, row: &Row) -> Result<()> {
    let old = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => HEADER.to_owned(),
        Err(e) => return Err(e).with_context(|| path.display().to_string()),
    };
    let mut lines = old.lines();
    ensure!(lines.next() == Some(HEADER), "{}: not a record of figures", path.display());
    let name = |line: &str| line.split(',').next().unwrap_or_default().to_owned();
    let mut all: BTreeMap<String, String> = lines.map(|line| (name(line), line.to_owned())).collect();
    all.insert(row.name.to_owned(), row.to_csv());
    let text: String =
        std::iter::once(HEADER).chain(all.values().map(String::as_str)).map(|l| format!("{l}\n")).collect();
    let new = path.with_extension("new");
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_row_replaces_older_and_others_stay() -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), format!("{HEADER}\nb,1,ms,,,,,,,\na,2,ms,,,,,,,\n"))?;
        save(file.path(), &Row { name: "a", value: 3.0, unit: "ms", ..Row::default() })?;
        let text = fs::read_to_string(file.path())?;
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].starts_with("a,3.000,ms,"), "{}", lines[1]);
        assert!(lines[2].starts_with("b,1,ms,"), "{}", lines[2]);
        Ok(())
    }

    #[test]
    fn rows_come_one_by_one_into_a_new_file() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("record.csv");
        for (name, value) in [("b", 1.0), ("a", 2.0), ("b", 3.0)] {
            save(&path, &Row { name, value, unit: "ms", ..Row::default() })?;
        }
        let text = fs::read_to_string(&path)?;
        let figures: Vec<_> = text.lines().skip(1).map(|line| line.split(",ms,").next().unwrap_or_default()).collect();
        assert_eq!(figures, ["a,2.000", "b,3.000"]);
        assert_eq!(fs::read_dir(folder.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn foreign_file_is_left_alone() -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), "something else\n")?;
        assert!(save(file.path(), &Row { name: "a", unit: "ms", ..Row::default() }).is_err());
        assert_eq!(fs::read_to_string(file.path())?, "something else\n");
        Ok(())
    }

    #[test]
    fn figures_have_four_digits() {
        assert_eq!(figure(128.123), "128.1");
        assert_eq!(figure(0.0123456), "0.01235");
        assert_eq!(figure(12345.6), "12346");
    }
}
