//! The fast path against the definition, over shapes, dtypes and layouts.

use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;

use super::{ConvParams, ConvProblem, conv_nd, conv_nd_add, conv1d, conv2d, conv3d, reference, winograd};
use crate::{error::Error, gemm::test_data::noise};

/// One row of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case<const D: usize> {
    n: usize,
    c: usize,
    k: usize,
    input: [usize; D],
    filter: [usize; D],
    pub(super) params: ConvParams<D>,
}

/// `(n, c -> k, input, filter)` with default parameters.
pub(super) fn case<const D: usize>(n: usize, c: usize, k: usize, input: [usize; D], filter: [usize; D]) -> Case<D> {
    Case { n, c, k, input, filter, params: ConvParams::default() }
}

impl<const D: usize> Case<D> {
    pub(super) fn pad(mut self, padding: [(usize, usize); D]) -> Self {
        self.params.padding = padding;
        self
    }
    pub(super) fn same(self) -> Self {
        let padding = self.filter.map(|f| ((f - 1) / 2, f / 2));
        self.pad(padding)
    }
    pub(super) fn stride(mut self, stride: [usize; D]) -> Self {
        self.params.stride = stride;
        self
    }
    pub(super) fn dilate(mut self, dilation: [usize; D]) -> Self {
        self.params.dilation = dilation;
        self
    }
    pub(super) fn groups(mut self, groups: usize) -> Self {
        self.params.groups = groups;
        self
    }

    pub(super) fn tensors(&self) -> Result<(Tensor, Tensor, Tensor)> {
        let shape = |lead: [usize; 2], axes: [usize; D]| lead.into_iter().chain(axes).collect::<Vec<_>>();
        let tensor = |shape: Vec<usize>, seed| {
            let len = shape.iter().product();
            Tensor::from_vec(noise(len, seed), shape, &Device::Cpu)
        };
        Ok((
            tensor(shape([self.n, self.c], self.input), 1)?,
            tensor(shape([self.k, self.c / self.params.groups], self.filter), 2)?,
            tensor(vec![self.k], 3)?,
        ))
    }
}

/// The same values in other strides. `None` where the shape has no such layout.
fn relaid(t: &Tensor, layout: usize) -> Result<Option<Tensor>> {
    let last = t.rank() - 1;
    let other = match layout {
        // Two axes exchanged in memory.
        0 => t.transpose(1, last)?.contiguous()?.transpose(1, last)?,
        // The middle of a larger tensor, along the last axis and along the channels.
        1 => t.pad_with_zeros(last, 2, 1)?.narrow(last, 2, t.dim(last)?)?,
        2 => t.pad_with_zeros(1, 1, 1)?.narrow(1, 1, t.dim(1)?)?,
        // Innermost last, as channels-last models keep it.
        _ => t
            .permute((0..t.rank()).map(|i| (i + 1) % t.rank()).collect::<Vec<_>>())?
            .contiguous()?
            .permute((0..t.rank()).map(|i| (i + last) % t.rank()).collect::<Vec<_>>())?,
    };
    assert_eq!(other.dims(), t.dims());
    Ok((!other.is_contiguous()).then_some(other))
}

fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn check<const D: usize>(case: Case<D>) -> Result<()> {
    let (x, w, b) = case.tensors()?;
    // Rounding unit of the result, and of its smallest normal.
    for (dtype, unit, tiny) in
        [(DType::F32, 0.0, 0.0), (DType::BF16, 1.0 / 256.0, 0.0), (DType::F16, 1.0 / 2048.0, 3e-8)]
    {
        let (x, w) = (x.to_dtype(dtype)?, w.to_dtype(dtype)?);
        let want = values(&reference::conv_nd(&x, &w, Some(&b), &case.params).unwrap());
        let scale = want.iter().fold(0.0f64, |m, y| m.max(y.abs()));
        let plain = conv_nd(&x, &w, Some(&b), &case.params).unwrap();
        assert_eq!(plain.dtype(), dtype);
        assert!(plain.is_contiguous());
        let got = values(&plain);
        assert_eq!(got.len(), want.len(), "{case:?}");
        for (i, (y, want)) in got.iter().zip(&want).enumerate() {
            let error = (y - want).abs();
            assert!(error <= 1e-5 * scale + unit * want.abs() + tiny, "{case:?} {dtype:?} at {i}: {y} for {want}");
        }
        // Strides change nothing, not a bit.
        for layout in 0..4 {
            if let Some(x) = relaid(&x, layout)? {
                assert!(!x.is_contiguous());
                let y = conv_nd(&x, &w, Some(&b), &case.params).unwrap();
                assert_eq!(values(&y), got, "{case:?} {dtype:?}: x in layout {layout}");
            }
            if let Some(w) = relaid(&w, layout)? {
                assert!(!w.is_contiguous());
                let y = conv_nd(&x, &w, Some(&b), &case.params).unwrap();
                assert_eq!(values(&y), got, "{case:?} {dtype:?}: kernel in layout {layout}");
            }
        }
        // Half precision means rounding the inputs and the result, nothing between.
        let wide = conv_nd(&x.to_dtype(DType::F32)?, &w, Some(&b), &case.params).unwrap();
        assert_eq!(values(&wide.to_dtype(dtype)?), got, "{case:?} {dtype:?}: mixed dtypes");
    }
    Ok(())
}

#[test]
fn one_axis() -> Result<()> {
    for c in [
        case(1, 1, 1, [1], [1]),
        case(1, 1, 3, [1], [1]),
        case(2, 3, 5, [7], [3]),
        case(1, 4, 12, [31], [3]).same(),
        case(1, 4, 13, [32], [3]).same(),
        case(1, 4, 11, [33], [3]).same(),
        case(3, 2, 24, [64], [5]).same(),
        case(1, 85, 4, [40], [3]),
        case(1, 86, 4, [40], [3]),
        case(1, 64, 4, [40], [3]),
        case(1, 65, 4, [40], [3]),
        case(1, 191, 7, [9], [1]),
        case(1, 192, 7, [9], [1]),
        case(1, 193, 7, [9], [1]),
        case(1, 385, 7, [9], [1]),
        case(1, 257, 7, [9], [1]),
        case(1, 255, 3, [65], [1]),
        case(2, 6, 6, [20], [3]).groups(6).same(),
        case(2, 6, 12, [20], [3]).groups(6),
        case(2, 6, 18, [20], [3]).groups(6),
        case(2, 6, 9, [20], [4]).groups(3),
        case(1, 5, 5, [17], [3]).stride([2]),
        case(1, 5, 5, [17], [3]).stride([3]).pad([(2, 0)]),
        case(1, 5, 5, [17], [3]).dilate([4]),
        case(1, 5, 5, [18], [3]).dilate([3]).stride([2]).pad([(0, 5)]),
        case(1, 2, 3, [3], [7]).pad([(2, 2)]),
        case(1, 2, 3, [1], [9]).pad([(8, 0)]),
        case(1, 2, 3, [1], [9]).pad([(0, 8)]),
        case(1, 2, 3, [2], [2]).pad([(9, 9)]),
        case(1, 3, 4, [50], [1]).stride([7]),
        case(1, 3, 4, [50], [2]).stride([60]).pad([(20, 3)]),
        case(5, 1, 3, [11], [11]),
        case(1, 3, 3, [97], [13]).same().stride([2]),
        case(1, 1, 4, [200], [3]).same(),
        case(7, 3, 3, [2], [2]),
        case(1, 4, 4, [33], [3]).pad([(1, 0)]).groups(4),
        case(1, 4, 4, [5], [3]).groups(4).stride([2]),
        case(1, 4, 8, [40], [3]).groups(4).dilate([2]).pad([(4, 1)]),
        case(1, 1, 100, [6], [3]),
        case(1, 16, 3, [129], [3]).same(),
        case(1, 2, 2, [5000], [3]).same(),
        case(1, 2, 3, [3000], [3]).same(),
        case(1, 7, 30, [16], [16]),
    ] {
        check(c)?;
    }
    Ok(())
}

