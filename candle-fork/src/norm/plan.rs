//! How the work of the norm kernels is dealt out. Pure; used by the launchers.

/// Threads of a warp.
const WARP: usize = 32;

/// Most vectors of a row that a thread holds in registers: the kernels `*_1_*` to `*_5_*`.
const MAX_HELD: usize = 5;

/// A row of vectors, dealt to threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    /// Threads of a row, a power of two.
    pub(super) lanes: u32,
    /// Vectors of a thread.
    pub(super) held: usize,
}

impl Share {
    /// For rows of `vectors`, at most `max_lanes` threads each (a power of two); `None` if a row does not fit.
    ///
    /// As few places without a vector as possible, then four vectors per thread or the nearest to it: few threads have
    /// little to add up among themselves.
    pub(super) fn of(vectors: usize, max_lanes: usize) -> Option<Self> {
        let share = |held: usize| {
            let lanes = vectors.div_ceil(held).next_power_of_two();
            (vectors > 0 && lanes <= max_lanes).then_some(Self { lanes: lanes as u32, held })
        };
        (1..=MAX_HELD)
            .filter_map(share)
            .min_by_key(|share| (share.lanes as usize * share.held - vectors, share.held.abs_diff(4)))
    }
}

/// Blocks for `items` of which each takes `per_block`: at most `most`, at least one. Kernels loop over what is left.
pub(super) fn blocks(items: usize, per_block: usize, most: usize) -> u64 {
    items.div_ceil(per_block.max(1)).clamp(1, most) as u64
}

/// Parts of one sum: how many, and the length of all but the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) count: usize,
    pub(super) len: usize,
}

impl Parts {
    /// About `wanted` parts of `len` items, none shorter than `least`, each a multiple of `least`.
    pub(super) fn of(len: usize, wanted: usize, least: usize) -> Self {
        let part = len.div_ceil(wanted.max(1)).max(1).next_multiple_of(least);
        Self { count: len.div_ceil(part), len: part }
    }
}

/// Groups of a channels-last position that a block of `threads` takes at once: `moments_last` of `group_norm.cu`.
pub(super) fn groups_at_once(group_vectors: usize, threads: usize) -> usize {
    if group_vectors < threads { threads / group_vectors } else { 1 }
}

/// Threads of a block whose rows have `lanes` threads: one row if they fill whole warps, else as many as fit.
pub(super) fn block_threads(lanes: u32, threads: u32) -> u32 {
    if lanes as usize > WARP { lanes } else { threads }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_of_the_video_vaes_leave_no_lane_idle() {
        // Channels in vectors of 8 halves.
        for channels in [32, 48, 96, 128, 160, 192, 256, 320, 384, 512, 640, 1024] {
            let share = Share::of(channels / 8, WARP).unwrap();
            assert_eq!(share.lanes as usize * share.held, channels / 8, "{channels}");
        }
        assert_eq!(Share::of(96 / 8, WARP), Some(Share { lanes: 4, held: 3 }));
        assert_eq!(Share::of(384 / 8, WARP), Some(Share { lanes: 16, held: 3 }));
        assert_eq!(Share::of(1024 / 8, WARP), Some(Share { lanes: 32, held: 4 }));
    }

    #[test]
    fn every_row_that_fits_is_covered() {
        for max_lanes in [32, 256] {
            for vectors in 1..=max_lanes * MAX_HELD {
                let share = Share::of(vectors, max_lanes).unwrap();
                let lanes = share.lanes as usize;
                assert!(lanes * share.held >= vectors && lanes.is_power_of_two() && lanes <= max_lanes);
                // No thread is without all of its vectors but where the row is shorter than the threads.
                assert!(lanes * (share.held - 1) < vectors, "{vectors}: {share:?}");
            }
            assert_eq!(Share::of(max_lanes * MAX_HELD + 1, max_lanes), None);
        }
        assert_eq!(Share::of(0, WARP), None);
    }

    #[test]
    fn parts_cover_a_sum() {
        for (len, wanted, least) in
            [(1, 1, 1), (100, 7, 1), (100, 7, 8), (6240, 512, 64), (3, 100, 8), (1 << 30, 2048, 64)]
        {
            let parts = Parts::of(len, wanted, least);
            assert!(parts.len.is_multiple_of(least) && parts.count <= wanted, "{len} {wanted} {least}: {parts:?}");
            assert!(parts.count * parts.len >= len && (parts.count - 1) * parts.len < len);
        }
        assert_eq!(Parts::of(0, 4, 8).count, 0);
    }

    #[test]
    fn blocks_are_bounded() {
        assert_eq!([blocks(0, 64, 100), blocks(65, 64, 100), blocks(1 << 40, 64, 100)], [1, 2, 100]);
        assert_eq!([groups_at_once(1, 256), groups_at_once(4, 256), groups_at_once(3, 256)], [256, 64, 85]);
        assert_eq!([groups_at_once(256, 256), groups_at_once(1000, 256)], [1, 1]);
        assert_eq!([block_threads(4, 256), block_threads(32, 256), block_threads(128, 256)], [256, 256, 128]);
    }
}
