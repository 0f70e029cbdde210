//! Damaged files: never a panic, always one line that names the file.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use candle_core::{DType, Device};
use tempfile::TempDir;
use weights::{
    Expected, Loader, Safetensors, StoredDType, TensorSource, inspect,
    write::{Metadata, TensorData, to_bytes},
};

/// A good file with all that a header may hold.
fn good() -> Vec<u8> {
    let metadata = Metadata::from([("format".to_owned(), "pt".to_owned()), ("note".to_owned(), "é \"x\"".to_owned())]);
    let tensors = [
        TensorData::bf16("blocks.0.weight", &[2, 3], &[1.0; 6]),
        TensorData::f32("norm", &[2], &[1.0, 2.0]),
        TensorData::new("steps", StoredDType::I64, &[], vec![1; 8]),
        TensorData::new("quant", StoredDType::I8, &[4, 1], vec![3; 4]),
        TensorData::new("empty", StoredDType::F16, &[0, 5], vec![]),
    ];
    to_bytes(&tensors, &metadata).unwrap()
}

/// The file with another header; the data stays.
fn with_header(file: &[u8], change: impl FnOnce(&str) -> String) -> Vec<u8> {
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header = change(std::str::from_utf8(&file[8..8 + len]).unwrap());
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(&file[8 + len..]);
    out
}

/// Every damaged version, with a word on how.
fn damaged() -> Vec<(String, Vec<u8>)> {
    let file = good();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut out = Vec::new();
    for cut in (0..file.len()).step_by(7) {
        out.push((format!("cut after {cut}"), file[..cut].to_vec()));
    }
    for at in (0..header).step_by(4) {
        for bit in [0, 5, 7] {
            let mut bytes = file.clone();
            bytes[at] ^= 1 << bit;
            out.push((format!("bit {bit} of byte {at}"), bytes));
        }
    }
    let numbers = [
        "-1",
        "1.5",
        "1e30",
        "18446744073709551615",
        "18446744073709551616",
        "9223372036854775807",
        "null",
        "\"2\"",
        "[]",
        "{}",
    ];
    for (from, what) in [("[2,3]", "extent"), ("[0,8]", "offset"), ("[8,16]", "offset")] {
        for number in numbers {
            let first = format!("[{number},{}", &from[from.find(',').unwrap() + 1..]);
            let second = format!("{},{number}]", &from[..from.find(',').unwrap()]);
            for to in [first, second] {
                out.push((format!("{what}s {from} are {to}"), with_header(&file, |h| h.replace(from, &to))));
            }
        }
    }
    for (from, to) in [
        ("\"BF16\"", "\"bf16\""),
        ("\"BF16\"", "\"F4\""),
        ("\"BF16\"", "\"F64\""),
        ("\"BF16\"", "3"),
        ("\"BF16\"", "null"),
        ("\"norm\"", "\"steps\""),
        ("\"norm\"", "\"__metadata__\""),
        ("\"dtype\"", "\"type\""),
        ("\"shape\"", "\"dtype\""),
        ("\"data_offsets\"", "\"data\""),
        ("\"pt\"", "1"),
        ("\"pt\"", "{\"a\":[1,{}]}"),
        ("\"format\"", "\"note\""),
        ("{", "["),
        ("}", ""),
        (",", ""),
        (":", ","),
        ("\"", "'"),
        ("\"", ""),
        ("é", "\\ud800"),
        ("é", "\\u0000"),
        (
            "[2]",
            "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]",
        ),
    ] {
        out.push((format!("{from} is {to}"), with_header(&file, |h| h.replace(from, to))));
    }
    for (what, change) in [
        ("nothing in the header", (|_| String::new()) as fn(&str) -> String),
        ("an empty list", |_| "[]".to_owned()),
        ("an empty object", |_| "{}".to_owned()),
        ("two objects", |h| format!("{h}{h}")),
        ("a letter behind", |h| format!("{h}x")),
        ("a space before", |h| format!(" {h}")),
        ("a NUL before", |h| format!("\0{h}")),
        ("deep lists", |_| format!("{{\"a\":{}", "[".repeat(10_000))),
        ("deep objects", |_| "{\"a\":".repeat(10_000)),
        ("deep metadata", |_| format!("{{\"__metadata__\":{}", "{\"a\":".repeat(10_000))),
        ("a long name", |h| h.replace("norm", &"n\\n".repeat(10_000)).replace("[2]", "[3]")),
        ("a name with escapes", |h| h.replace("norm", "\\u001b[2J\\r\\n\\u202e").replace("[2]", "[3]")),
    ] {
        out.push((what.to_owned(), with_header(&file, change)));
    }
    for length in [
        0,
        1,
        8,
        header as u64 - 9,
        header as u64,
        file.len() as u64,
        100_000_000,
        100_000_001,
        1 << 32,
        1 << 63,
        u64::MAX,
        u64::MAX - 8,
    ] {
        let mut bytes = file.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        out.push((format!("header length {length}"), bytes));
    }
    for extra in [1usize, 8, 4096] {
        let mut bytes = file.clone();
        bytes.resize(bytes.len() + extra, 0);
        out.push((format!("{extra} bytes behind"), bytes));
    }
    out
}

