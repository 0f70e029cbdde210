//! Where the files of a run go: names, and the check that they can be written.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use media::OutputFile;

/// Tries a place that a file will go to. Nothing stays there until the file is finished.
///
/// # Errors
/// Those of [`OutputFile::create`].
pub(crate) fn check_place(file: &Path) -> anyhow::Result<()> {
    // Opening a pipe or a device has effects of its own: a reader would see an empty file.
    let special = fs::metadata(file).is_ok_and(|found| !found.is_file() && !found.is_dir());
    if !special {
        OutputFile::create(file)?;
    }
    Ok(())
}

/// The files of a run of `batch` pictures.
///
/// `%d` and `%0Nd` in the file's name become the number of the picture, counted from 1; without them, and with more than
/// one picture, `-1`, `-2`... goes between the stem and the extension.
pub(crate) fn files(template: &Path, batch: usize) -> Vec<PathBuf> {
    (1..=batch).map(|number| file(template, number, batch)).collect()
}

fn file(template: &Path, number: usize, batch: usize) -> PathBuf {
    let numbered = template.file_name().and_then(|name| name.to_str()).and_then(|name| substitute(name, number));
    if let Some(name) = numbered {
        return template.with_file_name(name);
    }
    if batch == 1 {
        return template.to_owned();
    }
    let mut name = OsString::from(template.file_stem().unwrap_or_default());
    name.push(format!("-{number}"));
    if let Some(extension) = template.extension() {
        name.push(".");
        name.push(extension);
    }
    template.with_file_name(name)
}

/// `name` with each `%d` and `%0Nd` replaced; none if it has no such pattern.
fn substitute(name: &str, number: usize) -> Option<String> {
    let mut out = String::with_capacity(name.len());
    let mut rest = name;
    let mut found = false;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        if let Some((width, after)) = number_pattern(after) {
            out.push_str(&format!("{number:0width$}"));
            rest = after;
            found = true;
        } else {
            out.push('%');
            rest = after;
        }
    }
    out.push_str(rest);
    found.then_some(out)
}

/// Width of the pattern whose `%` came just before `text`, and what follows the pattern.
fn number_pattern(text: &str) -> Option<(usize, &str)> {
    if let Some(after) = text.strip_prefix('d') {
        return Some((0, after));
    }
    let (digits, after) = text.strip_prefix('0')?.split_once('d')?;
    let plausible = (1..=2).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    plausible.then(|| digits.parse().ok()).flatten().map(|width| (width, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(template: &str, batch: usize) -> Vec<String> {
        files(Path::new(template), batch).iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn one_picture_keeps_its_name() {
        assert_eq!(names("dir/a.png", 1), ["dir/a.png"]);
        assert_eq!(names("100%.png", 1), ["100%.png"]);
    }

    #[test]
    fn a_batch_is_numbered_from_one() {
        assert_eq!(names("dir/a.b.png", 2), ["dir/a.b-1.png", "dir/a.b-2.png"]);
        assert_eq!(names("dir.d/%03d.png", 2), ["dir.d/001.png", "dir.d/002.png"]);
        assert_eq!(names("%d-of-%02d.png", 1), ["1-of-01.png"]);
        assert_eq!(names("100%-%d.png", 1), ["100%-1.png"]);
    }

    #[test]
    fn other_percent_signs_stay() {
        assert_eq!(names("%x%0d%1d%%.png", 2), ["%x%0d%1d%%-1.png", "%x%0d%1d%%-2.png"]);
        // A pattern in a folder's name is not the file's.
        assert_eq!(names("%d/a.png", 1), ["%d/a.png"]);
    }
}