#[test]
fn two_axes() -> Result<()> {
    for c in [
        case(1, 1, 1, [1, 1], [1, 1]),
        case(1, 3, 5, [1, 1], [1, 1]),
        case(2, 3, 7, [5, 4], [3, 3]),
        case(1, 4, 12, [8, 8], [3, 3]).same(),
        case(1, 3, 13, [7, 32], [3, 3]).same(),
        case(1, 3, 4, [4, 31], [3, 3]).same(),
        case(1, 3, 4, [4, 33], [3, 3]).same(),
        case(1, 3, 4, [3, 64], [3, 3]).same(),
        case(1, 3, 4, [3, 65], [3, 3]).same(),
        case(1, 21, 5, [6, 6], [3, 3]).same(),
        case(1, 22, 5, [6, 6], [3, 3]).same(),
        case(1, 48, 13, [6, 7], [2, 2]),
        case(1, 29, 5, [6, 6], [3, 3]).same(),
        case(1, 57, 12, [5, 7], [3, 3]),
        case(3, 2, 6, [9, 11], [1, 1]),
        case(1, 256, 3, [4, 5], [1, 1]),
        case(1, 257, 13, [4, 9], [1, 1]),
        case(2, 5, 25, [8, 8], [2, 2]).stride([2, 2]),
        case(1, 4, 6, [9, 9], [3, 3]).stride([2, 2]).pad([(0, 1), (0, 1)]),
        case(1, 4, 6, [9, 10], [3, 3]).stride([2, 3]).same(),
        case(1, 4, 6, [9, 10], [3, 2]).stride([1, 2]).dilate([2, 3]),
        case(1, 3, 4, [12, 12], [3, 3]).dilate([3, 3]).same(),
        case(1, 3, 4, [12, 40], [3, 3]).dilate([1, 5]).pad([(1, 1), (5, 5)]),
        case(1, 2, 3, [2, 2], [5, 5]).pad([(2, 2), (2, 2)]),
        case(1, 2, 3, [1, 3], [4, 2]).pad([(3, 0), (0, 7)]),
        case(1, 2, 3, [3, 1], [1, 6]).pad([(0, 0), (2, 3)]),
        case(1, 6, 6, [7, 7], [3, 3]).groups(6).same(),
        case(2, 6, 6, [7, 7], [3, 3]).groups(2).same(),
        case(2, 6, 9, [7, 5], [3, 3]).groups(3),
        case(1, 8, 16, [9, 9], [3, 3]).groups(8),
        case(1, 8, 24, [9, 9], [3, 3]).groups(8),
        case(1, 8, 8, [10, 10], [5, 5]).groups(8).stride([2, 2]).same(),
        case(1, 8, 8, [10, 10], [3, 3]).groups(4).dilate([2, 2]).same(),
        case(4, 1, 3, [6, 6], [6, 6]),
        case(1, 1, 2, [40, 40], [7, 7]).same(),
        case(1, 16, 1, [33, 17], [3, 3]).same(),
        case(1, 16, 2, [33, 17], [3, 3]).same(),
        case(1, 16, 3, [33, 17], [3, 3]).same(),
        case(1, 2, 26, [3, 3], [3, 3]),
        case(1, 3, 4, [2, 100], [1, 1]),
        case(1, 3, 4, [100, 2], [1, 1]),
        case(1, 3, 4, [100, 1], [3, 1]).same(),
        case(1, 3, 4, [1, 100], [1, 3]).same(),
        case(2, 3, 4, [13, 7], [4, 4]).stride([4, 4]),
        case(2, 3, 4, [13, 7], [2, 2]).stride([5, 5]),
        case(1, 3, 35, [16, 16], [3, 3]).same(),
        case(1, 3, 48, [16, 16], [3, 3]).same().stride([2, 2]),
        case(1, 64, 9, [4, 4], [2, 2]),
        case(2, 4, 5, [5, 5], [3, 3]).pad([(0, 2), (3, 1)]),
        case(1, 4, 5, [5, 5], [3, 3]).pad([(5, 5), (5, 5)]),
        case(1, 4, 5, [5, 5], [1, 1]).pad([(1, 1), (1, 1)]),
        case(1, 4, 5, [5, 5], [1, 1]).stride([2, 2]).pad([(1, 0), (0, 1)]),
        case(1, 2, 5, [31, 31], [3, 3]).same(),
        case(1, 2, 5, [32, 32], [3, 3]).same(),
        case(1, 2, 4, [33, 33], [3, 3]).same(),
        case(1, 12, 12, [5, 5], [1, 1]).groups(12),
        case(1, 12, 12, [5, 5], [1, 1]).groups(3),
        case(3, 4, 4, [6, 5], [2, 3]).groups(2).dilate([2, 1]),
        case(1, 1, 1, [64, 64], [3, 3]).same(),
        case(1, 171, 3, [3, 3], [3, 1]),
        case(1, 1, 64, [17, 19], [2, 2]).stride([2, 2]),
        case(1, 5, 7, [11, 13], [5, 3]).same(),
        case(1, 5, 7, [11, 13], [3, 5]).same().stride([3, 1]),
        case(6, 3, 3, [4, 4], [3, 3]).same(),
        case(1, 3, 96, [8, 8], [1, 1]),
        case(1, 3, 97, [8, 9], [1, 1]),
        case(1, 128, 16, [6, 6], [3, 3]).same(),
        case(1, 9, 6, [70, 3], [3, 3]).same(),
    ] {
        check(c)?;
    }
    Ok(())
}

