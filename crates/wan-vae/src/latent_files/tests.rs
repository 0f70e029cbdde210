use std::{fs, sync::Arc};

use candle_core::Device;
use proptest::prelude::*;
use tempfile::TempDir;
use weights::{Safetensors, TensorSource, write::to_bytes};

use super::*;
use crate::{
    Statistics,
    testing::{elements, noise, path},
};

fn ramp(len: usize) -> Vec<f32> {
    (0..len).map(|v| v as f32 - 3.0).collect()
}

fn file(tensors: &[TensorData<'_>]) -> Result<Tensor> {
    read_bytes(Arc::new(to_bytes(tensors, &Metadata::new()).unwrap()), "x.latent")
}

fn message(result: Result<Tensor>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(text.starts_with("x.") && !text.contains('\n'), "{text}");
    text
}

/// An array as NumPy writes it.
fn npy(version: u8, dict: &str, data: &[u8]) -> Vec<u8> {
    let mut out = b"\x93NUMPY".to_vec();
    out.extend([version, 0]);
    let prefix = if version == 1 { 10 } else { 12 };
    let len = (prefix + dict.len() + 1usize).next_multiple_of(64) - prefix;
    if version == 1 {
        out.extend((len as u16).to_le_bytes());
    } else {
        out.extend((len as u32).to_le_bytes());
    }
    out.extend(dict.as_bytes());
    out.resize(prefix + len - 1, b' ');
    out.push(b'\n');
    out.extend(data);
    out
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn array(dict: &str, data: &[u8]) -> Result<Tensor> {
    read_bytes(Arc::new(npy(1, dict, data)), "x.npy")
}

#[test]
fn the_demonstration_clip_is_read() {
    let latents = read(path("models/wan-demo.latent")).unwrap();
    assert_eq!(latents.dims(), [16, 3, 8, 8]);
    assert_eq!(latents.dtype(), DType::F32);
    // It holds what the encoder gives, not what a transformer sees.
    let config = fs::read(path("models/wan-vae-demo/config.json")).unwrap();
    let config: crate::VaeConfig = serde_json::from_slice(&config).unwrap();
    let statistics = Statistics::new(&config.latents_mean, &config.latents_std).unwrap();
    assert_ne!(likeness(&latents, &statistics).unwrap().kind(), Some(Kind::Normalized));
}

#[test]
fn a_written_file_is_comfyui_s_and_comes_back() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("clip.latent");
    let latents = RawLatents::new(noise(3, 1.0, &[4, 2, 3, 5])).unwrap();
    let metadata = Metadata::from([("seed".to_owned(), "7".to_owned())]);
    write(&path, &latents, &metadata).unwrap();
    let source = Safetensors::open(&path).unwrap();
    let found: Vec<_> = source.tensors().iter().map(|t| (t.name.as_str(), t.dtype, t.shape.clone())).collect();
    assert_eq!(
        found,
        [
            ("latent_format_version_0", StoredDType::F32, vec![0]),
            ("latent_tensor", StoredDType::F32, vec![1, 4, 2, 3, 5])
        ]
    );
    assert_eq!(source.metadata(), &metadata);
    let back = read(&path).unwrap();
    assert_eq!(back.dims(), [4, 2, 3, 5]);
    assert_eq!(elements(&back), elements(latents.tensor()));
    let lost = write(dir.path().join("none/x.latent"), &latents, &metadata).unwrap_err().to_string();
    assert!(lost.contains("none"), "{lost}");
}

#[test]
fn the_head_of_a_file_is_that_of_a_written_one() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("clip.latent");
    let metadata = Metadata::from([("vae".to_owned(), "x".to_owned())]);
    write(&path, &RawLatents::new(noise(3, 1.0, &[4, 2, 3, 5])).unwrap(), &metadata).unwrap();
    let file = fs::read(path).unwrap();
    assert_eq!(head((4, 2, 3, 5), &metadata).unwrap(), file[..file.len() - 4 * 2 * 3 * 5 * 4]);
    assert!(head((usize::MAX, 2, 3, 5), &metadata).is_err());
}

