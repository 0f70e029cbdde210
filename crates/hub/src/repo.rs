//! Names of repositories and of files in them.

use std::fmt;

use crate::error::{Error, Result};

/// The branch that counts where none is named.
const MAIN: &str = "main";
/// Longest part of a name; the hub allows 96 characters for both together.
const MAX_NAME: usize = 96;

/// A model repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RepoId {
    owner: String,
    name: String,
    revision: String,
}

impl RepoId {
    /// From `owner/name` or `owner/name@revision`.
    ///
    /// # Errors
    /// [`Error::BadRepo`].
    pub fn parse(text: &str) -> Result<Self> {
        Self::read(text).ok_or_else(|| Error::BadRepo { text: text.escape_debug().take(MAX_NAME).collect() })
    }

    /// From `owner/name/path/of/file` or `owner/name@revision/path/of/file`: the repository and the file in it.
    ///
    /// # Errors
    /// [`Error::BadRepo`].
    pub fn parse_with_file(text: &str) -> Result<(Self, String)> {
        let bad = || Error::BadRepo { text: text.escape_debug().take(MAX_NAME).collect() };
        let (owner, rest) = text.split_once('/').ok_or_else(bad)?;
        let (name, file) = rest.split_once('/').ok_or_else(bad)?;
        let repo = Self::read(&format!("{owner}/{name}")).ok_or_else(bad)?;
        if !is_plain_path(file) {
            return Err(bad());
        }
        Ok((repo, file.to_owned()))
    }

    fn read(text: &str) -> Option<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let (owner, name) = name.split_once('/')?;
        let fits = is_name(owner) && is_name(name) && is_revision(revision);
        fits.then(|| Self { owner: owner.to_owned(), name: name.to_owned(), revision: revision.to_owned() })
    }

    /// Owner.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Name, without the owner.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// `owner/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// Name of its folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }
}

/// `owner/name`, and the revision unless it is the default one.
impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        if self.revision == MAIN { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// What the hub allows as the name of an owner or a model; nothing that means something in a path.
fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=MAX_NAME).contains(&text.len())
        && text.chars().all(plain)
        && !text.contains("--")
        && !text.contains("..")
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
}

fn is_revision(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    text.len() <= 2 * MAX_NAME && text.chars().all(plain) && is_plain_path(text)
}

/// Whether `path` leads to a place below the folder that it starts from, on every system.
pub fn is_plain_path(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', ':'])
        && !path.chars().any(char::is_control)
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// Whether this is the full name of a commit, a git object or a sha256 digest of `digits` hexadecimal digits.
pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_told_from_other_text() {
        let repo = RepoId::parse("black-forest-labs/FLUX.2-klein-4B").unwrap();
        assert_eq!((repo.owner(), repo.name(), repo.revision()), ("black-forest-labs", "FLUX.2-klein-4B", "main"));
        assert_eq!(repo.folder(), "models--black-forest-labs--FLUX.2-klein-4B");
        assert_eq!(repo.to_string(), "black-forest-labs/FLUX.2-klein-4B");
        assert_eq!(RepoId::parse("a/b@refs/pr/1").unwrap().to_string(), "a/b@refs/pr/1");
        for bad in [
            "", "a", "/b", "a/", "a/b/c", "./b", "../b", "a/..", "a/b@", "a/b@../c", "a b/c", "a/b\n", "C:\\a/b",
            "~/b", "a--b/c", "a/b@/x", "-a/b", "é/b",
        ] {
            assert!(matches!(RepoId::parse(bad), Err(Error::BadRepo { .. })), "{bad:?}");
        }
        assert!(RepoId::parse("a\nb/c").unwrap_err().to_string().lines().count() == 1);
    }

    #[test]
    fn a_file_of_a_repository_can_be_named() {
        let (repo, file) = RepoId::parse_with_file("a/b@v1/sub/x.gguf").unwrap();
        assert_eq!((repo.to_string().as_str(), file.as_str()), ("a/b@v1", "sub/x.gguf"));
        for bad in ["a/b", "a/b/", "a/b/../c", "a/b//c", "x", "a/b/c\\d"] {
            assert!(RepoId::parse_with_file(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn paths_that_leave_their_folder_are_refused() {
        assert!(is_plain_path("a") && is_plain_path("a/b.c/d-1"));
        for bad in ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "c:d", "a\0b"] {
            assert!(!is_plain_path(bad), "{bad:?}");
        }
    }
}