#[test]
fn three_axes() -> Result<()> {
    for c in [
        case(1, 1, 1, [1, 1, 1], [1, 1, 1]),
        case(2, 3, 4, [3, 4, 5], [3, 3, 3]),
        case(1, 3, 4, [3, 4, 5], [3, 3, 3]).same(),
        case(1, 3, 13, [2, 3, 33], [3, 3, 3]).same(),
        case(1, 10, 5, [3, 4, 4], [3, 3, 3]).same(),
        case(1, 9, 5, [3, 4, 4], [3, 3, 3]).pad([(2, 0), (1, 1), (1, 1)]),
        case(1, 3, 4, [5, 6, 7], [1, 1, 1]),
        case(1, 257, 4, [2, 3, 5], [1, 1, 1]),
        case(1, 3, 4, [5, 6, 7], [3, 1, 1]).pad([(2, 0), (0, 0), (0, 0)]),
        case(1, 3, 4, [5, 6, 7], [1, 3, 3]).same(),
        case(1, 3, 4, [5, 6, 7], [2, 2, 2]).stride([2, 2, 2]),
        case(1, 3, 4, [5, 6, 7], [3, 2, 1]).stride([1, 3, 2]),
        case(1, 3, 4, [7, 6, 7], [3, 2, 3]).dilate([3, 2, 1]),
        case(1, 3, 4, [7, 6, 7], [2, 2, 2]).dilate([2, 3, 4]).same(),
        case(1, 4, 4, [4, 5, 6], [3, 3, 3]).groups(4).same(),
        case(1, 4, 8, [4, 5, 6], [3, 3, 3]).groups(4),
        case(2, 4, 6, [4, 5, 6], [2, 3, 2]).groups(2),
        case(1, 4, 12, [4, 5, 6], [2, 3, 2]).groups(4).stride([2, 1, 2]),
        case(1, 2, 3, [1, 1, 1], [3, 3, 3]).same(),
        case(1, 2, 3, [1, 2, 1], [4, 3, 2]).pad([(3, 0), (0, 2), (1, 1)]),
        case(1, 2, 3, [1, 1, 40], [1, 1, 3]).same(),
        case(1, 2, 3, [40, 1, 1], [3, 1, 1]).same(),
        case(1, 2, 3, [1, 40, 1], [1, 3, 1]).same(),
        case(3, 1, 5, [2, 3, 4], [2, 3, 4]),
        case(1, 1, 1, [6, 6, 6], [5, 5, 5]).same(),
        case(1, 2, 2, [6, 6, 6], [3, 3, 3]).same(),
        case(1, 2, 25, [3, 3, 3], [2, 2, 2]),
        case(1, 16, 3, [3, 5, 8], [3, 3, 3]).same(),
        case(2, 2, 3, [3, 9, 32], [1, 3, 3]).same(),
        case(1, 2, 3, [9, 4, 4], [4, 1, 1]).stride([4, 1, 1]).pad([(3, 0), (0, 0), (0, 0)]),
        case(1, 3, 3, [4, 4, 4], [1, 1, 1]).stride([2, 2, 2]),
        case(1, 3, 3, [4, 4, 4], [1, 1, 1]).pad([(1, 0), (0, 1), (1, 1)]),
        case(1, 5, 7, [2, 11, 3], [2, 3, 2]).same(),
        case(1, 1, 3, [2, 2, 2], [1, 1, 1]).pad([(4, 4), (4, 4), (4, 4)]),
    ] {
        check(c)?;
    }
    Ok(())
}

