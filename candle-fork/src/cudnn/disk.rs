//! Plans on disk: one file each, believed only if its key and its checksum are right.
//!
//! A plan's text may hold code for the GPU, so a directory that others may write is not used.

use std::{
    fs::{self, DirBuilder},
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use serde::{Deserialize, Serialize};

use super::{device::DeviceInfo, library::Version};

/// Changes whenever the meaning of a file does.
const FORMAT: u32 = 1;

/// Largest file that is read or written: several times the largest plan seen.
const MAX_BYTES: u64 = 4 << 20;

/// Files of a device at most; the oldest go first.
const MAX_FILES: usize = 1024;

#[derive(Debug, Serialize, Deserialize)]
struct File {
    format: u32,
    key: String,
    checksum: String,
    plan: String,
}

/// The plans of one version of the library for one kind of device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DiskCache {
    directory: PathBuf,
}

impl DiskCache {
    /// The cache under `root`, which is created if there is none.
    ///
    /// # Errors
    /// If the directory cannot be made, or others than the user own it or may write to it.
    pub(super) fn open(root: &Path, version: Version, device: &DeviceInfo) -> io::Result<Self> {
        let name = hash(device.name.as_bytes());
        let kind = format!("{version}-sm{}-{}-{name:016x}", device.capability / 10, device.multiprocessors);
        let directory = root.join("cudnn").join(kind);
        create(&directory)?;
        check_owner(&directory)?;
        Ok(Self { directory })
    }

    fn file(&self, key: &str) -> PathBuf {
        self.directory.join(format!("{:016x}.json", hash(key.as_bytes())))
    }

    /// The plan stored under `key`. A file that is not what it should be is deleted.
    pub(super) fn load(&self, key: &str) -> Option<String> {
        let path = self.file(key);
        let length = fs::metadata(&path).ok()?.len();
        let file = (length <= MAX_BYTES).then(|| fs::read(&path).ok()).flatten();
        let file: Option<File> = file.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match file {
            Some(file) if file.format == FORMAT && file.checksum == checksum(&file.key, &file.plan) => {
                // Another key with the same hash is an honest file.
                (file.key == key).then_some(file.plan)
            }
            _ => {
                self.remove(key);
                None
            }
        }
    }

    /// Stores a plan. Readers see the old file or the new one, never a part.
    ///
    /// # Errors
    /// Those of the file system; or a plan that is too large.
    pub(super) fn store(&self, key: &str, plan: &str) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let file = File { format: FORMAT, key: key.into(), checksum: checksum(key, plan), plan: plan.into() };
        let bytes = serde_json::to_vec(&file)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(io::Error::other(format!("a plan of {} bytes", bytes.len())));
        }
        self.make_room()?;
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let temporary = self.directory.join(format!(".{process}-{number}.tmp"));
        let written = fs::write(&temporary, &bytes).and_then(|()| fs::rename(&temporary, self.file(key)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Deletes what is stored under `key`.
    pub(super) fn remove(&self, key: &str) {
        // One that is gone already is gone.
        let _ = fs::remove_file(self.file(key));
    }

    /// Deletes the oldest file while there are too many.
    fn make_room(&self) -> io::Result<()> {
        let mut files: Vec<_> = fs::read_dir(&self.directory)?
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        if files.len() >= MAX_FILES {
            files.sort();
            for (_, path) in &files[..files.len() + 1 - MAX_FILES] {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}

/// Makes a directory that only the user may enter.
fn create(directory: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

#[cfg(unix)]
fn check_owner(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::symlink_metadata(directory)?;
    // The owner of a file made now is the user that we run as.
    let probe = directory.join(format!(".{}.probe", std::process::id()));
    fs::write(&probe, b"")?;
    let ours = fs::symlink_metadata(&probe).map(|metadata| metadata.uid());
    fs::remove_file(&probe)?;
    if !found.is_dir() || found.uid() != ours? || found.mode() & 0o022 != 0 {
        let what = format!("{} belongs to or may be written by others", directory.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(_: &Path) -> io::Result<()> {
    Ok(())
}

fn checksum(key: &str, plan: &str) -> String {
    let mut both = key.as_bytes().to_vec();
    // Not part of either text.
    both.push(0);
    both.extend(plan.as_bytes());
    format!("{:016x}", hash(&both))
}

/// FNV-1a of 64 bits: against accidents, not against attackers.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> DeviceInfo {
        DeviceInfo { ordinal: 0, name: "Some GPU".into(), capability: 900, multiprocessors: 132, driver: 13_000 }
    }

    fn cache(root: &Path) -> DiskCache {
        DiskCache::open(root, Version(91_900), &device()).unwrap()
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        // Published values.
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn plans_come_back_and_others_do_not() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path());
        assert_eq!(cache.load("key"), None);
        cache.store("key", "{\"plan\": 1}").unwrap();
        cache.store("other", "two").unwrap();
        assert_eq!(cache.load("key").as_deref(), Some("{\"plan\": 1}"));
        cache.store("key", "new").unwrap();
        assert_eq!((cache.load("key").as_deref(), cache.load("other").as_deref()), (Some("new"), Some("two")));
        cache.remove("key");
        assert_eq!((cache.load("key"), cache.load("other").as_deref()), (None, Some("two")));
    }

    #[test]
    fn versions_and_devices_do_not_share_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let base = cache(root.path());
        let other = |version, device: DeviceInfo| DiskCache::open(root.path(), Version(version), &device).unwrap();
        let others = [
            other(91_901, device()),
            other(91_900, DeviceInfo { multiprocessors: 114, ..device() }),
            other(91_900, DeviceInfo { capability: 1000, ..device() }),
            other(91_900, DeviceInfo { name: "Another GPU".into(), ..device() }),
        ];
        assert!(others.iter().all(|other| *other != base));
        // The same kind of device in another slot does.
        assert_eq!(other(91_900, DeviceInfo { ordinal: 3, driver: 13_010, ..device() }), base);
    }

    #[test]
    fn damaged_files_are_deleted() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path());
        for damage in ["truncated", "flipped", "emptied", "format"] {
            cache.store("key", "the plan of a convolution").unwrap();
            let path = cache.file("key");
            let text = fs::read_to_string(&path).unwrap();
            let damaged = match damage {
                "truncated" => text[..text.len() / 2].to_owned(),
                "flipped" => text.replace("convolution", "convolutiom"),
                "emptied" => String::new(),
                _ => text.replace("\"format\":1", "\"format\":2"),
            };
            assert_ne!(text, damaged);
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.load("key"), None, "{damage}");
            assert!(!path.exists(), "{damage}");
        }
    }

    #[test]
    fn a_file_of_another_key_is_not_taken() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path());
        cache.store("key", "plan").unwrap();
        fs::rename(cache.file("key"), cache.file("its namesake")).unwrap();
        assert_eq!(cache.load("its namesake"), None);
        assert!(cache.file("its namesake").exists());
    }

    #[test]
    fn nothing_temporary_is_left() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(root.path());
        cache.store("key", "plan").unwrap();
        let names: Vec<_> = fs::read_dir(&cache.directory).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(names, [cache.file("key")]);
        assert!(cache.store("key", &"x".repeat(MAX_BYTES as usize)).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let directory = cache(root.path()).directory;
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        let error = DiskCache::open(root.path(), Version(91_900), &device()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
