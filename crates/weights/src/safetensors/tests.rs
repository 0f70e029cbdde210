use std::{fs, sync::Arc};

use candle_core::DType;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::{
    dtype::StoredDType,
    write::{Metadata, TensorData, to_bytes, to_file},
};

/// A file with this header and `data` bytes behind it.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.resize(out.len() + data, 7);
    out
}

/// What is wrong with such a file.
fn problem(header: &str, data: usize) -> HeaderError {
    parse(&file(header, data)).expect_err(header)
}

/// The same, as the message of an opened file.
fn message(bytes: Vec<u8>) -> String {
    Safetensors::from_bytes(Arc::new(bytes), "x.safetensors").unwrap_err().to_string()
}

fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn a_plain_file_is_read() {
    let header = r#"{"__metadata__":{"k":"v"},"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}"#;
    let parsed = parse(&file(header, 10)).unwrap();
    assert_eq!(parsed.data_start, 8 + header.len());
    assert_eq!(parsed.metadata, Metadata::from([("k".to_owned(), "v".to_owned())]));
    let names: Vec<_> = parsed.tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.bytes.len())).collect();
    assert_eq!(names, [("a", StoredDType::BF16, 2), ("b", StoredDType::F32, 8)]);
}

#[test]
fn unknown_fields_and_empty_tensors_pass() {
    let header = r#"{"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0],"note":[{}]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"c":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}"#;
    assert_eq!(parse(&file(header, 1)).unwrap().tensors.len(), 3);
}

/// The format pads with spaces; some writers pad with NULs.
#[test]
fn padding_by_spaces_and_nuls_passes() {
    let header = one("U8", "[1]", "[0,1]");
    for pad in ["", "       ", "\0\0\0", " \0 \0", "\n"] {
        assert_eq!(parse(&file(&format!("{header}{pad}"), 1)).map(|h| h.tensors.len()), Ok(1), "{pad:?}");
    }
    assert_eq!(problem(&format!(" {header}"), 1), HeaderError::NotAnObject);
    assert!(matches!(problem(&format!("{header}x"), 1), HeaderError::Json { .. }));
    assert!(matches!(problem(&header.replace('1', "1\0"), 1), HeaderError::Json { .. }));
}

/// A half-downloaded file, cut at every 7th byte, says so and gives both sizes.
#[test]
fn truncation_is_named() {
    let whole = file(&one("U8", "[16]", "[0,16]"), 16);
    let len = whole.len();
    for cut in (0..len).step_by(7) {
        let text = message(whole[..cut].to_vec());
        assert!(text.starts_with("x.safetensors: "), "{text}");
        assert!(text.contains("download"), "{cut}: {text}");
    }
    let text = message(whole[..len - 4].to_vec());
    assert_eq!(text, format!("x.safetensors: expected {len} bytes, file has {}: truncated download?", len - 4));
}

#[test]
fn trailing_bytes_are_counted() {
    let mut bytes = file(&one("U8", "[16]", "[0,16]"), 16);
    let len = bytes.len();
    bytes.extend_from_slice(&[0; 8]);
    let text = message(bytes);
    assert!(text.contains("8 trailing bytes") && text.contains(&len.to_string()), "{text}");
}

#[test]
fn duplicate_keys_are_named() {
    let a = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let b = r#""b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}"#;
    let twice = format!("{{{a},{b},{}}}", a.replace("[0,1]", "[2,3]"));
    assert_eq!(problem(&twice, 3), HeaderError::DuplicateKey { name: "a".to_owned() });
    let same = format!("{{{a},{a}}}");
    assert_eq!(problem(&same, 1), HeaderError::DuplicateKey { name: "a".to_owned() });
    // The same name in another spelling.
    let escaped = format!("{{{a},{}}}", b.replace("\"b\"", "\"\\u0061\""));
    assert_eq!(problem(&escaped, 2), HeaderError::DuplicateKey { name: "a".to_owned() });
    let metadata = r#"{"__metadata__":{"k":"1"},"__metadata__":{}}"#;
    assert_eq!(problem(metadata, 0), HeaderError::DuplicateKey { name: METADATA.to_owned() });
    assert!(matches!(problem(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0), HeaderError::DuplicateKey { .. }));
    let field = r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(problem(field, 1).to_string().contains("tensor `a`: duplicate field `dtype`"));
}

