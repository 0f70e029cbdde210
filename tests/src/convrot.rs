//! The vectors of ConvRot, `goldens/convrot_vectors.json`: computed by numpy from the published formulas and checked with
//! exact fractions. Every one of them, bit by bit, on any device.

use std::{fs, sync::Arc};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_fork::{
    HostTensor, LinearWeight, QuantMode, QuantWeight, dequantize_int8_convrot, linear, quant, quantize_int8_convrot,
};
use half::{bf16, f16};
use serde_json::Value;

use crate::{data, gpu::Failures};

/// The file.
#[derive(Debug)]
pub struct Vectors(Value);

impl Vectors {
    /// Opens it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn open() -> Result<Self> {
        Ok(Self(serde_json::from_slice(&fs::read(data("goldens/convrot_vectors.json"))?)?))
    }

    fn entry(&self, name: &str) -> Result<Entry<'_>> {
        self.0.get(name).map(Entry).with_context(|| format!("no vectors {name}"))
    }

    fn entries(&self, name: &str) -> Result<Vec<Entry<'_>>> {
        let list = self.0.get(name).and_then(Value::as_array).with_context(|| format!("no vectors {name}"))?;
        Ok(list.iter().map(Entry).collect())
    }
}

/// One object of the file.
#[derive(Debug, Clone, Copy)]
struct Entry<'a>(&'a Value);

impl Entry<'_> {
    fn text(&self, key: &str) -> Result<&str> {
        self.0.get(key).and_then(Value::as_str).with_context(|| format!("no text {key}"))
    }

    fn size(&self, key: &str) -> Result<usize> {
        let size = self.0.get(key).and_then(Value::as_u64).with_context(|| format!("no size {key}"))?;
        Ok(usize::try_from(size)?)
    }

    /// Decimals. One entry has a bar between its rows.
    fn integers(&self, key: &str) -> Result<Vec<i32>> {
        self.text(key)?.replace('/', " ").split_whitespace().map(|word| Ok(word.parse()?)).collect()
    }

    fn bytes(&self, key: &str) -> Result<Vec<u8>> {
        Ok(self.integers(key)?.into_iter().map(|q| q as u8).collect())
    }

    /// Hexadecimal bits.
    fn bits(&self, key: &str) -> Result<Vec<u32>> {
        self.text(key)?.split_whitespace().map(|word| Ok(u32::from_str_radix(word, 16)?)).collect()
    }

    fn floats(&self, key: &str) -> Result<Vec<f32>> {
        Ok(self.bits(key)?.into_iter().map(f32::from_bits).collect())
    }
}

/// The bits of a tensor's elements.
///
/// # Errors
/// For other types than f32, f16, bf16 and u8.
pub fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F32 => flat.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect(),
        DType::F16 => flat.to_vec1::<f16>()?.into_iter().map(|v| u32::from(v.to_bits())).collect(),
        DType::BF16 => flat.to_vec1::<bf16>()?.into_iter().map(|v| u32::from(v.to_bits())).collect(),
        _ => flat.to_vec1::<u8>()?.into_iter().map(u32::from).collect(),
    })
}

/// Bytes as a matrix in host memory.
///
/// # Errors
/// If there are not `rows * columns` of them.
pub fn host(bytes: Vec<u8>, rows: usize, columns: usize) -> Result<HostTensor> {
    let range = 0..bytes.len();
    Ok(HostTensor::new(Arc::new(bytes), range, DType::U8, (rows, columns))?)
}

/// Checks all vectors on `device`.
///
/// # Errors
/// If the file cannot be read or a call fails; mismatches go to `failures`.
pub fn check(device: &Device, failures: &mut Failures) -> Result<()> {
    let vectors = Vectors::open()?;
    let mut checker = Checker { device, failures };
    vectors.entries("hadamard_signs")?.iter().try_for_each(|entry| checker.signs(*entry))?;
    vectors.entries("dequant")?.iter().try_for_each(|entry| checker.dequantized(*entry))?;
    let (weight, argument) = (vectors.entry("weight_quantise_f32")?, vectors.entry("activation_quantise")?);
    checker.quantized(weight, "weight", &weight.floats("w_f32_bits")?, "q", &[DType::F32])?;
    let x: Vec<f32> = argument.integers("x")?.iter().map(|&x| x as f32).collect();
    checker.quantized(argument, "argument", &x, "q_f32", &[DType::F32, DType::F16, DType::BF16])?;
    checker.products(weight, argument, vectors.entry("w8a8_linear")?)?;
    checker.w4a4(vectors.entry("convrot_w4a4_dequant")?)?;
    checker.w4a8(vectors.entry("asym_w4a8_decode")?)
}

