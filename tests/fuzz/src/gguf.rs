//! The GGUF reader on any bytes: no panic, and whatever it accepts keeps its promises and can be decoded.
#![no_main]

use std::sync::Arc;

use candle_core::{DType, Device};
use libfuzzer_sys::fuzz_target;
use weights::{Gguf, Quantisation, TensorSource};

fuzz_target!(|data: &[u8]| {
    match Gguf::from_bytes(Arc::new(data.to_vec()), "fuzz") {
        Ok(source) => {
            let mut ranges: Vec<_> = source.tensors().iter().map(|t| t.bytes.clone()).collect();
            for (i, t) in source.tensors().iter().enumerate() {
                assert!(i == 0 || source.tensors()[i - 1].name < t.name, "names sorted and unique");
                assert_eq!(source.bytes(&t.name).expect("listed tensors are there").len(), t.bytes.len());
                assert!(!t.bytes.is_empty() && t.elements() > 0, "{t:?}");
                match &t.quantisation {
                    Some(Quantisation::Ggml(blocks)) => {
                        assert!(source.host(&t.name).is_err(), "{t:?}");
                        // The metadata may restore a shape that blocks do not divide.
                        if let Ok(weight) = source.quant(&t.name) {
                            assert!(blocks.is_supported());
                            let wide = weight.dequantize(DType::F32, &Device::Cpu).expect("blocks are decoded");
                            assert_eq!(wide.elem_count(), t.elements());
                        }
                    }
                    _ => assert_eq!(source.host(&t.name).is_ok(), t.dtype.to_candle().is_some(), "{t:?}"),
                }
            }
            ranges.sort_by_key(|r| (r.start, r.end));
            for pair in ranges.windows(2) {
                assert!(pair[0].end <= pair[1].start, "ranges are disjoint");
            }
            assert!(ranges.last().is_none_or(|last| last.end <= data.len()), "{ranges:?}");
            let _ = weights::inspect::recognise(source.tensors());
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("fuzz"), "{text}");
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }
});
