//! Errors.

use std::{fmt::Write as _, io};

use crate::{dtype::StoredDType, gguf::GgufError, loader::PlanReport, pth::PthError, safetensors::HeaderError};

/// What went wrong with a checkpoint or a model folder.
///
/// Every message is one line and names the file. Names that come out of a file are shown with control characters
/// escaped and cut to a readable length.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried: `open`, `read`, `map`, `write`…
        action: &'static str,
        /// File or folder.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A path leads to a folder, a pipe or a device where a file was wanted.
    #[error("{path} is {found}, not a file")]
    NotAFile {
        /// Path.
        path: String,
        /// What it is.
        found: &'static str,
    },
    /// The file is recognisably something else.
    #[error("{file} is {found}, not a safetensors file")]
    OtherFormat {
        /// File.
        file: String,
        /// What it is, with advice.
        found: &'static str,
    },
    /// The file is a damaged or hostile safetensors file.
    #[error("{file}: {problem}")]
    Header {
        /// File.
        file: String,
        /// What is wrong.
        problem: Box<HeaderError>,
    },
    /// The file is no PyTorch checkpoint, or a damaged or hostile one.
    #[error("{file}: {problem}")]
    Pth {
        /// File.
        file: String,
        /// What is wrong.
        problem: Box<PthError>,
    },
    /// The file is no GGUF file, or a damaged or hostile one.
    #[error("{file}: {problem}")]
    Gguf {
        /// File.
        file: String,
        /// What is wrong.
        problem: Box<GgufError>,
    },
    /// A quantised tensor contradicts itself or its side tensors, or is quantised in a way that is not supported.
    #[error("tensor `{tensor}` of {file} {problem}")]
    Quantised {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// Two tensors of a file would be the same tensor of the model.
    #[error("{file} holds both `{first}` and `{second}`, two names of one tensor")]
    TwoNames {
        /// File.
        file: String,
        /// Name.
        first: String,
        /// Name.
        second: String,
    },
    /// A small text file is larger than any real one.
    #[error("{file} has {bytes} bytes, more than the {limit} that are read at once")]
    TooLarge {
        /// File.
        file: String,
        /// Its size.
        bytes: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A JSON file does not parse, or not into what is needed.
    #[error("{file}: {message}")]
    Json {
        /// File.
        file: String,
        /// What is wrong, with line and column.
        message: String,
    },
    /// A path inside an index or a folder is absolute or leads outside.
    #[error("{file} names `{path}`, which is not a plain path inside its folder")]
    PathEscapes {
        /// The file or folder with the path.
        file: String,
        /// The path.
        path: String,
    },
    /// Files that the index names are not there.
    #[error("{index} names {} that are not there: {missing}", count(*.files, "file"))]
    MissingShards {
        /// The index.
        index: String,
        /// How many are missing.
        files: usize,
        /// Their names.
        missing: String,
    },
    /// The index places a tensor in a file that does not hold it.
    #[error("{index} places {} in files that do not hold them: {missing}", count(*.tensors, "tensor"))]
    IndexMismatch {
        /// The index.
        index: String,
        /// How many tensors.
        tensors: usize,
        /// The first of them, each with its file.
        missing: String,
    },
    /// A tensor stands in two shards.
    #[error("tensor `{tensor}` is in both {first} and {second}")]
    TensorInTwoFiles {
        /// Name.
        tensor: String,
        /// One file.
        first: String,
        /// The other file.
        second: String,
    },
    /// A folder holds no weights, or several candidates.
    #[error("{folder}: {problem}; the folder holds {found}")]
    NoWeights {
        /// The folder.
        folder: String,
        /// What is wrong.
        problem: &'static str,
        /// What is there.
        found: String,
    },
    /// A folder lacks a file.
    #[error("{folder} has no {file}; the folder holds {found}")]
    MissingFile {
        /// The folder.
        folder: String,
        /// The file, relative.
        file: String,
        /// What is there.
        found: String,
    },
    /// A path is not a folder in the diffusers layout.
    #[error("{path} is not a model folder (no model_index.json): {found}")]
    NotAModelFolder {
        /// Path.
        path: String,
        /// What it looks like, and what is there.
        found: String,
    },
    /// A tensor was asked for that the source does not hold.
    #[error("{file} has no tensor `{tensor}`")]
    NoSuchTensor {
        /// File.
        file: String,
        /// Name.
        tensor: String,
    },
    /// Names, shapes or element types are not those of the plan.
    #[error("{file} does not fit: {report}")]
    Plan {
        /// File.
        file: String,
        /// All differences at once.
        report: Box<PlanReport>,
    },
    /// A tensor was taken from a loader that is not in its plan, or was taken before.
    #[error("tensor `{tensor}` of {file} was asked for {problem}")]
    NotPlanned {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// `outside the plan` or `twice`.
        problem: &'static str,
    },
    /// Expected tensors were never taken: a fault of the model's code.
    #[error("{} of {file} were loaded by nothing: {names}", count(*.tensors, "tensor"))]
    Unused {
        /// File.
        file: String,
        /// How many.
        tensors: usize,
        /// The first of them.
        names: String,
    },
    /// A linear map was asked for, but the tensor has another rank.
    #[error("tensor `{tensor}` of {file} has shape {shape:?}, a linear map needs 2 extents")]
    NotAMatrix {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The element type cannot be used here.
    #[error("tensor `{tensor}` of {file} has element type {dtype}, which cannot be used as {wanted}")]
    DType {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// Type as stored.
        dtype: StoredDType,
        /// What it was wanted for.
        wanted: String,
    },
    /// A weight is NaN or infinite, or does not fit the type it is converted to.
    #[error("tensor `{tensor}` of {file}: element {index} is {value}")]
    NotFinite {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// Flat index of the first such element.
        index: usize,
        /// The value, with the type that it does not fit.
        value: String,
    },
    /// A tensor handed to the writer does not hold what its shape says, or has a name that cannot be written.
    #[error("cannot write tensor `{tensor}` to {file}: {problem}")]
    Unwritable {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A checkpoint cannot be quantised.
    #[error("{file} cannot be quantised: {problem}")]
    NotQuantisable {
        /// File.
        file: String,
        /// Why.
        problem: String,
    },
    /// Stopped by the observer.
    #[error(transparent)]
    Cancelled(#[from] policy::Cancelled),
    /// A table of names does not parse.
    #[error("line {line} of the name table: {problem}")]
    NameTable {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// A tensor could not be handed to the compute layer.
    #[error("cannot load tensor `{tensor}` of {file}")]
    Tensor {
        /// File.
        file: String,
        /// Name.
        tensor: String,
        /// The layer's error.
        #[source]
        source: Box<candle_fork::Error>,
    },
}

/// Result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How many names an error lists.
pub(crate) const LISTED: usize = 10;

/// Longest part of an untrusted name that a message shows, in characters.
const SHOWN: usize = 120;

/// An untrusted name, made fit for one line: control characters escaped, cut after [`SHOWN`] characters.
pub(crate) fn shown(name: &str) -> String {
    let mut out = String::new();
    for (i, c) in name.chars().enumerate() {
        if i == SHOWN {
            out.push('…');
            break;
        }
        if c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// `1 file`, `3 files`.
pub(crate) fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// The first [`LISTED`] names and how many follow.
pub(crate) fn list<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> String {
    let mut out = String::new();
    let mut more = 0;
    for (i, name) in names.into_iter().enumerate() {
        if i < LISTED {
            if i > 0 {
                out.push_str(", ");
            }
            out.push_str(&shown(name.as_ref()));
        } else {
            more += 1;
        }
    }
    if more > 0 {
        let _ = write!(out, " and {more} more");
    }
    out
}

impl Error {
    pub(crate) fn io(action: &'static str, path: impl AsRef<std::path::Path>, source: io::Error) -> Self {
        Self::Io { action, path: path.as_ref().display().to_string(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_small() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }

    #[test]
    fn names_are_made_fit_for_a_line() {
        assert_eq!(shown("blocks.0.weight"), "blocks.0.weight");
        assert_eq!(shown("a\nb\u{1b}[2J"), "a\\u{a}b\\u{1b}[2J");
        assert_eq!(shown("\u{202e}abc"), "\\u{202e}abc");
        assert_eq!(shown(&"é".repeat(500)).chars().count(), SHOWN + 1);
    }

    #[test]
    fn lists_are_cut() {
        assert_eq!(list(["a", "b"]), "a, b");
        let names: Vec<String> = (0..25).map(|i| i.to_string()).collect();
        assert!(list(&names).ends_with("8, 9 and 15 more"));
        assert_eq!(count(1, "file"), "1 file");
        assert_eq!(count(0, "file"), "0 files");
    }
}
