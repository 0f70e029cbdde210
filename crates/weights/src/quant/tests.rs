use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_fork::quant::Fp8Format;
use half::bf16;

use super::*;
use crate::{
    Expected, Loader, LoaderOptions, Safetensors, StoredDType, ValueCheck,
    write::{Metadata, TensorData, to_bytes},
};

fn file_with(tensors: &[TensorData<'_>], metadata: &Metadata) -> Arc<dyn TensorSource> {
    let bytes = to_bytes(tensors, metadata).unwrap();
    Arc::new(Safetensors::from_bytes(Arc::new(bytes), "x.safetensors").unwrap())
}

fn file(tensors: &[TensorData<'_>]) -> Arc<dyn TensorSource> {
    file_with(tensors, &Metadata::new())
}

fn marker(name: &str, json: &str) -> TensorData<'static> {
    TensorData::new(name, StoredDType::U8, &[json.len()], json.as_bytes().to_vec())
}

fn bytes(name: &str, dtype: StoredDType, shape: &[usize], values: &[u8]) -> TensorData<'static> {
    TensorData::new(name, dtype, shape, values.to_vec())
}

fn signed(name: &str, shape: &[usize], values: &[i8]) -> TensorData<'static> {
    bytes(name, StoredDType::I8, shape, &values.iter().map(|v| v.cast_unsigned()).collect::<Vec<_>>())
}

