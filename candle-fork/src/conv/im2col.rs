//! Patches of an input as the right operand of a matrix product, one packed panel at a time: the column matrix
//! `[C / groups x T x R x S, Z x P x Q]` never exists.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::ConvProblem;
use crate::{
    element::Element,
    gemm::{ColSource, gather},
};

/// The patches of one group of one image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patches<'a, T> {
    /// Storage of the input.
    data: &'a [T],
    /// Position of the group's first channel of the image.
    start: usize,
    /// Distances of neighbours along C, D, H, W.
    strides: [usize; 4],
    input: [usize; 3],
    filter: [usize; 3],
    output: [usize; 3],
    stride: [usize; 3],
    dilation: [usize; 3],
    padding: [usize; 3],
}

impl<'a, T: Element> Patches<'a, T> {
    /// Patches of the channels that start at `start` of `data`.
    pub(super) fn new(data: &'a [T], start: usize, strides: [usize; 4], problem: &ConvProblem) -> Self {
        let &ConvProblem { input, filter, output, stride, dilation, padding, .. } = problem;
        let patches = Self { data, start, strides, input, filter, output, stride, dilation, padding };
        let [_, sd, sh, sw] = strides;
        let plain =
            filter == [1; 3] && stride == [1; 3] && output == input && sh == input[2] * sw && sd == input[1] * sh;
        // A pointwise filter over packed planes sees each plane as a single line.
        let line = [1, 1, output.iter().product()];
        if plain { Self { input: line, output: line, ..patches } } else { patches }
    }

    /// Adds one filter's sums to the outputs from `first` on, which lie on one line.
    #[inline(always)]
    pub(super) fn add_line(&self, first: usize, filter: &[f32], acc: &mut [f32]) {
        let [_, p, q] = self.output;
        let [t, r, s] = self.filter;
        let [sc, sd, sh, sw] = self.strides;
        let (oz, oy, ox) = (first / q / p, first / q % p, first % q);
        for (i, &w) in filter.iter().enumerate() {
            let (ic, it, ir, is) = (i / (t * r * s), i / (r * s) % t, i / s % r, i % s);
            let iz = (oz * self.stride[0] + it * self.dilation[0]).wrapping_sub(self.padding[0]);
            let iy = (oy * self.stride[1] + ir * self.dilation[1]).wrapping_sub(self.padding[1]);
            let inside = self.inside(ox, acc.len(), is);
            if iz >= self.input[0] || iy >= self.input[1] || inside.is_empty() {
                continue;
            }
            let ix = (ox + inside.start) * self.stride[2] + is * self.dilation[2] - self.padding[2];
            let start = self.start + ic * sc + iz * sd + iy * sh + ix * sw;
            let step = self.stride[2] * sw;
            let acc = &mut acc[inside];
            if step == 1 {
                for (y, x) in acc.iter_mut().zip(&self.data[start..]) {
                    *y += w * x.widen();
                }
            } else {
                for (j, y) in acc.iter_mut().enumerate() {
                    *y += w * self.data[start + j * step].widen();
                }
            }
        }
    }

    /// Elements of the line `y` of frame `z` and `channel`, which lies inside: from column `x0 - pad` on, zero outside of
    /// the input. A `y` outside gives zeros.
    #[inline(always)]
    pub(super) fn line(&self, channel: usize, z: usize, y: usize, x0: usize, pad: usize, dst: &mut [f32]) {
        let [sc, sd, sh, sw] = self.strides;
        let (before, inside) = match y < self.input[1] {
            true => (pad.saturating_sub(x0).min(dst.len()), (pad + self.input[2]).saturating_sub(x0).min(dst.len())),
            false => (0, 0),
        };
        dst[..before].fill(0.0);
        dst[inside.max(before)..].fill(0.0);
        if before < inside {
            let start = self.start + channel * sc + z * sd + y * sh + (x0 + before - pad) * sw;
            gather(self.data, start, sw, &mut dst[before..inside]);
        }
    }

    /// Outputs of a line whose tap `s` falls inside the input, for outputs `q0..q0 + len`: relative to `q0`.
    #[inline(always)]
    fn inside(&self, q0: usize, len: usize, s: usize) -> Range<usize> {
        let (step, pad) = (self.stride[2], self.padding[2]);
        let first = q0 * step + s * self.dilation[2];
        let (before, after) = (pad.saturating_sub(first), (pad + self.input[2]).saturating_sub(first));
        if step == 1 {
            before.min(len)..after.min(len)
        } else {
            before.div_ceil(step).min(len)..after.div_ceil(step).min(len)
        }
    }
}