#[test]
fn winograd_serves_and_agrees() -> Result<()> {
    fn check_served<const D: usize>(case: Case<D>) -> Result<()> {
        let (x, w, _) = case.tensors()?;
        let problem = ConvProblem::new(x.dims(), w.dims(), &case.params).unwrap();
        assert!(winograd::serves(&problem), "{case:?}");
        check(case)
    }
    for c in [
        case(1, 16, 16, [16, 16], [3, 3]).same(),
        case(1, 17, 19, [17, 19], [3, 3]).same(),
        case(2, 16, 40, [9, 33], [3, 3]),
        case(1, 200, 16, [20, 64], [3, 3]).same(),
        case(1, 24, 33, [18, 67], [3, 3]).pad([(0, 1), (2, 0)]),
        case(1, 16, 16, [3, 130], [3, 3]).pad([(5, 0), (0, 9)]),
        case(1, 40, 34, [16, 18], [3, 3]).groups(2).same(),
        case(1, 16, 100, [150, 5], [3, 3]).same(),
        case(1, 16, 20, [1, 200], [3, 3]).same(),
    ] {
        check_served(c)?;
    }
    for c in [
        case(1, 16, 16, [3, 16, 16], [3, 3, 3]).pad([(2, 0), (1, 1), (1, 1)]),
        case(1, 8, 17, [4, 9, 35], [2, 3, 3]).pad([(0, 1), (1, 0), (1, 1)]).stride([2, 1, 1]),
        case(1, 70, 16, [5, 15, 18], [3, 3, 3]).pad([(2, 2), (1, 1), (1, 1)]).dilate([2, 1, 1]),
        case(1, 16, 16, [2, 18, 18], [1, 3, 3]),
    ] {
        check_served(c)?;
    }
    Ok(())
}

#[test]
fn candle_names_agree_with_the_general_form() -> Result<()> {
    let (x, w, _) = case(2, 4, 6, [9, 8], [3, 3]).groups(2).tensors()?;
    let want = values(&x.conv2d(&w, 1, 2, 1, 2)?);
    let got = values(&conv2d(&x, &w, 1, 2, 1, 2).unwrap());
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5));
    let (x, w, _) = case(2, 4, 6, [9], [3]).tensors()?;
    let want = values(&x.conv1d(&w, 2, 1, 2, 1)?);
    let got = values(&conv1d(&x, &w, 2, 1, 2, 1).unwrap());
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5));
    // Three axes with a filter of depth one are two axes, image by image.
    let (x, w, _) = case(1, 3, 4, [2, 6, 7], [1, 3, 3]).tensors()?;
    let got = conv3d(&x, &w, 0, 1, 1, 1).unwrap();
    for t in 0..2 {
        let plane = conv2d(&x.narrow(2, t, 1)?.squeeze(2)?, &w.squeeze(2)?, 0, 1, 1, 1).unwrap();
        assert_eq!(values(&got.narrow(2, t, 1)?), values(&plane));
    }
    Ok(())
}

