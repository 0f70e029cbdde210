//! What can be wrong with a safetensors file.

use super::header::MAX_HEADER;
use crate::dtype::StoredDType;

/// What is wrong with a safetensors file. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Nothing in the file.
    #[error("the file is empty: failed download?")]
    Empty,
    /// Not even the length of the header.
    #[error("the file has {len} bytes, fewer than the 8 of a header length: truncated download?")]
    TooShort {
        /// Size of the file.
        len: usize,
    },
    /// The file starts like another format.
    #[error("this is {found}, not a safetensors file")]
    OtherFormat {
        /// What it is, with advice.
        found: &'static str,
    },
    /// The declared header is longer than [`MAX_HEADER`].
    #[error("the header claims {declared} bytes, the limit is {MAX_HEADER}: not a safetensors file, or damaged")]
    HeaderTooLarge {
        /// Declared length.
        declared: u64,
    },
    /// The file ends inside the header.
    #[error("a header of {declared} bytes is announced, but the file has only {len} bytes: truncated download?")]
    HeaderTruncated {
        /// Declared length of the header.
        declared: u64,
        /// Size of the file.
        len: usize,
    },
    /// The header does not start with `{`.
    #[error("the header does not start with an opening brace: not a safetensors file, or damaged")]
    NotAnObject,
    /// The header is not the JSON that the format asks for.
    #[error("bad header: {message}")]
    Json {
        /// What is wrong, with line and column inside the header.
        message: String,
    },
    /// A name stands twice in the header.
    #[error("duplicate key `{name}` in the header")]
    DuplicateKey {
        /// The name.
        name: String,
    },
    /// A tensor bears the name that the format keeps for metadata.
    #[error("a tensor is named `__metadata__`, which the format reserves")]
    ReservedName,
    /// A value of the metadata is not a string.
    #[error("metadata `{key}` is {found}, but the format allows only strings there")]
    MetadataNotString {
        /// Key inside `__metadata__`.
        key: String,
        /// What stands there.
        found: &'static str,
    },
    /// An element type that we do not know.
    #[error("tensor `{tensor}` has the unknown element type `{dtype}`")]
    UnknownDType {
        /// Name.
        tensor: String,
        /// The type's name.
        dtype: String,
    },
    /// The tensor's size in bits overflows, or does not fill whole bytes.
    #[error("tensor `{tensor}` of type {dtype} and shape {shape} has a size that is {problem}")]
    BadSize {
        /// Name.
        tensor: String,
        /// Element type.
        dtype: StoredDType,
        /// Shape in text.
        shape: String,
        /// `beyond 64 bits` or `not a whole number of bytes`.
        problem: &'static str,
    },
    /// A tensor's range of bytes is not as long as its shape and type say, or runs backwards.
    #[error(
        "tensor `{tensor}` of type {dtype} and shape {shape} needs {expected} bytes, but its offsets are {begin}..{end}"
    )]
    SizeMismatch {
        /// Name.
        tensor: String,
        /// Element type.
        dtype: StoredDType,
        /// Shape in text.
        shape: String,
        /// Bytes needed.
        expected: usize,
        /// First offset.
        begin: u64,
        /// Last offset.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` and `{second}` overlap")]
    Overlap {
        /// Name.
        first: String,
        /// Name.
        second: String,
    },
    /// Bytes between tensors belong to none.
    #[error("{bytes} bytes before tensor `{tensor}` belong to no tensor")]
    Hole {
        /// Name of the tensor after the hole.
        tensor: String,
        /// Length of the hole.
        bytes: u64,
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
