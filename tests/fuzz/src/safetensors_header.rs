//! The header parser on any bytes: no panic, and whatever it accepts keeps its promises.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use weights::{Safetensors, TensorSource};

fuzz_target!(|data: &[u8]| {
    match Safetensors::from_bytes(Arc::new(data.to_vec()), "fuzz") {
        Ok(source) => {
            let mut ranges: Vec<_> = source.tensors().iter().map(|t| t.bytes.clone()).collect();
            for (i, t) in source.tensors().iter().enumerate() {
                assert!(i == 0 || source.tensors()[i - 1].name < t.name, "names sorted and unique");
                assert_eq!(t.dtype.byte_len(&t.shape), Some(t.bytes.len()), "size of {t:?}");
                assert_eq!(source.bytes(&t.name).expect("listed tensors are there").len(), t.bytes.len());
                assert_eq!(source.host(&t.name).is_ok(), t.dtype.to_candle().is_some(), "{t:?}");
            }
            // Inside the file, disjoint, and without holes up to its end.
            ranges.sort_by_key(|r| (r.start, r.end));
            for pair in ranges.windows(2) {
                assert_eq!(pair[0].end, pair[1].start, "ranges follow each other");
            }
            if let (Some(first), Some(last)) = (ranges.first(), ranges.last()) {
                assert!(first.start >= 8 && last.end == data.len(), "{ranges:?}");
            }
            let _ = weights::inspect::recognise(source.tensors());
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("fuzz"), "{text}");
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }
});
