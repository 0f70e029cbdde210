//! What can be wrong with a PyTorch checkpoint.

/// What is wrong with a PyTorch checkpoint (`.pth`, `.pt`, `.ckpt`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PthError {
    /// Not a zip archive.
    #[error("this is {found}, not a PyTorch checkpoint (a zip archive since PyTorch 1.6)")]
    NotAnArchive {
        /// What it is, as far as its first bytes tell.
        found: &'static str,
    },
    /// The archive's directory, which stands at its end, is not there.
    #[error("the zip archive has no directory at its end: truncated download?")]
    NoDirectory,
    /// The archive's directory contradicts itself or the file.
    #[error("damaged zip archive: {problem}")]
    Directory {
        /// What is wrong.
        problem: &'static str,
    },
    /// One member of the archive cannot be used.
    #[error("member `{member}` of the zip archive {problem}")]
    Member {
        /// Path inside the archive.
        member: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// No pickle in the archive.
    #[error("a zip archive without `data.pkl`, not a PyTorch checkpoint")]
    NoPickle,
    /// Several pickles, so the archive holds more than one checkpoint.
    #[error("the zip archive holds several `data.pkl`: which one is meant?")]
    SeveralPickles,
    /// Written on a big-endian machine.
    #[error("the checkpoint was written in byte order `{order}`, only `little` is read")]
    ByteOrder {
        /// Contents of the member `byteorder`.
        order: String,
    },
    /// The pickle is longer than any list of tensors.
    #[error("the pickle has {bytes} bytes, more than the {limit} that a list of tensors may take")]
    PickleTooLarge {
        /// Length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The pickle is damaged, or uses more than checkpoints need.
    #[error("bad pickle at byte {at}: {problem}")]
    Pickle {
        /// Offset inside `data.pkl`.
        at: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// An instruction of the pickle machine that no checkpoint of tensors uses.
    #[error("bad pickle at byte {at}: instruction 0x{opcode:02x} is not one that tensors need")]
    Opcode {
        /// Offset inside `data.pkl`.
        at: usize,
        /// The instruction.
        opcode: u8,
    },
    /// The pickle names a class or function other than those of plain tensors. Reading it would mean to run its code.
    #[error(
        "the checkpoint holds a Python object of `{class}`, which is not read because that would run code; save its state_dict instead"
    )]
    ForeignClass {
        /// Module and name.
        class: String,
    },
    /// No tensors where they could be.
    #[error("the checkpoint holds no named tensors, but {found}")]
    NoTensors {
        /// What is there.
        found: String,
    },
    /// More tensors than any model has.
    #[error("the checkpoint holds {found} tensors, more than the limit of {limit}")]
    TooManyTensors {
        /// Number of tensors.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A name stands twice.
    #[error("duplicate tensor name `{name}`")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A tensor does not fit its storage, or is of a kind that is not read.
    #[error("tensor `{tensor}` {problem}")]
    Tensor {
        /// Name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
}
