//! What a file claims is not what is allocated. One test, so that nothing else runs in the process.
#![cfg(target_os = "linux")]

use std::{
    fs::{self, File},
    io::Write,
    sync::Arc,
};

use candle_core::{DType, Device};
use tempfile::TempDir;
use weights::{
    Expected, Loader, Safetensors, StoredDType,
    write::{Metadata, header_only},
};

/// A figure of `/proc/self/status`, in bytes.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes * 1024
}

const MIB: u64 = 1 << 20;

#[test]
fn memory_follows_what_is_there() {
    let dir = TempDir::new().unwrap();

    // Only a length field. VmPeak counts what was reserved, touched or not.
    let path = dir.path().join("length.safetensors");
    for declared in [100_000_000u64, 100_000_001, 1 << 40, u64::MAX] {
        fs::write(&path, declared.to_le_bytes()).unwrap();
        let before = status("VmPeak");
        let text = Safetensors::open(&path).unwrap_err().to_string();
        assert!(text.contains(&declared.to_string()), "{text}");
        assert!(status("VmPeak") - before < 16 * MIB, "{declared}");
    }

    // The same in a file of 200 MB of holes: the header is not even looked through.
    let mut file = File::create(&path).unwrap();
    file.write_all(&100_000_001u64.to_le_bytes()).unwrap();
    file.set_len(200_000_000).unwrap();
    drop(file);
    let before = status("VmHWM");
    Safetensors::open(&path).unwrap_err();
    assert!(status("VmHWM") - before < 16 * MIB);

    // A model of 64 GiB that does not fit the plan: refused before a page of it is read.
    let names: Vec<String> = (0..64).map(|i| format!("blocks.{i}.weight")).collect();
    let shape = [1 << 14, 1 << 15];
    header_only(&path, names.iter().map(|n| (n.as_str(), StoredDType::BF16, &shape[..])), &Metadata::new()).unwrap();
    assert!(fs::metadata(&path).unwrap().len() > 64 << 30);
    let source = Arc::new(Safetensors::open(&path).unwrap());
    let mut plan: Vec<_> = names.iter().map(|n| Expected::new(n.clone(), shape)).collect();
    plan.push(Expected::new("lost.weight", [1]));
    Loader::new(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu).map(|_| ()).unwrap_err();
    plan.pop();
    Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    assert!(status("VmHWM") - before < 32 * MIB);
}
