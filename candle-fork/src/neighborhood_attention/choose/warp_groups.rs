//! How the kernel of `neighborhood_sm90.cu` cuts a problem.

use candle_core::DType;

use super::{Shape, factor_of_two};
use crate::neighborhood_attention::Axis;

/// Queries of an item along T, along the long axis, and of a group of warps along the long axis and the even one.
pub(in super::super) const FRAMES: usize = 4;
pub(in super::super) const LONG: usize = SIDE * GROUPS;
pub(in super::super) const SIDE: usize = 4;
const GROUPS: usize = 3;
/// Bytes of a row of a box, rows of a slot, slots.
const PITCH: usize = 128;
const ROWS: usize = 312;
#[cfg(feature = "cuda")]
const SLOTS: usize = 5;
/// Most keys that a group takes of a plane.
const KEYS: usize = 200;

/// Threads of a block, and its dynamic shared memory: alignment, slots, masks, places, barriers.
#[cfg(feature = "cuda")]
pub(in super::super) const THREADS: u32 = 128 * (GROUPS as u32 + 1);
#[cfg(feature = "cuda")]
pub(in super::super) const SHARED_BYTES: usize =
    1024 + SLOTS * ROWS * PITCH + GROUPS * 4 * 32 * 4 + KEYS * 4 + 2 * SLOTS * 8;

/// How the kernel runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in super::super) struct Plan {
    /// Keys of the steps through a plane, in eights.
    pub(in super::super) columns: [usize; 2],
    /// Parts of T.
    pub(in super::super) tiles: usize,
    /// Which of H and W, 0 or 1, is the long axis.
    pub(in super::super) long: usize,
    /// Patches along the long axis and the even one.
    pub(in super::super) patches: [usize; 2],
    /// Keys of a box along the long axis and the even one.
    pub(in super::super) panel: [usize; 2],
    /// Keys that a group takes of a plane.
    pub(in super::super) keys: usize,
    /// The factor of scores in the exponent of two.
    pub(in super::super) factor: f32,
}

/// How the kernel would run; `None` where it does not serve.
pub(in super::super) fn warp_groups(shape: Shape) -> Option<Plan> {
    let Shape { dtype, extents, frames, window, softmax_scale } = shape;
    let factor = factor_of_two(softmax_scale)?;
    if dtype == DType::F32 || !extents.width.is_multiple_of(8) || extents.width > PITCH / 2 {
        return None;
    }
    let [_, h, w] = extents.axes(window);
    let plan = |long: usize| {
        let [a, b] = if long == 0 { [h, w] } else { [w, h] };
        let ([rows, pitch], columns) = panel(a, b)?;
        Some(Plan {
            columns,
            tiles: frames.div_ceil(FRAMES),
            long,
            patches: [a.extent().div_ceil(LONG), b.extent().div_ceil(SIDE)],
            panel: [rows + LONG - SIDE, pitch],
            keys: rows * pitch,
            factor,
        })
    };
    // Fewer blocks are fewer queries beyond the grid.
    [0, 1].into_iter().filter_map(plan).min_by_key(|plan| plan.patches[0] * plan.patches[1])
}

