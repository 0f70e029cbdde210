use candle_core::{DType, Device};

use super::*;
use crate::{
    Expected, Loader, Safetensors, StoredDType, quant,
    write::{Metadata, TensorData, to_bytes},
};

fn file(tensors: &[TensorData<'_>]) -> Arc<dyn TensorSource> {
    let bytes = to_bytes(tensors, &Metadata::new()).unwrap();
    quant::fold(Arc::new(Safetensors::from_bytes(Arc::new(bytes), "x.safetensors").unwrap())).unwrap()
}

fn ramp(len: usize) -> Vec<f32> {
    (0..len).map(|v| v as f32).collect()
}

/// Takes the tensors apart as a model would.
fn views(info: &TensorInfo) -> Option<Vec<View>> {
    match info.name.as_str() {
        "qkv" => Some(View::parts(["q", "k", "v"].map(str::to_owned))),
        "ada" => Some(vec![View::new("scale_shift", Take::SwappedHalves)]),
        "conv" => Some(vec![View::new("linear", Take::Matrix)]),
        "old" => Some(vec![View::new("new", Take::Whole)]),
        "junk" => Some(Vec::new()),
        _ => None,
    }
}

fn floats(source: &dyn TensorSource, name: &str) -> Vec<f32> {
    let tensor = source.host(name).unwrap().to_tensor(DType::F32, &Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn tensors_are_seen_under_new_names() {
    let source = translate(
        file(&[
            TensorData::f32("qkv", &[6, 2], &ramp(12)),
            TensorData::bf16("ada", &[4, 1], &ramp(4)),
            TensorData::f32("conv", &[2, 3, 1, 1], &ramp(6)),
            TensorData::f32("old", &[2], &ramp(2)),
            TensorData::f32("junk", &[1], &ramp(1)),
            TensorData::f32("unknown", &[1], &ramp(1)),
        ]),
        views,
    )
    .unwrap();
    let names: Vec<_> = source.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["k", "linear", "new", "q", "scale_shift", "unknown", "v"]);
    assert_eq!(source.info("k").unwrap().shape, [2, 2]);
    assert_eq!(floats(&*source, "q"), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(floats(&*source, "k"), [4.0, 5.0, 6.0, 7.0]);
    assert_eq!(floats(&*source, "v"), [8.0, 9.0, 10.0, 11.0]);
    assert_eq!(source.info("linear").unwrap().shape, [2, 3]);
    assert_eq!(floats(&*source, "linear"), ramp(6));
    assert_eq!(floats(&*source, "scale_shift"), [2.0, 3.0, 0.0, 1.0]);
    assert_eq!(source.bytes("k").unwrap(), source.host("k").unwrap().bytes());
    assert_eq!(source.bytes("scale_shift").unwrap(), source.host("scale_shift").unwrap().bytes());
    for gone in ["qkv", "junk", "old"] {
        assert!(matches!(source.bytes(gone), Err(Error::NoSuchTensor { .. })), "{gone}");
        assert!(source.host(gone).is_err() && source.quant(gone).is_err());
    }
}

/// Parts of a fused matrix share the file's memory.
#[test]
fn parts_are_not_copied() {
    let inner = file(&[TensorData::f32("qkv", &[6, 2], &ramp(12))]);
    let source = translate(inner.clone(), views).unwrap();
    // Two rows of two floats each.
    assert_eq!(source.bytes("v").unwrap().as_ptr(), inner.bytes("qkv").unwrap()[32..].as_ptr());
    let (_, range) = source.shared("k").unwrap();
    assert_eq!(range, source.info("k").unwrap().bytes);
}

/// Codes and their scales are taken apart together.
#[test]
fn quantised_matrices_are_taken_apart() {
    let marker = |name: &str| {
        let json = br#"{"format":"int8_tensorwise"}"#.to_vec();
        TensorData::new(name, StoredDType::U8, &[json.len()], json)
    };
    // A matrix without a module's name has no side tensors: these are named as Comfy does.
    let codes: Vec<u8> = (0..12).collect();
    let scales = [1.0, 10.0, 100.0, 1e3, 1e4, 1e5];
    let source = file(&[
        TensorData::new("qkv.weight", StoredDType::I8, &[6, 2], codes.clone()),
        TensorData::f32("qkv.weight_scale", &[6, 1], &scales),
        marker("qkv.comfy_quant"),
        TensorData::new("ada.weight", StoredDType::I8, &[6, 2], codes),
        TensorData::f32("ada.weight_scale", &[6, 1], &scales),
        marker("ada.comfy_quant"),
    ]);
    let source = translate(source, |info| {
        let views = views(&TensorInfo { name: info.name.strip_suffix(".weight")?.to_owned(), ..info.clone() })?;
        Some(views)
    })
    .unwrap();
    let plan = [
        Expected::new("q", [2, 2]),
        Expected::new("k", [2, 2]),
        Expected::new("v", [2, 2]),
        Expected::new("scale_shift", [6, 2]),
    ];
    let mut loader = Loader::new(source, &plan, |_| false, DType::F32, &Device::Cpu).unwrap();
    let mut get = |name: &str| loader.tensor(name).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(get("k"), [[400.0, 500.0], [6e3, 7e3]]);
    assert_eq!(get("q"), [[0.0, 1.0], [20.0, 30.0]]);
    assert_eq!(get("scale_shift"), [[6e3, 7e3], [8e4, 9e4], [1e6, 1.1e6], [0.0, 1.0], [20.0, 30.0], [400.0, 500.0]]);
    assert_eq!(loader.linear("v").unwrap().out_features(), 2);
    loader.finish().unwrap();
}

/// What cannot be divided keeps its name, so that a plan reports it.
#[test]
fn shapes_that_do_not_divide_are_left() {
    let source = translate(
        file(&[
            TensorData::f32("qkv", &[7, 2], &ramp(14)),
            TensorData::f32("ada", &[3, 1], &ramp(3)),
            TensorData::f32("conv", &[2, 3, 1, 2], &ramp(12)),
        ]),
        views,
    )
    .unwrap();
    let names: Vec<_> = source.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["ada", "linear", "qkv"]);
    assert_eq!(source.info("linear").unwrap().shape, [2, 3, 1, 2]);
    let scalar = translate(file(&[TensorData::f32("qkv", &[], &ramp(1))]), views).unwrap();
    assert!(scalar.info("qkv").is_some());
    let fourth = |_: &TensorInfo| Some(vec![View::new("fourth", Take::Part { index: 3, of: 3 })]);
    let whole = translate(file(&[TensorData::f32("qkv", &[6], &ramp(6))]), fourth).unwrap();
    assert!(whole.info("fourth").is_none() && whole.info("qkv").is_some());
}

#[test]
fn two_names_of_one_tensor_are_refused() {
    let both = file(&[TensorData::f32("old", &[1], &ramp(1)), TensorData::f32("new", &[1], &ramp(1))]);
    let text = translate(both, views).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("x.safetensors holds both `") && text.contains("`old`") && text.contains("`new`"), "{text}");
}

#[test]
fn prefixes_are_found() {
    let source = file(&[TensorData::f32("model.diffusion_model.a", &[1], &ramp(1))]);
    assert_eq!(prefix_of(&*source, &["b", "a"]), Some("model.diffusion_model."));
    assert_eq!(prefix_of(&*source, &["b"]), None);
    assert_eq!(prefix_of(&*file(&[TensorData::f32("a", &[1], &ramp(1))]), &["a"]), Some(""));
}