#[test]
fn header_lengths_are_bounded() {
    for declared in [MAX_HEADER + 1, u64::MAX, u64::MAX - 7, 1 << 63] {
        let mut bytes = declared.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        assert_eq!(parse(&bytes), Err(HeaderError::HeaderTooLarge { declared }));
    }
    let mut bytes = MAX_HEADER.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    assert_eq!(parse(&bytes), Err(HeaderError::HeaderTruncated { declared: MAX_HEADER, len: 10 }));
    assert_eq!(parse(&[0; 8]), Err(HeaderError::NotAnObject));
    assert_eq!(parse(&[]), Err(HeaderError::Empty));
    assert_eq!(parse(&[1, 2, 3]), Err(HeaderError::TooShort { len: 3 }));
}

#[test]
fn metadata_must_be_strings() {
    for (value, found) in [
        ("0", "a number"),
        ("-1.5", "a number"),
        ("null", "null"),
        ("[1]", "a list"),
        ("{}", "an object"),
        ("true", "a truth value"),
    ] {
        let error = problem(&format!(r#"{{"__metadata__":{{"x":{value},"y":"z"}}}}"#), 0);
        assert_eq!(error, HeaderError::MetadataNotString { key: "x".to_owned(), found });
    }
    assert!(matches!(problem(r#"{"__metadata__":3}"#, 0), HeaderError::Json { .. }));
}

#[test]
fn a_file_with_metadata_only_is_empty() {
    for header in ["{}", r#"{"__metadata__":{"format":"pt"}}"#, r#"{"__metadata__":{}}"#] {
        let source = Safetensors::from_bytes(Arc::new(file(header, 0)), "x").unwrap();
        assert!(source.tensors().is_empty());
    }
}

#[test]
fn a_tensor_may_not_be_called_metadata() {
    let header = one("U8", "[1]", "[0,1]").replace("\"a\"", "\"__metadata__\"");
    assert_eq!(problem(&header, 1), HeaderError::ReservedName);
}

/// A file from a fuzzer that made another reader abort.
#[test]
fn sizes_that_disagree_are_refused() {
    let header = r#"{"weight":{"dtype":"F64","shape":[4],"data_offsets":[0,16]}}"#;
    let text = message(file(header, 16));
    assert!(text.contains("`weight`") && text.contains("F64") && text.contains("[4]"), "{text}");
    assert!(text.contains("32 bytes") && text.contains("0..16"), "{text}");
    assert!(matches!(problem(&one("U8", "[1]", "[1,0]"), 1), HeaderError::SizeMismatch { .. }));
}

#[test]
fn sizes_are_computed_without_overflow() {
    let max = u64::MAX;
    for shape in
        [format!("[{max},2]"), format!("[{max},{max},{max}]"), format!("[{max},{max},0]"), format!("[{}]", max / 8 + 1)]
    {
        let error = problem(&one("F32", &shape, "[0,4]"), 4);
        assert!(matches!(error, HeaderError::BadSize { problem: "beyond 64 bits", .. }), "{error}");
    }
    // Offsets at the end of the number range. The size fits, the place does not.
    let error = problem(&one("U8", "[4]", &format!("[{},{max}]", max - 4)), 4);
    assert!(matches!(error, HeaderError::Truncated { .. }), "{error}");
    let error = problem(&one("U8", "[4]", "[9000000000000000000,9000000000000000004]"), 4);
    assert!(matches!(error, HeaderError::Hole { .. }), "{error}");
}

#[test]
fn numbers_of_other_kinds_are_refused_with_the_name() {
    for bad in ["-1", "1.5", "1e3", "\"1\"", "null", "18446744073709551616", "1e400", "true", "[1]"] {
        for header in [one("U8", &format!("[{bad}]"), "[0,1]"), one("U8", "[1]", &format!("[0,{bad}]"))] {
            let error = problem(&header, 1);
            assert!(matches!(error, HeaderError::Json { .. }), "{bad}: {error}");
            let text = error.to_string();
            assert!(text.contains("tensor `a`") && text.contains("line 1 column"), "{text}");
        }
    }
    let header = one("U8", "[1]", "[0,1,2]");
    assert!(matches!(problem(&header, 1), HeaderError::Json { .. }));
    for field in ["dtype", "shape", "data_offsets"] {
        let header = one("U8", "[1]", "[0,1]").replace(field, "other");
        assert!(problem(&header, 1).to_string().contains(&format!("missing field `{field}`")));
    }
}

#[test]
fn ranks_are_bounded() {
    let ones = |n: usize| format!("[{}]", vec!["1"; n].join(","));
    assert!(parse(&file(&one("U8", &ones(MAX_RANK), "[0,1]"), 1)).is_ok());
    let error = problem(&one("U8", &ones(MAX_RANK + 1), "[0,1]"), 1);
    assert!(error.to_string().contains("more than 64 extents"), "{error}");
}

#[test]
fn deep_nesting_is_refused() {
    let header = format!(r#"{{"a":{}"#, "[".repeat(100_000));
    assert!(matches!(problem(&header, 0), HeaderError::Json { .. }));
    let header = format!(r#"{{"__metadata__":{{"k":{}"#, "[".repeat(100_000));
    assert!(matches!(problem(&header, 0), HeaderError::Json { .. }));
}

#[test]
fn data_is_covered_exactly_once() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{b}}}}}"#
        )
    };
    assert!(parse(&file(&two("[0,4]", "[4,8]"), 8)).is_ok());
    assert!(parse(&file(&two("[4,8]", "[0,4]"), 8)).is_ok());
    let overlap = HeaderError::Overlap { first: "a".to_owned(), second: "b".to_owned() };
    assert_eq!(problem(&two("[0,4]", "[3,7]"), 8), overlap);
    assert!(matches!(problem(&two("[0,4]", "[0,4]"), 4), HeaderError::Overlap { .. }));
    assert_eq!(problem(&two("[0,4]", "[5,9]"), 9), HeaderError::Hole { tensor: "b".to_owned(), bytes: 1 });
    assert_eq!(problem(&two("[1,5]", "[5,9]"), 9), HeaderError::Hole { tensor: "a".to_owned(), bytes: 1 });
}

