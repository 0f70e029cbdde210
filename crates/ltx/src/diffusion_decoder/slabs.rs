//! Attention in slabs of frames, with the results of the whole volume.
//!
//! The frames `a..b` attend to nothing outside of `start(a)..start(b - 1) + k`. Windows clamped to that range are those of
//! the whole volume for the frames `a..b` (not for the others in it, whose results are dropped): where the clamp to the
//! range holds a window back, the clamp to the volume does too. So a slab needs no other kernel, and its memory does not
//! grow with the clip.

use std::ops::Range;

use candle_fork::neighborhood_attention::Axis;

/// Frames that are computed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slab {
    /// Frames whose results are wanted.
    pub(super) rows: Range<usize>,
    /// Frames that they attend to; holds `rows`.
    pub(super) keys: Range<usize>,
}

/// Frames that kernels take together.
const TOGETHER: usize = 8;

/// Slabs of `frames` frames whose keys are at most `most` frames, or as many as one frame needs; about alike, and whole runs of
/// the frames that kernels take together where that is possible.
pub(super) fn slabs(frames: usize, window: usize, most: usize) -> Vec<Slab> {
    if most >= frames {
        return vec![Slab { rows: 0..frames, keys: 0..frames }];
    }
    let axis = Axis::new(frames, window);
    let widest = (most + 1).saturating_sub(axis.window()).max(1);
    let count = frames.div_ceil(widest);
    let even = frames.div_ceil(count);
    let runs = even / TOGETHER * TOGETHER;
    // The last slab takes what is left over.
    let step = if runs > 0 && frames - (count - 1) * runs <= widest { runs } else { even };
    let starts = (0..count).map(|i| i * step).filter(|&a| a < frames);
    let slab = |a: usize| {
        let b = if a + step >= frames || a == (count - 1) * step { frames } else { a + step };
        Slab { rows: a..b, keys: axis.panel(&(a..b)) }
    };
    starts.map(slab).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_within_a_slab_are_those_of_the_volume() {
        for frames in 1..=40 {
            for window in 1..=40 {
                for most in [1, 2, 7, 12, 39] {
                    let slabs = slabs(frames, window, most);
                    let rows: Vec<usize> = slabs.iter().flat_map(|slab| slab.rows.clone()).collect();
                    assert_eq!(rows, (0..frames).collect::<Vec<_>>());
                    for Slab { rows, keys } in slabs {
                        assert!(keys.len() <= most.max(window.min(frames)), "{frames} {window} {most}");
                        let (local, volume) = (Axis::new(keys.len(), window), Axis::new(frames, window));
                        for i in rows {
                            let seen = local.keys(i - keys.start);
                            let seen = seen.start + keys.start..seen.end + keys.start;
                            assert_eq!(seen, volume.keys(i), "frame {i} of {frames}, window {window}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_volume_that_fits_is_not_cut() {
        assert_eq!(slabs(9, 11, 9), [Slab { rows: 0..9, keys: 0..9 }]);
        assert_eq!(
            slabs(20, 5, 10),
            [
                Slab { rows: 0..5, keys: 0..7 },
                Slab { rows: 5..10, keys: 3..12 },
                Slab { rows: 10..15, keys: 8..17 },
                Slab { rows: 15..20, keys: 13..20 },
            ]
        );
        let rows: Vec<_> = slabs(121, 11, 56).into_iter().map(|slab| slab.rows).collect();
        assert_eq!(rows, [0..40, 40..80, 80..121]);
    }
}