/// Candle 0.11.1 packs a non-contiguous kernel of `conv1d` and then multiplies the unpacked one. When this test fails,
/// candle has been repaired: say so in the documentation and delete it.
#[test]
fn candle_reads_a_strided_conv1d_kernel_wrongly_and_we_do_not() -> Result<()> {
    let (x, w, _) = case(1, 4, 5, [12], [3]).tensors()?;
    let strided = w.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
    assert!(!strided.is_contiguous());
    let want = values(&x.conv1d(&w, 0, 1, 1, 1)?);
    let error = |y: &Tensor| values(y).iter().zip(&want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
    assert!(error(&x.conv1d(&strided, 0, 1, 1, 1)?) > 0.1);
    assert!(error(&conv1d(&x, &strided, 0, 1, 1, 1).unwrap()) < 1e-5);
    Ok(())
}

#[test]
fn threads_do_not_change_a_bit() -> Result<()> {
    for c in [
        case(2, 40, 50, [20, 33], [3, 3]).same(),
        case(3, 24, 24, [30, 31], [3, 3]).same().groups(24),
        case(2, 24, 24, [40, 31], [3, 3]).same().groups(4),
        case(1, 400, 300, [5, 5], [1, 1]),
    ] {
        let (x, w, b) = c.tensors()?;
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            values(&pool.install(|| conv_nd(&x, &w, Some(&b), &c.params)).unwrap())
        };
        let one = on(1);
        assert_eq!(one, on(2));
        assert_eq!(one, on(3));
    }
    Ok(())
}

#[test]
fn bad_arguments_are_errors() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    let p = ConvParams::<2>::default();
    let run = |x: &[usize], w: &[usize], p: &ConvParams<2>| ConvProblem::new(x, w, p).unwrap_err();
    let shape = |e: Error, name| assert!(matches!(&e, Error::Shape { operand, .. } if *operand == name), "{e}");
    let argument =
        |e: Error, text: &str| assert!(matches!(&e, Error::Argument { what, .. } if what.contains(text)), "{e}");
    shape(run(&[1, 3, 8], &[4, 3, 3, 3], &p), "x");
    shape(run(&[1, 3, 8, 8], &[4, 3, 3], &p), "weight");
    for at in 0..4 {
        let (mut x, mut w) = ([1, 3, 8, 8], [4, 3, 3, 3]);
        x[at] = 0;
        shape(run(&x, &w, &p), "x");
        w[at] = 0;
        shape(run(&[1, 3, 8, 8], &w, &p), "weight");
    }
    shape(run(&[1, 3, 8, 8], &[4, 2, 3, 3], &p), "weight");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { groups: 0, ..p }), "groups");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { groups: 2, ..p }), "groups");
    argument(run(&[1, 4, 8, 8], &[6, 1, 3, 3], &ConvParams { groups: 4, ..p }), "groups");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { stride: [1, 0], ..p }), "stride");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { dilation: [0, 1], ..p }), "dilation");
    argument(run(&[1, 3, 2, 8], &[4, 3, 3, 3], &p), "padded input 2");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { dilation: [1, 4], ..p }), "spans 9");
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { dilation: [1, usize::MAX], ..p }), "address space");
    let padding = [(usize::MAX, 1), (0, 0)];
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { padding, ..p }), "address space");
    let padding = [(1 << 40, 0), (1 << 40, 0)];
    argument(run(&[1, 3, 8, 8], &[4, 3, 3, 3], &ConvParams { padding, ..p }), "address space");

    let (x, w) = (zeros(&[1, 3, 8, 8])?, zeros(&[4, 3, 3, 3])?);
    shape(conv_nd(&x, &w, Some(&zeros(&[3])?), &p).unwrap_err(), "bias");
    let double = x.to_dtype(DType::F64)?;
    assert!(matches!(conv_nd(&double, &w, None, &p), Err(Error::DType { operand: "x", got: DType::F64, .. })));
    let ints = w.to_dtype(DType::U8)?;
    assert!(matches!(conv_nd(&x, &ints, None, &p), Err(Error::DType { operand: "weight", got: DType::U8, .. })));
    let padding = [(1 << 27, 1 << 27), (1 << 28, 0)];
    argument(conv_nd(&x, &w, None, &ConvParams { padding, ..p }).unwrap_err(), "memory");
    Ok(())
}