/// Every type that the format knows opens; those that candle has become tensors, the others give their bytes and a
/// typed error.
#[test]
fn all_types_open() {
    for &dtype in StoredDType::ALL {
        let bytes = dtype.byte_len(&[4, 2]).unwrap();
        let header = one(dtype.name(), "[4,2]", &format!("[0,{bytes}]"));
        let source = Safetensors::from_bytes(Arc::new(file(&header, bytes)), "x").unwrap();
        assert_eq!(source.info("a").unwrap().dtype, dtype);
        assert_eq!(source.bytes("a").unwrap(), vec![7; bytes]);
        match (dtype.to_candle(), source.host("a")) {
            (Some(candle), Ok(host)) => {
                assert_eq!((host.dtype(), host.dims()), (candle, &[4, 2][..]));
                assert_eq!(host.bytes().len(), bytes);
            }
            (None, Err(Error::DType { tensor, dtype: found, .. })) => {
                assert_eq!((tensor.as_str(), found), ("a", dtype))
            }
            (_, other) => panic!("{dtype}: {other:?}"),
        }
    }
    let error = problem(&one("Q4_0", "[1]", "[0,1]"), 1);
    assert_eq!(error, HeaderError::UnknownDType { tensor: "a".to_owned(), dtype: "Q4_0".to_owned() });
    for (dtype, shape) in [("F4", "[3]"), ("F6_E2M3", "[2]"), ("F6_E3M2", "[]")] {
        let error = problem(&one(dtype, shape, "[0,1]"), 1);
        assert!(matches!(error, HeaderError::BadSize { problem: "not a whole number of bytes", .. }), "{error}");
    }
}

