//! Quantised weights on the GPU: ConvRot and products of integers have the bits of the CPU, other formats its values.
//! Prints as it goes; run with `--nocapture`.

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{
    DType, Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use candle_fork::{
    LinearWeight, QuantMode, QuantWeight,
    convrot::{W8a8Counters, take_counters},
    dequantize_int8_convrot, linear,
    quant::{Fp8Format, Fp8Scales, Iq4Format},
    quantize_int8_convrot,
};
use flux2::{Components, Flux2Pipeline, LoadOptions, QuantPolicy};
use policy::Silent;
use tests::{
    Container, Golden,
    convrot::{bits, check, host},
    data, demo, gguf,
    gpu::{Choices, DTYPES, Failures, cuda, noise, poison, relative_error, seed, values},
    psnr, relayout, request,
};
use weights::{
    Safetensors,
    quantize::{Format, quantize},
};

const GROUPS: [Option<usize>; 6] = [Some(256), Some(4), Some(16), Some(64), Some(1024), None];

/// The device, or why there is none.
macro_rules! device {
    ($suite:expr) => {
        match cuda($suite)? {
            Some(device) => device,
            None => return Ok(()),
        }
    };
}

/// Where two results differ in their bits; any NaN equals any other.
fn difference(got: &Tensor, want: &Tensor) -> Result<Option<String>> {
    ensure!(got.dims() == want.dims() && got.dtype() == want.dtype(), "{got:?} {want:?}");
    let nan = |bits: u32| match got.dtype() {
        DType::F32 => f32::from_bits(bits).is_nan(),
        DType::F16 => half::f16::from_bits(bits as u16).is_nan(),
        DType::BF16 => half::bf16::from_bits(bits as u16).is_nan(),
        _ => false,
    };
    let (got, want) = (bits(got)?, bits(want)?);
    let differ = |(g, w): (&u32, &u32)| g != w && !(nan(*g) && nan(*w));
    let count = got.iter().zip(&want).filter(|&pair| differ(pair)).count();
    Ok(got
        .iter()
        .zip(&want)
        .position(differ)
        .map(|i| format!("{count} of {} differ, first {i}: {:#x} instead of {:#x}", got.len(), got[i], want[i])))
}

fn same(failures: &mut Failures, what: &str, got: Result<Tensor>, want: &Tensor) -> Result<()> {
    match got {
        Ok(got) => {
            let difference = difference(&got, want)?;
            failures.check(difference.is_none(), || format!("{what}: {}", difference.unwrap_or_default()));
        }
        Err(error) => failures.check(false, || format!("{what}: {error:#}")),
    }
    Ok(())
}

fn random_codes(choices: &mut Choices, len: usize) -> Vec<u8> {
    (0..len.div_ceil(8)).flat_map(|_| choices.bits().to_le_bytes()).take(len).collect()
}

/// Scales of every size, zero and subnormal results among them.
fn random_scales(choices: &mut Choices, len: usize) -> Vec<f32> {
    let special = [1e-30, 0.0, 2f32.powi(-130), 1e30, 2f32.powi(-8)];
    let mut one = || {
        let uniform = (choices.below(1 << 20) + 1) as f32 * 1e-7;
        if choices.below(8) == 0 { choices.of(&special) } else { uniform }
    };
    (0..len).map(|_| one()).collect()
}

fn decode(
    device: &Device,
    (codes, rows, columns): (&[u8], usize, usize),
    scales: &[f32],
    group: Option<usize>,
    dtype: DType,
) -> Result<Tensor> {
    let codes = Tensor::from_slice(codes, (rows, columns), device)?;
    Ok(dequantize_int8_convrot(&codes, &Tensor::new(scales, device)?, group, dtype)?)
}

#[test]
fn vectors() -> Result<()> {
    let device = device!("convrot vectors");
    let mut failures = Failures::default();
    check(&device, &mut failures)?;
    failures.finish("convrot vectors")
}

#[test]
fn decoding() -> Result<()> {
    let device = device!("convrot decoding");
    let mut choices = Choices::new(seed("convrot decoding"));
    let mut failures = Failures::default();
    for (rows, columns) in
        [(1, 256), (1, 1024), (3, 512), (17, 4096), (2, 16640), (129, 1280), (70_000, 256), (2048, 4096)]
    {
        let mut codes = random_codes(&mut choices, rows * columns);
        // A row of zeros, one of the lowest code, one of the highest.
        for (row, code) in [(0, 0), (1, 0x80), (2, 0x7f)] {
            if row + 1 < rows {
                codes[row * columns..][..columns].fill(code);
            }
        }
        for group in GROUPS.into_iter().filter(|group| group.is_none_or(|size| columns % size == 0)) {
            for count in [rows, 1] {
                let scales = random_scales(&mut choices, count);
                for dtype in DTYPES {
                    let what = format!("{rows} x {columns} {group:?} {count} scales {dtype:?}");
                    let want = decode(&Device::Cpu, (&codes, rows, columns), &scales, group, dtype)?;
                    poison(&device, 4 * codes.len())?;
                    let got = decode(&device, (&codes, rows, columns), &scales, group, dtype);
                    same(&mut failures, &what, got, &want)?;
                }
            }
        }
    }
    // Views: rows behind an offset, columns with a stride.
    let codes = random_codes(&mut choices, 40 * 1024);
    let (here, there) =
        (Tensor::from_slice(&codes, (40, 1024), &Device::Cpu)?, Tensor::from_slice(&codes, (40, 1024), &device)?);
    let scale = |device: &Device| Tensor::new(&[0.01f32], device);
    for (axis, start, len) in [(0, 3, 20), (1, 256, 512)] {
        let cut = |t: &Tensor, device| -> Result<Tensor> {
            Ok(dequantize_int8_convrot(&t.narrow(axis, start, len)?, &scale(device)?, Some(256), DType::BF16)?)
        };
        same(&mut failures, &format!("view along {axis}"), cut(&there, &device), &cut(&here, &Device::Cpu)?)?;
    }
    failures.finish("convrot decoding")
}

#[test]
fn ten_thousand_small_matrices() -> Result<()> {
    let device = device!("convrot small matrices");
    let mut choices = Choices::new(seed("convrot small matrices"));
    let mut failures = Failures::default();
    let start = Instant::now();
    for i in 0..10_000 {
        let group = choices.of(&GROUPS);
        let (rows, columns) = (1 + choices.below(5), group.unwrap_or(7) * (1 + choices.below(3)));
        let codes = random_codes(&mut choices, rows * columns);
        let count = choices.of(&[1, rows]);
        let scales = random_scales(&mut choices, count);
        let dtype = choices.of(&DTYPES);
        let what = format!("{i}: {rows} x {columns} {group:?} {count} scales {dtype:?}");
        let want = decode(&Device::Cpu, (&codes, rows, columns), &scales, group, dtype)?;
        same(&mut failures, &what, decode(&device, (&codes, rows, columns), &scales, group, dtype), &want)?;
    }
    println!("10,000 matrices in {:.1} s", start.elapsed().as_secs_f64());
    failures.finish("convrot small matrices")
}

/// More than 2^31 elements, where 32-bit offsets wrap.
#[test]
fn huge_matrices() -> Result<()> {
    let device = device!("convrot huge matrices");
    let mut failures = Failures::default();
    let (rows, columns) = (262_144, 8_448);
    // candle makes no random bytes; a pattern that differs from row to row does.
    let row: Vec<u8> = (0..columns).map(|i| (i * 37 + i / 251) as u8).collect();
    let row = Tensor::from_slice(&row, (1, columns), &device)?;
    let codes = Tensor::zeros((rows, columns), DType::U8, &device)?;
    for at in [0, rows / 2, rows - 1] {
        codes.slice_set(&row, 0, at)?;
    }
    for group in [Some(256), Some(64)] {
        let scale = Tensor::new(&[0.01f32], &device)?;
        let want = dequantize_int8_convrot(
            &row.to_device(&Device::Cpu)?,
            &scale.to_device(&Device::Cpu)?,
            group,
            DType::BF16,
        )?;
        let got = dequantize_int8_convrot(&codes, &scale, group, DType::BF16)?;
        for at in [0, rows / 2, rows - 1] {
            same(&mut failures, &format!("row {at} {group:?}"), Ok(got.narrow(0, at, 1)?), &want)?;
        }
        let before = got.narrow(0, rows - 2, 1)?;
        same(&mut failures, &format!("row {} {group:?}", rows - 2), Ok(before), &want.zeros_like()?)?;
    }
    failures.finish("convrot huge matrices")
}

/// Rows of every kind that quantisation meets.
fn arguments(seed: u64, rows: usize, columns: usize, dtype: DType) -> Result<Tensor> {
    let mut x: Vec<f32> = noise(seed, 1.0, &[rows * columns], DType::F32)?.to_vec1()?;
    let kinds: [fn(usize, &mut f32); 7] = [
        |_, v| *v = 0.0,
        |i, v| *v = if i == 3 { f32::NAN } else { *v },
        |i, v| *v = if i == 5 { f32::INFINITY } else { *v },
        |i, v| *v *= if i == 7 { 3000.0 } else { 1.0 },
        |_, v| *v = 0.75,
        |_, v| *v *= 1e-30,
        // Two elements of each 256, whose rotated sums and differences are 127 and (in f32) k + 1/2 scales: ties, which a
        // product with the scale's inverse, 8 / 7, misses.
        |i, v| {
            let k = (i / 256 * 7 % 120) as f32;
            *v = match i % 256 {
                0 => 7.0 * (127.5 + k),
                1 => 7.0 * (126.5 - k),
                _ => 0.0,
            };
        },
    ];
    for (row, kind) in x.chunks_exact_mut(columns).zip(kinds) {
        row.iter_mut().enumerate().for_each(|(i, v)| kind(i, v));
    }
    Ok(Tensor::from_vec(x, (rows, columns), &Device::Cpu)?.to_dtype(dtype)?)
}

#[test]
fn quantisation() -> Result<()> {
    let device = device!("convrot quantisation");
    let seed = seed("convrot quantisation");
    let mut failures = Failures::default();
    for (rows, columns, groups) in [
        (9, 256, &GROUPS[..4]),
        (7, 1024, &GROUPS),
        (65, 3072, &GROUPS),
        (8, 4096, &GROUPS),
        (8, 4352, &GROUPS[..4]),
        (130, 9216, &GROUPS),
        (8, 12288, &GROUPS),
        (8, 16384, &GROUPS),
        (8, 16640, &GROUPS[..4]),
        (70_000, 64, &GROUPS[1..4]),
        (8, 77, &GROUPS[5..]),
    ] {
        for dtype in DTYPES {
            let x = arguments(seed, rows, columns, dtype)?;
            let there = x.to_device(&device)?;
            for &group in groups {
                let what = |part| format!("{part} {rows} x {columns} {group:?} {dtype:?}");
                let (codes, scales) = quantize_int8_convrot(&x, group)?;
                poison(&device, 2 * x.elem_count())?;
                match quantize_int8_convrot(&there, group) {
                    Ok((got_codes, got_scales)) => {
                        same(&mut failures, &what("codes"), Ok(got_codes), &codes)?;
                        same(&mut failures, &what("scales"), Ok(got_scales), &scales)?;
                    }
                    Err(error) => failures.check(false, || format!("{}: {error}", what("call"))),
                }
            }
        }
    }
    failures.finish("convrot quantisation")
}

fn quantized(
    codes: Vec<u8>,
    rows: usize,
    columns: usize,
    scales: Vec<f32>,
    group: Option<usize>,
) -> Result<QuantWeight> {
    Ok(QuantWeight::int8(host(codes, rows, columns)?, scales, group)?)
}

/// Which product a call should have taken.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Path {
    CublasLt,
    Few,
}

