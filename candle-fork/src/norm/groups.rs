//! CPU kernel of the group norm.
//!
//! A group is one run of memory. It is cut into blocks of a fixed number of elements, so that threads have work however
//! few groups there are, and the bits do not depend on their number: block moments (parallel), merged per group in order,
//! then normalisation per block (parallel). Memory is read twice and written once.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::moments::{Center, Moments};
use crate::{
    activation::{Activation, exp::silu_f32},
    element::Element,
    error::{Result, What},
    operand::read,
};

/// Elements of a block: 64 KiB of f32, which the second of a block's two passes finds in a near cache.
const BLOCK: usize = 16 * 1024;

/// Everything but the elements.
pub(super) struct Problem {
    pub(super) channels: usize,
    /// Elements of one channel of one batch item.
    pub(super) extent: usize,
    pub(super) num_groups: usize,
    pub(super) eps: f64,
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
    pub(super) activation: Activation,
}

impl Problem {
    fn group_len(&self) -> usize {
        self.channels / self.num_groups * self.extent
    }
}

/// What a group is shifted and divided by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) mean: f64,
    /// `1 / sqrt(variance + eps)`.
    pub(super) inverse: f64,
}

/// With the moments of x, or with those of `groups`, of which x is a part.
pub(super) fn group_norm<T: Element>(x: &Tensor, groups: Option<&[Group]>, problem: &Problem) -> Result<Tensor> {
    let x = x.contiguous().what("packing of an operand")?;
    let mut out = T::zeros(x.elem_count());
    if !out.is_empty() {
        read("group_norm", [&x], |[view]| {
            let x = view.contiguous::<T>()?;
            match groups {
                Some(groups) => normalise(x, &mut out, groups, problem),
                None => normalise(x, &mut out, &take(x, problem.group_len(), problem.eps), problem),
            }
            Ok(())
        })?;
    }
    Tensor::from_vec(out, x.dims(), &Device::Cpu).what("result of group_norm")
}

/// The groups of x, which is not empty, one after another.
pub(super) fn statistics<T: Element>(x: &Tensor, group_len: usize, eps: f64) -> Result<Vec<Group>> {
    let x = x.contiguous().what("packing of an operand")?;
    read("group_statistics", [&x], |[view]| Ok(take(view.contiguous::<T>()?, group_len, eps)))
}

/// Groups of x that share a task, if they are small.
fn groups_per_task(group_len: usize) -> usize {
    (BLOCK / group_len).max(1)
}

fn take<T: Element>(x: &[T], group_len: usize, eps: f64) -> Vec<Group> {
    let arch = pulp::Arch::new();
    // Many small groups share a task, a large group is cut.
    let moments: Vec<Moments> = if group_len > BLOCK {
        x.chunks_exact(group_len)
            .map(|group| {
                let parts: Vec<_> = group.par_chunks(BLOCK).map(|x| arch.dispatch(BlockMoments { x })).collect();
                parts.into_iter().fold(Moments::default(), Moments::merge)
            })
            .collect()
    } else {
        let groups = x.par_chunks_exact(group_len).with_min_len(groups_per_task(group_len));
        groups.map(|x| arch.dispatch(BlockMoments { x })).collect()
    };
    moments.into_iter().map(|m| Group { mean: m.mean, inverse: m.inverse_deviation(eps) }).collect()
}

fn normalise<T: Element>(x: &[T], out: &mut [T], groups: &[Group], problem: &Problem) {
    let arch = pulp::Arch::new();
    let group_len = problem.group_len();
    let outputs = out.par_chunks_mut(group_len).zip(x.par_chunks(group_len)).zip(groups);
    outputs.with_min_len(groups_per_task(group_len)).enumerate().for_each(|(index, ((out, x), &group))| {
        let first_channel = index % problem.num_groups * (problem.channels / problem.num_groups);
        let blocks = out.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).enumerate();
        blocks.for_each(|(block, (out, x))| {
            arch.dispatch(BlockNorm { x, out, offset: block * BLOCK, first_channel, group, problem });
        });
    });
}

struct BlockMoments<'a, T> {
    x: &'a [T],
}

impl<T: Element> pulp::NullaryFnOnce for BlockMoments<'_, T> {
    type Output = Moments;

    #[inline(always)]
    fn call(self) -> Moments {
        Moments::of(self.x)
    }
}

struct BlockNorm<'a, T> {
    x: &'a [T],
    out: &'a mut [T],
    /// Where the block begins in its group.
    offset: usize,
    first_channel: usize,
    group: Group,
    problem: &'a Problem,
}

impl<T: Element> pulp::NullaryFnOnce for BlockNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let problem = self.problem;
        let center = Center::new(self.group.mean);
        let inverse = self.group.inverse;
        let mut done = 0;
        while done < self.x.len() {
            let position = self.offset + done;
            let channel = position / problem.extent;
            let run = (self.x.len() - done).min((channel + 1) * problem.extent - position);
            let (x, out) = (&self.x[done..][..run], &mut self.out[done..][..run]);
            let factor = (inverse * f64::from(problem.weight[self.first_channel + channel])) as f32;
            let bias = problem.bias[self.first_channel + channel];
            match problem.activation {
                Activation::None => affine::<T, false>(x, out, center, factor, bias),
                Activation::Silu => affine::<T, true>(x, out, center, factor, bias),
            }
            done += run;
        }
    }
}

#[inline(always)]
fn affine<T: Element, const SILU: bool>(x: &[T], out: &mut [T], center: Center, factor: f32, bias: f32) {
    for (y, &x) in out.iter_mut().zip(x) {
        let normal = center.distance(x.widen()) * factor + bias;
        *y = T::round(if SILU { silu_f32(normal) } else { normal });
    }
}
