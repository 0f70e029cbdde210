//! Transformed filters.

use std::ops::Range;

use super::{ConvProblem, GAP, POINTS, deal};
use crate::gemm::{KC, RowSource, for_each, work};

/// `G g G^T` of the filters `rows`, as `[point][block][row][KC]`. The depth is ordered by taps in time, then channels.
pub(super) fn transform(filters: &impl RowSource, rows: Range<usize>, problem: &ConvProblem, u: &mut [f32]) {
    let m = rows.len();
    let (channels, taps) = (problem.channels_per_group(), problem.filter[0]);
    let (length, depth) = (problem.depth(), channels * taps);
    let mut lists: Vec<Vec<&mut [f32]>> = Vec::new();
    lists.resize_with(m, Vec::new);
    let point = depth.next_multiple_of(KC) * m;
    let pieces = u.chunks_exact_mut(point + GAP).flat_map(|u| u[..point].chunks_exact_mut(KC));
    deal(pieces, &mut lists);
    for_each(
        lists,
        work(&[m, length, POINTS]),
        || vec![0.0; length.next_multiple_of(KC)],
        |filter, i, mut points| {
            let row = rows.start + i;
            for (k0, piece) in filter.chunks_exact_mut(KC).enumerate().map(|(b, piece)| (b * KC, piece)) {
                filters.pack(row..row + 1, k0..length.min(k0 + KC), piece);
            }
            let (squares, _) = filter.as_chunks::<9>();
            // `points` holds the blocks of the first point, then those of the second.
            let blocks = points.len() / POINTS;
            for d in 0..depth {
                let (tap, channel) = (d / channels, d % channels);
                let u = transformed(&squares[channel * taps + tap]);
                for (p, u) in u.into_iter().enumerate() {
                    points[p * blocks + d / KC][d % KC] = u;
                }
            }
        },
    );
}

/// `G g G^T` of one 3 x 3 filter.
#[inline]
fn transformed(g: &[f32; 9]) -> [f32; POINTS] {
    let along = |a: f32, b: f32, c: f32| [a, 0.5 * (a + b + c), 0.5 * (a - b + c), c];
    let columns = [0, 1, 2].map(|x| along(g[x], g[3 + x], g[6 + x]));
    let mut u = [0.0; POINTS];
    for (y, u) in u.chunks_exact_mut(4).enumerate() {
        u.copy_from_slice(&along(columns[0][y], columns[1][y], columns[2][y]));
    }
    u
}