/// Keys of a group along the long axis `a` and the even one, and the steps through them.
fn panel(a: Axis, b: Axis) -> Option<([usize; 2], [usize; 2])> {
    // Four rows are a multiple of eight keys, after which the storage of rows repeats.
    let (rows, pitch) = (a.window() + SIDE - 1, (b.window() + SIDE - 1).next_multiple_of(2));
    let columns = match rows * pitch {
        0..=64 => [8, 0],
        65..=112 => [14, 0],
        113..=KEYS => [13, 12],
        _ => return None,
    };
    // Of the last group, whole products.
    let reached = (LONG - SIDE) * pitch + 8 * (columns[0] + columns[1]);
    (reached <= ROWS && (rows + LONG - SIDE) * pitch <= ROWS).then_some(([rows, pitch], columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::neighborhood_attention::reference::Extents;

    fn plan(grid: [usize; 3], width: usize, window: [usize; 3]) -> Option<Plan> {
        let extents = Extents { batch: 1, grid, heads: 4, width };
        warp_groups(Shape { dtype: DType::BF16, extents, frames: grid[0], window, softmax_scale: 1.0 })
    }

    #[test]
    fn planes_of_the_decoder_fit() {
        let last = plan([121, 128, 192], 64, [11, 11, 11]).unwrap();
        assert_eq!((last.columns, last.tiles, last.long, last.patches), ([13, 12], 31, 1, [16, 32]));
        assert_eq!((last.panel, last.keys), ([22, 14], 196));
        assert_eq!(plan([31, 34, 60], 64, [3, 7, 7]).unwrap().columns, [14, 0]);
        assert_eq!(plan([61, 64, 96], 64, [3, 5, 5]).unwrap().columns, [8, 0]);
        assert_eq!(plan([9, 4, 4], 64, [11, 11, 11]).unwrap().panel, [15, 8], "clamped windows are even");
        for (width, window) in [(72, [3, 7, 7]), (60, [3, 7, 7]), (64, [3, 13, 13]), (64, [1, 1, 61])] {
            assert!(plan([9, 64, 64], width, window).is_none(), "{width} {window:?}");
        }
    }

    #[test]
    fn the_long_axis_is_the_one_that_twelves_fill() {
        let long = |h, w| plan([5, h, w], 64, [11, 11, 11]).unwrap().long;
        assert_eq!([long(128, 192), long(192, 128), long(12, 20), long(20, 12), long(48, 48)], [1, 0, 0, 1, 0]);
    }

    #[test]
    fn slots_hold_what_products_read() {
        for (h, w) in (1..40).flat_map(|h| (1..40).map(move |w| (h, w))) {
            if let Some(plan) = plan([5, 64, 64], 64, [3, 2 * h + 1, 2 * w + 1]) {
                let [rows, pitch] = plan.panel;
                let products = 8 * (plan.columns[0] + plan.columns[1]);
                assert!(plan.keys <= products && (LONG - SIDE) * pitch + products <= ROWS && pitch * rows <= ROWS);
                assert!((pitch * SIDE).is_multiple_of(8) && rows <= 256 && pitch <= 256);
            }
        }
    }

    /// As in neighborhood_sm90.cu: where the box of the queries from `first` on begins, and each group's keys in it.
    fn offsets(axis: Axis, first: usize) -> (i64, Vec<i64>) {
        let start = |row: usize| axis.start((first + row).min(axis.extent() - 1)) as i64;
        let of_groups = |from: i64| (0..GROUPS).map(move |group| (start(SIDE * group) - from).div_euclid(4) * 4);
        let fits = |from: &i64| {
            of_groups(*from).enumerate().all(|(group, offset)| start(SIDE * group + SIDE - 1) <= from + offset + 3)
        };
        let from = (0..4).map(|tries| start(0) - tries).find(fits).unwrap();
        (from, of_groups(from).collect())
    }

    #[test]
    fn keys_of_a_group_hold_its_windows() {
        for (extent, window) in (1..70).flat_map(|extent| (1..40).map(move |window| (extent, window))) {
            let axis = Axis::new(extent, window);
            let rows = axis.window() as i64 + 3;
            for first in (0..extent).step_by(LONG) {
                let (from, offsets) = offsets(axis, first);
                for row in 0..LONG {
                    let offset = offsets[row / SIDE];
                    let seen = axis.keys((first + row).min(extent - 1));
                    let holds = from + offset <= seen.start as i64 && seen.end as i64 <= from + offset + rows;
                    let inside = (0..=(LONG - SIDE) as i64).contains(&offset);
                    assert!(holds && inside, "L {extent} K {window} query {first} + {row}: {from} + {offset}");
                }
            }
        }
    }
}
