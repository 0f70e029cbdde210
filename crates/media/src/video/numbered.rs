//! File names with a place for the number of a frame.

use std::fs;
use std::path::{Path, PathBuf};

use crate::output::folder_of;
use crate::{Error, Result};

/// A file name with one `%d`, or one `%05d` that pads with zeros to five digits (`%01d` to `%099d`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NumberedName {
    folder: PathBuf,
    before: String,
    digits: usize,
    after: String,
}

impl NumberedName {
    /// # Errors
    /// [`Error::NumberPlace`] if the last part of `path` has no pattern, or several.
    pub(super) fn of_path(path: &Path) -> Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str());
        let places: Vec<_> = name.map(|name| places(name).collect()).unwrap_or_default();
        match (name, places.as_slice()) {
            (Some(name), &[(start, digits, end)]) => Ok(Self {
                folder: folder_of(path).to_owned(),
                before: name[..start].to_owned(),
                digits,
                after: name[end..].to_owned(),
            }),
            _ => Err(Error::NumberPlace { path: path.to_owned() }),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The name of frame `number`, without the folder.
    pub(super) fn name(&self, number: u64) -> String {
        format!("{}{number:0width$}{}", self.before, self.after, width = self.digits)
    }

    /// The path of frame `number`.
    pub(super) fn path(&self, number: u64) -> PathBuf {
        self.folder.join(self.name(number))
    }

    /// The number of the frame of this name.
    fn number(&self, name: &str) -> Option<u64> {
        let digits = name.strip_prefix(&self.before)?.strip_suffix(&self.after)?;
        let number = digits.parse().ok()?;
        // Not `+1`, nor other padding.
        (self.name(number) == name).then_some(number)
    }

    /// The numbers of the files that exist, in order.
    ///
    /// # Errors
    /// [`Error::Read`] if the folder cannot be listed.
    pub(super) fn existing(&self) -> Result<Vec<u64>> {
        let unreadable = |source| Error::Read { path: self.folder.clone(), source };
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(unreadable)? {
            numbers.extend(entry.map_err(unreadable)?.file_name().to_str().and_then(|name| self.number(name)));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }
}

/// Start, number of digits and end of each pattern in `name`.
fn places(name: &str) -> impl Iterator<Item = (usize, usize, usize)> {
    name.match_indices('%').filter_map(|(start, _)| {
        let rest = &name[start + 1..];
        let (digits, len) = match rest.split_once('d')?.0 {
            "" => (0, 0),
            text => {
                let width = text.strip_prefix('0')?;
                let plausible = (1..=2).contains(&width.len()) && width.bytes().all(|byte| byte.is_ascii_digit());
                (plausible.then(|| width.parse().ok()).flatten()?, text.len())
            }
        };
        Some((start, digits, start + 1 + len + 1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str) -> NumberedName {
        NumberedName::of_path(Path::new(path)).unwrap()
    }

    #[test]
    fn numbers_go_where_the_pattern_stands() {
        for (path, number, name) in [
            ("a/frame-%05d.png", 7, "frame-00007.png"),
            ("%d.png", 7, "7.png"),
            ("%03d.png", 12_345, "12345.png"),
            ("100%-%d.png", 1, "100%-1.png"),
            ("a%x%02db.png", 3, "a%x03b.png"),
        ] {
            assert_eq!(of(path).name(number), name, "{path}");
            assert_eq!(of(path).number(name), Some(number), "{path}");
        }
        assert_eq!(of("a/%d.png").path(2), Path::new("a/2.png"));
        assert_eq!(of("%d.png").folder(), Path::new("."));
    }

    #[test]
    fn names_of_other_series_do_not_count() {
        for name in ["frame-1.png", "frame-00001.jpg", "frame-+0001.png", "frame-000001.png", "frame-.png", "x.png", ""]
        {
            assert_eq!(of("frame-%05d.png").number(name), None, "{name}");
        }
        assert_eq!(of("%d.png").number("18446744073709551616.png"), None);
        // Prefix and suffix must not share characters.
        assert_eq!(of("11%d11").number("111"), None);
    }
}
