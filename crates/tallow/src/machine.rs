//! What this machine has, as Linux tells it in `/proc` (nothing elsewhere), and where it keeps files.

use std::{env, fs, path::PathBuf};

/// Bytes of memory: all, and those that new work could take.
pub(crate) fn memory() -> (Option<u64>, Option<u64>) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    (kilobytes(&text, "MemTotal"), kilobytes(&text, "MemAvailable"))
}

/// Most bytes of memory that this process has held at one time, mapped files included.
pub(crate) fn peak_memory() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM")
}

/// Where files that can be made again are kept: `$XDG_CACHE_HOME/tallow/NAME`, or `.cache/tallow/NAME` at home.
pub(crate) fn cache_folder(name: &str) -> Option<PathBuf> {
    let set = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let root = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(root.join("tallow").join(name))
}

/// The first model name of the processors.
pub(crate) fn cpu_model() -> Option<String> {
    model_name(&fs::read_to_string("/proc/cpuinfo").ok()?)
}

/// The value of a line such as `MemTotal:  16393872 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn model_name(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == "model name").then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_understood() {
        let meminfo = "MemTotal:       16393872 kB\nMemFree: 1 kB\nMemAvailable: x kB\n";
        assert_eq!(kilobytes(meminfo, "MemTotal"), Some(16_393_872 * 1024));
        assert_eq!(kilobytes(meminfo, "MemAvailable"), None);
        assert_eq!(kilobytes(meminfo, "Mem"), None);
        assert_eq!(model_name("processor\t: 0\nmodel name\t: A CPU @ 2\n").as_deref(), Some("A CPU @ 2"));
        assert_eq!(model_name("processor: 0\n"), None);
    }
}
