//! Pictures that are the frames of a video.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::{FrameSource, unreadable};
use crate::video::numbered::NumberedName;
use crate::{Error, ImageFormat, Result, Rgb8, decode_file};

/// Files, read one by one.
pub(super) struct Pictures {
    paths: std::vec::IntoIter<PathBuf>,
    len: u64,
}

impl Pictures {
    fn new(paths: Vec<PathBuf>) -> Self {
        Self { len: paths.len() as u64, paths: paths.into_iter() }
    }
}

impl FrameSource for Pictures {
    fn next(&mut self, _: u64) -> Result<Option<Rgb8>> {
        self.paths.next().map(decode_file).transpose()
    }

    fn len(&self) -> Option<u64> {
        Some(self.len)
    }
}

pub(super) fn single(path: &Path) -> Pictures {
    Pictures::new(vec![path.to_owned()])
}

/// The pictures that a name with a place for the number stands for; none if it has no such place.
pub(super) fn of_pattern(path: &Path) -> Option<Result<Pictures>> {
    let name = NumberedName::of_path(path).ok()?;
    Some(name.existing().and_then(|numbers| {
        check_numbers(path, &numbers)?;
        Ok(Pictures::new(numbers.into_iter().map(|number| name.path(number)).collect()))
    }))
}

/// The pictures of a folder, in the order of the last number in their names. Other files are passed over.
pub(super) fn of_folder(folder: &Path) -> Result<Pictures> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|source| unreadable(folder, source))? {
        let name = entry.map_err(|source| unreadable(folder, source))?.file_name();
        let hidden = name.as_encoded_bytes().starts_with(b".");
        if !hidden && ImageFormat::from_path(&name).is_ok() {
            names.push(name);
        }
    }
    // The same message on every machine.
    names.sort_unstable();
    let Some(first) = names.first().map(Series::of_name) else {
        return Err(Error::NoPictures { path: folder.to_owned() });
    };
    if let Some(other) = names.iter().find(|name| !Series::of_name(name).is_like(&first)) {
        let (first, other) = (PathBuf::from(&names[0]), PathBuf::from(other));
        return Err(Error::MixedSeries { path: folder.to_owned(), first, other });
    }
    let numbered = names.iter().filter_map(|name| Some((Series::of_name(name).number?, folder.join(name))));
    let mut pictures: Vec<_> = numbered.collect();
    pictures.sort_unstable();
    let (numbers, paths): (Vec<_>, Vec<_>) = pictures.into_iter().unzip();
    check_numbers(folder, &numbers)?;
    Ok(Pictures::new(paths))
}

/// What the names of the frames of one video have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Series {
    before: String,
    number: Option<u64>,
    after: String,
}

impl Series {
    fn of_name(file: &OsString) -> Self {
        let name = file.to_string_lossy();
        let stem_len = name.rfind('.').unwrap_or(name.len());
        let is_digit = |c: char| c.is_ascii_digit();
        let end = name[..stem_len].rfind(is_digit).map_or(stem_len, |last| last + 1);
        let start = name[..end].trim_end_matches(is_digit).len();
        let number = name[start..end].parse().ok();
        Self { before: name[..start].to_owned(), number, after: name[end..].to_owned() }
    }

    fn is_like(&self, other: &Self) -> bool {
        (&self.before, self.number.is_some(), &self.after) == (&other.before, other.number.is_some(), &other.after)
    }
}

/// Every number once, without gaps: a lost frame would shift the rest.
fn check_numbers(path: &Path, sorted: &[u64]) -> Result<()> {
    if sorted.is_empty() {
        return Err(Error::NoPictures { path: path.to_owned() });
    }
    match sorted.windows(2).find(|pair| pair[0].checked_add(1) != Some(pair[1])) {
        Some(pair) => Err(Error::Numbering { path: path.to_owned(), before: pair[0], after: pair[1] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_of_a_name_counts() {
        for (name, before, number, after) in [
            ("frame-00012.png", "frame-", Some(12), ".png"),
            ("seed42_7.jpg", "seed42_", Some(7), ".jpg"),
            ("7.png", "", Some(7), ".png"),
            ("a1b.png", "a", Some(1), "b.png"),
            ("cover.png", "cover", None, ".png"),
            ("99999999999999999999.png", "", None, ".png"),
        ] {
            let series = Series::of_name(&OsString::from(name));
            assert_eq!(
                (series.before.as_str(), series.number, series.after.as_str()),
                (before, number, after),
                "{name}"
            );
        }
    }
}
