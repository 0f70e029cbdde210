//! CPU kernel of the RMS norm over channels.
//!
//! Channels of one position lie far apart, so positions are taken in blocks that fit a near cache with all their
//! channels: one pass sums the squares of the block, a second one, which finds it in the cache, normalises. Memory is
//! read once and written once.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::{
    activation::{Activation, exp::silu_f32},
    element::Element,
    error::{Result, What},
    operand::read,
};

/// Elements of a block over all channels: 256 KiB of f32 going in, as many coming out.
const BLOCK: usize = 64 * 1024;

/// Most positions of a block.
const MAX_POSITIONS: usize = 1024;

/// Channels whose squares are summed before they join the sums of the channels before them.
const PARTIAL: usize = 16;

/// Norms below this count as this.
const MIN_NORM: f32 = 1e-12;

/// Everything but the elements.
pub(super) struct Problem {
    /// Elements of one channel of `past`.
    pub(super) lead: usize,
    /// Elements of one channel of x.
    pub(super) extent: usize,
    pub(super) weight: Vec<f32>,
    pub(super) activation: Activation,
}

pub(super) fn channel_rms_norm<T: Element>(
    past: Option<&Tensor>,
    x: &Tensor,
    dims: Vec<usize>,
    problem: &Problem,
) -> Result<Tensor> {
    let x = x.contiguous().what("packing of an operand")?;
    let mut out = T::zeros(dims.iter().product());
    if out.is_empty() {
        return Tensor::from_vec(out, dims, &Device::Cpu).what("result of channel_rms_norm");
    }
    match past {
        None => read("channel_rms_norm", [&x], |[x]| {
            normalise(&[], x.contiguous::<T>()?, &mut out, problem);
            Ok(())
        })?,
        Some(past) => {
            let past = past.contiguous().what("packing of an operand")?;
            read("channel_rms_norm", [&past, &x], |[past, x]| {
                normalise(past.contiguous::<T>()?, x.contiguous::<T>()?, &mut out, problem);
                Ok(())
            })?;
        }
    }
    Tensor::from_vec(out, dims, &Device::Cpu).what("result of channel_rms_norm")
}

fn normalise<T: Element>(past: &[T], x: &[T], out: &mut [T], problem: &Problem) {
    let &Problem { lead, extent, ref weight, .. } = problem;
    let channels = weight.len();
    let block = (BLOCK / channels / 64 * 64).clamp(64, MAX_POSITIONS);
    let mut heads = Vec::new();
    let mut tasks: Vec<(usize, Vec<&mut [T]>)> = Vec::new();
    for (image, out) in out.chunks_exact_mut(channels * (lead + extent)).enumerate() {
        let first = tasks.len();
        tasks.extend((0..extent.div_ceil(block)).map(|b| {
            let start = image * channels * extent + b * block;
            (start, Vec::with_capacity(channels))
        }));
        for channel in out.chunks_exact_mut(lead + extent) {
            let (head, body) = channel.split_at_mut(lead);
            heads.push(head);
            for ((_, rows), row) in tasks[first..].iter_mut().zip(body.chunks_mut(block)) {
                rows.push(row);
            }
        }
    }
    if lead > 0 {
        heads.into_par_iter().zip(past.par_chunks_exact(lead)).for_each(|(head, past)| head.copy_from_slice(past));
    }
    let arch = pulp::Arch::new();
    let per_task = (BLOCK / (channels * block.min(extent.max(1)))).max(1);
    tasks
        .into_par_iter()
        .with_min_len(per_task)
        .for_each(|(start, rows)| arch.dispatch(Block { x: &x[start..], rows, problem }));
}

/// All channels of a run of positions. A struct and not a closure, as [`crate::operand::RowKernel`] explains.
struct Block<'a, T> {
    /// From the first channel's first position on.
    x: &'a [T],
    /// The results, one run per channel.
    rows: Vec<&'a mut [T]>,
    problem: &'a Problem,
}

impl<T: Element> pulp::NullaryFnOnce for Block<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { x, rows, problem } = self;
        let len = rows.first().map_or(0, |row| row.len());
        let (mut sums, mut partial) = ([0.0f32; MAX_POSITIONS], [0.0f32; MAX_POSITIONS]);
        let (sums, partial) = (&mut sums[..len], &mut partial[..len]);
        for c0 in (0..rows.len()).step_by(PARTIAL) {
            partial.fill(0.0);
            for c in c0..rows.len().min(c0 + PARTIAL) {
                for (sum, x) in partial.iter_mut().zip(&x[c * problem.extent..][..len]) {
                    *sum += x.widen() * x.widen();
                }
            }
            sums.iter_mut().zip(&*partial).for_each(|(sum, partial)| *sum += partial);
        }
        let root = (rows.len() as f32).sqrt();
        for sum in sums.iter_mut() {
            let norm = sum.sqrt();
            // A NaN stays one.
            *sum = root / if norm < MIN_NORM { MIN_NORM } else { norm };
        }
        for (c, out) in rows.into_iter().enumerate() {
            let (x, weight) = (&x[c * problem.extent..][..len], problem.weight[c]);
            match problem.activation {
                Activation::None => scale::<T, false>(x, sums, weight, out),
                Activation::Silu => scale::<T, true>(x, sums, weight, out),
            }
        }
    }
}

#[inline(always)]
fn scale<T: Element, const SILU: bool>(x: &[T], factors: &[f32], weight: f32, out: &mut [T]) {
    for ((y, x), factor) in out.iter_mut().zip(x).zip(factors) {
        let normal = x.widen() * factor * weight;
        *y = T::round(if SILU { silu_f32(normal) } else { normal });
    }
}
