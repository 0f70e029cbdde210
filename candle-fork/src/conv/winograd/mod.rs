//! Winograd's minimal filtering F(2 x 2, 3 x 3): 16 products for a square of four outputs where the definition needs 36.
//!
//! For each pair of filter and channel, with `*` the product element by element,
//!
//! ```text
//! square[2, 2] = A^T ((G g G^T) * (B^T d B)) A
//!
//! G   = | 1  0  0 |   B^T = | 1  0 -1  0 |   A^T = | 1  1  1  0 |
//!       | ½  ½  ½ |         | 0  1  1  0 |         | 0  1 -1 -1 |
//!       | ½ -½  ½ |         | 0 -1  1  0 |
//!       | 0  0  1 |         | 0  1  0 -1 |
//! ```
//!
//! (Winograd, "Arithmetic Complexity of Computations", 1980; for networks Lavin and Gray, "Fast Algorithms for
//! Convolutional Neural Networks", arXiv:1509.09308, section 4.1.) Sums over channels and over taps in time commute with
//! the transforms, so that each of the 16 elements is one matrix product `[filters, depth] x [depth, squares]` of depth
//! `taps in time x channels`.
//!
//! | file | what |
//! |---|---|
//! | `mod.rs` | when it serves, rounds and tasks |
//! | `filters.rs` | `G g G^T`, packed as left operands |
//! | `patches.rs` | `B^T d B`, packed as right operands |
//! | `squares.rs` | `A^T m A`, bias, rounding |
//!
//! Measured on two Sapphire Rapids cores (GFLOP/s counted as the definition has them; direct product beside it): 128 to
//! 128 channels at 256 x 256 252 (227), 512 to 512 at 64 x 64 350 (265).
//!
//! Nothing depends on the number of threads or on the rounds. Squares begin at even rows and columns of the output: the
//! same output computed as part of another picture may differ in the last bits if its parity differs.

mod filters;
mod patches;
mod squares;

use std::ops::Range;

use super::{ConvProblem, im2col::Patches};
use crate::{
    element::Element,
    gemm::{AlignedBuffer, Block, KC, RowSource, for_each, panel_width, work},
};

/// Elements of a transformed square or filter.
const POINTS: usize = 16;

/// Largest buffer of transformed filters, in floats: 64 MiB. Small in tests, which then see several rounds.
const FILTER_FLOATS: usize = if cfg!(test) { 1 << 16 } else { 16 << 20 };

/// Largest buffers of transformed squares and their products, in floats: 16 MiB.
const SQUARE_FLOATS: usize = if cfg!(test) { 1 << 15 } else { 4 << 20 };

/// Floats between the points of a buffer: without them all 16 would fall into one set of the cache.
const GAP: usize = 32;

/// Accumulator of a task, in floats: 512 KiB of the second level.
const TASK_FLOATS: usize = 128 << 10;

/// Whether it applies, and pays: enough filters to share a transformed patch, enough squares to share a filter.
pub(super) fn serves(problem: &ConvProblem) -> bool {
    let [_, r, s] = problem.filter;
    let plain = [r, s] == [3, 3] && problem.stride[1..] == [1, 1] && problem.dilation[1..] == [1, 1];
    let depth = problem.channels_per_group() * problem.filter[0];
    let grid = Grid::new(problem);
    // Of one frame: however many frames a call brings, each is computed the same way.
    let squares = grid.height * grid.width;
    plain && problem.filters_per_group() >= 16 && depth >= 16 && squares >= 64
}

/// The squares of an output: row by row of a frame, frame by frame.
#[derive(Debug, Clone, Copy)]
struct Grid {
    frames: usize,
    height: usize,
    width: usize,
}

/// Neighbours in one row of squares, from column `start` of a panel on.
#[derive(Debug, Clone, Copy)]
struct Run {
    start: usize,
    len: usize,
    frame: usize,
    /// Row and first column in the grid.
    y: usize,
    x: usize,
}

impl Grid {
    fn new(problem: &ConvProblem) -> Self {
        let [frames, height, width] = problem.output;
        Self { frames, height: height.div_ceil(2), width: width.div_ceil(2) }
    }

    fn squares(&self) -> usize {
        self.frames * self.height * self.width
    }

