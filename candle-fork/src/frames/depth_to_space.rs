//! Channels that become frames and pixels.

use candle_core::Tensor;

use super::{argument, extents};
use crate::{
    activation::residual,
    error::{Result, What},
    layout::{contiguous, in_order, memory_order},
    operand::{check, check_dtype, shape_error},
};

/// Channels become frames and pixels, and those of a shortcut are added.
///
/// **Shapes**: x `[N, K C, T, H, W]` with K = pt ph pw of `factor`, shortcut `[N, K c, T, H, W]` where c divides C, with any
/// strides; result `[N, C, T pt - drop, H ph, W pw]` in x's memory order.
/// **Dtypes**: f32, f16 or bf16, the same for both; added in f32, rounded once. Without a shortcut elements are copied.
/// **Formula**: with `k = (u ph + q) pw + r`,
/// `y[n, o, t pt + u - drop, h ph + q, w pw + r] = x[n, k C + o, t, h, w] + shortcut[n, (o mod c) K + k, t, h, w]`
/// (`Lightricks/LTX-2: packages/ltx-core, model/video_vae`, `DepthToSpaceUpsample`). Cells of x are the *slow* part of its
/// channels: filters of the convolution before have to be brought into this order once, which makes the move one of whole
/// runs of channels. Those of the shortcut are the fast part, as published.
/// **Numerics**: one rounding.
/// **Policy**: none.
///
/// # Errors
/// - [`crate::Error::Shape`] if an operand is not of rank 5 or the shapes do not fit.
/// - [`crate::Error::Argument`] if a factor is 0, frames to drop are not fewer than a frame becomes, or an operand tracks
///   gradients or is on another device.
/// - [`crate::Error::DType`] for other element types, or if they differ.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fork::frames::depth_to_space;
/// let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu)?.reshape((1, 4, 1, 1, 1))?;
/// let y = depth_to_space(&x, [2, 1, 1], None, 0)?;
/// assert_eq!(y.dims(), [1, 2, 2, 1, 1]);
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn depth_to_space(x: &Tensor, factor: [usize; 3], shortcut: Option<&Tensor>, drop: usize) -> Result<Tensor> {
    const OP: &str = "depth_to_space";
    check(OP, &[("x", x)])?;
    let [n, channels, t, h, w] = extents(OP, "x", x)?;
    let cells: usize = factor.iter().product();
    if cells == 0 || drop >= factor[0] {
        return Err(argument(OP, format!("factors are {factor:?} and {drop} frames are dropped")));
    }
    if !channels.is_multiple_of(cells) || t == 0 {
        return Err(shape_error(OP, "x", x, format!("[N, {cells} C, T, H, W] with frames")));
    }
    let c = channels / cells;
    if let Some(shortcut) = shortcut {
        check(OP, &[("x", x), ("shortcut", shortcut)])?;
        check_dtype(OP, "shortcut", shortcut, x)?;
        let fits = match *shortcut.dims() {
            [sn, sc, st, sh, sw] => {
                [sn, st, sh, sw] == [n, t, h, w] && sc > 0 && sc.is_multiple_of(cells) && c.is_multiple_of(sc / cells)
            }
            _ => false,
        };
        if !fits {
            let expected = format!("[{n}, {cells} c, {t}, {h}, {w}] where c divides {c}");
            return Err(shape_error(OP, "shortcut", shortcut, expected));
        }
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && let Some(y) = super::cuda::depth_to_space(x, factor, shortcut, drop)?
    {
        return Ok(y);
    }
    let order = memory_order(x);
    let mut y = moved(&contiguous(x)?, factor, Slow::Cells)?;
    if let Some(shortcut) = shortcut {
        let shortcut = moved(&contiguous(shortcut)?, factor, Slow::Channels)?;
        let repeats = c / shortcut.dim(1).what(OP)?;
        y = residual(&y, &shortcut.repeat((1, repeats, 1, 1, 1)).what(OP)?)?;
    }
    let kept = y.narrow(2, drop, t * factor[0] - drop).what(OP)?;
    in_order(&kept, order)
}

/// What varies slowly among channels.
#[derive(Clone, Copy, PartialEq)]
enum Slow {
    Cells,
    Channels,
}

/// x `[N, C, T, H, W]`, contiguous, to cells.
fn moved(x: &Tensor, [pt, ph, pw]: [usize; 3], slow: Slow) -> Result<Tensor> {
    let (n, channels, t, h, w) = x.dims5().what("cells")?;
    let c = channels / (pt * ph * pw);
    let (split, axes) = match slow {
        Slow::Cells => ([n, pt, ph, pw, c, t, h, w], [0, 4, 5, 1, 6, 2, 7, 3]),
        Slow::Channels => ([n, c, pt, ph, pw, t, h, w], [0, 1, 5, 2, 6, 3, 7, 4]),
    };
    let cells = x.reshape(split.to_vec()).and_then(|x| x.permute(axes.to_vec())).what("cells")?;
    contiguous(&cells)?.reshape((n, c, t * pt, h * ph, w * pw)).what("cells")
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::{
        error::Error,
        layout::channels_last,
        testing::{DTYPES, Data, tensor, to_f64},
    };

    /// Value of a tensor given as values, at an index.
    fn at(values: &[f64], dims: &[usize], index: [usize; 5]) -> f64 {
        values[index.iter().zip(dims).fold(0, |place, (i, n)| place * n + i)]
    }

    #[test]
    fn every_position_is_that_of_the_formula() {
        for ([pt, ph, pw], c, run, drop) in
            [([2, 2, 2], 4, 2, 1), ([2, 2, 2], 8, 8, 0), ([2, 1, 1], 3, 1, 1), ([1, 2, 2], 8, 4, 0)]
        {
            let cells = pt * ph * pw;
            let (dims, shortcut_dims) = ([2, cells * c, 3, 2, 5], [2, cells * run, 3, 2, 5]);
            for dtype in DTYPES {
                let (x, shortcut) =
                    (tensor(&dims, dtype, Data::Normal, 1), tensor(&shortcut_dims, dtype, Data::Normal, 2));
                let (from, added) = (to_f64(&x), to_f64(&shortcut));
                for with in [false, true] {
                    for x in [x.clone(), channels_last(&x).unwrap()] {
                        let y = depth_to_space(&x, [pt, ph, pw], with.then_some(&shortcut), drop).unwrap();
                        let out = [2, c, 3 * pt - drop, 2 * ph, 5 * pw];
                        assert_eq!((y.dims(), memory_order(&y)), (&out[..], memory_order(&x)));
                        for (index, got) in to_f64(&y).into_iter().enumerate() {
                            let mut i = [0; 5];
                            let mut rest = index;
                            for axis in (0..5).rev() {
                                (i[axis], rest) = (rest % out[axis], rest / out[axis]);
                            }
                            let frame = i[2] + drop;
                            let (place, k) =
                                ([frame / pt, i[3] / ph, i[4] / pw], (frame % pt * ph + i[3] % ph) * pw + i[4] % pw);
                            let source = |channel| [i[0], channel, place[0], place[1], place[2]];
                            let mut want = at(&from, &dims, source(k * c + i[1]));
                            if with {
                                want += at(&added, &shortcut_dims, source(i[1] % run * cells + k));
                            }
                            let ulp = [1e-7, 5e-4, 4e-3][DTYPES.iter().position(|d| *d == dtype).unwrap()];
                            let error = if with { ulp * want.abs().max(0.1) } else { 0.0 };
                            assert!((got - want).abs() <= error, "{i:?}: {got}, {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let x = |channels: usize| tensor(&[1, channels, 2, 2, 2], DType::F32, Data::Normal, 1);
        assert!(matches!(depth_to_space(&x(7), [2, 1, 1], None, 0), Err(Error::Shape { operand: "x", .. })));
        for (factor, drop) in [([2, 0, 1], 0), ([2, 1, 1], 2), ([1, 2, 2], 1)] {
            assert!(matches!(depth_to_space(&x(8), factor, None, drop), Err(Error::Argument { .. })), "{factor:?}");
        }
        for channels in [3, 6] {
            let refused = depth_to_space(&x(8), [2, 1, 1], Some(&x(channels)), 0);
            assert!(matches!(refused, Err(Error::Shape { operand: "shortcut", .. })), "{channels}");
        }
    }
}