proptest! {
    /// The output extent is the number of positions at which the filter fits.
    #[test]
    fn extents_count_positions(
        input in 1usize..40, filter in 1usize..9, stride in 1usize..6, dilation in 1usize..6,
        before in 0usize..12, after in 0usize..12,
    ) {
        let params = ConvParams { stride: [stride], dilation: [dilation], padding: [(before, after)], groups: 1 };
        let padded = before + input + after;
        let positions = (0..padded).step_by(stride).filter(|o| o + (filter - 1) * dilation < padded).count();
        match ConvProblem::new(&[1, 1, input], &[1, 1, filter], &params) {
            Ok(problem) => prop_assert_eq!(problem.output, [1, 1, positions]),
            Err(_) => prop_assert_eq!(positions, 0),
        }
    }

    /// Whatever the sizes, an answer or a typed error, never a panic.
    #[test]
    fn any_sizes_are_survived(x in prop::array::uniform5(any::<usize>()), w in prop::array::uniform5(any::<usize>()),
        stride in prop::array::uniform3(any::<usize>()), dilation in prop::array::uniform3(any::<usize>()),
        before in prop::array::uniform3(any::<usize>()), groups in any::<usize>(), shift in 0u32..64) {
        let small = |v: usize| v >> shift;
        let params = ConvParams {
            stride: stride.map(small), dilation: dilation.map(small), padding: before.map(|b| (small(b), small(b))), groups: small(groups),
        };
        let _ = ConvProblem::new(&x.map(small), &w.map(small), &params);
    }
}

#[test]
fn a_residual_is_added_to_the_convolution() -> Result<()> {
    let case = case::<2>(2, 6, 4, [5, 7], [3, 3]).same();
    let (x, weight, bias) = case.tensors()?;
    let residual = Tensor::from_vec(noise(2 * 4 * 5 * 7, 9), (2, 4, 5, 7), &Device::Cpu)?;
    let plain = conv_nd(&x, &weight, Some(&bias), &case.params).unwrap();
    // In any layout and dtype of the residual.
    let relaid = relaid(&residual, 0)?.unwrap();
    for other in [residual.clone(), relaid, residual.to_dtype(DType::F64)?] {
        let sum = conv_nd_add(&x, &weight, Some(&bias), &other, &case.params).unwrap();
        assert_eq!(values(&sum), values(&(&plain + &residual)?));
    }
    let narrow = residual.narrow(3, 0, 6)?;
    let error = conv_nd_add(&x, &weight, Some(&bias), &narrow, &case.params).unwrap_err();
    assert!(matches!(error, Error::Shape { operand: "residual", .. }), "{error}");
    Ok(())
}

#[test]
fn the_padding_behind_is_what_the_output_needs() {
    for (input, filter, stride, dilation) in
        (1..8).flat_map(|i| (1..4).flat_map(move |f| (1..4).flat_map(move |s| (1..3).map(move |d| (i, f, s, d)))))
    {
        for (before, after) in (0..4).flat_map(|b| (0..4).map(move |a| (b, a))) {
            let params = ConvParams::<1> {
                stride: [stride],
                dilation: [dilation],
                padding: [(before, after)],
                ..Default::default()
            };
            let Ok(problem) = ConvProblem::new(&[1, 1, input], &[1, 1, filter], &params) else { continue };
            let needed = problem.padding_after()[2];
            assert!(needed <= after, "{problem:?}");
            let again = ConvParams::<1> { padding: [(before, needed)], ..params };
            let again = ConvProblem::new(&[1, 1, input], &[1, 1, filter], &again).unwrap();
            assert_eq!(again.output, problem.output);
            if needed > 0 {
                let less = ConvParams::<1> { padding: [(before, needed - 1)], ..params };
                let less = ConvProblem::new(&[1, 1, input], &[1, 1, filter], &less);
                assert!(less.is_ok_and(|less| less.output != problem.output) || problem.output[2] == 1);
            }
        }
    }
}
