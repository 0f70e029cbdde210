//! Lists of checksums as `sha256sum` writes them.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};

use super::Check;

/// The usual name of a list.
pub(super) const STANDARD: &str = "SHA256SUMS";

/// Largest list that is read.
const MAX_BYTES: u64 = 16 << 20;

/// A list of checksums; its paths start from its folder.
#[derive(Debug)]
pub(super) struct Manifest {
    path: PathBuf,
    /// Path as listed, and sha256 in lower case.
    entries: Vec<(String, String)>,
}

impl Manifest {
    /// Reads a list.
    ///
    /// # Errors
    /// If it cannot be read, or a line is no checksum with a path that stays inside the list's folder.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {name}"))?;
        ensure!(bytes.len() as u64 <= MAX_BYTES, "{name} is larger than {MAX_BYTES} bytes, no list of checksums");
        let text = String::from_utf8(bytes).ok().with_context(|| format!("{name} is not UTF-8"))?;
        let mut entries = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = entry(line).with_context(|| {
                format!(
                    "line {} of {name} is no sha256 of 64 digits, two spaces and a path inside the folder",
                    index + 1
                )
            })?;
            entries.push(entry);
        }
        Ok(Self { path: path.to_owned(), entries })
    }

    /// Its path, for messages.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The files that it lists.
    pub(super) fn checks(&self) -> Vec<Check> {
        let check = |(name, digest): &(String, String)| Check {
            path: self.folder().join(name),
            name: name.clone(),
            expected: Some(digest.clone()),
        };
        self.entries.iter().map(check).collect()
    }

    /// The checksum of a file.
    pub(super) fn of(&self, file: &Path) -> Option<String> {
        // The same file may be spelled in several ways.
        let same = |name: &str| match (self.folder().join(name).canonicalize(), file.canonicalize()) {
            (Ok(listed), Ok(file)) => listed == file,
            _ => false,
        };
        self.entries.iter().find(|(name, _)| same(name)).map(|(_, digest)| digest.clone())
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }
}

/// `DIGEST  PATH`, or `DIGEST *PATH` for a file that was read as binary.
fn entry(line: &str) -> Option<(String, String)> {
    let (digest, name) = line.split_at_checked(64)?;
    let name = name.strip_prefix("  ").or_else(|| name.strip_prefix(" *"))?;
    let name = name.strip_prefix("./").unwrap_or(name);
    let hex = digest.bytes().all(|b| b.is_ascii_hexdigit());
    (hex && hub::repo::is_plain_path(name)).then(|| (name.to_owned(), digest.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lists_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        let (a, b) = ("0".repeat(64), "AB".repeat(32));
        fs::write(&path, format!("# made today\n\n{a}  x.safetensors\r\n{b} *./sub/y z.gguf\n")).unwrap();
        let list = Manifest::read(&path).unwrap();
        let y = ("sub/y z.gguf".to_owned(), b.to_lowercase());
        assert_eq!(list.entries, [("x.safetensors".to_owned(), a.clone()), y]);
        assert_eq!(list.checks()[0].path, folder.path().join("x.safetensors"));
        fs::write(folder.path().join("x.safetensors"), "").unwrap();
        assert_eq!(list.of(&folder.path().join("./x.safetensors")), Some(a));
        assert_eq!(list.of(&path), None);
    }

    #[test]
    fn bad_lines_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        let digest = "0".repeat(64);
        for line in [
            format!("{digest} x"),
            format!("{digest}  ../x"),
            format!("{digest}  /etc/passwd"),
            format!("{}  x", &digest[1..]),
            format!("g{}  x", &digest[1..]),
            format!("{digest}  "),
            "é".repeat(50),
        ] {
            fs::write(&path, format!("{digest}  good\n{line}\n")).unwrap();
            let text = Manifest::read(&path).unwrap_err().to_string();
            assert!(text.contains("line 2 of"), "{line}: {text}");
        }
    }
}