#[test]
fn integer_products() -> Result<()> {
    let device = device!("integer products");
    let seed = seed("integer products");
    let mut choices = Choices::new(seed);
    let mut failures = Failures::default();
    for (m, n, k, group, path) in [
        (1, 4096, 1024, Some(256), Path::Few),
        (2, 48, 256, Some(256), Path::Few),
        (3, 16, 512, Some(64), Path::Few),
        (7, 4100, 256, Some(256), Path::Few),
        (8, 33, 100, None, Path::Few),
        (16, 48, 1024, Some(256), Path::CublasLt),
        (31, 16, 256, Some(256), Path::CublasLt),
        (33, 4100, 512, Some(16), Path::CublasLt),
        (127, 4096, 256, Some(256), Path::CublasLt),
        (129, 48, 4096, Some(1024), Path::CublasLt),
        (130, 64, 4096, None, Path::CublasLt),
        // Columns that cuBLASLt does not take, and a depth that our kernel reads byte by byte.
        (33, 4098, 256, Some(256), Path::Few),
        (40, 64, 1092, Some(4), Path::Few),
        (4097, 256, 256, Some(256), Path::CublasLt),
        // Two tiles and a rest.
        (1300, 16384, 256, Some(256), Path::CublasLt),
    ] {
        let weight = quantized(random_codes(&mut choices, n * k), n, k, random_scales(&mut choices, n), group)?;
        let here = LinearWeight::from_quant(weight.clone(), QuantMode::W8A8, DType::BF16, &Device::Cpu)?;
        let there = LinearWeight::from_quant(weight, QuantMode::W8A8, DType::BF16, &device)?;
        for dtype in DTYPES {
            let x = arguments(seed + 1, m, k, dtype)?;
            let bias = noise(seed + 2, 1.0, &[n], DType::BF16)?;
            for bias in [None, Some(&bias)] {
                let what = format!("{m} x {k} by {n} {group:?} {dtype:?} bias {}", bias.is_some());
                let want = linear(&x, &here, bias)?;
                poison(&device, 4 * m * n)?;
                let on_device = bias.map(|bias| bias.to_device(&device)).transpose()?;
                take_counters();
                let got = linear(&x.to_device(&device)?, &there, on_device.as_ref()).map_err(Into::into);
                let W8a8Counters { cublas_lt, few, .. } = take_counters();
                let taken = if path == Path::Few { [0, 1] } else { [1, 0] };
                failures.check([cublas_lt, few] == taken, || format!("{what}: {cublas_lt} by cuBLASLt, {few} by ours"));
                same(&mut failures, &what, got, &want)?;
            }
        }
    }
    failures.finish("integer products")
}

