//! What the figures were measured on, and the process's own memory.

use std::{fs, process::Command};

/// The processor's name and the number of threads in use, for example `Intel(R) Xeon(R) Processor x2`.
pub fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned()))
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    format!("{name} x{}", rayon::current_num_threads())
}

/// The commit that is checked out, `+` appended if the tree differs from it; empty outside a repository. `TALLOW_COMMIT`
/// in the environment goes first, for programs that run away from their repository.
pub fn commit() -> String {
    if let Ok(commit) = std::env::var("TALLOW_COMMIT") {
        return commit;
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        String::from_utf8(output.stdout).ok().map(|s| s.trim().to_owned())
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|s| !s.is_empty());
    git(&["rev-parse", "--short=12", "HEAD"]).map(|c| if changed { c + "+" } else { c }).unwrap_or_default()
}

/// Today, UTC, `YYYY-MM-DD`; empty if there is no `date` program.
pub fn date() -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d"]).output().ok();
    output.and_then(|o| String::from_utf8(o.stdout).ok()).map(|s| s.trim().to_owned()).unwrap_or_default()
}

/// The NVIDIA driver's version, `driver 580.1`; `no driver` where there is none.
pub fn driver() -> String {
    let output = Command::new("nvidia-smi").args(["--query-gpu=driver_version", "--format=csv,noheader"]).output();
    let text = output.ok().and_then(|o| String::from_utf8(o.stdout).ok()).unwrap_or_default();
    text.lines().next().map_or_else(|| "no driver".to_owned(), |version| format!("driver {}", version.trim()))
}

/// Largest resident set of this process so far, mapped files included, in bytes; `None` where `/proc` has none.
pub fn peak_resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