/// Opens the file in every way, reads every tensor, loads by a plan.
fn use_file(path: &Path) -> weights::Result<()> {
    let inspected = inspect(path).map(|report| report.tensors());
    let source = Safetensors::open(path);
    assert_eq!(inspected.is_err(), source.as_ref().is_err_and(|e| !matches!(e, weights::Error::OtherFormat { .. })));
    let source = source?;
    assert_eq!(inspected?, source.tensors().len());
    for t in source.tensors() {
        assert_eq!(source.bytes(&t.name)?.len(), t.bytes.len());
        assert_eq!(source.host(&t.name).is_ok(), t.dtype.to_candle().is_some());
    }
    let plan = [Expected::new("blocks.0.weight", [2, 3]), Expected::new("norm", [2])];
    let ignored = |name: &str| ["steps", "quant", "empty"].contains(&name);
    let mut loader = Loader::new(std::sync::Arc::new(source), &plan, ignored, DType::F32, &Device::Cpu)?;
    loader.linear("blocks.0.weight")?;
    loader.tensor("norm")?;
    loader.finish()
}

#[test]
fn damaged_files_give_errors_of_one_line() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("damaged.safetensors");
    fs::write(&path, good()).unwrap();
    use_file(&path).unwrap();

    let cases = damaged();
    assert!(cases.len() > 400, "{}", cases.len());
    let mut refused = 0;
    for (what, bytes) in &cases {
        fs::write(&path, bytes).unwrap();
        match catch_unwind(AssertUnwindSafe(|| use_file(&path))) {
            Err(_) => panic!("{what}: panic"),
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                refused += 1;
                let text = error.to_string();
                assert!(!text.chars().any(char::is_control), "{what}: {text:?}");
                assert!(text.contains("damaged.safetensors"), "{what}: {text}");
                assert!(text.chars().count() < 1200, "{what}: {text}");
            }
        }
    }
    // Some flips only change a letter of the metadata, or a space of the padding into a NUL's neighbour.
    assert!(refused * 10 > cases.len() * 9, "{refused} of {}", cases.len());
}

/// The same bytes as an index: names, paths and numbers of a hostile author.
#[test]
fn damaged_indexes_give_errors_of_one_line() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("1.safetensors"), good()).unwrap();
    let path = dir.path().join("model.safetensors.index.json");
    let index = r#"{"metadata":{"total_size":44},"weight_map":{"blocks.0.weight":"1.safetensors","norm":"1.safetensors","steps":"1.safetensors"}}"#;
    fs::write(&path, index).unwrap();
    use_file(&path).unwrap();
    for at in 0..index.len() {
        for change in
            [&index.as_bytes()[..at], &[&index.as_bytes()[..at], b"\xff", &index.as_bytes()[at + 1..]].concat()]
        {
            fs::write(&path, change).unwrap();
            let opened = catch_unwind(AssertUnwindSafe(|| Safetensors::open(&path)));
            let error = match opened.unwrap_or_else(|_| panic!("byte {at}: panic")) {
                // The metadata is skipped, not read.
                Ok(_) if change.len() == index.len() && at < index.find("weight_map").unwrap() => continue,
                Ok(_) => panic!("byte {at}: opened"),
                Err(error) => error,
            };
            let text = error.to_string();
            assert!(text.contains("model.safetensors.index.json") && !text.contains('\n'), "byte {at}: {text}");
        }
    }
}
