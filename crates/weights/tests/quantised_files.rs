//! Damaged and hostile files of quantised models: never a panic, an abort, or memory for what a file only claims; always
//! one line that names the file.
//!
//! The files are read by a child process, so that an abort is seen as one.
#![cfg(target_os = "linux")]

use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::Command,
    sync::Arc,
};

use candle_core::{
    DType, Device, Tensor,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use tempfile::TempDir;
use weights::{
    Expected, Loader, StoredDType, TensorSource, inspect, open,
    write::{Metadata, TensorData, to_bytes},
};

/// Where the child finds the files.
const CORPUS: &str = "TALLOW_TEST_CORPUS";

fn marker(name: &str, json: &str) -> TensorData<'static> {
    TensorData::new(name, StoredDType::U8, &[json.len()], json.as_bytes().to_vec())
}

/// Every format of safetensors files that is read.
fn safetensors() -> Vec<u8> {
    let int8 = r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":16}"#;
    let tensors = [
        TensorData::new("a.weight", StoredDType::I8, &[2, 16], vec![3; 32]),
        TensorData::f32("a.weight_scale", &[2, 1], &[0.5, 0.25]),
        marker("a.comfy_quant", int8),
        TensorData::new("b.weight", StoredDType::F8E4M3, &[2, 4], vec![0x38; 8]),
        TensorData::f32("b.weight_scale", &[], &[0.5]),
        TensorData::f32("b.input_scale", &[], &[0.5]),
        TensorData::new("c.weight", StoredDType::F8E5M2, &[1, 4], vec![0x3c; 4]),
        TensorData::new("d.weight", StoredDType::I8, &[1, 8], vec![0x21; 8]),
        TensorData::f32("d.weight_scale", &[1], &[0.5]),
        marker("d.comfy_quant", r#"{"format":"convrot_w4a4","convrot_groupsize":16}"#),
        TensorData::new("e.weight", StoredDType::I8, &[1, 8], vec![0x21; 8]),
        TensorData::f32("e.weight_s_rel", &[1, 1], &[2.0]),
        TensorData::f32("e.weight_s_channel", &[1], &[0.5]),
        TensorData::f32("e.weight_codebook", &[16], &[0.5; 16]),
        marker("e.comfy_quant", r#"{"format":"asym_w4a8_int8","convrot_groupsize":16}"#),
        TensorData::bf16("norm", &[2], &[1.0, 2.0]),
    ];
    let layers = r#"{"format_version":"1.0","layers":{"b":{"format":"float8_e4m3fn"}}}"#;
    let metadata = Metadata::from([("_quantization_metadata".to_owned(), layers.to_owned())]);
    to_bytes(&tensors, &metadata).unwrap()
}

/// A GGUF file as candle writes it.
fn gguf() -> Vec<u8> {
    let wide = Tensor::arange(0f32, 512.0, &Device::Cpu).unwrap().reshape((2, 256)).unwrap();
    let tensor = |t| QTensor::quantize(&wide, t).unwrap();
    let tensors = [tensor(GgmlDType::Q8_0), tensor(GgmlDType::Q4K), tensor(GgmlDType::F32)];
    let named: Vec<_> = ["blk.0.a.weight", "blk.0.b.weight", "norm"].into_iter().zip(&tensors).collect();
    let (name, count) = (gguf_file::Value::String("flux".to_owned()), gguf_file::Value::U32(7));
    let words = ["a", "bc"].map(|word| gguf_file::Value::String(word.to_owned()));
    let words = gguf_file::Value::Array(words.to_vec());
    let keys = [("general.architecture", &name), ("flux.block_count", &count), ("tokenizer.words", &words)];
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &keys, &named).unwrap();
    file.into_inner()
}

/// Every damaged version: cut, bits turned, numbers replaced.
fn damaged(file: &[u8], header: usize, numbers: bool) -> Vec<Vec<u8>> {
    let mut out: Vec<_> = (0..file.len()).step_by(7).map(|cut| file[..cut].to_vec()).collect();
    for at in 0..header {
        // Low bits change numbers and letters, high bits make text what no text is.
        for bit in [at % 3, 5 + at % 3] {
            let mut bytes = file.to_vec();
            bytes[at] ^= 1 << bit;
            out.push(bytes);
        }
    }
    for at in (0..header.saturating_sub(8)).step_by(2).filter(|_| numbers) {
        for number in [0u64, 1 << 31, u64::from(u32::MAX), 1 << 40, 1 << 62, u64::MAX] {
            let mut bytes = file.to_vec();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            out.push(bytes);
        }
    }
    out
}

/// Opens the file in every way and decodes all that it holds.
fn use_file(path: &Path) -> weights::Result<()> {
    let inspected = inspect(path);
    let source = open(path)?;
    inspected?;
    // Types that cannot be computed with are refused by name.
    let plan: Vec<_> = source.tensors().iter().map(|t| Expected::new(t.name.clone(), t.shape.clone())).collect();
    let load = || Loader::new(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu);
    let (mut whole, mut maps) = (load()?, load()?);
    for t in source.tensors() {
        assert_eq!(source.bytes(&t.name)?.len(), t.bytes.len());
        whole.tensor(&t.name)?;
        if t.shape.len() == 2 {
            maps.linear(&t.name)?;
        }
    }
    whole.finish()
}

fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(key)).unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes * 1024
}

