//! Decoding against the matrix written out, quantisation against its formula, bad arguments.

use candle_core::{DType, Device, Tensor, Var};

use super::{
    cpu::{self, LEAST_SCALE},
    dequantize_int8_convrot,
    group::{Group, transform},
    quantize_int8_convrot,
};
use crate::{
    error::Error,
    testing::{DTYPES, Data, assert_same_bits_for_all_thread_counts, tensor, to_f64},
};

const GROUPS: [Option<usize>; 6] = [None, Some(4), Some(16), Some(64), Some(256), Some(1024)];

/// All codes in an irregular order.
fn codes(rows: usize, columns: usize) -> Vec<u8> {
    (0..rows * columns).map(|i| (i * 37 + i / 251 * 11) as u8).collect()
}

/// Row i of the matrix, as what the transform makes of a unit vector; `group.rs` holds that to the closed form.
fn row(size: usize, i: usize) -> Vec<i32> {
    let mut unit = vec![0; size];
    unit[i] = 1;
    transform(&mut unit);
    unit
}

#[test]
fn decoding_is_the_product_with_the_matrix_rounded_twice() {
    for group in GROUPS {
        let size = group.unwrap_or(1);
        let (rows, columns) = (3, 1024);
        let codes = codes(rows, columns);
        let scales = [0.3f32, 2f32.powi(-130), 1e30];
        let shape = |scales: &[f32]| Tensor::new(scales, &Device::Cpu).unwrap();
        let tensor = Tensor::from_slice(&codes, (rows, columns), &Device::Cpu).unwrap();
        for per_row in [true, false] {
            let scales = if per_row { &scales[..] } else { &scales[..1] };
            for dtype in DTYPES {
                let got = to_f64(&dequantize_int8_convrot(&tensor, &shape(scales), group, dtype).unwrap());
                for (r, got) in got.chunks_exact(columns).enumerate() {
                    let factor = scales[r % scales.len()] / (size as f32).sqrt();
                    for (c, &got) in got.iter().enumerate().step_by(13) {
                        let first = r * columns + c / size * size;
                        let sum: i32 =
                            row(size, c % size).iter().zip(&codes[first..]).map(|(h, &q)| h * i32::from(q as i8)).sum();
                        let wide = sum as f32 * factor;
                        let want = match dtype {
                            DType::F32 => f64::from(wide),
                            DType::F16 => half::f16::from_f32(wide).to_f64(),
                            _ => half::bf16::from_f32(wide).to_f64(),
                        };
                        assert_eq!(got, want, "{group:?} {dtype:?} {r} {c}");
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_are_positive_and_scales_of_zero_give_them() {
    let zero = Tensor::zeros((2, 256), DType::U8, &Device::Cpu).unwrap();
    let scales = Tensor::new(&[3f32, 0.0], &Device::Cpu).unwrap();
    let w = dequantize_int8_convrot(&zero, &scales, Some(256), DType::F32).unwrap();
    assert!(w.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|v| v.to_bits() == 0));
}

#[test]
fn a_quantised_matrix_comes_back() {
    for group in GROUPS {
        for dtype in DTYPES {
            let w = tensor(&[5, 2048], dtype, Data::Normal, 7);
            let (codes, scales) = quantize_int8_convrot(&w, group).unwrap();
            assert_eq!((codes.dims(), scales.dims()), (&[5, 2048][..], &[5][..]));
            let back = dequantize_int8_convrot(&codes, &scales, group, DType::F32).unwrap();
            let (w, back, scales) = (to_f64(&w), to_f64(&back), to_f64(&scales));
            for (r, scale) in scales.iter().enumerate() {
                let range = r * 2048..(r + 1) * 2048;
                let error: f64 = w[range.clone()].iter().zip(&back[range]).map(|(w, b)| (w - b) * (w - b)).sum();
                // Errors of rounding are even over one step: its square over 12, which rotation keeps.
                let rms = (error / 2048.0).sqrt() / scale;
                assert!((0.25..0.32).contains(&rms), "{group:?} {dtype:?} {r}: {rms} steps");
            }
        }
    }
}

#[test]
fn the_largest_magnitude_becomes_127_and_ties_go_to_even() {
    // Not rotated: codes can be read off.
    let w = Tensor::new(&[[127f32, -0.5, 0.5, 1.5, 2.5, -127.0]], &Device::Cpu).unwrap();
    let (codes, scales) = quantize_int8_convrot(&w, None).unwrap();
    assert_eq!(scales.to_vec1::<f32>().unwrap(), [1.0]);
    let codes: Vec<i8> = codes.to_vec2::<u8>().unwrap()[0].iter().map(|&q| q as i8).collect();
    assert_eq!(codes, [127, 0, 0, 2, 2, -127]);
}

#[test]
fn rows_that_are_zero_or_not_finite() {
    let mut w = vec![1f32; 4 * 256];
    w[..256].fill(0.0);
    w[256 + 3] = f32::NAN;
    w[512 + 200] = f32::NEG_INFINITY;
    let w = Tensor::from_vec(w, (4, 256), &Device::Cpu).unwrap();
    let (codes, scales) = quantize_int8_convrot(&w, Some(256)).unwrap();
    let (codes, scales) = (codes.to_vec2::<u8>().unwrap(), scales.to_vec1::<f32>().unwrap());
    assert_eq!(scales[0], LEAST_SCALE);
    // Infinities of both signs may meet, so either is right.
    assert!(scales[1].is_nan() && !scales[2].is_finite());
    assert!(codes[..3].iter().flatten().all(|&q| q == 0));
    // A group of equal values is its own image.
    assert_eq!(scales[3], 1.0 / 127.0);
    assert!(codes[3].iter().all(|&q| q == 127));
}

#[test]
fn strides_offsets_and_threads_change_nothing() {
    let w = tensor(&[6, 512], DType::BF16, Data::Normal, 3);
    let wide = Tensor::cat(&[&w, &w.ones_like().unwrap()], 1).unwrap();
    let view = wide.narrow(1, 0, 512).unwrap();
    assert!(!view.is_contiguous());
    let (codes, scales) = quantize_int8_convrot(&w, Some(256)).unwrap();
    let (other, _) = quantize_int8_convrot(&view, Some(256)).unwrap();
    assert_eq!(codes.to_vec2::<u8>().unwrap(), other.to_vec2::<u8>().unwrap());
    let whole = dequantize_int8_convrot(&codes, &scales, Some(256), DType::F32).unwrap();
    let (part, few) = (codes.narrow(0, 2, 3).unwrap(), scales.narrow(0, 2, 3).unwrap());
    let part = dequantize_int8_convrot(&part, &few, Some(256), DType::F32).unwrap();
    assert_eq!(to_f64(&part), to_f64(&whole.narrow(0, 2, 3).unwrap()));
    let columns = codes.narrow(1, 256, 256).unwrap();
    let columns = dequantize_int8_convrot(&columns, &scales, Some(256), DType::F32).unwrap();
    assert_eq!(to_f64(&columns), to_f64(&whole.narrow(1, 256, 256).unwrap()));
    let large = tensor(&[64, 1024], DType::F32, Data::Normal, 4);
    assert_same_bits_for_all_thread_counts(|| {
        let (codes, scales) = quantize_int8_convrot(&large, Some(1024)).unwrap();
        dequantize_int8_convrot(&codes, &scales, Some(1024), DType::F32).unwrap()
    });
}

#[test]
fn rotating_twice_gives_back_what_was_rotated() {
    let group = Group::new("test", Some(64), 128).unwrap();
    let x: Vec<f32> = (0..256).map(|i| (i * 7 % 32) as f32).collect();
    let mut twice = x.clone();
    cpu::rotate(&mut twice, 128, group);
    assert_ne!(twice, x);
    cpu::rotate(&mut twice, 128, group);
    // Small integers: exact.
    assert_eq!(twice, x);
}

#[test]
fn empty_matrices_are_fine_and_bad_arguments_are_not() {
    let scales = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    let codes = |dims: &[usize]| Tensor::zeros(dims, DType::U8, &Device::Cpu).unwrap();
    for dims in [[0, 256], [3, 0]] {
        let w = dequantize_int8_convrot(&codes(&dims), &scales(1), Some(256), DType::BF16).unwrap();
        assert_eq!((w.dims(), w.dtype()), (&dims[..], DType::BF16));
        let (codes, scales) = quantize_int8_convrot(&w, Some(256)).unwrap();
        assert_eq!((codes.dims(), scales.dims()), (&dims[..], &dims[..1]));
    }
    let error = |c: &Tensor, s: &Tensor, group| dequantize_int8_convrot(c, s, group, DType::F32).unwrap_err();
    let good = codes(&[2, 512]);
    assert!(matches!(error(&codes(&[512]), &scales(1), Some(256)), Error::Shape { operand: "codes", .. }));
    assert!(matches!(error(&good, &scales(3), Some(256)), Error::Shape { operand: "scales", .. }));
    let row = scales(2).reshape((1, 2)).unwrap();
    assert!(matches!(error(&good, &row, Some(256)), Error::Shape { operand: "scales", .. }));
    for group in [0, 1, 32, 128, 1024, 4096] {
        assert!(matches!(error(&good, &scales(1), Some(group)), Error::Argument { .. }), "{group}");
    }
    let float = good.to_dtype(DType::F32).unwrap();
    assert!(matches!(error(&float, &scales(1), Some(256)), Error::DType { operand: "codes", .. }));
    let half = scales(1).to_dtype(DType::F16).unwrap();
    assert!(matches!(error(&good, &half, Some(256)), Error::DType { operand: "scales", .. }));
    let wide = dequantize_int8_convrot(&good, &scales(1), Some(256), DType::F64);
    assert!(matches!(wide, Err(Error::DType { operand: "result", .. })));
    assert!(matches!(quantize_int8_convrot(&good, Some(256)), Err(Error::DType { operand: "weight", .. })));
    let tracked = Var::from_tensor(&float).unwrap();
    assert!(matches!(quantize_int8_convrot(tracked.as_tensor(), Some(256)), Err(Error::Argument { .. })));
    assert!(matches!(quantize_int8_convrot(&float, Some(1024)), Err(Error::Argument { .. })));
}
