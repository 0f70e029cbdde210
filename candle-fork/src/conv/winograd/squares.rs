//! Squares of outputs from their products.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::{ConvProblem, Grid, POINTS, Run};
use crate::{
    element::Element,
    gemm::{for_each, panel_width, work},
};

/// Columns of the widest panel of any machine.
const WIDEST: usize = 32;

/// `A^T m A` of the products `[point][panel][m][nr]` of `squares`, plus bias, rounded once into `out[m, pixels]`.
pub(super) fn transform<T: Element>(
    products: &[f32],
    problem: &ConvProblem,
    grid: &Grid,
    squares: Range<usize>,
    bias: Option<&[f32]>,
    out: &mut [T],
) {
    let pixels = problem.pixels();
    let m = out.len() / pixels;
    let outs: Vec<_> = out.chunks_exact_mut(pixels).collect();
    for_each(
        outs,
        work(&[POINTS, m, squares.len(), 4]),
        || (),
        |(), row, out| {
            let bias = bias.map_or(0.0, |bias| bias[row]);
            Arch::new().dispatch(Row { products, problem, grid, squares: squares.clone(), row, m, bias, out });
        },
    );
}

struct Row<'a, T> {
    products: &'a [f32],
    problem: &'a ConvProblem,
    grid: &'a Grid,
    squares: Range<usize>,
    row: usize,
    m: usize,
    bias: f32,
    out: &'a mut [T],
}

impl<T: Element> WithSimd for Row<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match panel_width(2) {
            WIDEST => self.run::<WIDEST>(),
            16 => self.run::<16>(),
            8 => self.run::<8>(),
            _ => self.run::<2>(),
        }
    }
}

impl<T: Element> Row<'_, T> {
    /// `N` is the width of a panel.
    #[inline(always)]
    fn run<const N: usize>(self) {
        let Self { products, problem, grid, squares, row, m, bias, out } = self;
        let point = products.len() / POINTS;
        let mut lines = [[0.0; 2 * WIDEST]; 2];
        for (panel, first) in squares.clone().step_by(N).enumerate() {
            let at = (panel * m + row) * N;
            let mut points = [[0.0; N]; POINTS];
            for (p, values) in points.iter_mut().enumerate() {
                values.copy_from_slice(&products[p * point + at..][..N]);
            }
            let [upper, lower] = &mut lines;
            gather(&points, |[a, b, c, _]| a + b + c, bias, upper);
            gather(&points, |[_, b, c, d]| b - c - d, bias, lower);
            for run in grid.runs(first..squares.end.min(first + N)) {
                write(&lines, &run, problem, out);
            }
        }
    }
}

/// One line of a panel of squares: `combine` of the rows of points, times A.
#[inline(always)]
fn gather<const N: usize>(
    points: &[[f32; N]; POINTS],
    combine: impl Fn([f32; 4]) -> f32,
    bias: f32,
    line: &mut [f32; 2 * WIDEST],
) {
    let mut columns = [[0.0; N]; 4];
    for (x, column) in columns.iter_mut().enumerate() {
        for j in 0..N {
            column[j] = combine([points[x][j], points[4 + x][j], points[8 + x][j], points[12 + x][j]]);
        }
    }
    let ([a, b, c, d], (pairs, _)) = (&columns, line.as_chunks_mut::<2>());
    for (j, pair) in pairs.iter_mut().take(N).enumerate() {
        *pair = [a[j] + b[j] + c[j] + bias, b[j] - c[j] - d[j] + bias];
    }
}

/// The part of the lines that one run covers. At odd extents the last line or column has nowhere to go.
#[inline(always)]
fn write<T: Element>(lines: &[[f32; 2 * WIDEST]; 2], run: &Run, problem: &ConvProblem, out: &mut [T]) {
    let [_, height, width] = problem.output;
    let len = (2 * run.len).min(width - 2 * run.x);
    for (r, line) in lines.iter().enumerate().take(height - 2 * run.y) {
        let to = ((run.frame * height + 2 * run.y + r) * width) + 2 * run.x;
        T::round_slice(&line[2 * run.start..][..len], &mut out[to..][..len]);
    }
}
