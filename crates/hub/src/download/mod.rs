//! Bringing what the cache lacks from the hub.

mod blob;
mod client;
use std::{fs, io, path::Path};

use policy::{Event, Observer};

use self::{
    blob::Blob,
    client::{Client, Listing, RepoFile},
};
use crate::{
    cache::{Cache, Snapshot},
    digest::mebibytes,
    error::{Error, Result},
    fetch::Want,
    repo::RepoId,
    select::{MODEL_INDEX, components, needed},
    settings::Settings,
};

/// Makes the snapshot of the newest commit hold what is wanted.
pub(crate) fn fetch(repo: &RepoId, want: Want<'_>, settings: &Settings, observer: &dyn Observer) -> Result<Snapshot> {
    let client = Client::new(settings);
    let listing = client.list(repo)?;
    let run =
        Run { client: &client, repo, listing: &listing, folder: &Cache::new(&settings.cache).folder(repo), observer };
    let wanted = match want {
        Want::File(file) => vec![run.find(file)?],
        Want::Model { without } => run.of_model(without)?,
    };
    run.get(&wanted)?;
    run.remember()?;
    Ok(Snapshot { folder: run.snapshot(), commit: listing.commit.clone() })
}

/// One download.
struct Run<'a> {
    client: &'a Client<'a>,
    repo: &'a RepoId,
    listing: &'a Listing,
    /// Folder of the repository in the cache.
    folder: &'a Path,
    observer: &'a dyn Observer,
}

impl<'a> Run<'a> {
    fn find(&self, file: &str) -> Result<&'a RepoFile> {
        let files = &self.listing.files;
        files.iter().find(|f| f.path == file).ok_or_else(|| Error::NoSuchFile {
            repo: self.repo.to_string(),
            file: file.to_owned(),
            found: list(files.iter().map(|f| f.path.as_str())),
        })
    }

    /// The files that the model needs, after its index has come.
    fn of_model(&self, without: &[&str]) -> Result<Vec<&'a RepoFile>> {
        self.get(&[self.find(MODEL_INDEX)?])?;
        let index = self.snapshot().join(MODEL_INDEX);
        let text = fs::read_to_string(&index).map_err(|e| Error::io("read", &index, e))?;
        let index = serde_json::from_str(&text)
            .map_err(|e| Error::Answer { url: format!("{}/{MODEL_INDEX}", self.repo), problem: e.to_string() })?;
        let paths: Vec<&str> = self.listing.files.iter().map(|f| f.path.as_str()).collect();
        let needed = needed(&paths, &components(&index));
        let elsewhere = |path: &str| {
            let component = path.split_once('/').map_or("", |(component, _)| component);
            without.contains(&component) && !path.ends_with("config.json")
        };
        needed.into_iter().filter(|path| !elsewhere(path)).map(|path| self.find(path)).collect()
    }

    fn snapshot(&self) -> std::path::PathBuf {
        self.folder.join("snapshots").join(&self.listing.commit)
    }

    /// Brings files into the snapshot.
    fn get(&self, files: &[&RepoFile]) -> Result<()> {
        let total: u64 = files.iter().map(|file| file.size).sum();
        let mut before = 0;
        for file in files {
            let progress = |done: u64| {
                let (done, total) = (mebibytes(before + done), mebibytes(total));
                self.observer.notify(Event::Progress { done, total })
            };
            let blob = Blob { folder: self.folder, file };
            blob.fill(&progress, |from| self.client.open(self.repo, &self.listing.commit, file, from))?;
            link(&blob.path(), &self.snapshot().join(&file.path), file)?;
            before += file.size;
        }
        Ok(())
    }

    /// Notes which commit the branch or tag stands for, so that it is found again offline.
    fn remember(&self) -> Result<()> {
        if self.repo.revision() == self.listing.commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(self.repo.revision());
        let parent = path.parent().unwrap_or(self.folder);
        fs::create_dir_all(parent).map_err(|e| Error::io("make", parent, e))?;
        fs::write(&path, &self.listing.commit).map_err(|e| Error::io("write", &path, e))
    }
}

/// Makes `at` lead to `blob`: a relative link, so that the cache can be moved; a copy where there are no links.
fn link(blob: &Path, at: &Path, file: &RepoFile) -> Result<()> {
    if at.exists() {
        return Ok(());
    }
    let parent = at.parent().unwrap_or(at);
    fs::create_dir_all(parent).map_err(|e| Error::io("make", parent, e))?;
    // From snapshots/COMMIT and the folders of the file's path up to the repository.
    let up = "../".repeat(2 + file.path.matches('/').count());
    let target = format!("{up}blobs/{}", file.digest.name());
    match symlink(&target, at) {
        Ok(()) => Ok(()),
        // Another program was quicker.
        Err(_) if at.exists() => Ok(()),
        Err(_) => fs::copy(blob, at).map(drop).map_err(|e| Error::io("write", at, e)),
    }
}

#[cfg(unix)]
fn symlink(target: &str, at: &Path) -> io::Result<()> {
    if at.is_symlink() {
        // It leads nowhere: its blob was removed.
        fs::remove_file(at)?;
    }
    std::os::unix::fs::symlink(target, at)
}

#[cfg(not(unix))]
fn symlink(_: &str, _: &Path) -> io::Result<()> {
    // Links need special rights on Windows.
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// Names of a listing in a message: the first ten.
fn list<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 10;
    let more = names.len().saturating_sub(SHOWN);
    let shown: Vec<&str> = names.take(SHOWN).collect();
    match (shown.is_empty(), more) {
        (true, _) => "nothing".to_owned(),
        (false, 0) => shown.join(", "),
        (false, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut() {
        let names: Vec<String> = (0..12).map(|n| n.to_string()).collect();
        assert!(list(names.iter().map(String::as_str)).ends_with("8, 9 and 2 more"));
        assert_eq!(list([].into_iter()), "nothing");
    }
}