/// The largest sums that there are, against 64-bit integers; tiles; repetition.
#[test]
fn integer_sums_are_exact() -> Result<()> {
    let device = device!("integer sums");
    let mut failures = Failures::default();
    let (m, n, k) = (200, 64, 16384);
    let weight = quantized(vec![0x80; n * k], n, k, vec![1.0], None)?;
    let weight = LinearWeight::from_quant(weight, QuantMode::W8A8, DType::F32, &device)?;
    // Every code of x is 127, its scale 1.
    let y = linear(&Tensor::full(127f32, (m, k), &device)?, &weight, None)?;
    let want = (-128i64 * 127 * k as i64) as f32;
    failures.check(values(&y)?.iter().all(|&v| v == f64::from(want)), || format!("sums are not {want}"));

    let seed = seed("integer sums");
    let mut choices = Choices::new(seed);
    let (n, k) = (9216, 512);
    let weight = quantized(random_codes(&mut choices, n * k), n, k, vec![0.01; n], Some(256))?;
    let weight = LinearWeight::from_quant(weight, QuantMode::W8A8, DType::BF16, &device)?;
    let x = noise(seed, 1.0, &[3000, k], DType::BF16)?.to_device(&device)?;
    let whole = linear(&x, &weight, None)?;
    same(&mut failures, "the same call again", linear(&x, &weight, None).map_err(Into::into), &whole)?;
    for (first, rows) in [(0, 5), (890, 20), (2999, 1), (17, 2000)] {
        let part = linear(&x.narrow(0, first, rows)?, &weight, None).map_err(Into::into);
        same(&mut failures, &format!("rows {first} to {first} + {rows}"), part, &whole.narrow(0, first, rows)?)?;
    }
    // Three maps of one argument are one map.
    let parts = [(0, 3072), (3072, 3072), (6144, 3072)].map(|(first, rows)| weight.rows(first, rows));
    let stack = LinearWeight::stack(parts.into_iter().collect::<candle_fork::Result<Vec<_>>>()?)?;
    same(&mut failures, "a stack of three", linear(&x, &stack, None).map_err(Into::into), &whole)?;
    failures.finish("integer sums")
}

