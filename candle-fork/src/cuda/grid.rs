//! Sizes of launches: grids within the limits of every device, and what kernels divide by. No device needed.

use crate::error::{Error, Result};

/// Threads of a block where a kernel does not care.
pub const THREADS: u32 = 256;

/// Most blocks of a one-dimensional grid: many times what a device holds at once, so that a loop over the grid only
/// begins to loop where it costs nothing.
const MAX_BLOCKS: u64 = 1 << 20;

/// Blocks of a launch and their threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// For a kernel that loops over `items` in steps of the whole grid, one item per thread and step. No items give one
    /// block that finds nothing to do; callers had better not launch at all.
    pub fn over(items: u64) -> Self {
        Self::over_with(items, THREADS)
    }

    /// [`Self::over`] with blocks of `threads`.
    pub fn over_with(items: u64, threads: u32) -> Self {
        let blocks = items.div_ceil(u64::from(threads.max(1))).clamp(1, MAX_BLOCKS);
        // At most `MAX_BLOCKS`, which fits.
        Self { blocks: [blocks as u32, 1, 1], threads, shared_bytes: 0 }
    }

    /// Exactly these blocks (x, y, z).
    ///
    /// # Errors
    /// [`Error::Unsupported`] beyond the limits of every CUDA device: 2^31 - 1 blocks along x, 65535 along y and z, 1024
    /// threads a block; or without a block or thread.
    pub fn blocks(op: &'static str, blocks: [u64; 3], threads: u32) -> Result<Self> {
        const LIMITS: [u64; 3] = [i32::MAX as u64, 65535, 65535];
        if blocks.iter().zip(LIMITS).any(|(&n, limit)| n == 0 || n > limit) || threads == 0 || threads > 1024 {
            return Err(Error::Unsupported { op, what: format!("a grid of {blocks:?} blocks of {threads} threads") });
        }
        Ok(Self { blocks: blocks.map(|n| n as u32), threads, shared_bytes: 0 })
    }
}

/// Division by a number that is fixed for a launch: `Divisor` of `common.cuh`, without a division on the device.
///
/// With `s` the least shift such that `2^s >= d`, and `m = floor(2^32 (2^s - d) / d) + 1`, the quotient of any
/// `n < 2^31` is `(floor(m n / 2^32) + n) >> s` ("Division by Invariant Integers using Multiplication", Granlund and
/// Montgomery, section 4); the bound on n keeps the sum within 32 bits.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divisor {
    value: u32,
    multiplier: u32,
    shift: u32,
    unused: u32,
}

impl Divisor {
    /// Dividends stay below this.
    pub const LIMIT: u64 = 1 << 31;

    /// # Errors
    /// [`Error::Unsupported`] for 0 or a value of [`Self::LIMIT`] or more.
    pub fn new(op: &'static str, value: usize) -> Result<Self> {
        match u32::try_from(value) {
            Ok(value @ 1..=0x7fff_ffff) => {
                let shift = value.next_power_of_two().trailing_zeros();
                let multiplier = (((1u64 << shift) - u64::from(value)) << 32) / u64::from(value) + 1;
                // Below 2^32, because 2^shift < 2 value.
                Ok(Self { value, multiplier: multiplier as u32, shift, unused: 0 })
            }
            _ => Err(Error::Unsupported { op, what: format!("an extent of {value}") }),
        }
    }

    /// What the device computes.
    #[cfg(test)]
    fn divide(self, n: u32) -> u32 {
        let high = ((u64::from(n) * u64::from(self.multiplier)) >> 32) as u32;
        (high + n) >> self.shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_their_items_and_stay_within_limits() {
        for (items, grid) in [(0, 1), (1, 1), (256, 1), (257, 2), (1 << 28, 1 << 20), (u64::MAX, 1 << 20)] {
            assert_eq!(Grid::over(items).blocks, [grid, 1, 1], "{items}");
        }
        assert_eq!(Grid::over_with(65, 32).blocks, [3, 1, 1]);
        assert!(Grid::blocks("test", [1 << 20, 65535, 1], 1024).is_ok());
        for (grid, threads) in
            [([1 << 31, 1, 1], 32), ([1, 65536, 1], 32), ([1, 1, 0], 32), ([1, 1, 1], 0), ([1, 1, 1], 1025)]
        {
            assert!(
                matches!(Grid::blocks("test", grid, threads), Err(Error::Unsupported { .. })),
                "{grid:?} {threads}"
            );
        }
    }

    #[test]
    fn divisors_are_exact() {
        let last = 0x7fff_ffffu32;
        let divisors = (1..600).chain([1000, 4095, 4096, 4097, 65535, 65537, 1 << 30, (1 << 30) + 1, last - 1, last]);
        for value in divisors {
            let divisor = Divisor::new("test", value as usize).unwrap();
            let edges = (0..40).chain((1..40).flat_map(|q| {
                let multiple = u64::from(value) * q;
                (multiple - 1..=multiple + 1).filter(|&n| n < Divisor::LIMIT).map(|n| n as u32)
            }));
            let spread = (0..last).step_by(7_654_321);
            for n in edges.chain(spread).chain(last - 3..=last) {
                assert_eq!(divisor.divide(n), n / value, "{n} / {value}");
            }
        }
        assert!(Divisor::new("test", 0).is_err() && Divisor::new("test", 1 << 31).is_err());
    }
}
