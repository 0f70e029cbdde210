//! The noise of torch's CPU generator; what it computes is told at
//! [`NoiseGenerator::TorchCpu`](super::NoiseGenerator::TorchCpu).
//!
//! The two rules follow `pytorch/pytorch`: `aten/src/ATen/native/cpu/DistributionTemplates.h` (16 values or more) and
//! `aten/src/ATen/core/DistributionsHelper.h` (fewer).

use std::f64::consts::TAU;

use rayon::prelude::*;

use super::mt19937::Mt19937;

/// Values of one block of the rule for long streams; the first half holds cosines, the second sines.
const BLOCK: usize = 16;

/// Fewest blocks of a task.
const TASK: usize = 256;

/// Overwrites `values` with the stream of `seed` of that length.
pub(super) fn normal_into(seed: u64, values: &mut [f32]) {
    // torch drops the upper half of the seed.
    let mut words = Mt19937::new(seed as u32);
    if values.len() < BLOCK { short(&mut words, values) } else { long(&mut words, values) }
}

/// Fewer than 16 values: a pair for every two uniforms, in `f64`. Of an odd number the last sine is not used.
fn short(words: &mut Mt19937, values: &mut [f32]) {
    for pair in values.chunks_mut(2) {
        let turn = uniform53(words);
        let radius = libm::sqrt(-2.0 * libm::log1p(-uniform53(words)));
        let values = [radius * libm::cos(TAU * turn), radius * libm::sin(TAU * turn)];
        for (slot, value) in pair.iter_mut().zip(values) {
            *slot = value as f32;
        }
    }
}

/// 16 values or more: all uniforms first, then block by block in place; of a length that is not a multiple of 16 the
/// last 16 places are drawn and transformed again.
fn long(words: &mut Mt19937, values: &mut [f32]) {
    values.fill_with(|| uniform24(words));
    let (blocks, rest) = values.as_chunks_mut::<BLOCK>();
    blocks.par_iter_mut().with_min_len(TASK).for_each(transform);
    if !rest.is_empty()
        && let Some(last) = values.last_chunk_mut::<BLOCK>()
    {
        last.fill_with(|| uniform24(words));
        transform(last);
    }
}

/// Uniforms to normals, each result rounded to `f32` as torch's vector instructions round it.
fn transform(block: &mut [f32; BLOCK]) {
    const HALF: usize = BLOCK / 2;
    for j in 0..HALF {
        // Exact: a multiple of 2^-24 in (0, 1].
        let u = 1.0 - block[j];
        let log = libm::log(f64::from(u)) as f32;
        let radius = libm::sqrtf(-2.0 * log);
        // The rounding of this product moves a value by up to 1.4e-6, so it is part of the rule.
        let angle = f64::from(std::f32::consts::TAU * block[j + HALF]);
        block[j] = radius * libm::cos(angle) as f32;
        block[j + HALF] = radius * libm::sin(angle) as f32;
    }
}

/// 24 bits of one word, in [0, 1).
fn uniform24(words: &mut Mt19937) -> f32 {
    const UNIT: f32 = 1.0 / (1 << 24) as f32;
    (words.next_u32() & 0x00ff_ffff) as f32 * UNIT
}

/// 53 bits of two words, the first one on top, in [0, 1).
fn uniform53(words: &mut Mt19937) -> f64 {
    const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
    let (high, low) = (words.next_u32(), words.next_u32());
    let bits = (u64::from(high) << 32 | u64::from(low)) & ((1 << 53) - 1);
    bits as f64 * UNIT
}
