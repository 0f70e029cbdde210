//! Files of the hub's cache, which carry their checksums in their names.

use std::{
    fs,
    path::{Path, PathBuf},
};

use hub::{Digest, cache::promised};

use super::Check;

/// Folders in folders that are looked into; models have two.
const DEPTH: usize = 8;

/// The file, or every file of the folder in the order of their names, each with its sha256 if the cache has one.
pub(super) fn of_cache(path: &Path) -> Vec<Check> {
    let mut found = Vec::new();
    if path.is_file() {
        found.push(path.to_owned());
    } else {
        collect(path, DEPTH, &mut found);
    }
    let check = |file: PathBuf| {
        let expected = match promised(&file) {
            Some(Digest::Sha256(digest)) => Some(digest),
            _ => None,
        };
        let name = file.strip_prefix(path).ok().filter(|name| name.components().next().is_some());
        let name = name.unwrap_or(&file).display().to_string();
        Check { path: file, name, expected }
    };
    found.into_iter().map(check).collect()
}

/// Folders that are links are left out: they could lead in circles.
fn collect(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries {
        if path.is_file() || path.is_symlink() && !path.is_dir() {
            found.push(path);
        } else if depth > 0 && path.is_dir() && !path.is_symlink() {
            collect(&path, depth - 1, found);
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_to_blobs_have_checksums_and_other_files_have_none() {
        let root = tempfile::tempdir().unwrap();
        let snapshot = root.path().join("snapshots/c");
        fs::create_dir_all(snapshot.join("vae")).unwrap();
        fs::create_dir(root.path().join("blobs")).unwrap();
        let (large, small) = ("a".repeat(64), "b".repeat(40));
        for blob in [&large, &small] {
            fs::write(root.path().join("blobs").join(blob), "x").unwrap();
        }
        symlink(format!("../../../blobs/{large}"), snapshot.join("vae/w.safetensors")).unwrap();
        symlink(format!("../../blobs/{small}"), snapshot.join("config.json")).unwrap();
        symlink(".", snapshot.join("circle")).unwrap();
        fs::write(snapshot.join("notes"), "x").unwrap();
        // A link whose blob is gone is found missing later.
        symlink(format!("../../blobs/{}", "c".repeat(64)), snapshot.join("gone")).unwrap();
        let found: Vec<_> = of_cache(&snapshot).into_iter().map(|check| (check.name, check.expected)).collect();
        let expected = [
            ("config.json", None),
            ("gone", Some("c".repeat(64))),
            ("notes", None),
            ("vae/w.safetensors", Some(large)),
        ];
        assert_eq!(found, expected.map(|(name, digest)| (name.to_owned(), digest)));
    }
}
