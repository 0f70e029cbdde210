//! Processes of their own: without cuDNN, without its compiler, with plans on disk.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::Write,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_fork::{
    AttentionMask, attention,
    cudnn_policy::{Attention, Counters, scope, take_counters},
};
use serde_json::{Value, json};
use tests::gpu::{cuda, leave_out, noise, relative_error, values};
use tracing_subscriber::{filter::LevelFilter, util::SubscriberInitExt};

use crate::{bits, cudnn_serves, policy, under};

/// Text that was logged.
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().map_err(|_| std::io::Error::other("a panic"))?.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Where the child keeps plans.
const PLANS: &str = "ATTENTION_PLANS";

/// Not a test: a process of its own, with its own cuDNN. Prints one line of JSON.
#[test]
#[ignore = "run by the other tests"]
fn child() -> Result<()> {
    let device = cuda("the child of gpu_attention")?.context("no device")?;
    let x = noise(1, 1.0, &[2, 300, 4, 128], DType::BF16)?.to_device(&device)?;
    let run = || Ok(attention(&x, &x, &x, 0.088, AttentionMask::Full)?);
    let math = under(Attention::Math, run).result?;
    let mut auto = policy(Attention::Auto);
    auto.plan_cache = std::env::var_os(PLANS).map(|path| Arc::from(Path::new(&path)));
    let warned = Arc::new(Mutex::new(Vec::<u8>::new()));
    take_counters();
    let sink = warned.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(LevelFilter::WARN);
    let listening = subscriber.with_writer(move || Sink(sink.clone())).finish().set_default();
    let results = scope(auto, || (0..3).map(|_| run()).collect::<Result<Vec<Tensor>>>())?;
    drop(listening);
    let Counters { attention, plans_built, plans_loaded, plan_cache_hits, .. } = take_counters();
    let warnings = warned.lock().map_or(usize::MAX, |text| text.iter().filter(|&&byte| byte == b'\n').count());
    let required = under(Attention::Required, run).result.map_or_else(|e| format!("{e:#}"), |_| "served".to_owned());
    let same = results.iter().map(|y| Ok(bits(y)? == bits(&math)?)).collect::<Result<Vec<_>>>()?;
    let fallbacks: Vec<String> = attention.fallbacks.keys().map(|reason| format!("{reason:?}")).collect();
    println!(
        "CHILD {}",
        json!({
            "same": same.iter().all(|&same| same), "error": relative_error(&values(&results[0])?, &values(&math)?),
            "attempts": attention.attempts, "dispatched": attention.dispatched, "fused": attention.fused,
            "fallbacks": fallbacks, "required": required, "warnings": warnings,
            "built": plans_built, "loaded": plans_loaded, "hits": plan_cache_hits,
            "digest": bits(&results[0])?.iter().fold(0u64, |hash, bits| (hash ^ bits).wrapping_mul(0x0100_0000_01b3)),
        })
    );
    Ok(())
}

/// What a child says whose environment has these variables too.
fn say(variables: &[(&str, &OsStr)]) -> Result<Value> {
    let output = Command::new(std::env::current_exe()?)
        .args(["processes::child", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}\n{text}\n{error}", output.status);
    let line = text.lines().find_map(|line| line.split_once("CHILD ")).context("no answer")?.1;
    Ok(serde_json::from_str(line)?)
}

#[test]
fn without_cudnn_the_bytes_are_our_own_and_one_warning_is_given() -> Result<()> {
    if cuda("gpu_attention without cuDNN")?.is_none() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let said = say(&[("TALLOW_CUDNN", folder.path().join("libcudnn.so.9").as_os_str())])?;
    ensure!(said["same"] == true && said["fallbacks"] == json!(["Unavailable"]), "{said}");
    ensure!(said["attempts"] == 3 && said["dispatched"] == 0 && said["fused"] == 3, "{said}");
    ensure!(said["warnings"] == 1, "{said}");
    ensure!(said["required"].as_str().is_some_and(|text| text.contains("cudnn is not available")), "{said}");
    Ok(())
}

#[test]
fn plans_outlive_the_process() -> Result<()> {
    let suite = "gpu_attention, plans on disk";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn_serves(suite, &device)? {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let [first, second] = [say(&[(PLANS, folder.path().as_os_str())])?, say(&[(PLANS, folder.path().as_os_str())])?];
    for (said, built) in [(&first, 1), (&second, 0)] {
        ensure!(said["built"] == built && said["loaded"] == 1 - built && said["hits"] == 2, "{said}");
        ensure!(said["dispatched"] == 3 && said["required"] == "served" && said["warnings"] == 0, "{said}");
        ensure!(said["error"].as_f64().is_some_and(|error| error < 1e-2), "{said}");
    }
    ensure!(first["digest"] == second["digest"], "the plan on disk gives other bytes: {first} {second}");
    Ok(())
}

/// A cuDNN whose folder has no NVRTC beside it, and a loader that finds a broken one first.
#[test]
fn without_a_compiler_cudnn_does_not_serve() -> Result<()> {
    let suite = "gpu_attention without NVRTC";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    if !cudnn_serves(suite, &device)? {
        return Ok(());
    }
    let found = candle_fork::diagnosis::cuda()?.cudnn.ok().context("cuDNN serves and is not found")?;
    let Some((folder, major)) = found.path.as_deref().and_then(Path::parent).zip(found.cuda.split('.').next()) else {
        return leave_out(suite, "the system does not tell where cuDNN lies");
    };
    let root = tempfile::tempdir()?;
    let (libraries, broken) = (root.path().join("cudnn/lib"), root.path().join("broken"));
    fs::create_dir_all(&libraries)?;
    fs::create_dir_all(&broken)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("libcudnn") {
            // No link by name: the process would see the file, and NVRTC beside it, where it really lies.
            let (from, to) = (fs::canonicalize(entry.path())?, libraries.join(entry.file_name()));
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop))?;
        }
    }
    fs::write(broken.join(format!("libnvrtc.so.{major}")), "not a library")?;
    let mut search = OsString::from(&broken);
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        search.push(":");
        search.push(others);
    }
    let said = say(&[("TALLOW_CUDNN", libraries.as_os_str()), ("LD_LIBRARY_PATH", &search)])?;
    ensure!(said["same"] == true && said["fallbacks"] == json!(["Unavailable"]), "{said}");
    ensure!(said["dispatched"] == 0 && said["fused"] == 3 && said["warnings"] == 1, "{said}");
    ensure!(said["required"].as_str().is_some_and(|text| text.contains("nvrtc")), "{said}");
    Ok(())
}
