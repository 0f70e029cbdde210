//! The fast path on the CPU: patches packed panel by panel into the matrix product, or direct loops where a group has
//! too few filters to pay for packing.

use candle_core::{CpuStorage, Layout, Shape, Storage, Tensor, op::BackpropOp};
use pulp::{Arch, Simd, WithSimd};

use super::{ConvProblem, OP, im2col::Patches, winograd};
use crate::{
    element::Element,
    error::{Error, Result, What},
    gemm::{Matrix, Stack, direct, for_each, unsupported, work, zeros},
    operand::to_f32_vec,
};

/// Filters per group up to which the direct loops beat packing.
const FEW_FILTERS: usize = 2;

/// See [`super::conv_nd`], which has checked everything but the element types.
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    problem: &ConvProblem,
    dims: Vec<usize>,
) -> Result<Tensor> {
    let bias = bias.map(to_f32_vec).transpose()?;
    let (x, x_layout) = x.storage_and_layout();
    let Storage::Cpu(x) = &*x else {
        return Err(Error::Argument { op: OP, what: "x is not on the CPU".into() });
    };
    let bias = bias.as_deref();
    let storage = match x {
        CpuStorage::F32(x) => CpuStorage::F32(typed(x, x_layout, weight, bias, problem)?),
        CpuStorage::F16(x) => CpuStorage::F16(typed(x, x_layout, weight, bias, problem)?),
        CpuStorage::BF16(x) => CpuStorage::BF16(typed(x, x_layout, weight, bias, problem)?),
        other => return Err(unsupported(OP, "x", candle_core::backend::BackendStorage::dtype(other))),
    };
    Ok(Tensor::from_storage(Storage::Cpu(storage), Shape::from(dims), BackpropOp::none(), false))
}

/// Distances along N or K, then C, then the three axes that [`ConvProblem`] has.
fn strides(layout: &Layout) -> [usize; 5] {
    let mut strides = [0; 5];
    let (lead, axes) = layout.stride().split_at(2.min(layout.stride().len()));
    strides[..lead.len()].copy_from_slice(lead);
    strides[5 - axes.len()..].copy_from_slice(axes);
    // An absent axis has extent 1, but the walk over merged axes wants the strides of a packed one.
    let present = 5 - axes.len();
    let whole = layout.dims().get(2).map_or(0, |extent| strides[present.min(4)] * extent);
    strides[2..present].fill(whole);
    strides
}

fn typed<T: Element>(
    x: &[T],
    x_layout: &Layout,
    weight: &Tensor,
    bias: Option<&[f32]>,
    problem: &ConvProblem,
) -> Result<Vec<T>> {
    let mut out = zeros(OP, problem.n * problem.k * problem.pixels())?;
    let [sn, sc, sd, sh, sw] = strides(x_layout);
    let input = Input { data: x, start: x_layout.start_offset(), image: sn, strides: [sc, sd, sh, sw] };
    if problem.filters_per_group() <= FEW_FILTERS {
        direct_loops(&input, &to_f32_vec(weight)?, bias, problem, &mut out);
        return Ok(out);
    }
    // One row per filter; this copies a kernel whose elements do not follow one another.
    let rows = weight.reshape((problem.k, problem.depth())).what("conv: weight")?;
    let (storage, layout) = rows.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::Argument { op: OP, what: "x is on the CPU, the weight is not".into() });
    };
    let filters = Stack::new(vec![Matrix::of_storage(OP, storage, layout)?]);
    product(&input, &filters, bias, problem, &mut out);
    Ok(out)
}

/// The input where it lies.
struct Input<'a, T> {
    data: &'a [T],
    start: usize,
    /// Distance of images.
    image: usize,
    /// Distances along C, D, H, W.
    strides: [usize; 4],
}

impl<T> Input<'_, T> {
    /// Position of channel `c` of image `n`.
    fn channel(&self, n: usize, c: usize) -> usize {
        self.start + n * self.image + c * self.strides[0]
    }
}

/// One matrix product per image and group.
fn product<T: Element>(
    x: &Input<'_, T>,
    filters: &Stack<'_>,
    bias: Option<&[f32]>,
    problem: &ConvProblem,
    out: &mut [T],
) {
    let (depth, pixels, kg) = (problem.depth(), problem.pixels(), problem.filters_per_group());
    let outs: Vec<_> = out.chunks_exact_mut(kg * pixels).collect();
    for_each(
        outs,
        work(&[problem.n, problem.k, pixels, depth]),
        || (),
        |(), i, out| {
            let (n, g) = (i / problem.groups, i % problem.groups);
            let start = x.channel(n, g * problem.channels_per_group());
            let patches = Patches::new(x.data, start, x.strides, problem);
            let rows = g * kg..(g + 1) * kg;
            if winograd::serves(problem) {
                winograd::product(&patches, filters, rows, problem, bias, out);
            } else {
                direct(filters, rows, (pixels, depth), &patches, bias, out);
            }
        },
    );
}

/// Every output line as a sum of scaled input lines, f32 sums in the order C, T, R, S.
fn direct_loops<T: Element>(
    x: &Input<'_, T>,
    weight: &[f32],
    bias: Option<&[f32]>,
    problem: &ConvProblem,
    out: &mut [T],
) {
    let q = problem.output[2];
    let lines = problem.output[0] * problem.output[1];
    // About 16 Ki outputs per task.
    let lines_per_task = (16384 / q).clamp(1, lines);
    let tasks: Vec<_> = out
        .chunks_exact_mut(lines * q)
        .enumerate()
        .flat_map(|(nk, plane)| {
            let parts = plane.chunks_mut(lines_per_task * q).enumerate();
            parts.map(move |(i, out)| (nk / problem.k, nk % problem.k, i * lines_per_task, out))
        })
        .collect();
    let depth = problem.depth();
    let work = work(&[problem.n, problem.k, problem.pixels(), depth]);
    for_each(
        tasks,
        work,
        || vec![0.0; q],
        |acc, _, (n, k, line, out)| {
            let channel = x.channel(n, k / problem.filters_per_group() * problem.channels_per_group());
            let x = Patches::new(x.data, channel, x.strides, problem);
            let filter = &weight[k * depth..][..depth];
            let bias = bias.map_or(0.0, |bias| bias[k]);
            Arch::new().dispatch(Lines { x: &x, filter, bias, q, line, acc, out });
        },
    );
}

struct Lines<'a, 'b, T> {
    x: &'a Patches<'b, T>,
    filter: &'a [f32],
    bias: f32,
    q: usize,
    line: usize,
    acc: &'a mut [f32],
    out: &'a mut [T],
}

impl<T: Element> WithSimd for Lines<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (i, out) in self.out.chunks_exact_mut(self.q).enumerate() {
            self.acc.fill(0.0);
            self.x.add_line((self.line + i) * self.q, self.filter, self.acc);
            self.acc.iter_mut().for_each(|y| *y += self.bias);
            T::round_slice(self.acc, out);
        }
    }
}
