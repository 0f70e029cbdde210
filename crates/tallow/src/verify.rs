//! `tallow verify`: are the files what they should be.
//!
//! A changed bit in a checkpoint seldom shows as anything but a worse picture, so contents are compared with checksums:
//! those of a list, or those by which the hub's cache names its blobs.

mod files;
mod manifest;

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use hub::{RepoId, digest::sha256};
use policy::{Event, Observer};

use self::manifest::Manifest;
use crate::{
    cli::VerifyArgs, failure::Failure, failure::one_line, interrupt, model::hub_settings, progress::Progress, terminal,
};

/// Most files that the final message names.
const NAMED: usize = 10;

/// A file with the checksum that it should have, if one is known.
#[derive(Debug, PartialEq, Eq)]
struct Check {
    path: PathBuf,
    /// For messages: relative to what was asked about.
    name: String,
    expected: Option<String>,
}

/// Compares the files and prints a line for each.
///
/// # Errors
/// If a file differs or is missing, if no checksum is known, if something cannot be read; an interruption.
pub(crate) fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let path = place(&args.path)?;
    let checks = checks(&path, args.manifest.as_deref())?;
    if checks.iter().all(|check| check.expected.is_none()) {
        return Err(anyhow!(
            "nothing to compare {} with: there is no {} beside it, and it is no file of the hub's cache with a sha256; \
             give a list of checksums with --manifest",
            path.display(),
            manifest::STANDARD
        )
        .into());
    }
    let stop = interrupt::install(args.quiet)?;
    let total = checks.iter().filter(|check| check.expected.is_some()).count();
    let progress = Progress::new(stop, total, args.quiet);
    let mut bad = Vec::new();
    let mut item = 0;
    for check in &checks {
        let name = one_line(&check.name);
        let Some(expected) = &check.expected else {
            say(args, &progress, &format!("unchecked {name}"))?;
            continue;
        };
        item += 1;
        progress.begin_item(item);
        progress.notify(Event::Stage { name: "verify" }).map_err(|_| Failure::Interrupted)?;
        match sha256(&check.path, &progress) {
            Ok(found) if found == *expected => say(args, &progress, &format!("ok {name}"))?,
            Ok(found) => {
                say(args, &progress, &format!("BAD {name}"))?;
                bad.push(format!("{name} has sha256 {found}, expected {expected}"));
            }
            Err(hub::Error::Cancelled(_)) => return Err(Failure::Interrupted),
            Err(error) => {
                say(args, &progress, &format!("BAD {name}"))?;
                bad.push(format!("{:#}", anyhow::Error::from(error)));
            }
        }
    }
    progress.clear();
    report(&bad, total)
}

fn say(args: &VerifyArgs, progress: &Progress, line: &str) -> anyhow::Result<()> {
    if args.quiet {
        return Ok(());
    }
    progress.clear();
    terminal::stdout(&format!("{line}\n"))
}

fn report(bad: &[String], total: usize) -> Result<(), Failure> {
    if bad.is_empty() {
        return Ok(());
    }
    let more = bad.len().saturating_sub(NAMED);
    let more = if more == 0 { String::new() } else { format!("; and {more} more") };
    let named = bad.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    let files = if total == 1 { "file is" } else { "files are" };
    Err(anyhow!("{} of {total} {files} not what they should be: {named}{more}", bad.len()).into())
}

/// What was asked about: a path, or the files of a model in the hub's cache.
fn place(path: &Path) -> anyhow::Result<PathBuf> {
    let repo = path.to_str().filter(|_| !path.exists()).and_then(|text| RepoId::parse(text).ok());
    let Some(repo) = repo else { return Ok(path.to_owned()) };
    let settings = hub_settings()?;
    let snapshot = hub::Cache::new(&settings.cache).snapshot(&repo);
    let snapshot = snapshot.with_context(|| format!("{repo} is neither a path nor in the hub's cache"))?;
    Ok(snapshot.folder)
}

/// Every file, with what is known of it.
fn checks(path: &Path, manifest: Option<&Path>) -> anyhow::Result<Vec<Check>> {
    let is_file = path.metadata().with_context(|| format!("cannot open {}", path.display()))?.is_file();
    let folder = if is_file { path.parent().unwrap_or(Path::new("")) } else { path };
    let beside = folder.join(manifest::STANDARD);
    let list = manifest.or_else(|| beside.is_file().then_some(beside.as_path()));
    let Some(list) = list else { return Ok(files::of_cache(path)) };
    let list = Manifest::read(list)?;
    if !is_file {
        return Ok(list.checks());
    }
    match list.of(path) {
        Some(expected) => {
            Ok(vec![Check { path: path.to_owned(), name: path.display().to_string(), expected: Some(expected) }])
        }
        None => bail!("{} does not list {}", list.name(), path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_report_is_cut() {
        assert!(report(&[], 3).is_ok());
        let bad: Vec<String> = (0..12).map(|n| format!("file {n}")).collect();
        let text = report(&bad, 20).unwrap_err().to_string();
        assert!(text.starts_with("12 of 20 files are not") && text.ends_with("file 9; and 2 more"), "{text}");
    }
}
