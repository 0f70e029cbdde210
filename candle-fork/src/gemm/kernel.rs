//! The register tile and the loops right around it.
//!
//! ```text
//! for panel in panels of B (NR columns, KC deep: lies in the first-level cache)
//!     for tile in rows of A by MR (streams from the second level)
//!         c[MR][NR] = 0                                  in registers
//!         for k in 0..kc: c[i][j] += a[i][k] * b[k][j]   one broadcast, NV fused multiply-adds
//!         acc += c
//! ```
//!
//! Departures from the usual GotoBLAS layout, and why:
//! - A is not interleaved by MR. Rows lie one after another, [`KC`] apart, so packing a row is a plain (widening) copy,
//!   which is what makes bf16 weights cheap; the constant pitch keeps all MR row addresses at fixed displacements from
//!   one pointer, so the layout costs no registers and does not depend on MR.
//! - The accumulator lives in a private buffer `[panel][row][NR]`, not in C: every load and store is a whole aligned
//!   vector, edges of C are the business of the final copy alone, and C is touched once whatever K is.
//! - Each k-block is summed from zero and then added, which splits the sum of K products into K / KC partial sums:
//!   rounding grows with KC + K / KC instead of K.

use pulp::{Arch, Simd, WithSimd};

/// Depth of a k-block, the pitch of packed rows. Fixed: it decides the order of summation, hence the result's bits.
///
/// 192 keeps a panel of B (24 KiB at 32 columns) and the rows of a tile (9 KiB) in 48 KiB of first-level cache, and
/// divides the depths of common models. Measured at 768 tokens x 3072 on a Sapphire Rapids core of 178 GFLOP/s:
/// 143 at 128, 145 at 192, 141 at 256.
pub(crate) const KC: usize = 192;

/// Columns of a panel of B on this machine: `vectors` (1 or 2) registers wide.
pub(crate) fn panel_width(vectors: usize) -> usize {
    struct Lanes;
    impl WithSimd for Lanes {
        type Output = usize;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }
    vectors * Arch::new().dispatch(Lanes)
}

/// One k-block of a product: all operands packed, see the module's documentation.
pub(crate) struct Block<'a> {
    /// Packed rows of A, pitch [`KC`].
    pub(crate) a: &'a [f32],
    /// Packed panels of B, `[panel][kc][NR]`.
    pub(crate) b: &'a [f32],
    /// Accumulator `[panel][row][NR]`.
    pub(crate) acc: &'a mut [f32],
    /// Depth of this block, at most [`KC`].
    pub(crate) kc: usize,
    /// Registers per panel row, 1 or 2.
    pub(crate) vectors: usize,
    /// Whether this is the first k-block: the accumulator is overwritten.
    pub(crate) first: bool,
}

impl Block<'_> {
    /// Adds the block's product to the accumulator.
    pub(crate) fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl WithSimd for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // 24 accumulators + 2 of B + 1 broadcast of 32 registers, or 12 + 2 + 1 of 16.
        match (S::REGISTER_COUNT >= 32, self.vectors) {
            (true, 1) => panels::<S, 12, 1>(simd, self),
            (true, _) => panels::<S, 12, 2>(simd, self),
            (false, 1) => panels::<S, 6, 1>(simd, self),
            (false, _) => panels::<S, 6, 2>(simd, self),
        }
    }
}

#[inline(always)]
fn panels<S: Simd, const MR: usize, const NV: usize>(simd: S, block: Block<'_>) {
    let nr = NV * S::F32_LANES;
    let (a, _) = block.a.as_chunks::<KC>();
    let (a_tiles, a_rest) = a.as_chunks::<MR>();
    if a.is_empty() || block.kc == 0 {
        return;
    }
    for (b, acc) in block.b.chunks_exact(block.kc * nr).zip(block.acc.chunks_exact_mut(a.len() * nr)) {
        let (b, _) = S::as_simd_f32s(b).0.as_chunks::<NV>();
        let (acc, _) = S::as_mut_simd_f32s(acc).0.as_chunks_mut::<NV>();
        let (c_tiles, c_rest) = acc.as_chunks_mut::<MR>();
        for (a, c) in a_tiles.iter().zip(c_tiles) {
            tile(simd, a, b, c, block.first);
        }
        macro_rules! rest {
            ($($n:literal)*) => {
                match a_rest.len() {
                    $($n if $n < MR => {
                        if let (Some(a), Some(c)) = (a_rest.first_chunk::<$n>(), c_rest.first_chunk_mut::<$n>()) {
                            tile(simd, a, b, c, block.first);
                        }
                    })*
                    _ => {}
                }
            };
        }
        rest!(1 2 3 4 5 6 7 8 9 10 11);
    }
}

#[inline(always)]
fn tile<S: Simd, const MR: usize, const NV: usize>(
    simd: S,
    a: &[[f32; KC]; MR],
    b: &[[S::f32s; NV]],
    acc: &mut [[S::f32s; NV]; MR],
    first: bool,
) {
    let mut c = [[simd.splat_f32s(0.0); NV]; MR];
    let kc = b.len().min(KC);
    for k in 0..kc {
        let bk = b[k];
        for i in 0..MR {
            let x = simd.splat_f32s(a[i][k]);
            for j in 0..NV {
                c[i][j] = simd.mul_add_e_f32s(x, bk[j], c[i][j]);
            }
        }
    }
    if first {
        *acc = c;
    } else {
        for i in 0..MR {
            for j in 0..NV {
                acc[i][j] = simd.add_f32s(acc[i][j], c[i][j]);
            }
        }
    }
}