/// Run by the test below, in a process of its own.
#[test]
#[ignore = "the child of `no_file_ends_the_process`"]
fn child() {
    let dir = env::var(CORPUS).unwrap();
    let mut report = String::new();
    for name in ["model.safetensors", "model.gguf"] {
        let path = Path::new(&dir).join(name);
        let file = fs::read(&path).unwrap();
        use_file(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
        let is_gguf = name.ends_with("gguf");
        // Of a GGUF file the data are large and mean nothing; of the other the markers are data.
        let header = if is_gguf { 320 } else { file.len() };
        let cases = damaged(&file, header, is_gguf);
        let before = status("VmPeak");
        let mut refused = 0;
        for (i, bytes) in cases.iter().enumerate() {
            let path = Path::new(&dir).join(format!("damaged-{name}"));
            fs::write(&path, bytes).unwrap();
            let used = catch_unwind(AssertUnwindSafe(|| use_file(&path)));
            if let Err(error) = used.unwrap_or_else(|_| panic!("case {i} of {name}: panic")) {
                refused += 1;
                let text = error.to_string();
                assert!(!text.chars().any(char::is_control), "case {i}: {text:?}");
                assert!(text.contains("damaged-"), "case {i}: {text}");
            }
        }
        let grown = (status("VmPeak") - before) >> 20;
        assert!(grown < 64, "{name}: {grown} MiB for files of {} bytes", file.len());
        report += &format!("{name}: {refused} of {} refused\n", cases.len());
        assert!(refused * 2 > cases.len(), "{report}");
    }
    fs::write(Path::new(&dir).join("report"), report).unwrap();
}

#[test]
fn no_file_ends_the_process() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("model.safetensors"), safetensors()).unwrap();
    fs::write(dir.path().join("model.gguf"), gguf()).unwrap();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--test-threads", "1"])
        .env(CORPUS, dir.path())
        // Two threads: each reserves an arena, which counts as memory.
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{output}", child.status);
    let report = fs::read_to_string(dir.path().join("report")).unwrap();
    assert!(report.contains("model.gguf: "), "{report}");
}

/// Lengths that a file of 64 bytes claims.
#[test]
fn claims_are_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("claims.gguf");
    for at in [8, 16, 24] {
        for claim in [1u64 << 32, 1 << 40, u64::MAX] {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.resize(64, 0);
            // One entry, so that its length is read.
            bytes[16] = u8::from(at == 24);
            bytes[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            fs::write(&path, &bytes).unwrap();
            let text = open(&path).map(|_| ()).unwrap_err().to_string();
            assert!(text.contains("claims.gguf") && text.contains(&claim.to_string()), "{text}");
        }
    }
}

/// Formats that are not read are said to be what they are.
#[test]
fn older_formats_are_named() {
    let dir = TempDir::new().unwrap();
    for (magic, word) in [
        (&b"lmgg\x01\0\0\0\0\0\0\0"[..], "GGML"),
        (b"tjgg\x03\0\0\0\0\0\0\0", "GGML"),
        (b"FUGG\0\0\0\x03", "big-endian"),
    ] {
        let path = dir.path().join("old.bin");
        fs::write(&path, magic).unwrap();
        let text = open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    }
}

/// A source that is asked for what it does not hold.
#[test]
fn what_is_not_there_is_refused() {
    let dir = TempDir::new().unwrap();
    for (name, bytes) in [("model.safetensors", safetensors()), ("model.gguf", gguf())] {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let source: Arc<dyn TensorSource> = open(&path).unwrap();
        for missing in ["none", "a.weight_scale", "a.comfy_quant"] {
            assert!(source.bytes(missing).is_err() && source.shared(missing).is_err(), "{missing}");
            assert!(source.host(missing).is_err() && source.quant(missing).is_err(), "{missing}");
        }
        let quantised = source.tensors().iter().find(|t| t.quantisation.is_some()).unwrap();
        assert!(source.host(&quantised.name).is_err());
        let plain = source.tensors().iter().find(|t| t.quantisation.is_none()).unwrap();
        assert!(source.quant(&plain.name).unwrap_err().to_string().contains("is not quantised"));
    }
}
