//! Archives and pickles made by hand; whole files from PyTorch are tried in `tests/pth.rs`.

use std::sync::Arc;

use super::*;

/// A member of a small archive.
struct Member<'a> {
    name: &'a str,
    data: &'a [u8],
}

/// How an archive's directory is written.
#[derive(Clone, Copy, PartialEq)]
enum Sizes {
    /// As usual in small files.
    Narrow,
    /// With 64-bit fields, as PyTorch writes large ones.
    Wide,
}

fn archive(members: &[Member<'_>], sizes: Sizes) -> Vec<u8> {
    let wide = sizes == Sizes::Wide;
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for Member { name, data } in members {
        let offset = out.len();
        let both = |head: &mut Vec<u8>| {
            for v in [0u16, 0, 0, 0] {
                head.extend(v.to_le_bytes()); // flags, method, time, date
            }
            head.extend(0u32.to_le_bytes()); // checksum
            for _ in 0..2 {
                head.extend(if wide { u32::MAX } else { data.len() as u32 }.to_le_bytes());
            }
            head.extend((name.len() as u16).to_le_bytes());
        };
        out.extend(b"PK\x03\x04\x14\0");
        both(&mut out);
        out.extend(4u16.to_le_bytes());
        out.extend(name.as_bytes());
        out.extend(b"FB\0\0");
        out.extend_from_slice(data);

        directory.extend(b"PK\x01\x02\x14\0\x14\0");
        both(&mut directory);
        directory.extend(if wide { 32u16 } else { 0 }.to_le_bytes());
        directory.extend([0; 10]); // comment, disk, attributes
        directory.extend(if wide { u32::MAX } else { offset as u32 }.to_le_bytes());
        directory.extend(name.as_bytes());
        if wide {
            directory.extend([b'F', b'B', 0, 0, 1, 0, 24, 0]);
            for v in [data.len(), data.len(), offset] {
                directory.extend((v as u64).to_le_bytes());
            }
        }
    }
    let (start, len, count) = (out.len(), directory.len(), members.len());
    out.extend(directory);
    if wide {
        let end = out.len() as u64;
        out.extend(b"PK\x06\x06");
        out.extend(44u64.to_le_bytes());
        out.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for v in [count, count, len, start] {
            out.extend((v as u64).to_le_bytes());
        }
        out.extend(b"PK\x06\x07\0\0\0\0");
        out.extend(end.to_le_bytes());
        out.extend(1u32.to_le_bytes());
    }
    out.extend(b"PK\x05\x06\0\0\0\0");
    for v in [count, count] {
        out.extend(if wide { u16::MAX } else { v as u16 }.to_le_bytes());
    }
    for v in [len, start] {
        out.extend(if wide { u32::MAX } else { v as u32 }.to_le_bytes());
    }
    out.extend(0u16.to_le_bytes());
    out
}

/// A pickle of `{"w": tensor}` with a storage of `len` floats; offset, shape and strides as given, up to 255 each.
fn tensor(len: i32, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let mut p = b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(".to_vec();
    p.extend(b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuJ");
    p.extend(len.to_le_bytes());
    p.extend(b"tQK");
    p.push(offset);
    for list in [shape, strides] {
        p.push(b'(');
        p.extend(list.iter().flat_map(|&v| [b'K', v]));
        p.push(b't');
    }
    p.extend(b"\x89ccollections\nOrderedDict\n)RtRs.");
    p
}

/// A file with that pickle and a storage of six floats that count up.
fn file(pickle: &[u8]) -> Vec<u8> {
    let data: Vec<u8> = (0..6).flat_map(|v| (v as f32).to_le_bytes()).collect();
    let members = [Member { name: "x/data.pkl", data: pickle }, Member { name: "x/data/0", data: &data }];
    archive(&members, Sizes::Narrow)
}

fn open(file: Vec<u8>) -> Result<Pth> {
    Pth::from_bytes(Arc::new(file), "x.pth")
}

fn problem(file: Vec<u8>) -> PthError {
    match open(file) {
        Err(Error::Pth { problem, .. }) => *problem,
        other => panic!("{other:?}"),
    }
}

fn values(file: Vec<u8>) -> (Vec<usize>, Vec<f32>) {
    let pth = open(file).unwrap();
    let values = pth.bytes("w").unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    (pth.info("w").unwrap().shape.clone(), values)
}

#[test]
fn the_root_folder_may_have_any_name() {
    let pickle = tensor(6, 0, &[2, 3], &[3, 1]);
    let data = [0u8; 24];
    for root in ["archive/", "data/", "wanx_vae/", ""] {
        let (first, second) = (format!("{root}data.pkl"), format!("{root}data/0"));
        let members = [Member { name: &first, data: &pickle }, Member { name: &second, data: &data }];
        assert_eq!(values(archive(&members, Sizes::Narrow)).0, [2, 3], "{root}");
    }
    let members = [Member { name: "a/data.pkl", data: &pickle }, Member { name: "b/data.pkl", data: &pickle }];
    assert_eq!(problem(archive(&members, Sizes::Narrow)), PthError::SeveralPickles);
}

#[test]
fn wide_directories_are_read() {
    let pickle = tensor(6, 0, &[2, 3], &[3, 1]);
    let members = [Member { name: "x/data.pkl", data: &pickle }, Member { name: "x/data/0", data: &[0; 24] }];
    let file = archive(&members, Sizes::Wide);
    assert_eq!(values(file.clone()), (vec![2, 3], vec![0.0; 6]));
    for at in 0..file.len() {
        for bit in 0..8 {
            let mut bytes = file.clone();
            bytes[at] ^= 1 << bit;
            let _ = open(bytes);
        }
    }
}

#[test]
fn views_are_gathered() {
    for (offset, shape, strides, expected) in [
        (0, &[2, 3][..], &[3, 1][..], &[0, 1, 2, 3, 4, 5][..]),
        (2, &[2, 2], &[2, 1], &[2, 3, 4, 5]),
        (0, &[3, 2], &[1, 3], &[0, 3, 1, 4, 2, 5]),
        (1, &[2, 2], &[3, 1], &[1, 2, 4, 5]),
        (0, &[2, 1, 3], &[3, 77, 1], &[0, 1, 2, 3, 4, 5]),
        (5, &[], &[], &[5]),
        (0, &[2, 2, 1], &[1, 2, 9], &[0, 2, 1, 3]),
    ] {
        let (found, values) = values(file(&tensor(6, offset, shape, strides)));
        assert_eq!(found, shape.iter().map(|&d| usize::from(d)).collect::<Vec<_>>());
        assert_eq!(values, expected.iter().map(|&v| v as f32).collect::<Vec<_>>(), "{shape:?} {strides:?}");
    }
    // Overlapping windows stay within the storage's size.
    assert_eq!(values(file(&tensor(6, 0, &[2, 3], &[1, 1]))).1, [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]);
}

#[test]
fn tensors_beyond_their_storage_are_refused() {
    let text = |pickle: &[u8]| problem(file(pickle)).to_string();
    assert_eq!(text(&tensor(6, 1, &[2, 3], &[3, 1])), "tensor `w` reaches beyond its storage");
    assert_eq!(text(&tensor(6, 0, &[2, 2], &[5, 1])), "tensor `w` reaches beyond its storage");
    assert_eq!(text(&tensor(7, 0, &[2, 3], &[3, 1])), "tensor `w` needs a storage of 28 bytes, but `x/data/0` has 24");
    assert!(text(&tensor(-1, 0, &[2, 3], &[3, 1])).contains("negative"));
    assert!(text(&tensor(6, 0, &[2, 3], &[3])).contains("as many strides"));
    assert!(text(&tensor(6, 0, &[255, 255, 255], &[0, 0, 0])).contains("expanded"));
    let rank = [1; 65];
    assert!(text(&tensor(6, 0, &rank, &rank)).contains("no counts"));
    let huge = [255; 9];
    assert!(text(&tensor(6, 0, &huge, &huge)).contains("64 bits"));
    // No elements: neither strides nor storage count.
    assert_eq!(values(file(&tensor(99, 9, &[0, 255], &[255, 255]))), (vec![0, 255], vec![]));
}

/// Ninety transposed views of one storage would take ninety times its size.
#[test]
fn gathered_views_take_no_more_than_the_file() {
    let one = tensor(6, 0, &[3, 2], &[1, 3]);
    let item = &one[3..one.len() - 2];
    let mut pickle = b"\x80\x02}(".to_vec();
    for i in 0..90u8 {
        let mut item = item.to_vec();
        item[5] = b'!' + i;
        pickle.extend(item);
    }
    pickle.extend(b"u.");
    let data = vec![0; 24];
    let file = |storage: &[u8], pickle: &[u8]| {
        let members = [Member { name: "x/data.pkl", data: pickle }, Member { name: "x/data/0", data: storage }];
        archive(&members, Sizes::Narrow)
    };
    assert_eq!(open(file(&data, &pickle)).unwrap().tensors().len(), 90);
    // The pickle is small beside a storage of 40,000 floats.
    let wide: Vec<u8> = {
        let mut out = Vec::new();
        let mut rest = &pickle[..];
        while let Some(at) = rest.windows(5).position(|w| w == b"J\x06\0\0\0") {
            out.extend_from_slice(&rest[..at]);
            out.extend(b"J");
            out.extend(40_000i32.to_le_bytes());
            rest = &rest[at + 5..];
        }
        out.extend_from_slice(rest);
        // Shape (200, 200), strides (1, 200).
        let shapes = [&b"(K\x03K\x02t(K\x01K\x03t"[..], b"(K\xc8K\xc8t(K\x01K\xc8t"];
        let mut i = 0;
        while i + shapes[0].len() <= out.len() {
            if out[i..].starts_with(shapes[0]) {
                out[i..i + shapes[0].len()].copy_from_slice(shapes[1]);
            }
            i += 1;
        }
        out
    };
    assert!(problem(file(&vec![0; 160_000], &wide)).to_string().contains("more memory than the file"));
}

#[test]
fn hostile_pickles_are_refused() {
    let case = |pickle: &[u8]| problem(file(pickle)).to_string();
    for (pickle, word) in [
        (&b""[..], "ends inside"),
        (b".", "stack is empty"),
        (b"\x80\x00.", "protocol"),
        (b"N", "ends inside"),
        (b"N.", "single value"),
        (b"}.", "an empty dictionary"),
        (b"](NNe.", "a list of 2 objects"),
        (b"cos\nsystem\n(S'true'\ntR.", "`os.system`"),
        (b"cbuiltins\neval\n.", "`builtins.eval`"),
        (b"\x8c\x02os\x8c\x06system\x93.", "`os.system`"),
        (b"NN\x93.", "name of a class"),
        (b"c\x1b[2J\nx\n.", "\\u{1b}[2J.x"),
        (b"i", "0x69"),
        (b"P1\n.", "0x50"),
        (b"\x82\x01", "0x82"),
        (b"X\xff\xff\xff\xffab", "ends inside"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "ends inside"),
        (b"X\x02\0\0\0\xff\xfe.", "UTF-8"),
        (b"h\x07.", "before it is made"),
        (b"t", "never began"),
        (b"N(0", "stack is empty"),
        (b"N(b", "stack is empty"),
        (b"}Ks", "ends inside"),
        (b"}NNNu", "never began"),
        (b"}(Nu", "without a value"),
        (b"](NNu.", "other than a dictionary"),
        (b"}Na.", "other than a list"),
        (b"NQ.", "other than a storage"),
        (b"NNR.", "not a function"),
        (b"ccollections\nOrderedDict\n(]tR.", "does not take"),
        (b"ctorch\nFloatStorage\n)R.", "does not take"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "does not take"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(NtR.", "unknown function"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "from too few"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNtR.", "no storage"),
    ] {
        let text = case(pickle);
        assert!(text.contains(word) && !text.contains('\n'), "{pickle:?}: {text}");
    }
    // Memory and time stay in proportion to the pickle: a dictionary inside itself, doubling tuples, deep nesting, marks.
    assert!(case(b"}q\0X\x0a\0\0\0state_dicth\0s.").contains("inside dictionaries"));
    let mut doubling = b"N".to_vec();
    doubling.extend([&b"q\0h\0\x86"[..]; 10_000].concat());
    doubling.push(b'.');
    assert!(case(&doubling).contains("a list of 2"));
    let mut deep = b"N".to_vec();
    deep.extend([0x85; 1_000_000]);
    deep.push(b'.');
    assert!(case(&deep).contains("a list of 1"));
    assert!(case(&vec![b'N'; 1 << 21]).contains("more objects"));
    assert!(case(&vec![b'('; 1 << 20]).contains("ends inside"));
    assert_eq!(
        problem(file(&vec![b'0'; MAX_PICKLE + 1])),
        PthError::PickleTooLarge { bytes: MAX_PICKLE + 1, limit: MAX_PICKLE }
    );
}

#[test]
fn names_stand_once() {
    let one = tensor(6, 0, &[2, 3], &[3, 1]);
    let item = &one[3..one.len() - 2];
    let pickle = [b"\x80\x02}(", item, item, b"u."].concat();
    assert_eq!(problem(file(&pickle)), PthError::DuplicateName { name: "w".to_owned() });
}

#[test]
fn numbers_have_two_complements() {
    use super::pickle::{Object, Pickle};
    let int = |pickle: &[u8]| {
        let pickle = Pickle::parse(pickle).unwrap();
        match pickle.get(pickle.root()) {
            &Object::Int(value) => Some(value),
            _ => None,
        }
    };
    assert_eq!(int(b"\x8a\0."), Some(0));
    assert_eq!(int(b"\x8a\x01\xff."), Some(-1));
    assert_eq!(int(b"\x8a\x02\xff\0."), Some(255));
    assert_eq!(int(b"\x8a\x05\0\0\0\0\x01."), Some(1 << 32));
    assert_eq!(int(b"\x8a\x09\0\0\0\0\0\0\0\0\x01."), None);
    assert_eq!(int(b"J\xfe\xff\xff\xff."), Some(-2));
    assert_eq!(int(b"M\xff\xff."), Some(65535));
}

#[test]
fn damaged_directories_are_refused() {
    let pickle = tensor(6, 0, &[2, 3], &[3, 1]);
    let good = file(&pickle);
    let end = good.len() - 22;
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        problem(file).to_string()
    };
    assert!(problem(b"PK\x03\x04".to_vec()).to_string().contains("truncated"));
    assert!(problem(good[..good.len() - 1].to_vec()).to_string().contains("truncated"));
    assert!(problem([&good[..], b"x"].concat()).to_string().contains("truncated"));
    assert!(with(end + 4, b"\x01").contains("several parts"));
    assert!(with(end + 8, b"\x03\0\x03\0").contains("directory"));
    assert!(with(end + 12, b"\xff\xff\xff\x7f").contains("outside"));
    assert!(with(end + 16, b"\xff\xff\xff\x7f").contains("outside"));
    let start = good.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    assert!(with(start, b"x").contains("as many members"));
    assert!(with(start + 8, b"\x01").contains("encrypted"));
    assert!(with(start + 10, b"\x08").contains("compressed"));
    assert!(with(start + 20, b"\x01\0\0\0").contains("two sizes"));
    assert!(with(start + 42, b"\x01\0\0\0").contains("no header"));
    assert!(with(start + 42, b"\xff\xff\xff\x7f").contains("outside"));
    assert!(with(start + 20, b"\xff\xff\xff\x7f\xff\xff\xff\x7f").contains("longer than the archive"));
    assert!(with(30, b"y").contains("another name"));
    assert!(problem(b"\x80\x02}.".to_vec()).to_string().contains("old PyTorch checkpoint"));
    assert!(problem(Vec::new()).to_string().contains("an empty file"));
}
