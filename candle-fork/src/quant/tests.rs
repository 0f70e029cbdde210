//! Every format against its formula, whole and in parts; linear maps with quantised weights.

use std::sync::Arc;

use candle_core::{
    DType, Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use half::{bf16, f16};

use super::{Fp8Format, Fp8Scales, Iq4Format, QuantMode, QuantWeight, W4a8Scales, decode_w4a8, unpack_w4a4};
use crate::{
    LinearWeight,
    convrot::{quantize_int8_convrot, take_counters},
    error::Error,
    gemm::test_data::noise,
    host::HostTensor,
    linear,
    testing::to_f64,
};

const CPU: &Device = &Device::Cpu;

/// Bytes behind an odd address.
fn host(bytes: &[u8], dims: &[usize]) -> HostTensor {
    let mut shifted = vec![0xff; bytes.len() + 16];
    let start = shifted.as_ptr().align_offset(16) + 1;
    shifted[start..start + bytes.len()].copy_from_slice(bytes);
    HostTensor::new(Arc::new(shifted), start..start + bytes.len(), DType::U8, dims).unwrap()
}

fn codes(rows: usize, columns: usize) -> Vec<u8> {
    (0..rows * columns).map(|i| (i * 37 + i / 251 * 11) as u8).collect()
}

fn int8(rows: usize, columns: usize, group: Option<usize>) -> QuantWeight {
    let scales = (0..rows).map(|r| 0.01 + r as f32 * 1e-4).collect();
    QuantWeight::int8(host(&codes(rows, columns), &[rows, columns]), scales, group).unwrap()
}

fn fp8(rows: usize, columns: usize, format: Fp8Format) -> QuantWeight {
    // Without NaN and infinities.
    let codes: Vec<u8> = codes(rows, columns).into_iter().map(|q| if q & 0x7f >= 0x7c { 0x38 } else { q }).collect();
    let scales: Vec<f32> = (0..rows.div_ceil(8) * columns.div_ceil(32)).map(|i| 1e-3 * (1 + i % 7) as f32).collect();
    let scales = Fp8Scales::Blocks { scales, rows: 8, columns: 32 };
    QuantWeight::fp8(host(&codes, &[rows, columns]), format, scales).unwrap()
}

fn ggml(rows: usize, columns: usize, dtype: GgmlDType) -> QuantWeight {
    let w = Tensor::from_vec(noise(rows * columns, 5), (rows, columns), CPU).unwrap();
    let bytes = QTensor::quantize(&w, dtype).unwrap();
    let bytes = bytes.data().unwrap();
    QuantWeight::ggml(host(&bytes, &[bytes.len()]), dtype, [rows, columns]).unwrap()
}

/// Blocks of noise with scales about 1/64, every other one negative.
fn iq4(rows: usize, columns: usize, format: Iq4Format) -> QuantWeight {
    let mut bytes = codes(rows, columns / format.block() * format.block_bytes());
    for (i, block) in bytes.chunks_exact_mut(format.block_bytes()).enumerate() {
        let scale = f16::from_f32((1.0 + i as f32 / 128.0) / 64.0 * if i % 2 == 0 { 1.0 } else { -1.0 });
        block[..2].copy_from_slice(&scale.to_le_bytes());
    }
    QuantWeight::iq4(host(&bytes, &[bytes.len()]), format, [rows, columns]).unwrap()
}

fn all(rows: usize, columns: usize) -> Vec<QuantWeight> {
    vec![
        int8(rows, columns, None),
        int8(rows, columns, Some(64)),
        int8(rows, columns, Some(256)),
        fp8(rows, columns, Fp8Format::E4M3),
        fp8(rows, columns, Fp8Format::E5M2),
        ggml(rows, columns, GgmlDType::Q8_0),
        ggml(rows, columns, GgmlDType::Q4K),
        ggml(rows, columns, GgmlDType::Q6K),
        iq4(rows, columns, Iq4Format::NonLinear),
        iq4(rows, columns, Iq4Format::Super),
    ]
}

#[test]
fn bytes_of_both_formats_have_their_published_values() {
    use Fp8Format::{E4M3, E5M2};
    for (bits, value) in [
        (0x00, 0.0),
        (0x01, 2f32.powi(-9)),
        (0x07, 7.0 * 2f32.powi(-9)),
        (0x08, 2f32.powi(-6)),
        (0x38, 1.0),
        (0x7e, 448.0),
    ] {
        assert_eq!(E4M3.widen(bits), value, "{bits:#x}");
        assert_eq!(E4M3.widen(bits | 0x80).to_bits(), (-value).to_bits(), "{bits:#x}");
    }
    for (bits, value) in [
        (0x00, 0.0),
        (0x01, 2f32.powi(-16)),
        (0x04, 2f32.powi(-14)),
        (0x3c, 1.0),
        (0x7b, 57344.0),
        (0x7c, f32::INFINITY),
    ] {
        assert_eq!(E5M2.widen(bits), value, "{bits:#x}");
        assert_eq!(E5M2.widen(bits | 0x80).to_bits(), (-value).to_bits(), "{bits:#x}");
    }
    assert!(E4M3.widen(0x7f).is_nan() && E4M3.widen(0xff).is_nan() && E5M2.widen(0x7d).is_nan());
    // Magnitudes rise with their bits.
    for format in [E4M3, E5M2] {
        let values: Vec<f32> = (0..0x7c).map(|bits| format.widen(bits)).collect();
        assert!(values.is_sorted() && values.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

/// The scale of an element, given its row and column.
type ScaleAt<'a> = &'a dyn Fn(usize, usize) -> usize;

#[test]
fn every_kind_of_scales_is_found_from_every_row() {
    let (rows, columns) = (20, 72);
    let ones = vec![0x38; rows * columns];
    let make = |scales| QuantWeight::fp8(host(&ones, &[rows, columns]), Fp8Format::E4M3, scales).unwrap();
    let blocks: Vec<f32> = (0..3 * 3).map(|i| i as f32).collect();
    let kinds: [(Fp8Scales, ScaleAt<'_>); 3] = [
        (Fp8Scales::Tensor(7.0), &|_, _| 7),
        (Fp8Scales::Rows((0..rows).map(|r| r as f32).collect()), &|r, _| r),
        (Fp8Scales::Blocks { scales: blocks, rows: 8, columns: 32 }, &|r, c| r / 8 * 3 + c / 32),
    ];
    for (scales, at) in kinds {
        let weight = make(scales);
        let check = |weight: &QuantWeight, row: &dyn Fn(usize) -> usize| {
            let wide = weight.dequantize(DType::F32, CPU).unwrap().to_vec2::<f32>().unwrap();
            for (r, values) in wide.iter().enumerate() {
                for (c, &value) in values.iter().enumerate() {
                    assert_eq!(value, at(row(r), c) as f32, "{} {r} {c}", weight.describe());
                }
            }
        };
        check(&weight, &|r| r);
        // Cut in the middle of a block, and again.
        let cut = weight.rows(3, 15).unwrap();
        check(&cut, &|r| 3 + r);
        check(&cut.rows(7, 5).unwrap(), &|r| 10 + r);
        let ids = [19, 0, 8, 8, 7];
        check(&weight.gather(&ids).unwrap(), &|r| ids[r] as usize);
    }
}

#[test]
fn parts_are_parts_of_the_whole_in_every_format() {
    for weight in all(24, 512) {
        let name = weight.describe();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let whole = weight.dequantize(dtype, CPU).unwrap();
            assert_eq!((whole.dims(), whole.dtype()), (&[24, 512][..], dtype));
            let part = weight.rows(5, 9).unwrap();
            assert_eq!((part.out_features(), part.in_features()), (9, 512));
            assert_eq!(
                to_f64(&part.dequantize(dtype, CPU).unwrap()),
                to_f64(&whole.narrow(0, 5, 9).unwrap()),
                "{name}"
            );
            let ids = [23u32, 0, 7, 7];
            let rows = weight.gather(&ids).unwrap().dequantize(dtype, CPU).unwrap();
            let want = whole.index_select(&Tensor::new(&ids, CPU).unwrap(), 0).unwrap();
            assert_eq!(to_f64(&rows), to_f64(&want), "{name}");
            // One rounding, of f32 values.
            let wide = weight.dequantize(DType::F32, CPU).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let rounded: Vec<f64> = wide
                .iter()
                .map(|&v| match dtype {
                    DType::F16 => f16::from_f32(v).to_f64(),
                    DType::BF16 => bf16::from_f32(v).to_f64(),
                    _ => f64::from(v),
                })
                .collect();
            assert_eq!(to_f64(&whole), rounded, "{name} {dtype:?}");
        }
    }
}

#[test]
fn ggml_blocks_are_decoded_as_candle_decodes_them() {
    use GgmlDType::*;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K] {
        let w = Tensor::from_vec(noise(6 * 512, 5), (6, 512), CPU).unwrap();
        let theirs = QTensor::quantize(&w, dtype).unwrap();
        let weight = ggml(6, 512, dtype);
        assert_eq!(weight.stored_bytes(), theirs.storage_size_in_bytes(), "{dtype:?}");
        let want = to_f64(&theirs.dequantize(CPU).unwrap());
        assert_eq!(to_f64(&weight.dequantize(DType::F32, CPU).unwrap()), want, "{dtype:?}");
    }
}

/// Values by hand: the smallest and the largest code in the first and last place of both halves, scales of both signs.
#[test]
fn codes_of_a_table_have_its_values() {
    let one = f16::ONE.to_le_bytes();
    let mut nl = [&one[..], &[0x88; 16]].concat();
    (nl[2], nl[17]) = (0xf0, 0x7e);
    let weight = QuantWeight::iq4(host(&nl, &[18]), Iq4Format::NonLinear, [1, 32]).unwrap();
    let mut want = [1.0; 32];
    (want[0], want[16], want[15], want[31]) = (-127.0, 113.0, 89.0, -10.0);
    assert_eq!(weight.dequantize(DType::F32, CPU).unwrap().to_vec2::<f32>().unwrap(), [want]);

    // Scales of 6 bits: 63, 0, 32 and, from bits in all places, 38 for the last five; less 32.
    let low = [0x0f, 0x60, 0x66, 0x66];
    let high = 0b10_10_10_10_10_10_00_11u16.to_le_bytes();
    let xs = [&one[..], &high, &low, &[0x88; 128]].concat();
    let weight = QuantWeight::iq4(host(&xs, &[136]), Iq4Format::Super, [1, 256]).unwrap();
    let got = weight.dequantize(DType::F32, CPU).unwrap().to_vec2::<f32>().unwrap();
    let runs: Vec<f32> = got[0].chunks_exact(32).map(|run| run[0]).collect();
    assert_eq!(runs, [31.0, -32.0, 0.0, 6.0, 6.0, 6.0, 6.0, 6.0]);
    assert!(got[0].chunks_exact(32).all(|run| run.iter().all(|v| *v == run[0])));
}

/// Kept as it is stored, a matrix gives what its decoded form gives.
#[test]
fn linear_maps_agree_with_the_decoded_matrix() {
    for weight in all(40, 768) {
        let name = weight.describe();
        let wide = LinearWeight::from_tensor(weight.dequantize(DType::F32, CPU).unwrap()).unwrap();
        let kept = LinearWeight::from_quant(weight, QuantMode::DequantizePerLayer, DType::BF16, CPU).unwrap();
        let bias = Tensor::from_vec(noise(40, 3), 40, CPU).unwrap();
        for rows in [1, 4, 5, 33] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let x = Tensor::from_vec(noise(rows * 768, 4), (rows, 768), CPU).unwrap().to_dtype(dtype).unwrap();
                let want = linear(&x.to_dtype(DType::F32).unwrap(), &wide, Some(&bias)).unwrap();
                let got = linear(&x, &kept, Some(&bias)).unwrap();
                assert_eq!((got.dims(), got.dtype()), (&[rows, 40][..], dtype));
                let (got, want) = (to_f64(&got), to_f64(&want));
                let size = want.iter().fold(0f64, |m, v| m.max(v.abs()));
                let unit = if dtype == DType::F32 { 0.0 } else { 1.0 / 256.0 };
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = (got - want).abs();
                    assert!(error <= 2e-6 * size + unit * want.abs(), "{name} {rows} {dtype:?} {i}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn stacks_mix_formats_and_floats() {
    let mut parts = all(24, 512);
    parts.insert(2, int8(16, 512, Some(256)));
    let x = Tensor::from_vec(noise(7 * 512, 4), (7, 512), CPU).unwrap();
    for mode in [QuantMode::DequantizeOnce, QuantMode::DequantizePerLayer, QuantMode::W8A8] {
        let mut weights: Vec<LinearWeight> =
            parts.iter().map(|part| LinearWeight::from_quant(part.clone(), mode, DType::F32, CPU).unwrap()).collect();
        let float = Tensor::from_vec(noise(10 * 512, 9), (10, 512), CPU).unwrap();
        weights.insert(1, LinearWeight::from_tensor(float).unwrap());
        let apart: Vec<Tensor> = weights.iter().map(|weight| linear(&x, weight, None).unwrap()).collect();
        let apart = Tensor::cat(&apart, 1).unwrap();
        let stack = LinearWeight::stack(weights).unwrap();
        assert_eq!(stack.dtype(), DType::F32);
        let bias = Tensor::from_vec(noise(stack.out_features(), 3), stack.out_features(), CPU).unwrap();
        assert_eq!(to_f64(&linear(&x, &stack, None).unwrap()), to_f64(&apart));
        let biased = linear(&x, &stack, Some(&bias)).unwrap();
        assert_eq!(to_f64(&biased), to_f64(&apart.broadcast_add(&bias).unwrap()));
        // Rows across several parts.
        let cut = linear(&x, &stack.rows(20, 90).unwrap(), None).unwrap();
        assert_eq!(to_f64(&cut), to_f64(&apart.narrow(1, 20, 90).unwrap()), "{mode:?}");
    }
}

#[test]
fn products_of_integers_have_the_bits_of_their_formula() {
    for (rows, columns, group) in [(5, 256, Some(256)), (3, 100, None), (48, 16384, Some(1024)), (1, 64, Some(16))] {
        for per_row in [true, false] {
            // The lowest code throughout: the largest sum there is.
            let codes = if columns == 16384 { vec![0x80; rows * columns] } else { codes(rows, columns) };
            let scales: Vec<f32> = (0..if per_row { rows } else { 1 }).map(|r| 0.01 + r as f32 * 1e-3).collect();
            let weight = QuantWeight::int8(host(&codes, &[rows, columns]), scales.clone(), group).unwrap();
            let weight = LinearWeight::from_quant(weight, QuantMode::W8A8, DType::F32, CPU).unwrap();
            let bias = noise(rows, 3);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let x = Tensor::from_vec(noise(6 * columns, 4), (2, 3, columns), CPU).unwrap().to_dtype(dtype).unwrap();
                let (qx, sx) = quantize_int8_convrot(&x.reshape((6, columns)).unwrap(), group).unwrap();
                let (qx, sx) = (qx.to_vec2::<u8>().unwrap(), sx.to_vec1::<f32>().unwrap());
                take_counters();
                let y = linear(&x, &weight, Some(&Tensor::new(bias.as_slice(), CPU).unwrap())).unwrap();
                assert_eq!(take_counters().cpu, 1);
                assert_eq!((y.dims(), y.dtype()), (&[2, 3, rows][..], dtype));
                let mut want = Vec::new();
                for (x, sx) in qx.iter().zip(&sx) {
                    for (o, w) in codes.chunks_exact(columns).enumerate() {
                        let sum: i64 = x.iter().zip(w).map(|(&x, &w)| i64::from(x as i8) * i64::from(w as i8)).sum();
                        want.push(sum as f32 * (sx * scales[o % scales.len()]) + bias[o]);
                    }
                }
                let want = Tensor::from_vec(want, (2, 3, rows), CPU).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(to_f64(&y), to_f64(&want), "{rows} {columns} {group:?} {dtype:?}");
            }
        }
    }
}

#[test]
fn rows_that_are_not_finite_stay_alone() {
    let mut x = noise(5 * 256, 1);
    x[256 + 7] = f32::NAN;
    x[3 * 256 + 9] = f32::INFINITY;
    let x = Tensor::from_vec(x, (5, 256), CPU).unwrap();
    for mode in [QuantMode::DequantizePerLayer, QuantMode::W8A8] {
        let weight = LinearWeight::from_quant(int8(20, 256, Some(256)), mode, DType::F32, CPU).unwrap();
        let y = linear(&x, &weight, None).unwrap().to_vec2::<f32>().unwrap();
        for (r, row) in y.iter().enumerate() {
            assert!(row.iter().all(|v| v.is_finite() != [1, 3].contains(&r)), "{mode:?} {r}");
        }
    }
}

#[test]
fn packed_codes_of_4_bits() {
    // Low nibble first; 8 to 15 are negative.
    assert_eq!(unpack_w4a4(&[0x8f, 0x70], 4).unwrap(), [-1i8, -8, 0, 7].map(|q| q as u8));
    for (bytes, columns) in [(3, 4), (2, 3), (2, 0)] {
        assert!(matches!(unpack_w4a4(&vec![0; bytes], columns), Err(Error::Argument { .. })), "{bytes} {columns}");
    }
    let scales = |relative| W4a8Scales { relative, group_size: 4, codebook: None };
    let codes = decode_w4a8(&[0x0f, 0x98], 1, 4, scales(&[3.0])).unwrap();
    assert_eq!(codes, [21i8, -24, 0, 3].map(|q| q as u8));
    // Six bits: nibbles 15, 0, 8, 9 with 0, 1, 2, 3 above them, less 32. A tie goes to even, the last is clamped.
    let codes = decode_w4a8(&[0x0f, 0x98, 0b11_10_01_00], 1, 4, scales(&[5.5])).unwrap();
    assert_eq!(codes, [-94i8, -88, 44, 127].map(|q| q as u8));
    let book = [0.0; 16];
    for (bytes, rows, columns, relative, group_size, codebook) in [
        (2, 1, 4, 2, 4, None),
        (3, 1, 4, 1, 4, Some(&book)),
        (5, 2, 4, 2, 4, None),
        (2, 0, 4, 1, 4, None),
        (2, 1, 4, 1, 0, None),
        (2, 1, 4, 1, 3, None),
        (2, 1, 0, 1, 4, None),
    ] {
        let relative = vec![1.0; relative];
        let scales = W4a8Scales { relative: &relative, group_size, codebook };
        let result = decode_w4a8(&vec![0; bytes], rows, columns, scales);
        assert!(matches!(result, Err(Error::Argument { .. })), "{bytes} {rows} {columns} {group_size}");
    }
    // What is not finite would vanish in the codes.
    let mut book = book;
    book[3] = f32::NAN;
    for (relative, codebook) in [(f32::NAN, None), (f32::INFINITY, None), (1.0, Some(&book))] {
        let scales = W4a8Scales { relative: &[relative], group_size: 4, codebook };
        assert!(matches!(decode_w4a8(&[0; 2], 1, 4, scales), Err(Error::Argument { .. })), "{scales:?}");
    }
}

#[test]
fn bad_weights_are_errors() {
    let bytes = |dims: &[usize]| host(&vec![0; dims.iter().product()], dims);
    let int8 = |dims: &[usize], scales: &[f32], group| QuantWeight::int8(bytes(dims), scales.to_vec(), group);
    assert!(matches!(int8(&[8], &[1.0], None), Err(Error::Shape { operand: "codes", .. })));
    assert!(matches!(int8(&[2, 0], &[1.0], None), Err(Error::Shape { operand: "codes", .. })));
    for scales in [&[][..], &[1.0, 2.0, 3.0]] {
        assert!(matches!(int8(&[2, 4], scales, None), Err(Error::Shape { operand: "scales", .. })));
    }
    for scale in [-1.0, f32::NAN, f32::INFINITY] {
        let error = int8(&[2, 4], &[1.0, scale], None).unwrap_err().to_string();
        assert!(error.contains("scale 1 is"), "{error}");
    }
    assert!(matches!(int8(&[2, 24], &[1.0], Some(16)), Err(Error::Argument { .. })));
    let wide = HostTensor::new(Arc::new(vec![0u8; 32]), 0..32, DType::F32, (2, 4)).unwrap();
    assert!(matches!(QuantWeight::int8(wide, vec![1.0], None), Err(Error::DType { operand: "codes", .. })));

    let fp8 = |scales| QuantWeight::fp8(bytes(&[4, 4]), Fp8Format::E4M3, scales);
    assert!(matches!(fp8(Fp8Scales::Rows(vec![1.0; 3])), Err(Error::Shape { operand: "scales", .. })));
    let blocks = |n, rows, columns| Fp8Scales::Blocks { scales: vec![1.0; n], rows, columns };
    assert!(matches!(fp8(blocks(3, 2, 2)), Err(Error::Shape { operand: "scales", .. })));
    assert!(matches!(fp8(blocks(4, 0, 2)), Err(Error::Argument { .. })));
    assert!(matches!(fp8(Fp8Scales::Tensor(f32::NAN)), Err(Error::Argument { .. })));

    let ggml = |len: usize, dims| QuantWeight::ggml(bytes(&[len]), GgmlDType::Q8_0, dims);
    assert!(matches!(ggml(34, [1, 31]), Err(Error::Argument { .. })));
    assert!(matches!(ggml(35, [1, 32]), Err(Error::HostRange { .. })));
    assert!(matches!(ggml(0, [0, 32]), Err(Error::Shape { .. })));
    assert!(matches!(ggml(34, [usize::MAX, 32]), Err(Error::HostRange { .. })));

    let iq4 = |len: usize, dims| QuantWeight::iq4(bytes(&[len]), Iq4Format::Super, dims);
    assert_eq!(iq4(136, [1, 256]).unwrap().stored_bytes(), 136);
    assert!(matches!(iq4(136, [1, 224]), Err(Error::Argument { .. })));
    assert!(matches!(iq4(135, [1, 256]), Err(Error::HostRange { .. })));
    assert!(matches!(iq4(0, [0, 256]), Err(Error::Shape { .. })));
    assert!(matches!(iq4(136, [usize::MAX, 256]), Err(Error::HostRange { .. })));

    let weight = int8(&[4, 4], &[1.0], None).unwrap();
    for (start, len) in [(0, 0), (0, 5), (4, 1), (usize::MAX, 2)] {
        assert!(matches!(weight.rows(start, len), Err(Error::Argument { .. })), "{start} {len}");
    }
    assert!(matches!(weight.gather(&[0, 4]), Err(Error::Argument { .. })));
    assert!(matches!(weight.gather(&[]), Err(Error::Argument { .. })));
    assert!(matches!(weight.dequantize(DType::F64, CPU), Err(Error::DType { .. })));
    let deep = QuantWeight::int8(bytes(&[1, 1 << 17]), vec![1.0], None).unwrap();
    let deep = LinearWeight::from_quant(deep, QuantMode::W8A8, DType::F32, CPU).unwrap();
    let x = Tensor::zeros((1, 1 << 17), DType::F32, CPU).unwrap();
    assert!(matches!(linear(&x, &deep, None), Err(Error::Unsupported { .. })));
}

#[test]
fn formats_have_names() {
    let names: Vec<String> = all(24, 512).iter().map(QuantWeight::describe).collect();
    assert_eq!(
        names,
        [
            "int8 with a scale for each row",
            "int8 convrot 64 with a scale for each row",
            "int8 convrot 256 with a scale for each row",
            "fp8 e4m3 with a scale for each 8x32 block",
            "fp8 e5m2 with a scale for each 8x32 block",
            "gguf q8_0",
            "gguf q4k",
            "gguf q6k",
            "gguf iq4_nl",
            "gguf iq4_xs",
        ]
    );
}
