//! What is left when cuDNN is absent, broken, too old or known to be wrong: im2col's bytes, a reason on record, and never
//! an abort. The library is loaded once per process, so each surrounding gets a process of its own.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_fork::{ConvParams, conv_nd, cudnn_policy::Backend};
use serde_json::{Value, json};
use tests::gpu::{Counted, cuda, leave_out, noise, on, relative_error, skip, values};

/// Large enough that `Backend::Auto` wants cuDNN.
const VIDEO: [[usize; 5]; 2] = [[1, 96, 6, 60, 64], [96, 96, 3, 3, 3]];
const PICTURE: [[usize; 5]; 2] = [[1, 96, 1, 192, 200], [96, 96, 1, 3, 3]];

/// Names the library that a child is to use.
const CUDNN: &str = "TALLOW_CUDNN";

/// Not a test: the process in which a surrounding is tried. Prints one line of JSON for each convolution.
#[test]
#[ignore = "run by the other tests"]
fn child() -> Result<()> {
    let device = cuda("the child of gpu_fallback")?.context("no device")?;
    for (name, [x_dims, weight_dims], dtype) in [
        ("video bf16", VIDEO, DType::BF16),
        ("video f16", VIDEO, DType::F16),
        ("video f32", VIDEO, DType::F32),
        ("picture bf16", PICTURE, DType::BF16),
    ] {
        let x = noise(1, 1.0, &x_dims, dtype)?.to_device(&device)?;
        let weight = noise(2, 0.02, &weight_dims, dtype)?.to_device(&device)?;
        let params = ConvParams { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        let run = || Ok(conv_nd::<3>(&x, &weight, None, &params)?);
        let want = on(Backend::Im2col, run).result?;
        let Counted { result, counters } = on(Backend::Auto, run);
        let got: Tensor = result?;
        let required = on(Backend::Required, run).result.map_or_else(|e| format!("{e:#}"), |_| "served".to_owned());
        let fallbacks: Vec<String> = counters.fallbacks.keys().map(|reason| format!("{reason:?}")).collect();
        println!(
            "CHILD {}",
            json!({
                "case": name, "same": values(&got)? == values(&want)?, "attempts": counters.attempts,
                "dispatched": counters.dispatched, "fallbacks": fallbacks, "required": required,
                "error": relative_error(&values(&got)?, &values(&want)?),
            })
        );
    }
    Ok(())
}

/// What a child says when its library is at `cudnn`.
fn try_with(cudnn: &Path) -> Result<Vec<Value>> {
    let output = Command::new(std::env::current_exe()?)
        .args(["child", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CUDNN, cudnn)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{}: {}\n{text}\n{}",
        cudnn.display(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let lines = text.lines().filter_map(|line| line.split_once("CHILD ").map(|(_, line)| line));
    let said = lines.map(|line| Ok(serde_json::from_str(line)?)).collect::<Result<Vec<Value>>>()?;
    ensure!(said.len() == 4, "{text}");
    Ok(said)
}

/// Holds that every convolution fell back for `reason`, with im2col's bytes, and that `Required` said so.
fn assert_all_fall_back(cudnn: &Path, reason: &str, words: &str) -> Result<()> {
    for said in try_with(cudnn)? {
        assert_fell_back(&said, reason)?;
        let required = said["required"].as_str().unwrap_or_default();
        ensure!(required.contains(words), "`{words}` is not in: {said}");
    }
    Ok(())
}

fn assert_fell_back(said: &Value, reason: &str) -> Result<()> {
    ensure!(said["same"] == true && said["dispatched"] == 0 && said["attempts"] == 1, "{said}");
    ensure!(said["fallbacks"] == json!([reason]) && said["required"] != "served", "{said}");
    Ok(())
}

#[test]
fn no_library() -> Result<()> {
    if cuda("gpu_fallback without cuDNN")?.is_none() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    assert_all_fall_back(&folder.path().join("libcudnn.so.9"), "Unavailable", "")
}

#[test]
fn a_file_that_is_no_library() -> Result<()> {
    if cuda("gpu_fallback with a broken file")?.is_none() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("libcudnn.so.9");
    std::fs::write(&file, b"not a library")?;
    assert_all_fall_back(&file, "Unavailable", "")
}

/// Looks like cuDNN up to the checks, and ends the process, as cuDNN would, if anything more is asked of it.
const STAND_IN: &str = r#"
#include <stdlib.h>
#include <string.h>
#define FATAL(name) void name(void) { abort(); }
size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART; }
size_t cudnnGetMaxDeviceVersion(void) { return 1210; }
int cudnnGraphVersionCheck(void) { return CHECK; }
const char *cudnnGetErrorString(int status) { return status == 1002 ? "SUBLIBRARY_VERSION_MISMATCH" : "OTHER"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
FATAL(cudnnCreate) FATAL(cudnnDestroy) FATAL(cudnnSetStream) FATAL(cudnnGetStream)
FATAL(cudnnBackendCreateDescriptor) FATAL(cudnnBackendDestroyDescriptor) FATAL(cudnnBackendSetAttribute)
FATAL(cudnnBackendGetAttribute) FATAL(cudnnBackendFinalize) FATAL(cudnnBackendExecute)
"#;

/// A stand-in of this version, built for this CUDA runtime. `None` without a C compiler.
fn stand_in(folder: &Path, version: u32, cudart: u32, check: i32) -> Result<Option<PathBuf>> {
    let source = folder.join("stand_in.c");
    std::fs::write(&source, STAND_IN)?;
    let library = folder.join("libcudnn.so.9");
    let defines = [format!("-DVERSION={version}"), format!("-DCUDART={cudart}"), format!("-DCHECK={check}")];
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", "-o"]).arg(&library).args(defines).arg(&source);
    match cc.output() {
        Ok(output) => {
            ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Ok(Some(library))
        }
        Err(error) => {
            skip("gpu_fallback with a stand-in", &format!("no C compiler ({error})"))?;
            Ok(None)
        }
    }
}

/// cuDNN ends the process if it does not find the cuBLASLt of its CUDA: there is none of CUDA 99.
#[test]
fn no_cublas_lt() -> Result<()> {
    with_stand_in(91_900, 99_000, 0, "libcublasLt.so.99")
}

#[test]
fn a_library_that_is_too_old() -> Result<()> {
    with_stand_in(8_907, 13_000, 0, "8.9.7")
}

#[test]
fn parts_of_different_versions() -> Result<()> {
    with_stand_in(91_900, 13_000, 1002, "MISMATCH")
}

fn with_stand_in(version: u32, cudart: u32, check: i32, words: &str) -> Result<()> {
    if cuda("gpu_fallback with a stand-in")?.is_none() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    match stand_in(folder.path(), version, cudart, check)? {
        Some(library) => assert_all_fall_back(&library, "Unavailable", words),
        None => Ok(()),
    }
}

/// `OLD_CUDNN` names a cuDNN from 9.8 up to, not including, 9.15: wrong for 3-D convolutions in half precision, right for
/// the others.
#[test]
fn a_version_that_is_wrong_for_video() -> Result<()> {
    let suite = "gpu_fallback with a cuDNN that is wrong for video";
    if cuda(suite)?.is_none() {
        return Ok(());
    }
    let Some(old) = std::env::var_os("OLD_CUDNN").filter(|path| !path.is_empty()) else {
        return leave_out(suite, "OLD_CUDNN names none");
    };
    for said in try_with(Path::new(&old))? {
        match said["case"].as_str() {
            Some("video bf16" | "video f16") => assert_fell_back(&said, "Errata")?,
            Some("picture bf16") => {
                ensure!(said["required"] == "served", "{said}");
                ensure!(said["error"].as_f64().is_some_and(|error| error < 1e-2), "{said}");
            }
            _ => ensure!(said["error"].as_f64().is_some_and(|error| error < 1e-5), "{said}"),
        }
    }
    Ok(())
}