#[test]
fn pieces_of_a_file_are_those_of_the_whole() {
    let values = ramp(3 * 5 * 2 * 2);
    let shape = [1, 3, 5, 2, 2];
    let whole = file(&[TensorData::f32("latents", &shape, &values)]).unwrap();
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {}, }}", python(&shape));
    let safetensors = to_bytes(&[TensorData::f32("latents", &shape, &values)], &Metadata::new()).unwrap();
    for bytes in [safetensors, npy(1, &dict, &bytes(&values))] {
        let file = LatentFile::from_bytes(Arc::new(bytes), "x.latent").unwrap();
        assert_eq!((file.extents(), file.dtype(), file.name()), ((3, 5, 2, 2), DType::F32, "x.latent"));
        for (first, count) in [(0, 5), (0, 1), (1, 3), (4, 1)] {
            let piece = file.frames(first, count).unwrap();
            assert_eq!(piece.dims(), [3, count, 2, 2]);
            assert_eq!(elements(&piece), elements(&whole.narrow(1, first, count).unwrap()), "{first} {count}");
        }
        // The next channel begins where this one ends.
        for (first, count) in [(0, 6), (4, 2), (5, 1), (usize::MAX, 2)] {
            assert!(file.frames(first, count).is_err(), "{first} {count}");
        }
        assert_eq!(elements(&file.all().unwrap()), values);
        assert_eq!(elements(&file.sample().unwrap()), values);
    }
    let long = to_bytes(&[TensorData::f32("latents", &[1, 40, 1, 1], &ramp(40))], &Metadata::new()).unwrap();
    // One channel of 40 frames is taken for 40 channels, as a first axis of 1 counts clips.
    assert_eq!(LatentFile::from_bytes(Arc::new(long), "x").unwrap().extents(), (40, 1, 1, 1));
    let long = to_bytes(&[TensorData::f32("latents", &[2, 40, 1, 1], &ramp(80))], &Metadata::new()).unwrap();
    let sample = LatentFile::from_bytes(Arc::new(long), "x").unwrap().sample().unwrap();
    assert_eq!(sample.dims(), [2, 16, 1, 1]);
    let sample = elements(&sample);
    assert!(sample.is_sorted() && sample[0] == -3.0 && sample[15] == 34.0, "{sample:?}");
}

#[test]
fn the_first_value_that_is_not_finite_is_named() {
    let check = |dtype, bytes: Vec<u8>| {
        let tensor = TensorData::new("latents", dtype, &[2, 3, 2, 2], bytes);
        let file = to_bytes(&[tensor], &Metadata::new()).unwrap();
        LatentFile::from_bytes(Arc::new(file), "x").unwrap().check_finite()
    };
    let mut values = ramp(24);
    assert!(check(StoredDType::F32, bytes(&values)).is_ok());
    values[12 + 4 + 3] = f32::NEG_INFINITY;
    values[23] = f32::NAN;
    let found = check(StoredDType::F32, bytes(&values)).unwrap_err();
    assert!(matches!(found, Error::NonFiniteLatents { channel: 1, frame: 1, value: f32::NEG_INFINITY }), "{found}");
    // Finite as it is stored, but not as it is used.
    let mut wide = [1f64; 24];
    wide[8] = 1e300;
    let found = check(StoredDType::F64, wide.iter().flat_map(|v| v.to_le_bytes()).collect()).unwrap_err();
    assert!(matches!(found, Error::NonFiniteLatents { channel: 0, frame: 2, .. }), "{found}");
}

#[test]
fn tensors_are_found_by_name_or_because_they_are_alone() {
    let clip = |name: &str| TensorData::f32(name, &[2, 1, 1, 3], &ramp(6));
    let other = || TensorData::f32("sigmas", &[3], &ramp(3));
    for name in ["latent_tensor", "latents", "samples", "latent"] {
        assert_eq!(elements(&file(&[other(), clip(name)]).unwrap()), ramp(6), "{name}");
    }
    assert_eq!(elements(&file(&[clip("anything")]).unwrap()), ramp(6));
    assert_eq!(elements(&file(&[clip("anything"), TensorData::f32(VERSION, &[0], &[])]).unwrap()), ramp(6));
    assert!(message(file(&[clip("a"), other()])).contains("latents, samples, latent): a, sigmas"));
    assert!(message(file(&[])).contains("it holds none"));
    // PyTorch's form.
    let lone = read(path("../crates/weights/tests/data/lone.pth")).unwrap();
    assert_eq!((lone.dims(), elements(&lone)[5]), (&[1, 1, 2, 3][..], 5.0));
}

