//! What a file claims is not what is allocated. One test, so that nothing else runs in the process.
#![cfg(target_os = "linux")]

use std::{
    fs::{self, File},
    io::Write,
    path::Path,
    sync::Arc,
};

use candle_core::{DType, Device};
use tempfile::TempDir;
use weights::{
    Expected, Loader, LoaderOptions, Safetensors, StoredDType, ValueCheck, open,
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

    quantised_matrices_stay_mapped(&dir.path().join("int8.safetensors"));
}

/// 8 GiB of rotated bytes: opened, planned and loaded without a page of them being read, and looked through without a copy.
fn quantised_matrices_stay_mapped(path: &Path) {
    let names: Vec<_> = (0..32).map(|i| (format!("blocks.{i}.weight"), format!("blocks.{i}.weight_scale"))).collect();
    let (shape, rows) = ([1 << 14, 1 << 14], [1 << 14, 1]);
    let weights = names.iter().map(|(weight, _)| (weight.as_str(), StoredDType::I8, &shape[..]));
    let scales = names.iter().map(|(_, scale)| (scale.as_str(), StoredDType::F32, &rows[..]));
    let layer = r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":256}"#;
    let layers: Vec<_> = (0..32).map(|i| format!(r#""blocks.{i}":{layer}"#)).collect();
    let text = format!(r#"{{"layers":{{{}}}}}"#, layers.join(","));
    let metadata = Metadata::from([("_quantization_metadata".to_owned(), text)]);
    header_only(path, weights.chain(scales), &metadata).unwrap();
    assert!(fs::metadata(path).unwrap().len() > 8 << 30);

    let (before, anonymous) = (status("VmHWM"), status("RssAnon"));
    let source = open(path).unwrap();
    assert_eq!(source.tensors().len(), names.len());
    let plan: Vec<_> = names.iter().map(|(weight, _)| Expected::new(weight.clone(), shape)).collect();
    let options = LoaderOptions::default().with_values(ValueCheck::Off);
    let load =
        |options| Loader::with_options(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu, options).unwrap();
    let mut loader = load(options);
    let loaded: Vec<_> = plan.iter().map(|e| loader.linear(&e.name).unwrap()).collect();
    loader.finish().unwrap();
    assert!(status("VmHWM") - before < 64 * MIB);
    drop(loaded);
    let mut loader = load(LoaderOptions::default());
    loader.linear(&plan[0].name).unwrap();
    assert!(status("RssAnon") - anonymous < 64 * MIB);
}