/// The tensors of a file as f32, with the plan's check that every one is known.
fn values(tensors: &[TensorData<'_>], plan: &[(&str, &[usize])]) -> Vec<Vec<f32>> {
    let source = fold(file(tensors)).unwrap();
    let expected: Vec<_> = plan.iter().map(|(name, shape)| Expected::new(*name, *shape)).collect();
    let mut loader = Loader::new(source, &expected, |_| false, DType::F32, &Device::Cpu).unwrap();
    let tensors = plan.iter().map(|(name, shape)| {
        let tensor = loader.tensor(name).unwrap();
        assert_eq!(tensor.dims(), *shape);
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    });
    let tensors = tensors.collect();
    loader.finish().unwrap();
    tensors
}

fn refused(tensors: &[TensorData<'_>]) -> String {
    let text = fold(file(tensors)).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("x.safetensors") && !text.contains('\n'), "{text}");
    text
}

#[test]
fn plain_files_are_left_alone() {
    let plain = file(&[TensorData::f32("w.weight", &[1, 2], &[1.0, 2.0]), signed("table", &[2], &[1, 2])]);
    let folded = fold(plain.clone()).unwrap();
    assert!(Arc::ptr_eq(&plain, &folded));
    assert!(quantised(&*plain).unwrap().is_empty());
}

/// One scale, or one for each row in either shape; the scale is what `[N]` and `[N, 1]` have in common.
#[test]
fn int8_is_scaled_by_tensor_or_row() {
    let codes = signed("m.weight", &[2, 4], &[1, -1, 2, -128, 3, 0, -3, 127]);
    let plain = marker("m.comfy_quant", r#"{"format":"int8_tensorwise"}"#);
    for (shape, scales) in [(&[][..], &[0.5f32][..]), (&[1], &[0.5]), (&[2], &[0.5, 2.0]), (&[2, 1], &[0.5, 2.0])] {
        let scale = TensorData::f32("m.weight_scale", shape, scales);
        let found = values(&[codes.clone(), plain.clone(), scale], &[("m.weight", &[2, 4])]);
        let second = scales[scales.len() - 1];
        let rows = [1.0 * 0.5, -0.5, 1.0, -64.0, 3.0 * second, 0.0, -3.0 * second, 127.0 * second];
        assert_eq!(found, [rows], "{shape:?}");
    }
}

/// A group of 4 with codes 1 0 0 0 is the first row of the group matrix; the marker decides, also from the metadata.
#[test]
fn rotations_are_undone() {
    let codes = signed("m.weight", &[1, 8], &[2, 0, 0, 0, 0, 0, 0, 2]);
    let scale = TensorData::f32("m.weight_scale", &[1, 1], &[1.0]);
    let rotated = [1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0];
    let text = r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":4}"#;
    let own = [codes.clone(), scale.clone(), marker("m.comfy_quant", text)];
    assert_eq!(values(&own, &[("m.weight", &[1, 8])]), [rotated]);

    let layers = format!(r#"{{"format_version":"1.0","layers":{{"m":{text}}}}}"#);
    let metadata = Metadata::from([("_quantization_metadata".to_owned(), layers)]);
    let source = fold(file_with(&[codes.clone(), scale.clone()], &metadata)).unwrap();
    let found = source.quant("m.weight").unwrap().dequantize(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(found.to_vec2::<f32>().unwrap(), [rotated]);
    assert_eq!(source.tensors().len(), 1);
    // The marker beside the matrix comes first.
    let plain = marker("m.comfy_quant", r#"{"format":"int8_tensorwise"}"#);
    let source = fold(file_with(&[codes, scale, plain], &metadata)).unwrap();
    let found = source.quant("m.weight").unwrap().dequantize(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(found.to_vec2::<f32>().unwrap(), [[2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]]);
}

/// All spellings of scales of 8-bit floats; 0x38 is 1, 0x40 is 2, 0xc0 is -2 in E4M3.
#[test]
fn fp8_is_scaled_however_it_is_spelled() {
    let e4m3 = bytes("m.weight", StoredDType::F8E4M3, &[2, 2], &[0x38, 0x40, 0xc0, 0x00]);
    let one = |name: &str| TensorData::f32(name, &[], &[0.5]);
    let scaled = [0.5, 1.0, -1.0, 0.0];
    let plan: &[(&str, &[usize])] = &[("m.weight", &[2, 2])];
    let input = one("m.input_scale");
    for tensors in [
        vec![one("m.weight_scale"), input.clone()],
        vec![one("m.weight_scale"), marker("m.comfy_quant", r#"{"format":"float8_e4m3fn"}"#)],
        vec![one("m.scale_weight"), one("m.scale_input"), bytes("scaled_fp8", StoredDType::F8E4M3, &[0], &[])],
        vec![TensorData::bf16("m.weight_scale", &[1], &[0.5])],
        vec![TensorData::f32("m.weight_scale_inv", &[1, 1], &[0.5])],
    ] {
        let found = values(&[&[e4m3.clone()][..], &tensors].concat(), plan);
        assert_eq!(found, [scaled], "{:?}", tensors[0].name);
    }
    let rows = TensorData::f32("m.weight_scale", &[2, 1], &[0.5, 4.0]);
    assert_eq!(values(&[e4m3.clone(), rows], plan), [[0.5, 1.0, -8.0, 0.0]]);
    // Without a scale the bytes are the values, whatever the rank.
    let bias = bytes("m.bias", StoredDType::F8E4M3, &[2], &[0x38, 0xc0]);
    let found = values(&[e4m3, bias], &[("m.weight", &[2, 2]), ("m.bias", &[2])]);
    assert_eq!(found, [vec![1.0, 2.0, -2.0, 0.0], vec![1.0, -2.0]]);
    // The upper byte of a half.
    let e5m2 = bytes("m.weight", StoredDType::F8E5M2, &[1, 2], &[0x3c, 0xc1]);
    assert_eq!(values(&[e5m2, one("m.weight_scale")], &[("m.weight", &[1, 2])]), [[0.5, -1.25]]);
}

#[test]
fn blocks_of_128_have_scales_of_their_own() {
    let (rows, columns) = (130, 129);
    let codes = bytes("m.weight", StoredDType::F8E4M3, &[rows, columns], &vec![0x38; rows * columns]);
    let scales = TensorData::f32("m.weight_scale_inv", &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let found = values(&[codes, scales], &[("m.weight", &[rows, columns])]).remove(0);
    for (r, c, scale) in [(0, 0, 1.0), (127, 127, 1.0), (0, 128, 2.0), (128, 0, 3.0), (129, 128, 4.0)] {
        assert_eq!(found[r * columns + c], scale, "{r} {c}");
    }
}

/// A convolution's kernel is a matrix with a row for each of its outputs.
#[test]
fn kernels_are_widened() {
    let codes = bytes("c.weight", StoredDType::F8E4M3, &[2, 1, 1, 2], &[0x38, 0x40, 0x38, 0x40]);
    let scale = TensorData::f32("c.weight_scale", &[2, 1, 1, 1], &[1.0, 10.0]);
    assert_eq!(values(&[codes, scale], &[("c.weight", &[2, 1, 1, 2])]), [[1.0, 2.0, 10.0, 20.0]]);
}

/// Signed nibbles, the even column in the low one.
#[test]
fn four_bit_codes_become_bytes() {
    let text = r#"{"format":"convrot_w4a4","convrot_groupsize":4}"#;
    let packed = bytes("m.weight", StoredDType::I8, &[1, 2], &[0x02, 0x00]);
    let tensors = [packed, marker("m.comfy_quant", text), TensorData::f32("m.weight_scale", &[1], &[0.5])];
    assert_eq!(values(&tensors, &[("m.weight", &[1, 4])]), [[0.5, 0.5, 0.5, -0.5]]);

    let text = r#"{"format":"asym_w4a8_int8","convrot_groupsize":4,"group_size":2}"#;
    // Codes 10, 8, 8, 8: 2 and zeros after the middle is taken off.
    let packed = bytes("m.weight", StoredDType::I8, &[1, 2], &[0x8a, 0x88]);
    let relative = TensorData::f32("m.weight_s_rel", &[1, 2], &[3.0, 1.0]);
    let channel = TensorData::f32("m.weight_s_channel", &[1], &[0.5]);
    let tensors = [packed.clone(), marker("m.comfy_quant", text), relative.clone(), channel.clone()];
    // 2 * 3 = 6, rotated by halves and scaled by a half.
    assert_eq!(values(&tensors, &[("m.weight", &[1, 4])]), [[1.5, 1.5, 1.5, -1.5]]);
    let mut codebook = vec![0.0f32; 16];
    codebook[10] = 4.0;
    let table = TensorData::f32("m.weight_codebook", &[16], &codebook);
    let tensors = [packed, marker("m.comfy_quant", text), relative, channel, table];
    assert_eq!(values(&tensors, &[("m.weight", &[1, 4])]), [[3.0, 3.0, 3.0, -3.0]]);
}

/// Plain floats beside quantised ones, a scale of 1 beside a float, stray names in sight.
#[test]
fn files_may_be_mixed() {
    let tensors = [
        signed("a.weight", &[1, 1], &[4]),
        marker("a.comfy_quant", r#"{"format":"int8_tensorwise","per_row":true}"#),
        TensorData::f32("a.weight_scale", &[], &[2.0]),
        TensorData::bf16("a.bias", &[1], &[7.0]),
        TensorData::bf16("b.weight", &[1, 1], &[3.0]),
        TensorData::f32("b.scale_weight", &[], &[1.0]),
        TensorData::f32("norm.scale", &[1], &[9.0]),
    ];
    let plan: [(&str, &[usize]); 4] =
        [("a.weight", &[1, 1]), ("a.bias", &[1]), ("b.weight", &[1, 1]), ("norm.scale", &[1])];
    assert_eq!(values(&tensors, &plan), [[8.0], [7.0], [3.0], [9.0]]);
    // A side tensor that belongs to nothing is reported by the plan.
    let stray = [signed("a.weight", &[1, 1], &[4]), marker("z.comfy_quant", r#"{"format":"int8_tensorwise"}"#)];
    let source = fold(file(&stray)).unwrap();
    let error = Loader::new(source, &[Expected::new("a.weight", [1, 1])], |_| false, DType::F32, &Device::Cpu);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("unexpected (z.comfy_quant)") && text.contains("a.weight is I8"), "{text}");
}

/// Codes stay where they are mapped, and a linear map of them equals one of the decoded matrix.
#[test]
fn linear_maps_read_the_stored_codes() {
    let device = Device::Cpu;
    let codes: Vec<i8> = (0..64 * 64).map(|i| (i * 31 % 255 - 127) as i8).collect();
    let scales: Vec<f32> = (0..64).map(|i| 0.01 + i as f32 * 1e-4).collect();
    let text = r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":16}"#;
    let tensors = [
        signed("q.weight", &[64, 64], &codes),
        TensorData::f32("q.weight_scale", &[64, 1], &scales),
        marker("q.comfy_quant", text),
        TensorData::bf16("k.weight", &[2, 64], &[0.25; 128]),
    ];
    let plan = [Expected::new("q.weight", [64, 64]), Expected::new("k.weight", [2, 64])];
    let load = || Loader::new(fold(file(&tensors)).unwrap(), &plan, |_| false, DType::F32, &device).unwrap();
    let (mut a, mut b) = (load(), load());
    let x: Vec<f32> = (0..5 * 64).map(|i| (i % 13) as f32 - 6.0).collect();
    let x = Tensor::from_vec(x, (5, 64), &device).unwrap();
    let stacked = candle_fork::linear(&x, &a.linear_stack(&["q.weight", "k.weight"]).unwrap(), None).unwrap();
    let wide = Tensor::cat(&[b.tensor("q.weight").unwrap(), b.tensor("k.weight").unwrap()], 0).unwrap();
    let exact = x.matmul(&wide.t().unwrap()).unwrap();
    let error = (stacked - &exact).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    let size = exact.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(error <= 1e-5 * size, "{error} of {size}");
}

#[test]
fn contradictions_are_refused() {
    let codes = || signed("m.weight", &[2, 8], &[1; 16]);
    let int8 = |more: &str| marker("m.comfy_quant", &format!(r#"{{"format":"int8_tensorwise"{more}}}"#));
    let scale = |shape: &[usize]| TensorData::f32("m.weight_scale", shape, &vec![1.0; shape.iter().product()]);
    let fp8 = || bytes("m.weight", StoredDType::F8E4M3, &[2, 8], &[0; 16]);
    let cases: Vec<(Vec<TensorData<'_>>, &str)> = vec![
        (vec![codes(), int8("")], "`m.weight` of x.safetensors is quantised, but `weight_scale` is missing"),
        (vec![codes(), int8(""), scale(&[3])], "has shape [2, 8], but its scale `m.weight_scale` has [3]"),
        (vec![codes(), int8(""), scale(&[1, 8])], "has [1, 8]"),
        (vec![codes(), int8(r#","convrot":true,"convrot_groupsize":32"#), scale(&[])], "in groups of 32"),
        (
            vec![codes(), int8(r#","convrot":true,"convrot_groupsize":16"#), scale(&[])],
            "of 8 columns cannot be rotated",
        ),
        (vec![codes(), int8(r#","convrot":true,"convrot_groupsize":4096"#), scale(&[])], "in groups of 4096"),
        (vec![codes(), int8(r#","convrot":true"#), scale(&[])], "in groups of 256"),
        (vec![fp8(), int8(""), scale(&[])], "is F8_E4M3, but its marker says int8_tensorwise"),
        (vec![codes(), marker("m.comfy_quant", r#"{"format":"float8_e5m2"}"#), scale(&[])], "is I8, but its marker"),
        (vec![codes(), marker("m.comfy_quant", "{"), scale(&[])], "`m.comfy_quant` of x.safetensors is no JSON"),
        (vec![codes(), TensorData::f32("m.comfy_quant", &[1], &[0.0])], "is F32, a marker is U8"),
        (
            vec![fp8(), scale(&[]), TensorData::f32("m.scale_weight", &[], &[1.0])],
            "has several scales: weight_scale, scale_weight",
        ),
        (vec![fp8(), scale(&[7])], "has [7]"),
        (
            vec![TensorData::bf16("m.weight", &[1, 1], &[1.0]), TensorData::f32("m.weight_scale", &[], &[0.5])],
            "is BF16, but `m.weight_scale` scales it",
        ),
        (
            vec![TensorData::bf16("m.weight", &[2, 1], &[1.0; 2]), TensorData::f32("m.weight_scale", &[2], &[1.0; 2])],
            "holds 2 numbers where one is needed",
        ),
        (
            vec![
                signed("m.weight", &[16], &[1; 16]),
                marker("m.comfy_quant", r#"{"format":"convrot_w4a4"}"#),
                scale(&[]),
            ],
            "convrot_w4a4 is for matrices",
        ),
        (
            vec![codes(), marker("m.comfy_quant", r#"{"format":"asym_w4a8_int8"}"#), scale(&[])],
            "`weight_s_rel` is missing",
        ),
    ];
    for (tensors, word) in cases {
        let found = refused(&tensors);
        assert!(found.contains(word), "{word}: {found}");
    }
    for text in ["x", r#"{"layers":{"m":[]}}"#] {
        let metadata = Metadata::from([("_quantization_metadata".to_owned(), text.to_owned())]);
        let error = fold(file_with(&[codes()], &metadata)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("x.safetensors: the metadata `_quantization_metadata`"), "{error}");
    }
}

/// What is known and not supported is named where a plan needs it, and nowhere else.
#[test]
fn other_formats_are_named() {
    let u8s = |name: &str, shape: &[usize]| bytes(name, StoredDType::U8, shape, &vec![0; shape.iter().product()]);
    let one = |name: &str| TensorData::f32(name, &[], &[1.0]);
    let cases: Vec<(Vec<TensorData<'_>>, &str)> = vec![
        (
            vec![
                u8s("m.weight", &[4, 2]),
                u8s("m.weight_scale", &[128, 4]),
                one("m.weight_scale_2"),
                one("m.input_scale"),
                marker("m.comfy_quant", r#"{"format":"nvfp4"}"#),
            ],
            "nvfp4",
        ),
        (
            vec![
                u8s("m.weight", &[4, 2]),
                bytes("m.weight_scale", StoredDType::F8E4M3, &[4, 1], &[0; 4]),
                one("m.weight_scale_2"),
            ],
            "nvfp4",
        ),
        (vec![bytes("m.weight", StoredDType::F8E4M3, &[4, 4], &[0; 16]), u8s("m.weight_scale", &[128, 4])], "mxfp8"),
        (
            vec![signed("m.weight", &[4, 4], &[0; 16]), TensorData::f32("m.weight_scale", &[4], &[1.0; 4])],
            "int8 without a comfy_quant marker",
        ),
        (
            vec![
                u8s("m.weight", &[8, 1]),
                TensorData::f32("m.weight.absmax", &[1], &[1.0]),
                TensorData::f32("m.weight.quant_map", &[16], &[0.0; 16]),
                u8s("m.weight.quant_state.bitsandbytes__nf4", &[9]),
            ],
            "bitsandbytes",
        ),
        (vec![signed("m.weight", &[4, 4], &[0; 16]), TensorData::f32("m.SCB", &[4], &[1.0; 4])], "bitsandbytes"),
        (vec![u8s("m.weight", &[4, 2]), marker("m.comfy_quant", r#"{"format":"next\nyear"}"#)], "next\\u{a}year"),
    ];
    for (mut tensors, name) in cases {
        tensors.push(one("other.weight"));
        let source = fold(file(&tensors)).unwrap();
        assert_eq!(source.tensors().len(), 2, "{name}");
        let plan = [Expected::new("m.weight", [4, 4]), Expected::new("other.weight", [])];
        let error = Loader::new(source.clone(), &plan, |_| false, DType::F32, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains(&format!("1 tensor of an unusable type (m.weight is {name})")), "{error}");
        assert!(error.contains("supported quantisations: int8_tensorwise, "), "{error}");
        assert!(source.quant("m.weight").is_err());
        // A part that is not needed does not matter.
        Loader::new(source, &plan[1..], |_| true, DType::F32, &Device::Cpu).unwrap();
    }
}

#[test]
fn values_that_are_not_numbers_are_refused() {
    let nan = bytes("m.weight", StoredDType::F8E4M3, &[1, 3], &[0x38, 0x00, 0xff]);
    let plan = [Expected::new("m.weight", [1, 3])];
    let options = LoaderOptions::default();
    let load = |tensors: &[TensorData<'_>], options| {
        let mut loader =
            Loader::with_options(fold(file(tensors)).unwrap(), &plan, |_| false, DType::F32, &Device::Cpu, options)
                .unwrap();
        loader.linear("m.weight").map(|_| ()).map_err(|e| e.to_string())
    };
    let text = load(std::slice::from_ref(&nan), options).unwrap_err();
    assert_eq!(text, "tensor `m.weight` of x.safetensors: element 2 is NaN");
    load(&[nan], options.with_values(ValueCheck::Off)).unwrap();
    // Scales are looked at in any case.
    let codes = signed("m.weight", &[1, 3], &[1, 2, 3]);
    for scale in [f32::NAN, f32::INFINITY, -1.0] {
        let scale = TensorData::f32("m.weight_scale", &[], &[scale]);
        let tensors = [codes.clone(), scale, marker("m.comfy_quant", r#"{"format":"int8_tensorwise"}"#)];
        let text = load(&tensors, options.with_values(ValueCheck::Off)).unwrap_err();
        assert!(text.contains("m.weight"), "{text}");
    }
}

#[test]
fn descriptions_name_format_scales_and_rotation() {
    let int8 = Quantisation::Int8 { group: Some(256), scales: Granularity::Rows, full_precision: false };
    assert_eq!(int8.to_string(), "int8_tensorwise, a scale per row, convrot 256");
    assert_eq!((int8.format(), int8.convrot()), ("int8_tensorwise", Some(256)));
    let fp8 = Quantisation::Fp8 { format: Fp8Format::E5M2, scales: Granularity::Blocks, full_precision: true };
    assert_eq!(fp8.to_string(), "float8_e5m2, a scale per 128x128");
    assert!(fp8.full_precision() && fp8.is_supported());
    assert_eq!(Quantisation::Ggml(GgmlType::Q4K).to_string(), "Q4_K");
    assert!(Quantisation::Ggml(GgmlType::Iq4Nl).is_supported() && !Quantisation::Ggml(GgmlType::Iq3S).is_supported());
    let json = serde_json::to_string(&Quantisation::W4A4 { group: 64 }).unwrap();
    assert_eq!(json, r#""convrot_w4a4, convrot 64""#);
}

/// Loading in half precision rounds each value once.
#[test]
fn half_precision_is_rounded_once() {
    let codes = signed("m.weight", &[1, 2], &[127, 3]);
    let tensors = [
        codes,
        marker("m.comfy_quant", r#"{"format":"int8_tensorwise"}"#),
        TensorData::f32("m.weight_scale", &[], &[0.1]),
    ];
    let plan = [Expected::new("m.weight", [1, 2])];
    let mut loader = Loader::new(fold(file(&tensors)).unwrap(), &plan, |_| false, DType::BF16, &Device::Cpu).unwrap();
    let found = loader.tensor("m.weight").unwrap().to_vec2::<bf16>().unwrap();
    assert_eq!(found, [[bf16::from_f32(127.0 * 0.1), bf16::from_f32(3.0 * 0.1)]]);
}
