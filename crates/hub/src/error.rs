//! Errors.

use std::{io, path::Path};

/// Why a model of the hub is not to be had.
///
/// Every message is one line. Tokens are never shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text names no repository.
    #[error("`{text}` names no model of the hub: expected owner/name or owner/name@revision")]
    BadRepo {
        /// The text.
        text: String,
    },
    /// Nothing says where the cache is.
    #[error("no place for the cache of the hub: set HF_HOME")]
    NoCache,
    /// The cache does not hold it, and the hub is not asked.
    #[error("{what} of {repo} is not in the cache {cache}; {advice}")]
    NotCached {
        /// `the model`, or a file.
        what: String,
        /// The repository.
        repo: String,
        /// Folder of the cache.
        cache: String,
        /// Why the hub was not asked, and what to do.
        advice: String,
    },
    /// The owner of the model wants to be asked first.
    #[error("{repo} is gated: ask for access on {page}{}", if *token { ", with the account of the token in use" } else { " and set HF_TOKEN to a token of that account" })]
    Gated {
        /// The repository.
        repo: String,
        /// Where access is given.
        page: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// There is no such repository, or none that may be seen.
    #[error("the hub has no model {repo}, or it is private{}", if *token { " to others" } else { ": set HF_TOKEN to see private ones" })]
    NoSuchRepo {
        /// The repository.
        repo: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision {revision}")]
    NoSuchRevision {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
    },
    /// The repository has no such file.
    #[error("{repo} has no file {file}; it holds {found}")]
    NoSuchFile {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// What it holds.
        found: String,
    },
    /// The hub refuses the token.
    #[error("the hub refuses the token in use for {repo}")]
    BadToken {
        /// The repository.
        repo: String,
    },
    /// The hub answered with an error.
    #[error("{url} answers with status {status}{message}")]
    Status {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
        /// The hub's words, with a colon before them; may be empty.
        message: String,
    },
    /// The hub answered with what cannot be understood, or must not be trusted.
    #[error("{url}: {problem}")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The hub cannot be reached, or the connection broke and could not be taken up again.
    #[error("cannot reach {url}")]
    Transport {
        /// What was asked for.
        url: String,
        /// The client's reason.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A downloaded file is not what the hub promised; it has been removed.
    #[error("{file} was damaged on its way: {what} is {found}, the hub says {expected}")]
    Damaged {
        /// The file.
        file: String,
        /// `its size` or `its sha256`.
        what: &'static str,
        /// What came.
        found: String,
        /// What was promised.
        expected: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// File or folder.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Stopped by the observer; what has come so far stays, and the next run goes on from there.
    #[error(transparent)]
    Cancelled(#[from] policy::Cancelled),
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.display().to_string(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_small_and_say_what_to_do() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
        let gated = |token| {
            Error::Gated { repo: "a/b".to_owned(), page: "https://huggingface.co/a/b".to_owned(), token }.to_string()
        };
        assert!(gated(false).contains("https://huggingface.co/a/b and set HF_TOKEN"), "{}", gated(false));
        assert!(gated(true).contains("the account of the token"), "{}", gated(true));
    }
}