#[test]
fn axes_are_channels_frames_height_width() {
    for (shape, expected) in [
        (&[2, 3, 1, 4][..], [2, 3, 1, 4]),
        (&[1, 2, 3, 1, 4], [2, 3, 1, 4]),
        (&[1, 4, 2, 3], [4, 1, 2, 3]),
        (&[4, 2, 3], [4, 1, 2, 3]),
    ] {
        let tensor = TensorData::f32("latents", shape, &ramp(24));
        assert_eq!(file(&[tensor]).unwrap().dims(), expected, "{shape:?}");
        let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {}, }}", python(shape));
        assert_eq!(array(&dict, &bytes(&ramp(24))).unwrap().dims(), expected, "{shape:?}");
    }
    for shape in [&[24][..], &[4, 6], &[1, 1, 4, 2, 1, 3], &[], &[0, 1, 2, 3], &[1, 4, 0, 2, 2]] {
        let values = ramp(shape.iter().product());
        let text = message(file(&[TensorData::f32("latents", shape, &values)]));
        assert!(text.contains("expected [z, n, h, w] or [1, z, n, h, w]"), "{text}");
    }
    let text = message(file(&[TensorData::f32("latents", &[2, 3, 2, 1, 2], &ramp(24))]));
    assert!(text.contains("a batch of 2 clips"), "{text}");
}

fn python(shape: &[usize]) -> String {
    let list: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("({})", list.join(", "))
}

#[test]
fn floats_of_every_width_become_f32() {
    use weights::StoredDType as D;
    let values = ramp(4);
    let wide: Vec<u8> = values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
    let half = [0x00u8, 0xc2, 0x00, 0xc0, 0x00, 0xbc, 0x00, 0x00];
    for tensor in [
        TensorData::bf16("latents", &[1, 1, 2, 2], &values),
        TensorData::new("latents", D::F16, &[1, 1, 2, 2], half.to_vec()),
        TensorData::new("latents", D::F64, &[1, 1, 2, 2], wide.clone()),
    ] {
        assert_eq!(elements(&file(&[tensor]).unwrap()), values);
    }
    for dtype in [D::I8, D::U8] {
        let text = message(file(&[TensorData::new("latents", dtype, &[1, 1, 2, 2], vec![0; 4])]));
        assert!(text.contains(dtype.name()), "{text}");
    }
    for (descr, data) in [("<f4", bytes(&values)), ("<f2", half.to_vec()), ("<f8", wide)] {
        let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1, 1, 2, 2), }}");
        for version in 1..=3 {
            let read = read_bytes(Arc::new(npy(version, &dict, &data)), "x.npy").unwrap();
            assert_eq!(elements(&read), values, "{descr} {version}");
        }
    }
}

#[test]
fn unusual_arrays_are_refused() {
    let data = bytes(&ramp(4));
    let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2), }";
    assert_eq!(elements(&array(good, &data).unwrap()), ramp(4));
    // Other orders and spaces, as other writers have them.
    let other = "{\"shape\":(1,1,2,2),\"fortran_order\":False,\"descr\":\"<f4\"}";
    assert_eq!(elements(&array(other, &data).unwrap()), ramp(4));
    for (from, to, word) in [
        ("<f4", ">f4", "type >f4"),
        ("<f4", "|O", "type |O"),
        ("<f4", "<V2", "type <V2"),
        ("<f4", "<f8", "needs 32 bytes, the file has 16"),
        ("False", "True", "column-major"),
        ("False", "Maybe", "not a dictionary"),
        ("(1, 1, 2, 2)", "(1, 1, 2, 3)", "truncated"),
        ("(1, 1, 2, 2)", "(1, 1, 1, 2)", "needs 8 bytes, the file has 16"),
        ("(1, 1, 2, 2)", "(4,)", "shape [4]"),
        ("(1, 1, 2, 2)", "()", "needs 4 bytes"),
        ("(1, 1, 2, 2)", "(-1, 1, 2, 2)", "not a dictionary"),
        ("(1, 1, 2, 2)", "(18446744073709551615, 2)", "64 bits"),
        ("(1, 1, 2, 2)", "(99999999999999999999999, 2)", "not a dictionary"),
        ("'shape'", "'form'", "not a dictionary"),
        ("'shape'", "'descr'", "not a dictionary"),
        ("}", "} x", "not a dictionary"),
        ("{", "[", "not a dictionary"),
    ] {
        let text = message(array(&good.replace(from, to), &data));
        assert!(text.contains(word), "{to}: {text}");
    }
    let cut = |len: usize| message(read_bytes(Arc::new(npy(1, good, &data)[..len].to_vec()), "x.npy"));
    for len in [6, 7, 8, 9, 10, 11, 100] {
        assert!(cut(len).contains("ends inside the header"), "{len}");
    }
    let mut version = npy(1, good, &data);
    version[6] = 9;
    assert!(message(read_bytes(Arc::new(version), "x.npy")).contains("version 9"));
    let mut long = npy(2, good, &data);
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(message(read_bytes(Arc::new(long), "x.npy")).contains("4294967295 bytes"));
}

