use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
};

use candle_core::{DType, Device, Tensor};
use candle_fork::quant::Fp8Format;
use policy::Silent;
use tempfile::TempDir;

use super::*;
use crate::{
    Safetensors,
    write::{Metadata, TensorData, to_bytes},
};

const CONVROT: Format = Format::Int8ConvRot { group_size: 16 };

fn values(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Two blocks, their surroundings, and a matrix that no group divides.
fn plain() -> Safetensors {
    let tensors = [
        TensorData::bf16("x_embedder.weight", &[32, 48], &values(1, 32 * 48)),
        TensorData::bf16("blocks.0.q.weight", &[8, 48], &values(2, 8 * 48)),
        TensorData::f32("blocks.0.q.bias", &[8], &values(3, 8)),
        TensorData::f32("blocks.1.q.weight", &[5, 32], &values(4, 160)),
        TensorData::f32("blocks.1.odd.weight", &[3, 20], &values(5, 60)),
    ];
    let metadata = Metadata::from([("from".to_owned(), "here".to_owned())]);
    let bytes = to_bytes(&tensors, &metadata).unwrap();
    Safetensors::from_bytes(std::sync::Arc::new(bytes), "plain").unwrap()
}

fn quantized(format: Format) -> (Safetensors, Quantised, TempDir) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("q.safetensors");
    let report = quantize(&plain(), format, &path, &Silent).unwrap();
    (Safetensors::open(&path).unwrap(), report, dir)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn int8_files_hold_codes_scales_and_markers() {
    let (file, report, _dir) = quantized(CONVROT);
    assert_eq!(report.matrices, 2);
    let kept = BTreeMap::from([(Kept::NoMatrix, 1), (Kept::OutsideBlocks, 1), (Kept::UnevenRows, 1)]);
    assert_eq!(report.kept, kept);
    assert_eq!(report.bytes_after, file.tensors().iter().map(|t| t.bytes.len() as u64).sum::<u64>());
    assert_eq!(file.metadata()["from"], "here");
    let marker = br#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":16}"#;
    assert_eq!(file.bytes("blocks.0.q.comfy_quant").unwrap(), marker);
    assert_eq!(
        file.info("blocks.1.q.weight").map(|t| (t.dtype, t.shape.clone())),
        Some((StoredDType::I8, vec![5, 32]))
    );
    assert_eq!(file.info("blocks.1.q.weight_scale").unwrap().shape, [5, 1]);
    for name in ["x_embedder.weight", "blocks.0.q.bias", "blocks.1.odd.weight"] {
        assert_eq!(file.bytes(name).unwrap(), plain().bytes(name).unwrap(), "{name}");
    }
    // Decoded, no element is off by more than the rotation of half a unit in each of a group's elements.
    let codes = Tensor::from_slice(file.bytes("blocks.1.q.weight").unwrap(), (5, 32), &Device::Cpu).unwrap();
    let scales = floats(file.bytes("blocks.1.q.weight_scale").unwrap());
    let largest = scales.iter().fold(0f32, |a, &b| a.max(b));
    let scales = Tensor::from_vec(scales, 5, &Device::Cpu).unwrap();
    let back = candle_fork::dequantize_int8_convrot(&codes, &scales, Some(16), DType::F32).unwrap();
    let back: Vec<f32> = back.flatten_all().unwrap().to_vec1().unwrap();
    let worst = back.iter().zip(values(4, 160)).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst > 0.0 && worst < 2.0 * largest, "{worst} {largest}");
}

#[test]
fn fp8_files_hold_one_scale_for_each_matrix() {
    let (file, report, _dir) = quantized(Format::Fp8Scaled);
    // Every matrix of a block: there are no groups.
    assert_eq!(report.matrices, 3);
    assert_eq!(file.bytes("blocks.0.q.comfy_quant").unwrap(), br#"{"format":"float8_e4m3fn"}"#);
    assert_eq!(file.info("blocks.1.odd.weight").unwrap().dtype, StoredDType::F8E4M3);
    assert_eq!(file.info("blocks.1.odd.weight_scale").unwrap().shape, [0; 0]);
    let scale = floats(file.bytes("blocks.1.odd.weight_scale").unwrap())[0];
    for (code, x) in file.bytes("blocks.1.odd.weight").unwrap().iter().zip(values(5, 60)) {
        let y = Fp8Format::E4M3.widen(*code) * scale;
        assert!((x - y).abs() <= x.abs() / 16.0 + scale / 1024.0, "{x} became {y}");
    }
}

#[test]
fn what_cannot_be_quantised_is_refused_before_a_file_is_made() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("q.safetensors");
    let refused = |tensors: &[TensorData<'_>], format| {
        let bytes = to_bytes(tensors, &Metadata::new()).unwrap();
        let source = Safetensors::from_bytes(std::sync::Arc::new(bytes), "made").unwrap();
        let text = quantize(&source, format, &path, &Silent).unwrap_err().to_string();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{text}");
        text
    };
    let odd = TensorData::f32("blocks.1.odd.weight", &[3, 20], &values(5, 60));
    let text = refused(std::slice::from_ref(&odd), CONVROT);
    assert!(text.contains("1 matrices") && text.contains("groups of 16"), "{text}");
    let outside = TensorData::f32("proj.weight", &[2, 16], &values(1, 32));
    assert!(refused(&[outside], CONVROT).contains("no matrices in numbered blocks"));
    let scale = TensorData::f32("blocks.1.odd.weight_scale", &[], &[1.0]);
    assert!(refused(&[odd.clone(), scale], Format::Fp8Scaled).contains("quantised matrix already"));
    let mut nan = values(6, 60);
    nan[43] = f32::NAN;
    let nan = TensorData::f32("blocks.1.odd.weight", &[3, 20], &nan);
    let text = refused(&[nan], Format::Fp8Scaled);
    assert!(text.contains("element 43 is NaN"), "{text}");
    let text = refused(&[TensorData::f32("blocks.1.q.weight", &[2, 16], &[f32::INFINITY; 32])], CONVROT);
    assert!(text.contains("element 0 is inf"), "{text}");
}

#[test]
fn a_stopped_run_leaves_no_file() {
    let dir = TempDir::new().unwrap();
    let stop = |event: &Event<'_>| match event {
        Event::Progress { done: 2, .. } => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let error = quantize(&plain(), CONVROT, dir.path().join("q"), &stop).unwrap_err();
    assert!(matches!(error, Error::Cancelled(_)), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_stage_begins_once_and_its_progress_never_falls_back() {
    for format in [CONVROT, Format::Fp8Scaled] {
        let dir = TempDir::new().unwrap();
        let (stages, counts) = (Cell::new(0), RefCell::new(Vec::new()));
        let listen = |event: &Event<'_>| {
            match event {
                Event::Stage { .. } => stages.set(stages.get() + 1),
                &Event::Progress { done, total } => counts.borrow_mut().push((done, total)),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        let source = plain();
        quantize(&source, format, dir.path().join("q"), &listen).unwrap();
        let (counts, total) = (counts.into_inner(), source.tensors().len());
        assert_eq!(stages.get(), 1, "{format}");
        assert!(counts.is_sorted() && counts.last() == Some(&(total, total)), "{format}: {counts:?}");
    }
}
