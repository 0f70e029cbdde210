//! A cursor over untrusted bytes: every read is compared with what is left.

use super::problem::GgufError;

type Result<T> = std::result::Result<T, GgufError>;

/// Where the next value of a header is read.
pub(super) struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a [u8], at: usize) -> Self {
        Self { file, at }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.file.len().saturating_sub(self.at)
    }

    /// The next `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: impl Fn() -> String) -> Result<&'a [u8]> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        match end.and_then(|end| Some((end, self.file.get(self.at..end)?))) {
            Some((end, bytes)) => {
                self.at = end;
                Ok(bytes)
            }
            None => Err(GgufError::Ends { what: what(), len: self.file.len() }),
        }
    }

    pub(super) fn u32(&mut self, what: impl Fn() -> String) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: impl Fn() -> String) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn array<const N: usize>(&mut self, what: impl Fn() -> String) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        // `take` gives as many bytes as were asked for.
        Ok(bytes.first_chunk::<N>().copied().unwrap_or([0; N]))
    }

    /// A length of 64 bits and as many bytes of text.
    pub(super) fn text(&mut self, what: impl Fn() -> String) -> Result<&'a str> {
        let len = self.u64(&what)?;
        let left = self.left() as u64;
        if len > left {
            return Err(GgufError::TooMany { what: format!("the length of {}", what()), claimed: len, limit: left });
        }
        let bytes = self.take(len, &what)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::NotText { what: what() })
    }
}