struct Checker<'a> {
    device: &'a Device,
    failures: &'a mut Failures,
}

impl Checker<'_> {
    fn same(&mut self, what: &str, got: &[u32], want: &[u32]) {
        let at = got.iter().zip(want).position(|(got, want)| got != want);
        let same = got.len() == want.len() && !want.is_empty() && at.is_none();
        self.failures.check(same, || match at {
            Some(i) => format!("{what}: element {i} is {:#x} instead of {:#x}", got[i], want[i]),
            None => format!("{what}: {} elements instead of {}", got.len(), want.len()),
        });
    }

    /// Codes, scales and result through the op.
    fn decode(&mut self, codes: &[u8], dims: [usize; 2], scales: &[f32], group: usize, dtype: DType) -> Result<Tensor> {
        let codes = Tensor::from_slice(codes, (dims[0], dims[1]), self.device)?;
        let scales = Tensor::new(scales, self.device)?;
        Ok(dequantize_int8_convrot(&codes, &scales, Some(group), dtype)?)
    }

    /// Unit vectors, scaled so that the matrix itself comes out.
    fn signs(&mut self, entry: Entry<'_>) -> Result<()> {
        let group = entry.size("group")?;
        let unit: Vec<u8> = (0..group * group).map(|i| u8::from(i / group == i % group)).collect();
        let matrix = self.decode(&unit, [group, group], &[(group as f32).sqrt()], group, DType::F32)?;
        let matrix = matrix.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
        let rows: Vec<(usize, String)> = match (entry.0.get("rows"), entry.0.get("selected")) {
            (Some(rows), _) => serde_json::from_value::<Vec<String>>(rows.clone())?.into_iter().enumerate().collect(),
            (None, Some(Value::Object(rows))) => rows
                .iter()
                .map(|(i, row)| Ok((i.parse()?, row.as_str().context("a row")?.to_owned())))
                .collect::<Result<_>>()?,
            // Of the largest only a hash is given; its closed form is checked beside the code.
            _ => Vec::new(),
        };
        for (i, row) in rows {
            let want: Vec<u32> = row.chars().map(|sign| if sign == '+' { 1f32 } else { -1.0 }.to_bits()).collect();
            let got: Vec<u32> = matrix[i].iter().map(|v| v.to_bits()).collect();
            self.same(&format!("row {i} of the matrix of {group}"), &got, &want);
        }
        Ok(())
    }

    fn dequantized(&mut self, entry: Entry<'_>) -> Result<()> {
        let (name, group) = (entry.text("name")?, entry.size("group")?);
        let (dims, codes) = ([entry.size("rows")?, entry.size("cols")?], entry.bytes("q")?);
        let scales = entry.floats("scale_f32_bits")?;
        for (dtype, key) in [(DType::F32, "f32_bits"), (DType::BF16, "bf16_bits"), (DType::F16, "f16_bits")] {
            let got = bits(&self.decode(&codes, dims, &scales, group, dtype)?)?;
            self.same(&format!("{name} {dtype:?}"), &got, &entry.bits(key)?);
        }
        let n = self.decode(&codes, dims, &[(group as f32).sqrt()], group, DType::F32)?;
        let want: Vec<u32> = entry.integers("n")?.iter().map(|&n| (n as f32).to_bits()).collect();
        self.same(&format!("{name} before the scale"), &bits(&n)?, &want);
        // Every shape that files have.
        let codes = Tensor::from_vec(codes, (dims[0], dims[1]), self.device)?;
        let shapes: &[&[usize]] = if scales.len() == 1 { &[&[], &[1], &[1, 1]] } else { &[&[dims[0], 1]] };
        for &shape in shapes {
            let scales = Tensor::from_slice(&scales, shape, self.device)?;
            let got = dequantize_int8_convrot(&codes, &scales, Some(group), DType::BF16)?;
            self.same(&format!("{name} with scales {shape:?}"), &bits(&got)?, &entry.bits("bf16_bits")?);
        }
        Ok(())
    }

    fn quantized(&mut self, entry: Entry<'_>, name: &str, x: &[f32], key: &str, dtypes: &[DType]) -> Result<()> {
        let dims = (entry.size("rows")?, entry.size("cols")?);
        for &dtype in dtypes {
            let x = Tensor::from_slice(x, dims, self.device)?.to_dtype(dtype)?;
            let (codes, scales) = quantize_int8_convrot(&x, Some(entry.size("group")?))?;
            let want: Vec<u32> = entry.bytes(key)?.into_iter().map(u32::from).collect();
            self.same(&format!("codes of the {name} in {dtype:?}"), &bits(&codes)?, &want);
            self.same(&format!("scales of the {name} in {dtype:?}"), &bits(&scales)?, &entry.bits("scale_f32_bits")?);
        }
        Ok(())
    }

    fn products(&mut self, weight: Entry<'_>, argument: Entry<'_>, want: Entry<'_>) -> Result<()> {
        let (rows, columns, group) = (weight.size("rows")?, weight.size("cols")?, weight.size("group")?);
        let codes = host(weight.bytes("q")?, rows, columns)?;
        let quantized = QuantWeight::int8(codes, weight.floats("scale_f32_bits")?, Some(group))?;
        let matrix = LinearWeight::from_quant(quantized, QuantMode::W8A8, DType::F32, self.device)?;
        let x: Vec<f32> = argument.integers("x")?.iter().map(|&x| x as f32).collect();
        let x = Tensor::from_vec(x, (argument.size("rows")?, columns), self.device)?;
        let bias = Tensor::new(want.floats("bias_f32_bits")?, self.device)?;
        for (dtype, bias, key) in [
            (DType::F32, None, "y_scale_product_first_f32_bits"),
            (DType::F32, Some(&bias), "y_scale_product_first_plus_bias_f32_bits"),
            (DType::BF16, Some(&bias), "y_scale_product_first_plus_bias_bf16_bits"),
        ] {
            let y = linear(&x.to_dtype(dtype)?, &matrix, bias)?;
            self.same(&format!("product {key}"), &bits(&y)?, &want.bits(key)?);
        }
        Ok(())
    }

    fn w4a4(&mut self, entry: Entry<'_>) -> Result<()> {
        let dims = [entry.size("rows")?, entry.size("cols")?];
        let codes = quant::unpack_w4a4(&entry.bytes("packed_u8")?, dims[1])?;
        ensure!(codes == entry.bytes("codes")?, "codes of w4a4");
        let scales = entry.floats("scale_f32_bits")?;
        for (dtype, key) in [(DType::F32, "f32_bits"), (DType::BF16, "bf16_bits")] {
            let got = self.decode(&codes, dims, &scales, entry.size("group")?, dtype)?;
            self.same(&format!("w4a4 {dtype:?}"), &bits(&got)?, &entry.bits(key)?);
        }
        Ok(())
    }

    fn w4a8(&mut self, entry: Entry<'_>) -> Result<()> {
        let dims = [entry.size("rows")?, entry.size("cols")?];
        let relative: Vec<Vec<f32>> = serde_json::from_value(entry.0["s_rel"].clone())?;
        let relative = relative.concat();
        let codebook: Vec<f32> = entry.floats("codebook_f32_bits")?;
        let codebook = <&[f32; 16]>::try_from(codebook.as_slice())?;
        let packed = entry.bytes("packed_u8")?;
        let decode = |relative: &[f32], codebook| {
            let scales = quant::W4a8Scales { relative, group_size: 16, codebook };
            quant::decode_w4a8(&packed, dims[0], dims[1], scales)
        };
        let codes = decode(&relative, Some(codebook))?;
        self.failures.check(codes == entry.bytes("i8")?, || "codes of w4a8 with a codebook".into());
        // The same bytes without a codebook have scales that only the note names.
        let affine = decode(&[15.0, 16.0, 14.0, 18.0], None)?;
        self.failures.check(affine == entry.bytes("i8_affine")?, || "codes of w4a8 without one".into());
        let scales = entry.floats("s_channel_f32_bits")?;
        for (dtype, key) in [(DType::F32, "f32_bits"), (DType::BF16, "bf16_bits")] {
            let got = self.decode(&codes, dims, &scales, 16, dtype)?;
            self.same(&format!("w4a8 {dtype:?}"), &bits(&got)?, &entry.bits(key)?);
        }
        Ok(())
    }
}