#[test]
fn fp8_has_the_bits_of_the_cpu() -> Result<()> {
    let device = device!("fp8");
    let mut choices = Choices::new(seed("fp8"));
    let mut failures = Failures::default();
    for (rows, columns) in [(1, 256), (7, 4096), (5, 77), (130, 384), (70_000, 32)] {
        let codes = random_codes(&mut choices, rows * columns);
        let blocks = rows.div_ceil(128) * columns.div_ceil(128);
        for scales in [
            Fp8Scales::Tensor(0.013),
            Fp8Scales::Rows(random_scales(&mut choices, rows)),
            Fp8Scales::Blocks { scales: random_scales(&mut choices, blocks), rows: 128, columns: 128 },
        ] {
            for format in [Fp8Format::E4M3, Fp8Format::E5M2] {
                let weight = QuantWeight::fp8(host(codes.clone(), rows, columns)?, format, scales.clone())?;
                for (first, len) in [(0, rows), (rows / 3, rows.div_ceil(2))] {
                    let (part, there) = (weight.rows(first, len)?, weight.to_device(&device)?.rows(first, len)?);
                    for dtype in DTYPES {
                        let what = format!("{rows} x {columns} rows {first} + {len} {} {dtype:?}", weight.describe());
                        poison(&device, 4 * codes.len())?;
                        let got = there.dequantize(dtype, &device).map_err(Into::into);
                        same(&mut failures, &what, got, &part.dequantize(dtype, &Device::Cpu)?)?;
                    }
                }
            }
        }
    }
    failures.finish("fp8")
}