impl<T: Element> ColSource for Patches<'_, T> {
    fn pack(&self, k: Range<usize>, cols: Range<usize>, nr: usize, panels: &mut [f32]) {
        Arch::new().dispatch(Pack { patches: self, k, cols, nr, panels });
    }
}

struct Pack<'a, 'b, T> {
    patches: &'a Patches<'b, T>,
    k: Range<usize>,
    cols: Range<usize>,
    nr: usize,
    panels: &'a mut [f32],
}

impl<T: Element> WithSimd for Pack<'_, '_, T> {
    type Output = ();

    /// One row of all panels after another: consecutive rows read the same few lines of one channel, which stay in the
    /// first-level cache. Panel after panel, every row would touch another channel, and channels of power-of-two planes
    /// fall into one cache set.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { patches: x, k, cols, nr, panels } = self;
        let (kc, width) = (k.len(), cols.len());
        if !width.is_multiple_of(nr) {
            panels[width / nr * nr * kc..].fill(0.0);
        }
        let [_, p, q] = x.output;
        let [t, r, s] = x.filter;
        let [sc, sd, sh, sw] = x.strides;
        let step = x.stride[2] * sw;
        let (z0, y0, x0) = (cols.start / q / p, cols.start / q % p, cols.start % q);
        for (row, k) in k.enumerate() {
            let (ic, it, ir, is) = (k / (t * r * s), k / (r * s) % t, k / s % r, k % s);
            // Where the next outputs go: `row` of the panel that starts at `base`, from column `off`.
            let (mut base, mut off) = (row * nr, 0);
            let (mut oz, mut oy, mut ox) = (z0, y0, x0);
            let mut left = width;
            while left > 0 {
                let len = (q - ox).min(left);
                // Left of the input the subtraction wraps to a huge number, which is outside as well.
                let iz = (oz * x.stride[0] + it * x.dilation[0]).wrapping_sub(x.padding[0]);
                let iy = (oy * x.stride[1] + ir * x.dilation[1]).wrapping_sub(x.padding[1]);
                let (start, inside) = if iz < x.input[0] && iy < x.input[1] {
                    (x.start + ic * sc + iz * sd + iy * sh, x.inside(ox, len, is))
                } else {
                    (0, 0..0)
                };
                let mut at = 0;
                while at < len {
                    let piece = (nr - off).min(len - at);
                    let dst = &mut panels[base + off..][..piece];
                    let (lo, hi) = (inside.start.clamp(at, at + piece), inside.end.clamp(at, at + piece));
                    if lo < hi {
                        let ix = (ox + lo) * x.stride[2] + is * x.dilation[2] - x.padding[2];
                        let src = start + ix * sw;
                        let (before, after) = (lo - at, at + piece - hi);
                        if step == 1
                            && piece == 32
                            && let Some(src) =
                                src.checked_sub(before).and_then(|src| x.data.get(src..)?.first_chunk::<32>())
                            && let Some(dst) = dst.first_chunk_mut::<32>()
                        {
                            // The common case with a length that the compiler knows: no calls, no loops. What was read
                            // beside the line, at its ends, is overwritten.
                            T::widen_slice(src, dst);
                            clear(&mut dst[..before]);
                            clear(&mut dst[32 - after..]);
                        } else {
                            dst[..before].fill(0.0);
                            dst[piece - after..].fill(0.0);
                            gather(x.data, src, step, &mut dst[before..piece - after]);
                        }
                    } else {
                        dst.fill(0.0);
                    }
                    (at, off) = (at + piece, off + piece);
                    if off == nr {
                        (base, off) = (base + kc * nr, 0);
                    }
                }
                left -= len;
                (ox, oy) = (0, oy + 1);
                if oy == p {
                    (oy, oz) = (0, oz + 1);
                }
            }
        }
    }
}

/// Zeros of usually one or no element, for which a call would be slow.
#[inline(always)]
fn clear(dst: &mut [f32]) {
    match dst {
        [] => {}
        [y] => *y = 0.0,
        _ => dst.fill(0.0),
    }
}
