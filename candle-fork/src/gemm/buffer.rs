//! Scratch memory whose first element starts a cache line.

/// Bytes to which packed operands are aligned: a cache line, and the widest vector of any supported machine.
const ALIGN: usize = 64;

/// A growable `f32` buffer aligned to [`ALIGN`] bytes. Contents are unspecified until written.
///
/// Vector loads from packed operands that straddle cache lines cost twice, and a `Vec<f32>` is aligned to 4 bytes only;
/// the buffer over-allocates by one line and starts at the first boundary.
#[derive(Debug, Default)]
pub(crate) struct AlignedBuffer {
    storage: Vec<f32>,
}

impl AlignedBuffer {
    /// `len` elements, grown if needed; earlier contents may move or be lost.
    #[inline]
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let slack = ALIGN / size_of::<f32>();
        if self.storage.len() < len + slack {
            // A fresh zeroed allocation instead of `resize`: nothing is copied and the pages stay untouched until used.
            self.storage = vec![0.0; len + slack];
        }
        let start = self.storage.as_ptr().align_offset(ALIGN).min(slack);
        &mut self.storage[start..start + len]
    }

    /// The first `len` elements as they were written through [`Self::get`].
    #[inline]
    pub(crate) fn filled(&self, len: usize) -> &[f32] {
        let slack = ALIGN / size_of::<f32>();
        let start = self.storage.as_ptr().align_offset(ALIGN).min(slack);
        &self.storage[start..start + len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_cache_line() {
        let mut buffer = AlignedBuffer::default();
        for len in [0, 1, 17, 1000, 64] {
            let slice = buffer.get(len);
            assert_eq!(slice.len(), len);
            assert_eq!(slice.as_ptr().addr() % ALIGN, 0);
            slice.fill(3.0);
            assert_eq!(buffer.filled(len), vec![3.0; len]);
        }
    }
}