#[test]
fn names_from_the_file_cannot_break_the_line() {
    let header = one("U8", "[1]", "[0,2]").replace("\"a\"", r#""a\nb\u001b[31m""#);
    let text = message(file(&header, 2));
    assert!(!text.contains(['\n', '\u{1b}']), "{text:?}");
    let long = one("U8", "[1]", "[0,2]").replace("\"a\"", &format!("\"{}\"", "n".repeat(100_000)));
    assert!(message(file(&long, 2)).len() < 400);
    let quoted = one("U8", "[\"\\n\\n evil\"]", "[0,2]");
    assert!(!message(file(&quoted, 2)).contains('\n'));
}

#[test]
fn other_formats_are_named() {
    for (bytes, word) in [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n".to_vec(), "Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html><body>403</body></html>".to_vec(), "HTML"),
        (b"PK\x03\x04\x14\0\0\0\x08\0".to_vec(), "PyTorch"),
        (b"\x80\x02}q\0X\x05\0\0\0".to_vec(), "pickle"),
        (b"GGUF\x03\0\0\0\0\0\0\0".to_vec(), "GGUF"),
        (b"GGUF".to_vec(), "GGUF"),
        (b"{}".to_vec(), "JSON"),
    ] {
        let text = message(bytes);
        assert!(text.starts_with("x.safetensors is ") && text.contains(word), "{text}");
    }
    // A header of 640 bytes begins like a pickle, one of 35615 like a gzip archive.
    for len in [640usize, 35615] {
        let header = format!("{:len$}", "{}");
        assert!(parse(&file(&header, 0)).is_ok(), "{len}");
    }
}

#[test]
fn paths_that_are_no_files_are_refused() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("none.safetensors");
    assert!(matches!(Safetensors::open(&missing), Err(Error::Io { action: "open", .. })));
    assert!(matches!(
        Safetensors::open(dir.path()),
        Err(Error::NoWeights { problem: "no safetensors or GGUF file", .. })
    ));
    let empty = dir.path().join("empty.safetensors");
    fs::write(&empty, b"").unwrap();
    let text = Safetensors::open(&empty).unwrap_err().to_string();
    assert!(text.contains("empty.safetensors") && text.contains("the file is empty"), "{text}");
    #[cfg(unix)]
    assert!(matches!(Safetensors::open("/dev/null"), Err(Error::NotAFile { .. })));
}

/// One behaviour everywhere: mapped, copied, from memory, by its folder.
#[test]
fn all_ways_to_open_agree() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.safetensors");
    let tensors = [TensorData::f32("w", &[2, 2], &[1.0, 2.0, 3.0, 4.0]), TensorData::bf16("b", &[3], &[0.5; 3])];
    to_file(&path, &tensors, &Metadata::new()).unwrap();
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes, to_bytes(&tensors, &Metadata::new()).unwrap());
    let sources = |bytes: Vec<u8>| {
        [
            Safetensors::open(&path),
            Safetensors::open_with(&path, ReadMode::Copy),
            Safetensors::open(dir.path()),
            Safetensors::from_bytes(Arc::new(bytes), "memory"),
        ]
    };
    for source in sources(bytes.clone()) {
        let source = source.unwrap();
        let w = source.host("w").unwrap().to_tensor(DType::F32, &candle_core::Device::Cpu).unwrap();
        assert_eq!(w.to_vec2::<f32>().unwrap(), [[1.0, 2.0], [3.0, 4.0]]);
        assert_eq!(source.info("b").unwrap().shape, [3]);
        assert!(matches!(source.host("c"), Err(Error::NoSuchTensor { .. })));
    }
    let mut longer = bytes;
    longer.extend_from_slice(&[0; 8]);
    fs::write(&path, &longer).unwrap();
    for source in sources(longer) {
        let text = source.unwrap_err().to_string();
        assert!(text.contains("8 trailing bytes"), "{text}");
    }
}

/// A folder with two shards, `a` in the first and `b` in the second, and its index.
fn shards(index: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, file) in [("a", "one.safetensors"), ("b", "two.safetensors")] {
        to_file(dir.path().join(file), &[TensorData::f32(name, &[1], &[1.0])], &Metadata::new()).unwrap();
    }
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    dir
}

fn open_shards(index: &str) -> Result<Safetensors> {
    let dir = shards(index);
    Safetensors::open(dir.path().join("model.safetensors.index.json"))
}

