//! What is asked of the hub: the list of a repository's files, and their contents.

use std::{io::Read, time::Duration};

use serde::Deserialize;
use ureq::{
    Agent, Body,
    config::RedirectAuthHeaders,
    http::{HeaderMap, Response, StatusCode, header},
};

use crate::{
    digest::Digest,
    error::{Error, Result},
    repo::{RepoId, is_hex, is_plain_path},
    settings::{ENDPOINT, Settings},
};

/// Largest list of files that is read: the hub's largest have some megabytes.
const MAX_LISTING: u64 = 64 << 20;
/// Until a connection is there.
const CONNECT: Duration = Duration::from_secs(10);
/// Without a byte on a connection.
const SILENCE: Duration = Duration::from_secs(60);

/// A client of one hub.
pub(super) struct Client<'a> {
    agent: Agent,
    settings: &'a Settings,
}

/// The files of a repository at a commit.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<RepoFile>,
}

/// One file of a repository.
#[derive(Debug, Clone)]
pub(super) struct RepoFile {
    /// Path, with `/`; checked to stay inside its folder.
    pub(super) path: String,
    /// Bytes.
    pub(super) size: u64,
    pub(super) digest: Digest,
}

/// Contents under way.
pub(super) struct Opened {
    /// The first byte that comes.
    pub(super) start: u64,
    pub(super) reader: Box<dyn Read>,
    pub(super) url: String,
}

/// The hub's words for a repository, as far as they are used (`GET /api/models/ID/revision/REVISION?blobs=true`).
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl<'a> Client<'a> {
    pub(super) fn new(settings: &'a Settings) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Large files come from another server, which has no business with the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("tallow/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Self { agent: config.into(), settings }
    }

    /// The files of `repo` at its revision.
    pub(super) fn list(&self, repo: &RepoId) -> Result<Listing> {
        let (id, revision) = (escaped(&repo.id()), escaped(repo.revision()).replace('/', "%2F"));
        let url = format!("{}/api/models/{id}/revision/{revision}?blobs=true", self.settings.endpoint);
        let mut response = self.get(&url, 0)?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(repo, "", &url, &mut response));
        }
        let body = response.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
        let body = body.map_err(|e| Error::Transport { url: url.clone(), source: Box::new(e) })?;
        listing(&body).map_err(|problem| Error::Answer { url, problem })
    }

    /// The contents of a file from byte `from` on.
    pub(super) fn open(&self, repo: &RepoId, commit: &str, file: &RepoFile, from: u64) -> Result<Opened> {
        let url =
            format!("{}/{}/resolve/{commit}/{}", self.settings.endpoint, escaped(&repo.id()), escaped(&file.path));
        let mut response = self.get(&url, from)?;
        let start = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if range_start(response.headers()) == Some(from) => from,
            StatusCode::PARTIAL_CONTENT => {
                let problem = format!("another part of the file came than the one from byte {from} on");
                return Err(Error::Answer { url, problem });
            }
            _ => return Err(self.refusal(repo, &file.path, &url, &mut response)),
        };
        Ok(Opened { start, reader: Box::new(response.into_body().into_reader()), url })
    }

    fn get(&self, url: &str, from: u64) -> Result<Response<Body>> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.settings.token {
            request = request.header(header::AUTHORIZATION, token.bearer());
        }
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        request.call().map_err(|e| Error::Transport { url: url.to_owned(), source: Box::new(e) })
    }

    /// What an error status means. The hub says so in headers (huggingface/huggingface_hub: `utils/_http.py`).
    fn refusal(&self, repo: &RepoId, file: &str, url: &str, response: &mut Response<Body>) -> Error {
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let (repo_name, token) = (repo.to_string(), self.settings.token.is_some());
        let status = response.status();
        match (header("x-error-code").as_deref(), status) {
            (Some("GatedRepo"), _) => {
                Error::Gated { page: format!("{ENDPOINT}/{}", repo.id()), repo: repo_name, token }
            }
            (Some("RevisionNotFound"), _) => {
                Error::NoSuchRevision { repo: repo_name, revision: repo.revision().to_owned() }
            }
            (Some("EntryNotFound"), _) if !file.is_empty() => {
                Error::NoSuchFile { repo: repo_name, file: file.to_owned(), found: "other files".to_owned() }
            }
            (Some("RepoNotFound"), _) => Error::NoSuchRepo { repo: repo_name, token },
            // Without a token the hub does not tell a missing repository from a private one.
            (_, StatusCode::UNAUTHORIZED) if token => Error::BadToken { repo: repo_name },
            (_, StatusCode::UNAUTHORIZED) => Error::NoSuchRepo { repo: repo_name, token },
            _ => {
                let words = header("x-error-message").unwrap_or_default();
                let words: String = words.chars().filter(|c| !c.is_control()).take(200).collect();
                let message = if words.is_empty() { words } else { format!(": {words}") };
                Error::Status { url: url.to_owned(), status: status.as_u16(), message }
            }
        }
    }
}