    /// The squares `range`, which make up a panel or less.
    fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Run> + use<> {
        let Self { height, width, .. } = *self;
        let first = range.start;
        let mut next = first;
        std::iter::from_fn(move || {
            let (line, x) = (next / width, next % width);
            let len = (width - x).min(range.end - next);
            let run = Run { start: next - first, len, frame: line / height, y: line % height, x };
            next += len;
            (len > 0).then_some(run)
        })
    }
}

/// `out[rows, pixels] = convolution + bias[rows]` for the filters `rows` of one group of one image.
pub(super) fn product<T: Element>(
    x: &Patches<'_, T>,
    filters: &impl RowSource,
    rows: Range<usize>,
    problem: &ConvProblem,
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    let (grid, pixels) = (Grid::new(problem), problem.pixels());
    let nr = panel_width(2);
    let depth = problem.channels_per_group() * problem.filter[0];
    let pitch = depth.next_multiple_of(KC);
    // Rounds of equal size: first over filters, then over squares.
    let limit = (FILTER_FLOATS / (POINTS * pitch)).max(1);
    let m_round = rows.len().div_ceil(rows.len().div_ceil(limit));
    let limit = (SQUARE_FLOATS / (POINTS * (depth + m_round))).max(nr);
    let round = grid.squares().div_ceil(grid.squares().div_ceil(limit)).next_multiple_of(nr);
    let (mut u, mut v, mut products) = (AlignedBuffer::default(), AlignedBuffer::default(), AlignedBuffer::default());
    for (r, out) in out.chunks_mut(m_round * pixels).enumerate() {
        let m = out.len() / pixels;
        let first = rows.start + r * m_round;
        let u = u.get(POINTS * (pitch * m + GAP));
        filters::transform(filters, first..first + m, problem, u);
        for start in (0..grid.squares()).step_by(round) {
            let squares = start..grid.squares().min(start + round);
            let panels = squares.len().div_ceil(nr);
            let v = v.get(POINTS * (depth * panels * nr + GAP));
            patches::transform(x, problem, &grid, squares.clone(), depth, v);
            let products = products.get(POINTS * (m * panels * nr + GAP));
            multiply(u, v, (m, panels, depth), products);
            let bias = bias.map(|bias| &bias[first..first + m]);
            squares::transform(products, problem, &grid, squares, bias, out);
        }
    }
}

/// The matrix products of all points: u `[point][block][m][KC]`, v `[point][block][panel][kc][nr]`, result
/// `[point][panel][m][nr]`, with [`GAP`] after each point.
fn multiply(u: &[f32], v: &[f32], (m, panels, depth): (usize, usize, usize), products: &mut [f32]) {
    let nr = panel_width(2);
    let (u_point, v_point) = (u.len() / POINTS, v.len() / POINTS);
    let per_task = (TASK_FLOATS / (m * nr)).clamp(1, panels);
    let tasks: Vec<_> = products
        .chunks_exact_mut(panels * m * nr + GAP)
        .enumerate()
        .flat_map(|(point, products)| {
            products[..panels * m * nr]
                .chunks_mut(per_task * m * nr)
                .enumerate()
                .map(move |(t, acc)| (point, t * per_task, acc))
        })
        .collect();
    for_each(
        tasks,
        work(&[POINTS, m, panels * nr, depth]),
        || (),
        |(), _, (point, panel, acc)| {
            let (u, v) = (&u[point * u_point..][..u_point], &v[point * v_point..][..v_point]);
            let count = acc.len() / (m * nr);
            for (block, a) in u.chunks_exact(m * KC).enumerate() {
                let kc = KC.min(depth - block * KC);
                let b = &v[block * KC * panels * nr + panel * kc * nr..][..count * kc * nr];
                Block { a, b, acc: &mut *acc, kc, vectors: 2, first: block == 0 }.run();
            }
        },
    );
}

/// Distributes the pieces of a buffer that lie `count` apart: piece i goes to list i % count.
fn deal<'a>(pieces: impl Iterator<Item = &'a mut [f32]>, lists: &mut [Vec<&'a mut [f32]>]) {
    let count = lists.len();
    for (i, piece) in pieces.enumerate() {
        lists[i % count].push(piece);
    }
}
