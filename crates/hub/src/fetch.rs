//! From the name of a model to the folder of its files.

use std::path::{Path, PathBuf};

#[cfg(feature = "download")]
use policy::Event;
use policy::Observer;

use crate::{
    cache::{Cache, Snapshot},
    error::{Error, Result},
    repo::RepoId,
    select::MODEL_INDEX,
    settings::Settings,
};

/// What is wanted of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want<'a> {
    /// A model in the diffusers layout; some of its components may come from elsewhere.
    Model {
        /// Components whose weights are not needed; their configuration files are.
        without: &'a [&'a str],
    },
    /// One file.
    File(&'a str),
}

/// Where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The folder of the model, or the file.
    pub path: PathBuf,
    /// The commit that it is of.
    pub commit: String,
    /// Why the hub could not be asked whether there is a newer one, if so.
    pub notice: Option<String>,
}

/// Finds what is wanted of `repo`. With feature `download` and unless [`Settings::offline`] the hub is asked for the
/// newest commit of the revision, and what the cache lacks is downloaded; a hub that cannot be reached is no failure if
/// the cache holds what is wanted.
///
/// The observer hears the stage `download` and its progress in MiB. A download that is stopped or breaks off goes on from
/// there at the next call; contents are compared with the hub's sizes and sha256 checksums.
///
/// # Errors
/// [`Error::NotCached`] if the cache lacks it and the hub is not asked; [`Error::Gated`], [`Error::NoSuchRepo`],
/// [`Error::NoSuchRevision`], [`Error::NoSuchFile`], [`Error::BadToken`], [`Error::Status`], [`Error::Answer`],
/// [`Error::Transport`] from the hub; [`Error::Damaged`], [`Error::Io`], [`Error::Cancelled`].
pub fn fetch(repo: &RepoId, want: Want<'_>, settings: &Settings, observer: &dyn Observer) -> Result<Fetched> {
    let cached = || cached(repo, want, &settings.cache);
    if settings.offline {
        return cached().ok_or_else(|| missing(repo, want, settings, "HF_HUB_OFFLINE forbids to download it"));
    }
    online(repo, want, settings, observer, cached)
}

#[cfg(feature = "download")]
fn online(
    repo: &RepoId,
    want: Want<'_>,
    settings: &Settings,
    observer: &dyn Observer,
    cached: impl Fn() -> Option<Fetched>,
) -> Result<Fetched> {
    observer.notify(Event::Stage { name: "download" })?;
    match crate::download::fetch(repo, want, settings, observer) {
        Ok(Snapshot { folder, commit }) => Ok(Fetched { path: place(want, &folder), commit, notice: None }),
        // Not reached: neither the hub nor its files have been seen, so the cache is as good as it was before.
        Err(error @ Error::Transport { .. }) => match cached() {
            Some(found) => {
                tracing::warn!(%error, %repo, "the hub cannot be reached, the cache is used");
                Ok(Fetched { notice: Some(error.to_string()), ..found })
            }
            None => Err(error),
        },
        Err(error) => Err(error),
    }
}

#[cfg(not(feature = "download"))]
fn online(
    repo: &RepoId,
    want: Want<'_>,
    settings: &Settings,
    _observer: &dyn Observer,
    cached: impl Fn() -> Option<Fetched>,
) -> Result<Fetched> {
    cached().ok_or_else(|| {
        missing(repo, want, settings, "this program was built without downloading: `hf download` fills the cache")
    })
}

/// What is wanted, as the cache holds it.
fn cached(repo: &RepoId, want: Want<'_>, cache: &Path) -> Option<Fetched> {
    let Snapshot { folder, commit } = Cache::new(cache).snapshot(repo)?;
    let file = match want {
        Want::Model { .. } => MODEL_INDEX,
        Want::File(file) => file,
    };
    Snapshot { folder: folder.clone(), commit: commit.clone() }.file(file)?;
    Some(Fetched { path: place(want, &folder), commit, notice: None })
}

fn place(want: Want<'_>, folder: &Path) -> PathBuf {
    match want {
        Want::Model { .. } => folder.to_owned(),
        Want::File(file) => folder.join(file),
    }
}

fn missing(repo: &RepoId, want: Want<'_>, settings: &Settings, advice: &str) -> Error {
    let what = match want {
        Want::Model { .. } => "the model".to_owned(),
        Want::File(file) => format!("the file {file}"),
    };
    Error::NotCached {
        what,
        repo: repo.to_string(),
        cache: settings.cache.display().to_string(),
        advice: advice.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use policy::Silent;

    use super::*;

    #[test]
    fn offline_finds_what_the_cache_holds_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let commit = "c".repeat(40);
        let folder = root.path().join("models--a--b/snapshots").join(&commit);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("x.gguf"), "").unwrap();
        let settings = Settings {
            cache: root.path().to_owned(),
            endpoint: "http://localhost:1".to_owned(),
            token: None,
            offline: true,
        };
        let repo = RepoId::parse(&format!("a/b@{commit}")).unwrap();
        let find = |want| fetch(&repo, want, &settings, &Silent);
        let file = find(Want::File("x.gguf")).unwrap();
        assert_eq!((file.path, file.commit, file.notice), (folder.join("x.gguf"), commit.clone(), None));
        for want in [Want::File("y.gguf"), Want::File("../x.gguf"), Want::Model { without: &[] }] {
            let error = find(want).unwrap_err();
            assert!(matches!(error, Error::NotCached { .. }), "{error}");
            assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
        }
        fs::write(folder.join(MODEL_INDEX), "{}").unwrap();
        assert_eq!(find(Want::Model { without: &[] }).unwrap().path, folder);
    }
}
