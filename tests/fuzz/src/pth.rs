//! The reader of PyTorch checkpoints on any bytes: no panic, and whatever it accepts keeps its promises.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use weights::{Pth, TensorSource};

fuzz_target!(|data: &[u8]| {
    match Pth::from_bytes(Arc::new(data.to_vec()), "fuzz") {
        Ok(source) => {
            for (i, t) in source.tensors().iter().enumerate() {
                assert!(i == 0 || source.tensors()[i - 1].name < t.name, "names sorted and unique");
                assert_eq!(t.dtype.byte_len(&t.shape), Some(t.bytes.len()), "size of {t:?}");
                assert_eq!(source.bytes(&t.name).expect("listed tensors are there").len(), t.bytes.len());
                assert_eq!(source.host(&t.name).is_ok(), t.dtype.to_candle().is_some(), "{t:?}");
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
