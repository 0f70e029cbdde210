//! Weights of signed bytes: decoding beside a copy, products of integers beside comfy-kitchen's, the modes of a linear map
//! beside one another and beside what the chooser says.

use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    HostTensor, LinearWeight, QuantMode, QuantWeight,
    convrot::take_counters,
    dequantize_int8_convrot, linear,
    quant::{DeviceFacts, LinearShape, Memory, Preference, choose},
    quantize_int8_convrot,
};

use super::{Gpu, Options, floors::Floors, peer, relative_error};
use crate::record::{Row, Sink};

/// Bytes over which inputs rotate, so that none is found in a cache.
const ROTATED: usize = 256 << 20;

const GROUP: Option<usize> = Some(256);

/// Rows and columns of the matrix that is decoded.
const DECODED: [usize; 2] = [16384, 4096];

/// Rows, in_features, out_features of the products that are recorded, and what they are called.
const PRODUCTS: [(&str, [usize; 3]); 3] = [
    ("w8a8_4096_3072_9216", [4096, 3072, 9216]),
    ("w8a8_4096_12288_3072", [4096, 12288, 3072]),
    ("w8a8_4096_4096_16384", [4096, 4096, 16384]),
];

/// More shapes over which modes are compared: few rows, many, and those of the models.
const COMPARED: [[usize; 3]; 11] = [
    [1, 4096, 4096],
    [4, 4096, 4096],
    [8, 4096, 4096],
    [64, 4096, 4096],
    [256, 4096, 4096],
    [512, 3072, 9216],
    [1024, 4096, 4096],
    [1024, 4096, 16384],
    [4096, 4096, 4096],
    [16384, 4096, 4096],
    [16384, 4096, 16384],
];

/// How much slower than the fastest mode the chosen one may be before the line says so.
const SLACK: f64 = 1.05;

/// Random codes and scales on the device.
fn quantized(gpu: &Gpu, rows: usize, columns: usize) -> Result<(Tensor, Tensor)> {
    Ok(quantize_int8_convrot(&gpu.noise(0.02, &[rows, columns], DType::BF16)?, GROUP)?)
}

fn weight(gpu: &Gpu, out_features: usize, in_features: usize) -> Result<QuantWeight> {
    let (codes, scales) = quantized(gpu, out_features, in_features)?;
    let bytes: Vec<u8> = codes.flatten_all()?.to_vec1()?;
    let len = bytes.len();
    let codes = HostTensor::new(Arc::new(bytes), 0..len, DType::U8, (out_features, in_features))?;
    Ok(QuantWeight::int8(codes, scales.to_vec1()?, GROUP)?.to_device(&gpu.device)?)
}

fn copies(bytes: usize) -> usize {
    ROTATED.div_ceil(bytes).clamp(1, 8)
}

/// Milliseconds of a mode, and its result for the first input.
fn time(gpu: &Gpu, weight: &QuantWeight, mode: QuantMode, inputs: &[Tensor], bias: &Tensor) -> Result<(f64, Tensor)> {
    let map = LinearWeight::from_quant(weight.clone(), mode, DType::BF16, &gpu.device)?;
    let call = |x: &Tensor| linear(x, &map, Some(bias));
    take_counters();
    let first = call(&inputs[0])?;
    let counters = take_counters();
    let products = counters.cublas_lt + counters.few;
    ensure!(products == u64::from(mode == QuantMode::W8A8), "{mode:?} took {counters:?}");
    let ms = gpu.time(5, 21, |i| Ok(call(&inputs[i % inputs.len()]).map(drop)?))?;
    Ok((ms, first))
}

/// What the modes came to for one shape.
struct Compared {
    /// Milliseconds of [`QuantMode::W8A8`].
    bytes: f64,
    /// Its error against the decoded weight.
    error: f64,
    /// How many times as long as the fastest mode the chosen one takes, at worst.
    choice: f64,
}