#[test]
fn iq4_has_the_bits_of_the_cpu() -> Result<()> {
    let device = device!("iq4");
    let mut choices = Choices::new(seed("iq4"));
    let mut failures = Failures::default();
    for (rows, columns) in [(1, 256), (7, 4096), (5, 768), (130, 2304), (70_000, 256)] {
        for format in [Iq4Format::NonLinear, Iq4Format::Super] {
            let size = format.block_bytes();
            let mut blocks = random_codes(&mut choices, rows * columns / format.block() * size);
            for block in blocks.chunks_exact_mut(size) {
                // A scale up to 2, of either sign.
                block[1] &= 0xbf;
            }
            let bytes = blocks.len();
            let weight = QuantWeight::iq4(host(blocks, 1, bytes)?, format, [rows, columns])?;
            for (first, len) in [(0, rows), (rows / 3, rows.div_ceil(2))] {
                let (part, there) = (weight.rows(first, len)?, weight.to_device(&device)?.rows(first, len)?);
                for dtype in DTYPES {
                    let what = format!("{rows} x {columns} rows {first} + {len} {} {dtype:?}", weight.describe());
                    poison(&device, 4 * rows * columns)?;
                    let got = there.dequantize(dtype, &device).map_err(Into::into);
                    same(&mut failures, &what, got, &part.dequantize(dtype, &Device::Cpu)?)?;
                }
            }
            // A product with few rows and with more, decoded for it.
            let map =
                |device| LinearWeight::from_quant(weight.clone(), QuantMode::DequantizePerLayer, DType::F32, device);
            let (here, there) = (map(&Device::Cpu)?, map(&device)?);
            for x_rows in [1, 9] {
                let x = noise(choices.bits(), 1.0, &[x_rows, columns], DType::F32)?;
                let what = || format!("{} {rows} x {columns} linear, {x_rows} rows", weight.describe());
                let Some(got) = failures.take(linear(&x.to_device(&device)?, &there, None), what) else { continue };
                let error = relative_error(&values(&got)?, &values(&linear(&x, &here, None)?)?);
                failures.check(error <= 5e-6, || format!("{}: error {error:.1e}", what()));
            }
        }
    }
    failures.finish("iq4")
}

