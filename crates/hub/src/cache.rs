//! Looking into the cache, without the network.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    digest::Digest,
    repo::{RepoId, is_hex, is_plain_path},
};

/// The cache of the hub.
#[derive(Debug, Clone, Copy)]
pub struct Cache<'a> {
    root: &'a Path,
}

/// The files of a model at one commit, as far as they have been downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Folder of the files.
    pub folder: PathBuf,
    /// The commit.
    pub commit: String,
}

impl<'a> Cache<'a> {
    /// The cache in `root`, the folder with a `models--OWNER--NAME` for each model.
    pub fn new(root: &'a Path) -> Self {
        Self { root }
    }

    /// What is there of `repo` at its revision: a commit that a branch or tag stands for, or the commit itself.
    pub fn snapshot(&self, repo: &RepoId) -> Option<Snapshot> {
        let folder = self.folder(repo);
        let commit = match fs::read_to_string(folder.join("refs").join(repo.revision())) {
            Ok(text) => text.trim().to_owned(),
            Err(_) => repo.revision().to_owned(),
        };
        // The contents of a file in the cache must not lead out of it.
        let folder = is_hex(&commit, 40).then(|| folder.join("snapshots").join(&commit))?;
        folder.is_dir().then_some(Snapshot { folder, commit })
    }

    /// Folder of a repository, there or not.
    pub(crate) fn folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }
}

impl Snapshot {
    /// A file of the snapshot, if it is there.
    pub fn file(&self, path: &str) -> Option<PathBuf> {
        let file = is_plain_path(path).then(|| self.folder.join(path))?;
        file.is_file().then_some(file)
    }
}

/// The digest that the cache promises for the contents of `path`: the name of the blob that it is a link to. None for
/// what is no link of a cache.
pub fn promised(path: &Path) -> Option<Digest> {
    let target = fs::read_link(path).ok()?;
    let in_blobs = target.parent()?.file_name()? == "blobs";
    in_blobs.then(|| Digest::of_blob(target.file_name()?.to_str()?))?
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn cache() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("models--a--b");
        fs::create_dir_all(folder.join("refs/pr")).unwrap();
        fs::write(folder.join("refs/main"), format!("{COMMIT}\n")).unwrap();
        fs::write(folder.join("refs/evil"), "../../../etc").unwrap();
        fs::create_dir_all(folder.join("snapshots").join(COMMIT).join("vae")).unwrap();
        fs::write(folder.join("snapshots").join(COMMIT).join("vae/config.json"), "{}").unwrap();
        root
    }

    fn snapshot(root: &tempfile::TempDir, repo: &str) -> Option<Snapshot> {
        Cache::new(root.path()).snapshot(&RepoId::parse(repo).unwrap())
    }

    #[test]
    fn revisions_lead_to_snapshots() {
        let root = cache();
        let main = snapshot(&root, "a/b").unwrap();
        assert_eq!(main.commit, COMMIT);
        assert_eq!(snapshot(&root, &format!("a/b@{COMMIT}")), Some(main.clone()));
        for repo in ["a/c", "a/b@v1", "a/b@evil", &format!("a/b@{}", COMMIT.replace('0', "1"))] {
            assert_eq!(snapshot(&root, repo), None, "{repo}");
        }
        assert!(main.file("vae/config.json").is_some());
        for path in ["vae", "none", "../../refs/main", "/etc/passwd"] {
            assert_eq!(main.file(path), None, "{path}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_of_the_cache_promise_their_contents() {
        let root = cache();
        let link = |target: &str| {
            let path = root.path().join("link");
            let _ = fs::remove_file(&path);
            std::os::unix::fs::symlink(target, &path).unwrap();
            promised(&path)
        };
        let digest = "ab".repeat(32);
        assert_eq!(link(&format!("../../blobs/{digest}")), Some(Digest::Sha256(digest.clone())));
        assert_eq!(link(&format!("../../other/{digest}")), None);
        assert_eq!(link("../../blobs/readme"), None);
        assert_eq!(promised(&root.path().join("models--a--b/refs/main")), None);
    }
}