#[test]
fn shards_are_one_source() {
    let dir = shards(r#"{"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#);
    for path in [dir.path().to_path_buf(), dir.path().join("model.safetensors.index.json")] {
        let source = Safetensors::open(path).unwrap();
        assert_eq!(source.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(source.files().len(), 2);
        let b = source.info("b").unwrap();
        assert!(source.file_of(b).ends_with("two.safetensors"));
        assert_eq!(source.host("b").unwrap().bytes(), 1.0f32.to_le_bytes());
    }
}

#[test]
fn missing_shards_are_all_named() {
    let error = open_shards(r#"{"weight_map":{"a":"one.safetensors","b":"three.safetensors","c":"four.safetensors"}}"#);
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("2 files") && text.contains("three.safetensors") && text.contains("four.safetensors"),
        "{text}"
    );
    assert!(!text.contains("one.safetensors"), "{text}");
}

#[test]
fn an_index_must_agree_with_its_shards() {
    let error = open_shards(r#"{"weight_map":{"a":"two.safetensors","b":"two.safetensors","c":"one.safetensors"}}"#);
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("2 tensors") && text.contains("a (two.safetensors)") && text.contains("c (one.safetensors)"),
        "{text}"
    );
}

#[test]
fn a_tensor_in_two_shards_names_both() {
    let dir = shards(r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#);
    let both = [TensorData::f32("a", &[1], &[2.0]), TensorData::f32("b", &[1], &[1.0])];
    to_file(dir.path().join("two.safetensors"), &both, &Metadata::new()).unwrap();
    let error = Safetensors::open(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::TensorInTwoFiles { tensor, .. } if tensor == "a"));
    let text = error.to_string();
    assert!(text.contains("one.safetensors") && text.contains("two.safetensors"), "{text}");
    let text = open_shards(r#"{"weight_map":{"a":"one.safetensors","a":"two.safetensors"}}"#).unwrap_err().to_string();
    assert!(text.contains("one.safetensors") && text.contains("two.safetensors"), "{text}");
}

#[test]
fn an_index_stays_in_its_folder() {
    for path in ["../one.safetensors", "/etc/passwd", "a/../../b", "C:\\\\x", "..\\\\x", ""] {
        let error = open_shards(&format!(r#"{{"weight_map":{{"a":"{path}"}}}}"#)).unwrap_err();
        assert!(matches!(error, Error::PathEscapes { .. }), "{path}: {error}");
    }
}

#[test]
fn a_broken_index_says_where() {
    for index in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#, "{\n\"weight_map\": nul", "\0"] {
        let error = open_shards(index).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Json { .. }), "{index}: {text}");
        assert!(text.contains("index.json") && text.contains("line"), "{index}: {text}");
    }
}

#[test]
fn damage_in_a_shard_names_the_shard() {
    let dir = shards(r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#);
    let path = dir.path().join("two.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let text = Safetensors::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("two.safetensors") && text.contains("truncated"), "{text}");
}

#[test]
fn sources_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Safetensors>();
    shared::<Error>();
    shared::<Arc<dyn TensorSource>>();
}

fn tensors() -> impl Strategy<Value = Vec<TensorData<'static>>> {
    let shape = prop::collection::vec(0usize..5, 0..4);
    let tensor =
        (prop::sample::select(StoredDType::ALL), shape, any::<u8>()).prop_filter_map("whole bytes", |(d, s, v)| {
            let len = d.byte_len(&s)?;
            Some((d, s, (0..len).map(|i| v.wrapping_add(i as u8)).collect::<Vec<u8>>()))
        });
    prop::collection::btree_map("[a-z.\\\\\"é\\n]{0,6}", tensor, 0..8).prop_map(|map| {
        map.into_iter().map(|(name, (dtype, shape, bytes))| TensorData::new(name, dtype, &shape, bytes)).collect()
    })
}

proptest! {
    /// What is written is read: names, types, shapes, bytes, metadata; ranges aligned and disjoint.
    #[test]
    fn written_files_are_read_back(
        tensors in tensors(),
        metadata in prop::collection::btree_map(".{0,4}", ".{0,4}", 0..3),
    ) {
        let bytes = to_bytes(&tensors, &metadata).unwrap();
        let source = Safetensors::from_bytes(Arc::new(bytes), "x").unwrap();
        prop_assert_eq!(source.metadata(), &metadata);
        prop_assert_eq!(source.tensors().len(), tensors.len());
        for t in &tensors {
            let info = source.require(&t.name).unwrap();
            prop_assert_eq!(info.dtype, t.dtype);
            prop_assert_eq!(&info.shape, &t.shape);
            prop_assert_eq!(source.bytes(&t.name).unwrap(), &*t.bytes);
            prop_assert_eq!(info.bytes.start % (t.dtype.bits() / 8).max(1), 0);
        }
    }

    /// No bytes whatever make the parser panic, and what it accepts has ranges inside the file.
    #[test]
    fn damaged_files_do_not_panic(
        tensors in tensors(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = to_bytes(&tensors, &Metadata::new()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(header) = parse(&bytes) {
            for t in &header.tensors {
                prop_assert!(header.data_start <= t.bytes.start && t.bytes.end <= bytes.len());
                prop_assert_eq!(t.dtype.byte_len(&t.shape), Some(t.bytes.len()));
            }
        }
    }
}
