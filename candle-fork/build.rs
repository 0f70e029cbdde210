//! With feature `cuda`: every `.cu` file under `src` to PTX, and a Rust file with one text constant per kernel file.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The directory, not the files found in it, so that a new kernel is noticed.
    println!("cargo:rerun-if-changed=src");
    let headers = cudaforge::collect_headers(&["src"]);
    let output = cudaforge::KernelBuilder::new()
        .source_dir("src")
        .watch(headers)
        .include_path("src")
        // Compiled on the device's driver for its own architecture; 8.0 is the first with bf16 arithmetic.
        .compute_cap(80)
        // What only one architecture has says so in its name.
        .with_compute_override_arch("*_sm90.cu", "90a")
        .arg("-O3")
        .arg("-std=c++17")
        .build_ptx()?;
    output.write(std::path::Path::new(&std::env::var("OUT_DIR")?).join("ptx.rs"))?;
    Ok(())
}
