//! Checksums of files.

use std::{fs::File, io::Read, path::Path};

use policy::{Event, Observer};
use sha2::{Digest as _, Sha256};

use crate::{
    error::{Error, Result},
    repo::is_hex,
};

/// Bytes that are read at once.
const BLOCK: usize = 1 << 20;

/// What the hub calls a blob: the sha256 of a large file, or the git object of a small one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Digest {
    /// 64 hexadecimal digits, in lower case.
    Sha256(String),
    /// 40 hexadecimal digits, in lower case: a SHA-1 over a header and the contents. It is a name only, not checked here.
    Git(String),
}

impl Digest {
    /// The digest that a blob of this name has; none for another name.
    pub fn of_blob(name: &str) -> Option<Self> {
        if is_hex(name, 64) {
            Some(Self::Sha256(name.to_owned()))
        } else {
            is_hex(name, 40).then(|| Self::Git(name.to_owned()))
        }
    }

    /// Name of the blob in the cache.
    pub fn name(&self) -> &str {
        match self {
            Self::Sha256(name) | Self::Git(name) => name,
        }
    }
}

/// The sha256 of a file, as 64 hexadecimal digits in lower case. The observer hears how many MiB are done.
///
/// # Errors
/// [`Error::Io`], [`Error::Cancelled`].
pub fn sha256(path: &Path, observer: &dyn Observer) -> Result<String> {
    let mut file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let total = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
    let mut hash = Sha256::new();
    let mut block = vec![0; BLOCK];
    let mut done = 0u64;
    loop {
        let n = file.read(&mut block).map_err(|e| Error::io("read", path, e))?;
        if n == 0 {
            break;
        }
        hash.update(&block[..n]);
        done += n as u64;
        observer.notify(Event::Progress { done: mebibytes(done), total: mebibytes(total.max(done)) })?;
    }
    Ok(hex(&hash.finalize()))
}

/// Bytes as units of progress: begun MiB.
pub(crate) fn mebibytes(bytes: u64) -> usize {
    bytes.div_ceil(1 << 20) as usize
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, ops::ControlFlow};

    use policy::Silent;

    use super::*;

    #[test]
    fn sha256_of_known_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        // FIPS 180-2: the empty message, "abc", and a million times "a".
        for (contents, digest) in [
            (Vec::new(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc".to_vec(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (vec![b'a'; 1_000_000], "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        ] {
            fs::write(&path, contents).unwrap();
            assert_eq!(sha256(&path, &Silent).unwrap(), digest);
        }
        fs::write(&path, vec![1; BLOCK + 1]).unwrap();
        let stop = |_: &Event<'_>| ControlFlow::Break(());
        assert!(matches!(sha256(&path, &stop), Err(Error::Cancelled(_))));
        assert!(matches!(sha256(&folder.path().join("none"), &Silent), Err(Error::Io { .. })));
    }

    #[test]
    fn blobs_tell_their_digest() {
        let (long, short) = ("a".repeat(64), "0".repeat(40));
        assert_eq!(Digest::of_blob(&long), Some(Digest::Sha256(long.clone())));
        assert_eq!(Digest::of_blob(&short), Some(Digest::Git(short.clone())));
        for name in ["", "A", &"A".repeat(64), &"a".repeat(63), "config.json"] {
            assert_eq!(Digest::of_blob(name), None, "{name}");
        }
        assert_eq!(Digest::Sha256(long.clone()).name(), long);
    }
}
