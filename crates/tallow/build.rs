//! Passes the target triple on to `tallow doctor`.

fn main() {
    // Cargo sets TARGET for build scripts only.
    let target = std::env::var("TARGET").unwrap_or_default();
    println!("cargo:rustc-env=TALLOW_TARGET={target}");
    println!("cargo:rerun-if-changed=build.rs");
}