#[test]
fn ggml_has_the_values_of_the_cpu() -> Result<()> {
    use GgmlDType::*;
    let device = device!("ggml");
    let seed = seed("ggml");
    let mut failures = Failures::default();
    let w = noise(seed, 0.1, &[96, 1024], DType::F32)?;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K] {
        let bytes = QTensor::quantize(&w, dtype)?.data()?.into_owned();
        let len = bytes.len();
        let weight = QuantWeight::ggml(host(bytes, 1, len)?, dtype, [96, 1024])?;
        let want = values(&weight.dequantize(DType::F32, &Device::Cpu)?)?;
        for out in DTYPES {
            let Some(got) = failures.take(weight.dequantize(out, &device), || format!("{dtype:?} {out:?}")) else {
                continue;
            };
            let bound = match out {
                DType::F32 => 1e-6,
                DType::F16 => 1e-3,
                _ => 5e-3,
            };
            let error = relative_error(&values(&got)?, &want);
            failures.check(error <= bound, || format!("{dtype:?} {out:?}: error {error:.1e}"));
        }
        // More than one row of an argument, and a part of the matrix.
        let kept =
            LinearWeight::from_quant(weight, QuantMode::DequantizePerLayer, DType::F32, &device)?.rows(32, 40)?;
        let wide = LinearWeight::from_tensor(Tensor::from_vec(
            want[32 * 1024..72 * 1024].iter().map(|&v| v as f32).collect::<Vec<_>>(),
            (40, 1024),
            &Device::Cpu,
        )?)?;
        for rows in [1, 9] {
            let x = noise(seed + 1, 1.0, &[2, rows, 1024], DType::F32)?;
            let want = values(&linear(&x, &wide, None)?)?;
            let what = || format!("{dtype:?} linear, {rows} rows");
            let Some(got) = failures.take(linear(&x.to_device(&device)?, &kept, None), what) else { continue };
            let error = relative_error(&values(&got)?, &want);
            failures.check(error <= 5e-6, || format!("{}: error {error:.1e}", what()));
        }
    }
    failures.finish("ggml")
}

/// Where a matrix is decoded changes nothing; a stack may mix formats.
#[test]
fn modes_and_stacks() -> Result<()> {
    let device = device!("modes of quantised weights");
    let seed = seed("modes of quantised weights");
    let mut choices = Choices::new(seed);
    let mut failures = Failures::default();
    let (n, k) = (320, 768);
    let int8 = |choices: &mut Choices, group| {
        quantized(random_codes(choices, n * k), n, k, (0..n).map(|r| 1e-3 * (r % 9) as f32).collect(), group)
    };
    let fp8_codes: Vec<u8> = random_codes(&mut choices, n * k).into_iter().map(|q| q & 0xbf).collect();
    let fp8 = QuantWeight::fp8(host(fp8_codes, n, k)?, Fp8Format::E4M3, Fp8Scales::Tensor(0.02))?;
    let formats = [int8(&mut choices, Some(256))?, int8(&mut choices, None)?, fp8];
    for dtype in DTYPES {
        let x = noise(seed, 1.0, &[50, k], dtype)?.to_device(&device)?;
        for weight in &formats {
            let run = |mode| -> Result<Tensor> {
                Ok(linear(&x, &LinearWeight::from_quant(weight.clone(), mode, dtype, &device)?, None)?)
            };
            let once = run(QuantMode::DequantizeOnce)?;
            let what = format!("{} {dtype:?} per layer", weight.describe());
            same(&mut failures, &what, run(QuantMode::DequantizePerLayer), &once)?;
        }
        for mode in [QuantMode::DequantizePerLayer, QuantMode::W8A8] {
            let mut parts = formats
                .iter()
                .map(|weight| LinearWeight::from_quant(weight.clone(), mode, dtype, &device))
                .collect::<candle_fork::Result<Vec<_>>>()?;
            parts.push(LinearWeight::from_tensor(noise(seed + 3, 0.1, &[40, k], dtype)?.to_device(&device)?)?);
            let apart = parts.iter().map(|part| linear(&x, part, None)).collect::<candle_fork::Result<Vec<_>>>()?;
            let apart = values(&Tensor::cat(&apart, 1)?)?;
            let stacked = values(&linear(&x, &LinearWeight::stack(parts)?, None)?)?;
            // cuBLAS may take another algorithm for other extents.
            let error = relative_error(&stacked, &apart);
            let bound = if dtype == DType::F32 { 1e-6 } else { 4e-3 };
            failures.check(error <= bound, || format!("stack {mode:?} {dtype:?}: error {error:.1e}"));
        }
    }
    failures.finish("modes of quantised weights")
}

