//! What a convolution sees around a clip, and the norm before it, in one pass.

use candle_core::{DType, Tensor};

use super::{argument, extents};
use crate::{
    activation::{Activation, silu},
    error::{Result, What},
    layout::{contiguous, in_order, memory_order},
    norm::rms_norm,
    operand::{check, check_dtype, shape_error},
};

/// Frames, rows and columns around a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Surround {
    /// Copies of the first frame before it.
    pub before: usize,
    /// Copies of the last frame behind it.
    pub after: usize,
    /// Rows and columns on each side of a picture that mirror those inside of its border; the border is not repeated.
    pub mirrored: usize,
}

/// A norm over the channels of each position that has no weights, with an activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PixelNorm {
    /// Added to the mean of squares.
    pub eps: f64,
    /// Applied to the result.
    pub activation: Activation,
}

/// A clip, normalised if asked for, with what surrounds it, behind what came before: the input of a convolution in one
/// pass.
///
/// **Shapes**: x `[N, C, T, H, W]` and past `[N, C, P, H + 2 m, W + 2 m]` with any strides, m = [`Surround::mirrored`]
/// less than H and W; result `[N, C, P + before + T + after, H + 2 m, W + 2 m]` in x's memory order. x itself, if nothing
/// is to be done.
/// **Dtypes**: f32, f16 or bf16, the same for both; computed in f32, rounded once. Without a norm elements are copied, as
/// those of past always are.
/// **Formula**: past; then, for frame t of the others, `z[clamp(t - before, 0, T - 1), mirror(h - m), mirror(w - m)]` with
/// `mirror(i) = -i` below 0, `2 (H - 1) - i` from H on, and z = x or
/// `activation(x / sqrt(mean over channels of x^2 + eps))` (`Lightricks/LTX-2: packages/ltx-core, model/video_vae`,
/// `CausalConv3d` and `PixelNorm`).
/// **Numerics**: within 2e-6 of the exact value (relative, before the activation). A position's bits depend on its
/// channels alone.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if an operand is not of rank 5, past does not fit, or x is too small to be mirrored or to have
///   ends.
/// - [`crate::Error::Argument`] if eps is negative or not finite, or an operand tracks gradients or is on another device.
/// - [`crate::Error::DType`] for other element types, or if they differ.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::frames::{Surround, surround};
/// let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu)?.reshape((1, 1, 1, 2, 2))?;
/// let y = surround(None, &x, None, Surround { mirrored: 1, ..Surround::default() })?;
/// assert_eq!(y.dims(), [1, 1, 1, 4, 4]);
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?[..8], [4.0, 3.0, 4.0, 3.0, 2.0, 1.0, 2.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn surround(past: Option<&Tensor>, x: &Tensor, norm: Option<PixelNorm>, around: Surround) -> Result<Tensor> {
    const OP: &str = "surround";
    check(OP, &[("x", x)])?;
    let [n, c, frames, height, width] = extents(OP, "x", x)?;
    let Surround { before, after, mirrored } = around;
    if mirrored > 0 && mirrored >= height.min(width) {
        return Err(shape_error(OP, "x", x, format!("more than {mirrored} rows and columns, to be mirrored")));
    }
    if frames == 0 && before + after > 0 {
        return Err(shape_error(OP, "x", x, "a frame, whose copies surround it"));
    }
    if let Some(PixelNorm { eps, .. }) = norm
        && !(eps >= 0.0 && eps.is_finite())
    {
        return Err(argument(OP, format!("eps is {eps}, expected a finite number of at least 0")));
    }
    let picture = [height + 2 * mirrored, width + 2 * mirrored];
    if let Some(past) = past {
        check(OP, &[("x", x), ("past", past)])?;
        check_dtype(OP, "past", past, x)?;
        match *past.dims() {
            [pn, pc, _, ph, pw] if [pn, pc, ph, pw] == [n, c, picture[0], picture[1]] => {}
            _ => return Err(shape_error(OP, "past", past, format!("[{n}, {c}, P, {}, {}]", picture[0], picture[1]))),
        }
    }
    if past.is_none() && norm.is_none() && around == Surround::default() {
        return Ok(x.clone());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && let Some(y) = super::cuda::surround(past, x, norm, around)?
    {
        return Ok(y);
    }
    composed(past, x, norm, around)
}

/// By ops that take one step each.
fn composed(past: Option<&Tensor>, x: &Tensor, norm: Option<PixelNorm>, around: Surround) -> Result<Tensor> {
    const WHAT: &str = "surround";
    let order = memory_order(x);
    let mut y = match norm {
        Some(norm) => normed(x, norm)?,
        None => contiguous(x)?,
    };
    for axis in [3, 4] {
        y = mirror(&y, axis, around.mirrored)?;
    }
    let end = |index: usize| contiguous(&y.narrow(2, index, 1).what(WHAT)?);
    let frames = y.dim(2).what(WHAT)?;
    let mut parts: Vec<Tensor> = past.map(contiguous).transpose()?.into_iter().collect();
    if around.before > 0 {
        parts.resize(parts.len() + around.before, end(0)?);
    }
    parts.push(y.clone());
    if around.after > 0 {
        parts.resize(parts.len() + around.after, end(frames - 1)?);
    }
    in_order(&Tensor::cat(&parts, 2).what(WHAT)?, order)
}

/// The norm of x, contiguous.
fn normed(x: &Tensor, PixelNorm { eps, activation }: PixelNorm) -> Result<Tensor> {
    const WHAT: &str = "norm over channels";
    let rows = x.to_dtype(DType::F32).and_then(|x| x.permute((0, 2, 3, 4, 1))).what(WHAT)?;
    let ones = Tensor::ones(rows.dim(4).what(WHAT)?, DType::F32, x.device()).what(WHAT)?;
    let mut y = rms_norm(&contiguous(&rows)?, &ones, eps)?;
    if activation == Activation::Silu {
        y = silu(&y)?;
    }
    contiguous(&y.permute((0, 4, 1, 2, 3)).and_then(|y| y.to_dtype(x.dtype())).what(WHAT)?)
}

/// x, contiguous, with `count` lines more on each side of an axis.
fn mirror(x: &Tensor, axis: usize, count: usize) -> Result<Tensor> {
    const WHAT: &str = "mirrored borders";
    if count == 0 {
        return Ok(x.clone());
    }
    let extent = x.dim(axis).what(WHAT)?;
    let (before, after) = ((1..=count).rev(), (extent - 1 - count..extent - 1).rev());
    let lines: Vec<u32> = before.chain(0..extent).chain(after).map(|line| line as u32).collect();
    let lines = Tensor::new(lines, x.device());
    lines.and_then(|lines| x.index_select(&lines, axis)).what(WHAT)
}

/// Threads of a row at most.
#[cfg(any(feature = "cuda", test))]
const WARP: usize = 32;

/// How vectors of a row are dealt out: threads of a row, and vectors of a thread, that a kernel is compiled for. None for
/// rows that no kernel takes.
#[cfg(any(feature = "cuda", test))]
pub(super) fn share(vectors: usize) -> Option<(usize, usize)> {
    let lanes = vectors.div_ceil(4).next_power_of_two().min(WARP);
    let held = vectors.div_ceil(lanes).next_power_of_two();
    (vectors > 0 && held <= 8).then_some((lanes, held))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{
        error::Error,
        layout::{MemoryOrder, channels_last},
        testing::{DTYPES, Data, tensor, to_f64},
    };

    const NORM: PixelNorm = PixelNorm { eps: 1e-2, activation: Activation::Silu };

    /// The formula, for one position.
    fn want(x: &[f64], dims: [usize; 5], around: Surround, norm: bool, at: [usize; 5]) -> f64 {
        let [_, c, t, h, w] = dims;
        let mirror = |i: usize, extent: usize| {
            let i = i as i64 - around.mirrored as i64;
            let last = extent as i64 - 1;
            (if i < 0 {
                -i
            } else if i > last {
                2 * last - i
            } else {
                i
            }) as usize
        };
        let frame = at[2].saturating_sub(around.before).min(t - 1);
        let (row, column) = (mirror(at[3], h), mirror(at[4], w));
        let value = |channel: usize| x[(((at[0] * c + channel) * t + frame) * h + row) * w + column];
        if !norm {
            return value(at[1]);
        }
        let mean = (0..c).map(|channel| value(channel).powi(2)).sum::<f64>() / c as f64;
        let y = value(at[1]) / (mean + NORM.eps).sqrt();
        y / (1.0 + (-y).exp())
    }

    #[test]
    fn every_position_is_that_of_the_formula() {
        let dims = [2, 8, 3, 4, 5];
        for dtype in DTYPES {
            let x = tensor(&dims, dtype, Data::Normal, 1);
            let values = to_f64(&x);
            for (before, after, mirrored, norm) in
                [(2, 0, 0, true), (1, 1, 1, true), (0, 0, 3, false), (3, 2, 2, false), (0, 1, 0, true)]
            {
                let around = Surround { before, after, mirrored };
                let out = [2, 8, 3 + before + after, 4 + 2 * mirrored, 5 + 2 * mirrored];
                for x in [x.clone(), channels_last(&x).unwrap()] {
                    let y = surround(None, &x, norm.then_some(NORM), around).unwrap();
                    assert_eq!(y.dims(), out);
                    assert_eq!(memory_order(&y), memory_order(&x));
                    let error =
                        if norm { [1e-6, 5e-4, 4e-3][DTYPES.iter().position(|d| *d == dtype).unwrap()] } else { 0.0 };
                    for (index, got) in to_f64(&y).into_iter().enumerate() {
                        let mut at = [0; 5];
                        let mut rest = index;
                        for axis in (0..5).rev() {
                            (at[axis], rest) = (rest % out[axis], rest / out[axis]);
                        }
                        let want = want(&values, dims, around, norm, at);
                        assert!((got - want).abs() <= error * want.abs().max(0.1), "{around:?} {at:?}: {got}, {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_past_comes_first_and_is_copied() {
        let (past, x) = (
            tensor(&[1, 8, 2, 4, 5], DType::F32, Data::Normal, 1),
            tensor(&[1, 8, 3, 2, 3], DType::F32, Data::Normal, 2),
        );
        let around = Surround { after: 1, mirrored: 1, ..Surround::default() };
        let alone = surround(None, &x, Some(NORM), around).unwrap();
        for past in [past.clone(), channels_last(&past).unwrap()] {
            let y = surround(Some(&past), &x, Some(NORM), around).unwrap();
            assert_eq!(to_f64(&y.narrow(2, 0, 2).unwrap()), to_f64(&past));
            assert_eq!(to_f64(&y.narrow(2, 2, 4).unwrap()), to_f64(&alone));
            assert_eq!(memory_order(&y), MemoryOrder::ChannelsFirst);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let x = |dims: &[usize]| tensor(dims, DType::F32, Data::Normal, 1);
        let mirrored = Surround { mirrored: 2, ..Surround::default() };
        let (one, small) = (x(&[1, 2, 1, 4, 4]), x(&[1, 2, 1, 2, 4]));
        assert!(matches!(surround(None, &small, None, mirrored), Err(Error::Shape { operand: "x", .. })));
        assert!(matches!(surround(None, &x(&[2, 1, 4, 4]), None, mirrored), Err(Error::Shape { operand: "x", .. })));
        assert!(matches!(surround(Some(&one), &one, None, mirrored), Err(Error::Shape { operand: "past", .. })));
        let empty = Tensor::zeros((1, 2, 0, 4, 4), DType::F32, &Device::Cpu).unwrap();
        let ends = Surround { before: 1, ..Surround::default() };
        assert!(matches!(surround(None, &empty, None, ends), Err(Error::Shape { operand: "x", .. })));
        for eps in [-1.0, f64::NAN, f64::INFINITY] {
            let norm = Some(PixelNorm { eps, ..NORM });
            assert!(matches!(surround(None, &one, norm, ends), Err(Error::Argument { .. })), "{eps}");
        }
        let half = one.to_dtype(DType::BF16).unwrap();
        let past = Surround::default();
        assert!(matches!(surround(Some(&half), &one, None, past), Err(Error::DType { operand: "past", .. })));
    }

    #[test]
    fn rows_that_fit_are_covered_by_a_kernel() {
        for vectors in 1..=256 {
            let (lanes, held) = share(vectors).unwrap();
            assert!(lanes * held >= vectors && lanes.is_power_of_two() && lanes <= WARP, "{vectors}");
            assert!([1, 2, 4, 8].contains(&held), "{vectors}: {held}");
        }
        assert_eq!(
            [share(16), share(32), share(128), share(256)],
            [Some((4, 4)), Some((8, 4)), Some((32, 4)), Some((32, 8))]
        );
        assert_eq!([share(0), share(257)], [None, None]);
    }
}
