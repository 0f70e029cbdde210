//! The weights and arguments of `reference/golden_klein_blocks.py`, which no file holds: each value follows from its
//! tensor's name and its index, and is exact in bf16.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;
use weights::{
    Expected, Safetensors, StoredDType, TensorSource,
    write::{TensorData, to_bytes},
};

/// Elements that a thread makes in one go.
const PIECE: usize = 1 << 16;

/// `base + scale u` rounded to bf16, where u are odd multiples of 1/256 between -1 and 1: the top 8 bits of splitmix64
/// over the FNV-1a hash of `name`.
fn values(name: &str, len: usize, scale: f32, base: f32) -> Vec<bf16> {
    let hash = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let stream = name.bytes().fold(0xcbf2_9ce4_8422_2325, hash);
    let mut values = vec![bf16::ZERO; len];
    values.par_chunks_mut(PIECE).enumerate().for_each(|(piece, values)| {
        for (i, value) in values.iter_mut().enumerate() {
            let index = (piece * PIECE + i) as u64;
            let z = index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(stream);
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let top = ((z ^ (z >> 31)) >> 56) as f32;
            *value = bf16::from_f32(base + scale * (2.0 * top - 255.0) / 256.0);
        }
    });
    values
}

/// An argument of a block, bf16 on the CPU.
///
/// # Errors
/// If candle fails.
pub fn argument(name: &str, dims: &[usize], scale: f32) -> Result<Tensor> {
    Ok(Tensor::from_vec(values(name, dims.iter().product(), scale, 0.0), dims, &Device::Cpu)?)
}

/// The tensors of a block: matrices and kernels of about unit gain, vectors about one.
///
/// # Errors
/// If the crate `weights` refuses them.
pub fn block_weights(expected: &[Expected]) -> Result<Arc<dyn TensorSource>> {
    let tensor = |e: &Expected| {
        let (scale, base) = if e.shape.len() == 1 { (0.25, 1.0) } else { (1.0 / 32.0, 0.0) };
        let values = values(&e.name, e.shape.iter().product(), scale, base);
        let bytes: Vec<u8> = values.into_iter().flat_map(bf16::to_le_bytes).collect();
        TensorData::new(e.name.clone(), StoredDType::BF16, &e.shape, bytes)
    };
    let tensors: Vec<TensorData<'_>> = expected.iter().map(tensor).collect();
    Ok(Arc::new(Safetensors::from_bytes(Arc::new(to_bytes(&tensors, &Default::default())?), "klein blocks")?))
}

/// Every `stride`-th token of `[B, S, ..]`, in f32 on the CPU.
///
/// # Errors
/// If candle fails.
pub fn every(x: &Tensor, stride: usize) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
    let rows = (0..x.dim(1)? as u32).step_by(stride).collect::<Vec<_>>();
    Ok(x.contiguous()?.index_select(&Tensor::new(rows, &Device::Cpu)?, 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the script prints them.
    #[test]
    fn values_are_those_of_the_script() {
        let first: Vec<f32> = values("in.image", 6, 1.0, 0.0).iter().map(|v| v.to_f32()).collect();
        assert_eq!(first, [0.660_156_25, 0.769_531_25, -0.371_093_75, 0.136_718_75, -0.824_218_75, -0.496_093_75]);
        assert_eq!(values("a", PIECE + 3, 1.0, 0.0)[..PIECE], values("a", PIECE, 1.0, 0.0)[..]);
    }
}
