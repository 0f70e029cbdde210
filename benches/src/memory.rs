//! Memory of this process beside the files that it maps: what a load costs on top of the file's pages, which the system
//! takes back when it needs them.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(1);

/// Bytes of this process that no file is behind; `None` where `/proc` has none.
fn unmapped() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Calls `f`, and tells by how many bytes the memory without a file behind it grew meanwhile, at most. Looks every
/// millisecond, so what comes and goes faster may be missed.
///
/// # Errors
/// If `f` fails, or there is no `/proc/self/status`.
pub fn peak_beside_files<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let before = unmapped().context("no /proc/self/status")?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            loop {
                // A last look after the end, so that a short call is seen as well.
                let last = done.load(Ordering::Acquire);
                most = most.max(unmapped().unwrap_or(0));
                if last {
                    return most;
                }
                thread::sleep(PERIOD);
            }
        });
        let result = f();
        done.store(true, Ordering::Release);
        let most = watch.join().map_err(|_| anyhow!("the watch of memory failed"))?;
        Ok((result?, most.saturating_sub(before)))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use weights::{ReadMode, StoredDType, TensorSource, open, safetensors::Safetensors, write};

    use super::*;

    /// A file that is mapped and read costs nothing, one that is copied all of it, also if it is freed again.
    #[test]
    fn files_do_not_count_and_copies_do() -> Result<()> {
        const LEN: usize = 256 << 20;
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(&write::header([("x", StoredDType::U8, &[LEN][..])], &write::Metadata::new())?)?;
        file.write_all(&vec![1; LEN])?;
        let (sum, mapped) = peak_beside_files(|| {
            let source = open(file.path())?;
            Ok(source.bytes("x")?.iter().map(|&byte| u64::from(byte)).sum::<u64>())
        })?;
        assert_eq!(sum, LEN as u64);
        let ((), copied) = peak_beside_files(|| Ok(Safetensors::open_with(file.path(), ReadMode::Copy).map(drop)?))?;
        assert!(mapped < LEN as u64 / 4 && copied > LEN as u64 / 2, "{mapped} {copied}");
        Ok(())
    }
}
