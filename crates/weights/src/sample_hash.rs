//! A name for the weights of a model that costs next to nothing.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use crate::{
    error::Result,
    source::{TensorInfo, TensorSource},
};

/// Runs of bytes that are hashed of each tensor.
const RUNS: usize = 8;
/// Bytes of a run.
const RUN: usize = 256;
/// Bytes of the digest that are kept.
const KEPT: usize = 16;

/// A hash of samples of the weights of `parts`, each with its name: `sample-sha256:` and 32 hexadecimal digits.
///
/// Hashed are name, element type and shape of every tensor, and of its bytes as stored eight runs of 256, evenly spread
/// from its first byte to its last (all of them, if there are no more). So it costs a few reads for each tensor, whatever
/// the size of the model.
///
/// **What it is not**: a hash of all bytes. Models that were trained, merged or converted differ in nearly every value and
/// so have other hashes; a single changed or damaged byte between the samples is not seen. The same tensors have the same
/// hash in one file or in shards, whatever the files are called and whatever other metadata they hold.
///
/// ```
/// use std::sync::Arc;
/// use weights::{Safetensors, sample_hash, write::{TensorData, to_bytes}};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let source = |x: f32| -> weights::Result<Safetensors> {
///     let file = to_bytes(&[TensorData::f32("bias", &[2], &[x, 1.0])], &Default::default())?;
///     Safetensors::from_bytes(Arc::new(file), "example")
/// };
/// let hash = sample_hash(&[("vae", &source(0.5)?)])?;
/// assert_eq!(hash.len(), "sample-sha256:".len() + 32);
/// assert_eq!(hash, sample_hash(&[("vae", &source(0.5)?)])?);
/// assert_ne!(hash, sample_hash(&[("vae", &source(0.25)?)])?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Those of [`TensorSource::bytes`].
pub fn sample_hash(parts: &[(&str, &dyn TensorSource)]) -> Result<String> {
    let mut hash = Sha256::new();
    for (part, source) in parts {
        text(&mut hash, part);
        number(&mut hash, source.tensors().len());
        for tensor in source.tensors() {
            describe(&mut hash, tensor);
            let bytes = source.bytes(&tensor.name)?;
            number(&mut hash, bytes.len());
            sample(&mut hash, bytes);
        }
    }
    let mut out = "sample-sha256:".to_owned();
    for byte in hash.finalize().iter().take(KEPT) {
        // Writing to a string does not fail.
        let _ = write!(out, "{byte:02x}");
    }
    Ok(out)
}

fn describe(hash: &mut Sha256, tensor: &TensorInfo) {
    text(hash, &tensor.name);
    text(hash, tensor.dtype.name());
    number(hash, tensor.shape.len());
    tensor.shape.iter().for_each(|&extent| number(hash, extent));
}

fn sample(hash: &mut Sha256, bytes: &[u8]) {
    if bytes.len() <= RUNS * RUN {
        return hash.update(bytes);
    }
    let last = bytes.len() - RUN;
    for run in 0..RUNS {
        // Rounded without a product that could overflow.
        let start = last / (RUNS - 1) * run + last % (RUNS - 1) * run / (RUNS - 1);
        hash.update(&bytes[start..][..RUN]);
    }
}

/// With its length before it, so that neighbours cannot be taken for one another.
fn text(hash: &mut Sha256, text: &str) {
    number(hash, text.len());
    hash.update(text);
}

fn number(hash: &mut Sha256, number: usize) {
    hash.update((number as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        dtype::StoredDType,
        safetensors::Safetensors,
        write::{TensorData, to_bytes},
    };

    fn source(tensors: &[TensorData<'_>]) -> Safetensors {
        let file = to_bytes(tensors, &Default::default()).unwrap();
        Safetensors::from_bytes(Arc::new(file), "test").unwrap()
    }

    fn hash(tensors: &[TensorData<'_>]) -> String {
        sample_hash(&[("part", &source(tensors))]).unwrap()
    }

    fn tensor(name: &str, shape: &[usize], bytes: &[u8]) -> TensorData<'static> {
        TensorData::new(name, StoredDType::U8, shape, bytes.to_vec())
    }

    #[test]
    fn every_byte_of_a_small_tensor_counts_and_the_samples_of_a_large_one() {
        for len in [1, RUNS * RUN, RUNS * RUN + 1, 5003] {
            let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let base = hash(&[tensor("a", &[len], &bytes)]);
            let changes = |at: usize| {
                let mut other = bytes.clone();
                other[at] ^= 1;
                hash(&[tensor("a", &[len], &other)]) != base
            };
            assert!(changes(0) && changes(len - 1), "{len}");
            assert_eq!((0..len).filter(|&at| changes(at)).count(), len.min(RUNS * RUN), "{len}");
        }
    }

    #[test]
    fn names_types_shapes_and_parts_count() {
        let base = hash(&[tensor("a", &[2, 3], &[0; 6]), tensor("b", &[1], &[0])]);
        let others = [
            hash(&[tensor("c", &[2, 3], &[0; 6]), tensor("b", &[1], &[0])]),
            hash(&[tensor("a", &[3, 2], &[0; 6]), tensor("b", &[1], &[0])]),
            hash(&[tensor("a", &[6], &[0; 6]), tensor("b", &[1], &[0])]),
            hash(&[TensorData::new("a", StoredDType::I8, &[2, 3], vec![0; 6]), tensor("b", &[1], &[0])]),
            hash(&[tensor("a", &[2, 3], &[0; 6])]),
            sample_hash(&[("other", &source(&[tensor("a", &[2, 3], &[0; 6]), tensor("b", &[1], &[0])]))]).unwrap(),
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(*other, base, "{i}");
            assert!(!others[..i].contains(other), "{i}");
        }
    }

    #[test]
    fn the_hash_of_a_known_file_stays_what_it_is() {
        // Computed by another program: sha256 of the fields, 64-bit little-endian lengths before each.
        assert_eq!(hash(&[tensor("a", &[2], &[7, 9])]), "sample-sha256:85f4c84d775587412dbc553cb8923416");
    }
}
