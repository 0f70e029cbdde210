//! Packed single-precision matrix product with operands from any source.
//!
//! | file | what |
//! |---|---|
//! | `kernel.rs` | the register tile and the loops right around it |
//! | `parallel.rs` | the two parallel products: few columns and many rows, few rows and many columns |
//! | `rows.rs` | up to four vectors times a matrix, at memory speed |
//! | `serial.rs` | one thread, right operand packed ahead: for ops that tile themselves |
//! | `source.rs`, `matrix.rs` | operands: matrices of f32, f16, bf16 in tensors or mapped bytes; other sources elsewhere |
//! | `buffer.rs` | aligned scratch memory |
//!
//! Products are f32 fused multiply-adds where the machine has them, in blocks of `KC` along the depth, the blocks'
//! sums added in order. Neither the number of threads nor the tiling changes the order, so results are reproducible on
//! a machine type; machines without fused multiply-add round differently.

mod buffer;
mod kernel;
mod matrix;
mod parallel;
mod rows;
mod serial;
mod source;

pub(crate) use buffer::AlignedBuffer;
pub(crate) use kernel::{Block, KC, panel_width};
pub(crate) use matrix::{Matrix, Stack, WideRows, gather, unsupported, zeros};
pub(crate) use parallel::{direct, for_each, transposed, work};
pub(crate) use rows::{FEW, few};
pub(crate) use serial::{Output, PackedCols, Scratch, Strided, serial};
pub(crate) use source::{ColSource, RowSource};

#[cfg(test)]
pub(crate) mod test_data {
    /// Reproducible values in -1..1.
    pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }
}