/// Times all modes for one shape and prints a line.
fn modes(gpu: &Gpu, facts: DeviceFacts, [m, k, n]: [usize; 3]) -> Result<Compared> {
    let weight = weight(gpu, n, k)?;
    let inputs = (0..copies(2 * m * k)).map(|_| gpu.noise(1.0, &[m, k], DType::BF16)).collect::<Result<Vec<_>>>()?;
    let bias = gpu.noise(0.1, &[n], DType::BF16)?;
    let all = [QuantMode::DequantizeOnce, QuantMode::DequantizePerLayer, QuantMode::W8A8];
    let [once, layer, bytes] = all.map(|mode| time(gpu, &weight, mode, &inputs, &bias));
    let ((once, want), (layer, _), (bytes, got)) = (once?, layer?, bytes?);
    let times = [once, layer, bytes];
    let error = relative_error(&got, &want)?;
    let quantise = gpu.time(5, 21, |i| Ok(quantize_int8_convrot(&inputs[i % inputs.len()], GROUP).map(drop)?))?;
    let rate = |ms: f64| 2.0 * (m * k * n) as f64 / ms / 1e9;
    let shape = LinearShape { rows: m, in_features: k, out_features: n };
    let mut choice = 1f64;
    let mut chosen = Vec::new();
    for (memory, possible) in
        [(Memory { available: 2, widened: 1 }, &all[..]), (Memory { available: 1, widened: 2 }, &all[1..])]
    {
        let of = |mode: &QuantMode| all.iter().position(|m| m == mode).map_or(f64::NAN, |i| times[i]);
        let mode = choose(shape, facts, memory, Preference::Speed);
        let fastest = possible.iter().map(of).fold(f64::INFINITY, f64::min);
        choice = choice.max(of(&mode) / fastest);
        chosen.push(format!("{mode:?}"));
    }
    println!(
        "{:<18} once {once:>8.4} ms {:>5.0} TOP/s   per layer {layer:>8.4} ms {:>5.0}   w8a8 {bytes:>8.4} ms {:>5.0} (of it \
         {quantise:.4} quantising)   error {error:.1e}   chosen {}{}",
        format!("{m}x{k}x{n}"),
        rate(once),
        rate(layer),
        rate(bytes),
        chosen.join("; "),
        if choice <= SLACK { "" } else { "   NOT THE FASTEST" }
    );
    Ok(Compared { bytes, error, choice })
}

/// Decoding of a matrix: ms and error.
fn decoding(gpu: &Gpu, floors: &Floors) -> Result<(f64, f64)> {
    let [rows, columns] = DECODED;
    let matrices = (0..copies(rows * columns)).map(|_| quantized(gpu, rows, columns)).collect::<Result<Vec<_>>>()?;
    let call = |(codes, scales): &(Tensor, Tensor)| dequantize_int8_convrot(codes, scales, GROUP, DType::BF16);
    let ms = gpu.time(5, 31, |i| Ok(call(&matrices[i % matrices.len()]).map(drop)?))?;
    let rate = floor_bytes() / ms / 1e6;
    println!("decoding {rows} x {columns}: {ms:.4} ms, {rate:.0} GB/s, {:.0} % of a copy", 100.0 * rate / floors.copy);
    // A part of it on the CPU.
    let part = |t: &Tensor| -> Result<Tensor> { Ok(t.narrow(0, rows - 64, 64)?.to_device(&Device::Cpu)?) };
    let (codes, scales) = &matrices[0];
    let want = dequantize_int8_convrot(&part(codes)?, &part(scales)?, GROUP, DType::BF16)?;
    Ok((ms, relative_error(&part(&call(&matrices[0])?)?, &want)?))
}

/// Bytes that decoding reads and writes.
fn floor_bytes() -> f64 {
    3.0 * (DECODED[0] * DECODED[1]) as f64
}

/// Decoding, three products, and the comparison of modes.
///
/// # Errors
/// If an op or the peer fails.
pub fn rows(gpu: &Gpu, options: &Options, sink: &mut Sink<'_>) -> Result<()> {
    let facts = DeviceFacts::of(&gpu.device)?;
    let floors = Floors::measure(gpu)?;
    let kitchen = peer::kitchen(options, &PRODUCTS.map(|(_, shape)| shape))?;
    // A rate is `work`, in units of a million of its unit, over milliseconds.
    let row = |name, ms: f64, work: f64, unit, figure: &str, floor, error| Row {
        name,
        value: work / ms,
        unit,
        peer: kitchen.as_ref().map(|p| p.name.clone()).unwrap_or_default(),
        peer_value: kitchen.as_ref().and_then(|p| Some(work / p.get(figure).ok()?)),
        floor: Some(floor),
        error,
        versions: gpu.versions.clone(),
    };
    let (ms, error) = decoding(gpu, &floors)?;
    let work = floor_bytes() / 1e6;
    let error = format!("rel_l2 {error:.1e} against the cpu");
    sink(row("convrot_dequant_16384x4096", ms, work, "GB/s", "decode", floors.copy, error))?;
    let mut worst = 1f64;
    for (name, shape) in PRODUCTS {
        let compared = modes(gpu, facts, shape)?;
        worst = worst.max(compared.choice);
        let figure = shape.map(|extent| extent.to_string()).join("x");
        let work = 2.0 * shape.iter().map(|&extent| extent as f64).product::<f64>() / 1e9;
        let error = format!("rel_l2 {:.1e} against the decoded weight", compared.error);
        // Twice the rate of half precision, as the card's units have it.
        sink(row(name, compared.bytes, work, "TOP/s", &figure, 2.0 * floors.bf16, error))?;
    }
    for shape in COMPARED {
        worst = worst.max(modes(gpu, facts, shape)?.choice);
    }
    let what = format!("chosen over fastest mode, the worst of {} shapes", PRODUCTS.len() + COMPARED.len());
    sink(Row {
        name: "int8_linear_choice",
        value: worst,
        unit: "-",
        error: what,
        versions: gpu.versions.clone(),
        ..Row::default()
    })
}
