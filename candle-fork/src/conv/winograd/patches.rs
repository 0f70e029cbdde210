//! Transformed patches.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::{ConvProblem, GAP, Grid, POINTS, Patches, Run, deal};
use crate::{
    element::Element,
    gemm::{KC, for_each, panel_width, work},
};

/// Columns of the widest panel of any machine.
const WIDEST: usize = 32;

/// `B^T d B` of all channels and taps in time of `squares`, as `[point][block][panel][kc][nr]`.
pub(super) fn transform<T: Element>(
    x: &Patches<'_, T>,
    problem: &ConvProblem,
    grid: &Grid,
    squares: Range<usize>,
    depth: usize,
    v: &mut [f32],
) {
    let nr = panel_width(2);
    let panels = squares.len().div_ceil(nr);
    let blocks = depth.div_ceil(KC);
    let mut lists: Vec<Vec<&mut [f32]>> = Vec::new();
    lists.resize_with(blocks * panels, Vec::new);
    let pieces = v.chunks_exact_mut(depth * panels * nr + GAP).flat_map(|point| {
        let blocks = point[..depth * panels * nr].chunks_mut(KC * panels * nr);
        blocks.flat_map(move |block| {
            let piece = block.len() / panels;
            block.chunks_exact_mut(piece)
        })
    });
    deal(pieces, &mut lists);
    for_each(
        lists,
        work(&[POINTS, depth, squares.len(), 4]),
        || (),
        |(), task, mut points| {
            let (block, panel) = (task / panels, task % panels);
            let first = squares.start + panel * nr;
            let last = squares.end.min(first + nr);
            if last - first < nr {
                points.iter_mut().for_each(|point| point.fill(0.0));
            }
            let d = block * KC..depth.min((block + 1) * KC);
            for run in grid.runs(first..last) {
                Arch::new().dispatch(Pack { x, problem, run, d: d.clone(), nr, points: &mut points });
            }
        },
    );
}

struct Pack<'a, 'b, 'c, T> {
    x: &'a Patches<'b, T>,
    problem: &'a ConvProblem,
    run: Run,
    d: Range<usize>,
    nr: usize,
    points: &'a mut [&'c mut [f32]],
}

impl<T: Element> WithSimd for Pack<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match self.nr {
            WIDEST => self.run::<WIDEST>(),
            16 => self.run::<16>(),
            _ => self.run::<8>(),
        }
    }
}

/// One value for each of a run's columns, and the first one behind them.
type Line = [f32; WIDEST + 1];

impl<T: Element> Pack<'_, '_, '_, T> {
    /// `N` is the panel's width, or more where panels are narrower still.
    #[inline(always)]
    fn run<const N: usize>(self) {
        let Self { x, problem, run, d, nr, points } = self;
        let channels = problem.channels_per_group();
        let mut row = [0.0; 2 * WIDEST + 2];
        let (mut even, mut odd): ([Line; 4], [Line; 4]) = ([[0.0; WIDEST + 1]; 4], [[0.0; WIDEST + 1]; 4]);
        for (k, d) in d.enumerate() {
            let (tap, channel) = (d / channels, d % channels);
            let to = k * nr + run.start;
            let z = (run.frame * problem.stride[0] + tap * problem.dilation[0]).wrapping_sub(problem.padding[0]);
            if z >= problem.input[0] {
                points.iter_mut().for_each(|point| point[to..to + run.len].fill(0.0));
                continue;
            }
            for (r, (even, odd)) in even.iter_mut().zip(&mut odd).enumerate() {
                let y = (2 * run.y + r).wrapping_sub(problem.padding[1]);
                x.line(channel, z, y, 2 * run.x, problem.padding[2], &mut row[..2 * run.len + 2]);
                let (pairs, _) = row.as_chunks::<2>();
                for ((even, odd), pair) in even[..N + 1].iter_mut().zip(&mut odd[..N + 1]).zip(pairs) {
                    (*even, *odd) = (pair[0], pair[1]);
                }
            }
            let [p0, p1, p2, p3] = points.as_chunks_mut::<4>().0 else { continue };
            let to = to..to + run.len;
            across::<N>(&even, &odd, |[a, _, c, _]| a - c, p0, to.clone());
            across::<N>(&even, &odd, |[_, b, c, _]| b + c, p1, to.clone());
            across::<N>(&even, &odd, |[_, b, c, _]| c - b, p2, to.clone());
            across::<N>(&even, &odd, |[_, b, _, d]| b - d, p3, to);
        }
    }
}

/// The four points of one row of `B^T d B`, which is `combine` of the rows of d, times B.
#[inline(always)]
fn across<const N: usize>(
    even: &[Line; 4],
    odd: &[Line; 4],
    combine: impl Fn([f32; 4]) -> f32,
    points: &mut [&mut [f32]; 4],
    to: Range<usize>,
) {
    let (mut e, mut o): (Line, Line) = ([0.0; WIDEST + 1], [0.0; WIDEST + 1]);
    for j in 0..=N {
        e[j] = combine([even[0][j], even[1][j], even[2][j], even[3][j]]);
        o[j] = combine([odd[0][j], odd[1][j], odd[2][j], odd[3][j]]);
    }
    let [p0, p1, p2, p3] = points;
    along::<N>(|j| e[j] - e[j + 1], &mut p0[to.clone()]);
    along::<N>(|j| o[j] + e[j + 1], &mut p1[to.clone()]);
    along::<N>(|j| e[j + 1] - o[j], &mut p2[to.clone()]);
    along::<N>(|j| o[j] - o[j + 1], &mut p3[to]);
}

/// `dst[j] = f(j)`, with a length that the compiler knows where the run fills its panel.
#[inline(always)]
fn along<const N: usize>(f: impl Fn(usize) -> f32, dst: &mut [f32]) {
    match dst.as_chunks_mut::<N>() {
        ([dst], []) => (0..N).for_each(|j| dst[j] = f(j)),
        (_, dst) => dst.iter_mut().take(N).enumerate().for_each(|(j, y)| *y = f(j)),
    }
}