/// The demonstration model with a quantised transformer makes the picture of the golden on the device, however the matrices
/// take part. The bounds are those of the CPU (tests/flux2/formats.rs).
#[test]
fn quantised_models_make_the_picture() -> Result<()> {
    const MODES: [QuantMode; 3] = [QuantMode::DequantizeOnce, QuantMode::DequantizePerLayer, QuantMode::W8A8];
    let device = device!("quantised models");
    let mut failures = Failures::default();
    let place = tempfile::tempdir()?;
    let plain = Container::read(&data("models/flux2-demo/transformer/diffusion_pytorch_model.safetensors"))?;
    let source = Safetensors::from_bytes(std::sync::Arc::new(plain.to_bytes()), "plain")?;
    quantize(&source, Format::Int8ConvRot { group_size: 16 }, place.path().join("int8"), &Silent)?;
    quantize(&source, Format::Fp8Scaled, place.path().join("fp8"), &Silent)?;
    let blocks = |name: &str, shape: &[usize]| match name {
        _ if shape.len() == 1 => GgmlDType::F32,
        _ if !name.contains("_blocks.") => GgmlDType::BF16,
        _ => GgmlDType::Q8_0,
    };
    std::fs::write(place.path().join("q8_0"), gguf(&relayout(&plain, "flux2-dev", "")?, "flux2", blocks)?)?;

    let golden = Golden::open("flux2-a")?;
    let wanted = golden.tensor("image")?.squeeze(0)?;
    let options = request(&golden)?;
    for (file, least) in [("int8", 50.0), ("fp8", 42.0), ("q8_0", 54.0)] {
        for mode in MODES {
            let load = LoadOptions::new(device.clone(), DType::F32).with_quant(QuantPolicy::Mode(mode));
            let picture = || -> Result<Tensor> {
                let components = Components::default().with_transformer(weights::open(place.path().join(file))?);
                let pipeline = Flux2Pipeline::load_with(&demo(), components, &load)?;
                Ok(pipeline.generate(&options, &Silent)?.image.to_device(&Device::Cpu)?)
            };
            take_counters();
            let Some(picture) = failures.take(picture(), || format!("{file} {mode:?}")) else { continue };
            let W8a8Counters { cublas_lt, few, .. } = take_counters();
            let of_bytes = file == "int8" && mode == QuantMode::W8A8;
            let found = psnr(&picture, &wanted, 1.0)?;
            println!("{file} {mode:?}: {found:.1} dB, {cublas_lt} products of bytes by cuBLASLt, {few} by ours");
            failures
                .check((cublas_lt + few > 0) == of_bytes, || format!("{file} {mode:?}: {cublas_lt} + {few} products"));
            failures.check(found >= least, || format!("{file} {mode:?}: {found:.1} dB, {least} are wanted"));
        }
    }
    failures.finish("quantised models")
}
