//! A marker of any bytes beside matrices of every element type, with side tensors of sizes that the input chooses: no panic,
//! and whatever is accepted can be decoded.
#![no_main]

use std::sync::Arc;

use candle_core::{DType, Device};
use libfuzzer_sys::fuzz_target;
use weights::{
    Safetensors, StoredDType, quant,
    write::{Metadata, TensorData, to_bytes},
};

const TYPES: [StoredDType; 5] =
    [StoredDType::I8, StoredDType::U8, StoredDType::F8E4M3, StoredDType::F8E5M2, StoredDType::BF16];
const SIDES: [&str; 6] =
    ["weight_scale", "scale_weight", "weight_scale_inv", "weight_s_rel", "weight_s_channel", "weight_codebook"];

fuzz_target!(|data: &[u8]| {
    let Some((&[dtype, rows, columns, sides, extent, place], marker)) = data.split_first_chunk::<6>() else { return };
    let dtype = TYPES[usize::from(dtype) % TYPES.len()];
    let shape = [usize::from(rows % 9), 16 * usize::from(columns % 20)];
    let bytes = dtype.byte_len(&shape).expect("a small matrix");
    let mut tensors = vec![TensorData::new("m.weight", dtype, &shape, vec![0x31; bytes])];
    for (i, side) in SIDES.iter().enumerate().filter(|(i, _)| sides >> i & 1 == 1) {
        let n = usize::from(extent % 17);
        let shape = if i % 2 == 0 { vec![shape[0], n] } else { vec![n] };
        let values = vec![0.5; shape.iter().product()];
        tensors.push(TensorData::f32(format!("m.{side}"), &shape, &values));
    }
    let mut metadata = Metadata::new();
    match (place % 2, std::str::from_utf8(marker)) {
        (0, Ok(text)) => drop(metadata.insert("_quantization_metadata".to_owned(), text.to_owned())),
        _ => tensors.push(TensorData::new("m.comfy_quant", StoredDType::U8, &[marker.len()], marker.to_vec())),
    }
    let file = to_bytes(&tensors, &metadata).expect("a small file");
    let source = Arc::new(Safetensors::from_bytes(Arc::new(file), "fuzz").expect("a good file"));
    match quant::fold(source) {
        Ok(source) => {
            for info in source.tensors().iter().filter(|t| t.quantisation.is_some()) {
                match source.quant(&info.name) {
                    Ok(weight) => {
                        let wide = weight.dequantize(DType::F32, &Device::Cpu).expect("codes are decoded");
                        assert_eq!(wide.elem_count(), info.elements(), "{info:?}");
                    }
                    Err(error) => assert!(!error.to_string().chars().any(char::is_control), "{error}"),
                }
            }
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("fuzz"), "{text}");
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }
});
