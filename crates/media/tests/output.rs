//! Where a file can be put, and what remains when it cannot.

use std::fs;
use std::io::Write;
use std::path::Path;

use media::{Error, OutputFile};

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn write(path: &Path, bytes: &[u8]) -> media::Result<()> {
    let mut file = OutputFile::create(path)?;
    file.write_all(bytes).map_err(|source| Error::Write { path: path.to_owned(), source })?;
    file.commit()
}

#[test]
fn a_file_appears_with_the_commit_and_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    let mut file = OutputFile::create(&path).unwrap();
    assert_eq!(file.path(), path);
    file.write_all(b"abc").unwrap();
    assert!(!path.exists());
    file.commit().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"abc");
    assert_eq!(names(folder.path()), ["a.png"]);
}

#[test]
fn without_a_commit_nothing_remains_and_an_older_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    let begin = || {
        OutputFile::create(&path).and_then(|mut file| {
            file.write_all(b"half").map_err(|source| Error::Write { path: path.clone(), source })?;
            Ok(file)
        })
    };
    drop(begin().unwrap());
    assert!(names(folder.path()).is_empty());

    fs::write(&path, b"old").unwrap();
    drop(begin().unwrap());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["a.png"]);

    begin().unwrap().commit().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"half");
}

#[test]
fn a_missing_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/such/a.png");
    let error = OutputFile::create(&path).unwrap_err();
    let missing = folder.path().join("no/such");
    assert!(matches!(&error, Error::NoFolder { folder, .. } if *folder == missing), "{error}");
    let expected = format!("cannot write {}: the folder {} does not exist", path.display(), missing.display());
    assert_eq!(error.to_string(), expected);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_folder_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner.png");
    fs::create_dir(&inner).unwrap();
    let with_separator = folder.path().join("new.png/");
    for path in [
        inner.as_path(),
        folder.path(),
        &with_separator,
        Path::new("."),
        Path::new(".."),
        Path::new("/"),
        Path::new(""),
    ] {
        assert!(matches!(OutputFile::create(path), Err(Error::IsFolder { .. })), "{}", path.display());
    }
    assert_eq!(names(folder.path()), ["inner.png"]);
}

#[test]
fn a_file_in_place_of_the_folder_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), b"x").unwrap();
    let error = OutputFile::create(folder.path().join("file/a.png")).unwrap_err();
    assert!(matches!(error, Error::Write { .. } | Error::NoFolder { .. }), "{error}");
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"x");
}

#[test]
fn a_place_that_becomes_a_folder_meanwhile_fails_at_the_commit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    let file = OutputFile::create(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(file.commit(), Err(Error::Write { .. })));
    assert_eq!(names(folder.path()), ["a.png"]);
}

#[test]
fn a_file_marked_read_only_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    fs::write(&path, b"old").unwrap();
    let mut permissions = fs::metadata(&path).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&path, permissions).unwrap();
    assert!(matches!(write(&path, b"new"), Err(Error::Write { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    use std::process::Command;
    use std::thread;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn new_files_have_the_usual_permissions_and_replaced_ones_keep_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let (usual, ours) = (folder.path().join("usual"), folder.path().join("a.png"));
        fs::write(&usual, b"").unwrap();
        write(&ours, b"1").unwrap();
        assert_eq!(mode(&ours), mode(&usual));

        fs::set_permissions(&ours, fs::Permissions::from_mode(0o640)).unwrap();
        write(&ours, b"2").unwrap();
        assert_eq!(mode(&ours), 0o640);
        assert_eq!(fs::read(&ours).unwrap(), b"2");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_found_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
        let result = OutputFile::create(folder.path().join("a.png"));
        // The superuser may write there all the same.
        if fs::write(folder.path().join("probe"), b"").is_err() {
            assert!(matches!(result, Err(Error::Write { .. })));
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn a_name_that_is_too_long_is_found_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a".repeat(300));
        assert!(matches!(OutputFile::create(&path), Err(Error::Write { .. })));
        // The longest legal one is not spoiled by the name of the temporary file.
        let path = folder.path().join("a".repeat(255));
        write(&path, b"x").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }

    #[test]
    fn links_are_followed_and_stay_links() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, link) = (folder.path().join("inner"), folder.path().join("a.png"));
        fs::create_dir(&inner).unwrap();
        symlink("inner/real.png", &link).unwrap();
        // To nowhere yet, then to a file.
        for bytes in [b"1", b"2"] {
            write(&link, bytes).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(fs::read(inner.join("real.png")).unwrap(), bytes);
        }
        assert_eq!(names(&inner), ["real.png"]);
        assert_eq!(names(folder.path()), ["a.png", "inner"]);

        symlink("loop", folder.path().join("loop")).unwrap();
        assert!(matches!(OutputFile::create(folder.path().join("loop")), Err(Error::Write { .. })));
        symlink("inner", folder.path().join("folder")).unwrap();
        assert!(matches!(OutputFile::create(folder.path().join("folder")), Err(Error::IsFolder { .. })));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_device_is_an_error_and_not_a_success() {
        let mut file = OutputFile::create("/dev/full").unwrap();
        let error = file.write_all(b"picture").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert!(fs::symlink_metadata("/dev/full").unwrap().file_type().is_char_device());
    }

    /// A pipe stands for the devices here: were it replaced by a file, nobody would miss it.
    #[test]
    fn a_pipe_is_written_directly_and_stays_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let reader = thread::spawn({
            let path = path.clone();
            move || fs::read(path).unwrap()
        });
        write(&path, b"picture").unwrap();
        // Before waiting for a reader that would wait for ever at a pipe that is gone.
        assert!(fs::metadata(&path).unwrap().file_type().is_fifo());
        assert_eq!(reader.join().unwrap(), b"picture");
        assert_eq!(names(folder.path()), ["pipe"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_open_file_of_this_process_is_written_and_not_replaced() {
        use std::io::{Read, Seek};
        use std::os::fd::AsRawFd;

        let mut open = tempfile::tempfile().unwrap();
        write(Path::new(&format!("/proc/self/fd/{}", open.as_raw_fd())), b"through").unwrap();
        let mut bytes = Vec::new();
        open.rewind().unwrap();
        open.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"through");
    }
}
