//! What can be wrong with a GGUF file.

use crate::dtype::StoredDType;

/// What is wrong with a GGUF file. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// Not a GGUF file.
    #[error("this is {found}, not a GGUF file")]
    OtherFormat {
        /// What it is, as far as its first bytes tell.
        found: &'static str,
    },
    /// Written on a big-endian machine.
    #[error("the file is big-endian, only little-endian GGUF files are read")]
    BigEndian,
    /// A version of the format that is not read.
    #[error("the file has GGUF version {version}, versions 2 and 3 are read")]
    Version {
        /// The version.
        version: u32,
    },
    /// The file ends inside the header.
    #[error("the file ends at byte {len}, inside {what}: truncated download?")]
    Ends {
        /// What was being read.
        what: String,
        /// Size of the file.
        len: usize,
    },
    /// A count or a length is larger than the rest of the file could hold, or than any model needs.
    #[error("{what} claims {claimed}, more than {limit}")]
    TooMany {
        /// What claims it.
        what: String,
        /// The claim.
        claimed: u64,
        /// What is possible.
        limit: u64,
    },
    /// A name or a string is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotText {
        /// What was being read.
        what: String,
    },
    /// A metadata value has a type that the format does not know, or that is not allowed there.
    #[error("metadata `{key}` has {problem}")]
    Metadata {
        /// Key.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A name stands twice.
    #[error("duplicate {kind} `{name}`")]
    Duplicate {
        /// `tensor` or `metadata key`.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// An element type that has no known size.
    #[error("tensor `{tensor}` has type number {id}, {problem}")]
    UnknownType {
        /// Name.
        tensor: String,
        /// Number.
        id: u32,
        /// Whether it was removed, or never known.
        problem: &'static str,
    },
    /// The extents of a tensor are impossible.
    #[error("tensor `{tensor}` of type {dtype} and shape {shape} {problem}")]
    BadShape {
        /// Name.
        tensor: String,
        /// Element type.
        dtype: StoredDType,
        /// Shape in text, outermost extent first.
        shape: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A tensor does not begin where the one before it ends.
    #[error(
        "tensor `{tensor}` is said to lie at offset {offset} of the data, but the tensor before it ends at {expected}"
    )]
    Offset {
        /// Name.
        tensor: String,
        /// Offset in the file.
        offset: u64,
        /// Where it should be, alignment included.
        expected: u64,
    },
    /// The file ends before the last tensor does.
    #[error("expected {expected} bytes, file has {len}: truncated download?")]
    Truncated {
        /// Size that the header asks for.
        expected: u64,
        /// Size of the file.
        len: usize,
    },
    /// The file goes on after the last tensor.
    #[error("{bytes} trailing bytes after the last tensor: expected {expected} bytes, file has {len}")]
    Trailing {
        /// How many.
        bytes: usize,
        /// Size that the header asks for.
        expected: u64,
        /// Size of the file.
        len: usize,
    },
}