/// Reads the list of files. Whatever would lead out of the cache is refused.
fn listing(body: &[u8]) -> Result<Listing, String> {
    let answer: Answer = serde_json::from_slice(body).map_err(|e| format!("not the list of a repository: {e}"))?;
    if !is_hex(&answer.sha, 40) {
        return Err("the commit is no hexadecimal number of 40 digits".to_owned());
    }
    let file = |sibling: Sibling| {
        let path = sibling.rfilename;
        let shown = || path.escape_debug().take(120).collect::<String>();
        if !is_plain_path(&path) {
            return Err(format!("`{}` is no plain path inside a folder", shown()));
        }
        let (name, size) = match sibling.lfs {
            Some(lfs) => (Some(lfs.sha256), Some(lfs.size)),
            None => (sibling.blob_id, sibling.size),
        };
        match (name.as_deref().and_then(Digest::of_blob), size) {
            (Some(digest), Some(size)) => Ok(RepoFile { path, size, digest }),
            _ => Err(format!("no size and checksum of `{}`", shown())),
        }
    };
    let files = answer.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
    Ok(Listing { commit: answer.sha, files })
}

/// The first byte of `Content-Range: bytes 100-199/200`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

/// A path as part of an address: everything but letters, digits, `-._~` and `/` as %XX.
fn escaped(path: &str) -> String {
    let byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => char::from(b).to_string(),
        _ => format!("%{b:02X}"),
    };
    path.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(file: &str) -> String {
        format!(r#"{{"sha": "{}", "siblings": [{file}], "gated": false}}"#, "c".repeat(40))
    }

    #[test]
    fn lists_of_files_are_read() {
        let sha256 = "a".repeat(64);
        let small = format!(r#"{{"rfilename": "vae/config.json", "size": 12, "blobId": "{}"}}"#, "b".repeat(40));
        let large = format!(
            r#"{{"rfilename": "x.gguf", "size": 99, "blobId": "{}", "lfs": {{"sha256": "{sha256}", "size": 99, "pointerSize": 1}}}}"#,
            "d".repeat(40)
        );
        let listing = listing(answer(&format!("{small},{large}")).as_bytes()).unwrap();
        assert_eq!(listing.commit, "c".repeat(40));
        assert_eq!((listing.files[0].path.as_str(), listing.files[0].size), ("vae/config.json", 12));
        assert_eq!(listing.files[1].digest, Digest::Sha256(sha256));
    }

    #[test]
    fn hostile_lists_are_refused() {
        let hash = "b".repeat(40);
        for (file, word) in [
            (format!(r#"{{"rfilename": "../x", "size": 1, "blobId": "{hash}"}}"#), "plain path"),
            (format!(r#"{{"rfilename": "/etc/x", "size": 1, "blobId": "{hash}"}}"#), "plain path"),
            (r#"{"rfilename": "x", "size": 1, "blobId": "../../x"}"#.to_owned(), "checksum"),
            (r#"{"rfilename": "x", "size": 1}"#.to_owned(), "checksum"),
            (format!(r#"{{"rfilename": "x", "size": -1, "blobId": "{hash}"}}"#), "not the list"),
        ] {
            let problem = listing(answer(&file).as_bytes()).unwrap_err();
            assert!(problem.contains(word), "{file}: {problem}");
        }
        assert!(listing(br#"{"sha": "../..", "siblings": []}"#).unwrap_err().contains("commit"));
        assert!(listing(b"<html>").unwrap_err().contains("not the list"));
    }

    #[test]
    fn addresses_and_ranges() {
        assert_eq!(escaped("a b/ü%.json"), "a%20b/%C3%BC%25.json");
        let mut headers = HeaderMap::new();
        assert_eq!(range_start(&headers), None);
        headers.insert(header::CONTENT_RANGE, "bytes 100-199/200".parse().unwrap());
        assert_eq!(range_start(&headers), Some(100));
    }
}