#[test]
fn files_are_told_by_their_first_bytes() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("x.latent");
    let dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2), }";
    fs::write(&path, npy(1, dict, &bytes(&ramp(4)))).unwrap();
    assert_eq!(elements(&read(&path).unwrap()), ramp(4));
    for (contents, word) in
        [(&b"GIF89a"[..], "x.latent"), (b"", "empty"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"PK\x03\x04", "zip")]
    {
        fs::write(&path, contents).unwrap();
        let text = read(&path).unwrap_err().to_string();
        assert!(text.contains("x.latent") && text.contains(word) && !text.contains('\n'), "{text}");
    }
    assert!(read(dir.path().join("none")).unwrap_err().to_string().contains("none"));
    assert!(read(dir.path()).is_err());
}

/// Latents drawn from the published statistics, and from a unit normal.
#[test]
fn either_kind_is_recognised() {
    for statistics in [Statistics::wan21(), Statistics::wan22()] {
        let z = statistics.mean().len();
        let normalized = crate::NormalizedLatents::new(noise(1, 1.0, &[z, 3, 6, 8])).unwrap();
        let raw = statistics.denormalize(&normalized).unwrap();
        let near = likeness(raw.tensor(), &statistics).unwrap();
        assert_eq!(near.kind(), Some(Kind::Raw), "{near:?}");
        let far = likeness(normalized.tensor(), &statistics).unwrap();
        assert_eq!(far.kind(), Some(Kind::Normalized), "{far:?}");
        // The same distance from either is no verdict.
        let half: Vec<f64> = statistics.std().iter().map(|&s| f64::from(s).sqrt()).collect();
        let mean: Vec<f64> = statistics.mean().iter().map(|&m| f64::from(m) / 2.0).collect();
        let between = Statistics::new(&mean, &half).unwrap().denormalize(&normalized).unwrap();
        assert_eq!(likeness(between.tensor(), &statistics).unwrap().kind(), None);
        assert!(matches!(likeness(&noise(1, 1.0, &[3, 1, 2, 2]), &statistics), Err(Error::Channels { got: 3, .. })));
    }
    // Constant and damaged values give numbers all the same.
    let flat = Tensor::zeros((16, 1, 2, 2), DType::F32, &Device::Cpu).unwrap();
    let found = likeness(&flat, &Statistics::wan21()).unwrap();
    assert!(found.raw.is_finite() && found.normalized.is_finite());
    let damaged = (flat + f64::NAN).unwrap();
    assert!(likeness(&damaged, &Statistics::wan21()).unwrap().raw.is_finite());
}

proptest! {
    /// Any header: no panic, one line.
    #[test]
    fn any_header_is_survived(text in "[{(]?(['a-z]{0,6}[:, ()0-9L<f]{0,12}){0,6}[})]?", data in 0usize..40) {
        if let Err(error) = read_bytes(Arc::new(npy(1, &text, &vec![0; data])), "x.npy") {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }

    /// A good file with any byte changed: no panic, one line.
    #[test]
    fn any_damage_is_survived(at in 0usize..144, to in any::<u8>()) {
        let dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 2, 2), }";
        let mut file = npy(1, dict, &bytes(&ramp(4)));
        file[at] = to;
        if let Err(error) = read_bytes(Arc::new(file), "x.npy") {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }
}
