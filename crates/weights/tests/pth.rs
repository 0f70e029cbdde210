//! Checkpoints that PyTorch wrote (`tests/reference/pth_files.py`), and damaged versions of them.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use tempfile::TempDir;
use weights::{Expected, Loader, Pth, StoredDType, TensorSource};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn tensor(source: &dyn TensorSource, name: &str) -> Tensor {
    source.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap()
}

fn values(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    tensor(source, name).flatten_all().unwrap().to_vec1().unwrap()
}

fn message(name: &str) -> String {
    let text = weights::open(data(name)).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains(name) && !text.contains('\n'), "{text}");
    text
}

#[test]
fn every_element_type_and_view_is_read() {
    let pth = Pth::open(data("flat.pth")).unwrap();
    use StoredDType as D;
    let expected: &[(&str, D, &[usize])] = &[
        ("bf16", D::BF16, &[3, 2]),
        ("bool", D::Bool, &[2]),
        ("columns", D::F32, &[4, 2]),
        ("empty", D::F32, &[0, 5]),
        ("f16", D::F16, &[4]),
        ("f32", D::F32, &[2, 3]),
        ("f64", D::F64, &[2]),
        ("i16", D::I16, &[3]),
        ("i32", D::I32, &[3]),
        ("i64", D::I64, &[]),
        ("i8", D::I8, &[3]),
        ("parameter", D::F32, &[2, 2]),
        ("rows", D::F32, &[2, 6]),
        ("tied", D::F32, &[4, 6]),
        ("transposed", D::F32, &[2, 3]),
        ("u8", D::U8, &[3]),
    ];
    let found: Vec<_> = pth.tensors().iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
    assert_eq!(found, expected);
    for name in ["bf16", "f16", "f32", "f64", "i16", "i32", "parameter", "tied", "u8", "empty"] {
        let ramp: Vec<f32> = (0..pth.info(name).unwrap().elements()).map(|v| v as f32).collect();
        assert_eq!(values(&pth, name), ramp, "{name}");
    }
    assert_eq!(values(&pth, "i64"), [7.0]);
    assert_eq!(pth.bytes("i8").unwrap(), [0, 1, 2]);
    assert_eq!(pth.bytes("bool").unwrap(), [1, 0]);
    assert_eq!(values(&pth, "rows"), (6..18).map(|v| v as f32).collect::<Vec<_>>());
    assert_eq!(values(&pth, "columns"), [1.0, 3.0, 7.0, 9.0, 13.0, 15.0, 19.0, 21.0]);
    assert_eq!(values(&pth, "transposed"), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    // Contiguous elements are used where they lie; views of one storage share them.
    let at = |name: &str| pth.bytes(name).unwrap().as_ptr();
    assert_eq!(at("rows"), at("tied").wrapping_add(6 * 4));
    let file = fs::read(data("flat.pth")).unwrap();
    for t in pth.tensors() {
        let gathered = ["columns", "transposed"].contains(&t.name.as_str());
        assert_eq!(pth.bytes(&t.name).unwrap().len(), t.bytes.len(), "{}", t.name);
        assert_eq!(&file[t.bytes.clone()] == pth.bytes(&t.name).unwrap(), !gathered, "{}", t.name);
    }
}

#[test]
fn tensors_are_found_where_training_puts_them() {
    for (name, tensors) in [
        ("state_dict.pth", &["w"][..]),
        ("nested.pth", &["w"]),
        ("python_zip.pth", &["w"]),
        ("metadata.pth", &["bias", "weight"]),
        ("lone.pth", &["tensor"]),
        ("protocol5.pth", &["bf16", "f32"]),
        ("narrow.pth", &["f8", "u16"]),
    ] {
        let source = weights::open(data(name)).unwrap();
        assert_eq!(source.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), tensors, "{name}");
        if tensors == ["w"] {
            assert_eq!(values(&source, "w"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "{name}");
        }
    }
    let source = weights::open(data("narrow.pth")).unwrap();
    assert_eq!(source.info("f8").unwrap().dtype, StoredDType::F8E4M3);
    assert_eq!(values(&source, "f8"), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(source.bytes("u16").unwrap(), [0, 0, 1, 0, 2, 0]);
    let lone = weights::open(data("lone.pth")).unwrap();
    assert_eq!(tensor(&lone, "tensor").dims(), [1, 2, 3]);
}

#[test]
fn a_checkpoint_loads_like_any_other() {
    let plan = [Expected::new("w", [2, 3])];
    let source = weights::open(data("state_dict.pth")).unwrap();
    let mut loader = Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(loader.tensor("w").unwrap().to_vec2::<f32>().unwrap(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
    loader.finish().unwrap();
    // What it is, if it is not the model that was wanted.
    let source = weights::open(data("lora.pth")).unwrap();
    let text = Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).unwrap_err().to_string();
    assert!(text.contains("lora.pth") && text.contains("LoRA"), "{text}");
}

#[test]
fn what_is_not_plain_tensors_is_named() {
    for (name, words) in [
        ("namespace.pth", &["`argparse.Namespace`", "run code"][..]),
        ("command.pth", &["system`"]),
        ("module.pth", &["`torch.nn.modules.linear.Linear`", "state_dict"]),
        ("numpy.pth", &["scalar`"]),
        ("expanded.pth", &["tensor `w`", "expanded"]),
        ("no_tensors.pth", &["no named tensors", "epoch, optimizer"]),
        ("list.pth", &["a list of 2 objects"]),
        ("sparse.pth", &["_rebuild_sparse_tensor`"]),
        ("complex.pth", &["`torch.ComplexDoubleStorage`"]),
        ("deflated.pth", &["compressed"]),
        ("big_endian.pth", &["byte order `big`"]),
        ("no_storage.pth", &["data/0`", "is missing"]),
        ("short_storage.pth", &["24 bytes", "has 20"]),
        ("no_pickle.pth", &["without `data.pkl`"]),
        // Not a zip archive, so the other reader names it.
        ("legacy.pth", &["Python pickle", "old PyTorch checkpoint"]),
    ] {
        let text = message(name);
        assert!(words.iter().all(|w| text.contains(w)), "{name}: {text}");
    }
}

/// Opens the file and reads every tensor.
fn use_file(path: &Path) -> weights::Result<usize> {
    let source = Pth::open(path)?;
    for t in source.tensors() {
        assert_eq!(source.bytes(&t.name)?.len(), t.bytes.len());
        assert_eq!(source.host(&t.name).is_ok(), t.dtype.to_candle().is_some());
    }
    Ok(source.tensors().len())
}

/// Every file cut short at every seventh byte and with single bits flipped everywhere.
#[test]
fn damaged_files_give_errors_of_one_line() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("damaged.pth");
    let (mut tried, mut refused) = (0, 0);
    for name in ["flat.pth", "protocol5.pth", "state_dict.pth", "nested.pth", "narrow.pth", "namespace.pth"] {
        let file = fs::read(data(name)).unwrap();
        let cuts = (0..file.len()).step_by(7).map(|cut| (format!("{name} cut after {cut}"), file[..cut].to_vec()));
        let flips = (0..file.len()).flat_map(|at| [0, 3, 7].map(|bit| (at, bit))).map(|(at, bit)| {
            let mut bytes = file.clone();
            bytes[at] ^= 1 << bit;
            (format!("{name} bit {bit} of byte {at}"), bytes)
        });
        for (what, bytes) in cuts.chain(flips) {
            tried += 1;
            // In memory: thousands of files would take long.
            let opened = catch_unwind(AssertUnwindSafe(|| Pth::from_bytes(Arc::new(bytes.clone()), "damaged.pth")));
            match opened {
                Err(_) => panic!("{what}: panic"),
                Ok(Ok(source)) => {
                    for t in source.tensors() {
                        assert_eq!(source.bytes(&t.name).unwrap().len(), t.bytes.len(), "{what}");
                    }
                }
                Ok(Err(error)) => {
                    refused += 1;
                    let text = error.to_string();
                    assert!(!text.chars().any(char::is_control), "{what}: {text:?}");
                    assert!(text.starts_with("damaged.pth: "), "{what}: {text}");
                    assert!(text.chars().count() < 800, "{what}: {text}");
                }
            }
            if tried % 97 == 0 {
                fs::write(&path, &bytes).unwrap();
                let _ = use_file(&path);
            }
        }
    }
    // Elements, paddings, checksums and dates are not looked at; everything else is.
    assert!(tried > 30_000, "{tried}");
    assert!(refused > tried / 4, "{refused} of {tried}");
    assert!(use_file(&data("flat.pth")).unwrap() == 16);
}
