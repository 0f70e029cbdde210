use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::{DTYPES, Data, tensor, to_f64, views};

proptest! {
    #[test]
    fn upsampling_agrees_with_indices(
        n in 1usize..3, c in 1usize..4, extents in [1usize..5, 1..6, 1..7], factors in [1usize..4, 1..4, 1..4], seed in 0u64..1000,
    ) {
        for dtype in DTYPES {
            let x = tensor(&[n, c, extents[0], extents[1], extents[2]], dtype, Data::Normal, seed);
            let want = reference::upsample_nearest(&to_f64(&x), extents, factors);
            for x in views(&x) {
                let y = upsample_nearest(&x, factors).unwrap();
                prop_assert_eq!(&y.dims()[2..], [extents[0] * factors[0], extents[1] * factors[1], extents[2] * factors[2]]);
                prop_assert_eq!(to_f64(&y), want.clone());
            }
            let mut out_dims = x.dims().to_vec();
            out_dims[2..].iter_mut().zip(factors).for_each(|(n, f)| *n *= f);
            prop_assert_eq!(to_f64(&device::upsample_nearest(&x, &out_dims, &factors).unwrap()), want);
        }
    }
}

#[test]
fn interleaving_puts_every_pixel_at_its_parity() {
    for dtype in DTYPES {
        for dims in [&[1, 1][..], &[3, 5], &[2, 3, 4, 7], &[1, 2, 3, 129, 131]] {
            let parts: [Tensor; 4] = std::array::from_fn(|i| tensor(dims, dtype, Data::Normal, i as u64));
            let values = parts.each_ref().map(to_f64);
            let (h, w) = (dims[dims.len() - 2], dims[dims.len() - 1]);
            for view in 0..views(&parts[0]).len() {
                let y = interleave2d(&parts.each_ref().map(|part| views(part)[view].clone())).unwrap();
                assert_eq!(&y.dims()[y.rank() - 2..], [2 * h, 2 * w]);
                for (index, got) in to_f64(&y).into_iter().enumerate() {
                    let (image, y, x) = (index / (4 * h * w), index / (2 * w) % (2 * h), index % (2 * w));
                    assert_eq!(got, values[y % 2 * 2 + x % 2][(image * h + y / 2) * w + x / 2]);
                }
                assert_eq!(to_f64(&y), to_f64(&device::interleave2d(&parts, y.dims().to_vec()).unwrap()));
            }
        }
    }
    let x = tensor(&[2, 3], DType::F32, Data::Normal, 1);
    let other = tensor(&[3, 2], DType::F32, Data::Normal, 1);
    let mixed = [x.clone(), x.clone(), x.clone(), other];
    assert!(matches!(interleave2d(&mixed), Err(Error::Shape { operand: "part", .. })));
    let half = [x.clone(), x.clone(), x.clone(), x.to_dtype(DType::F16).unwrap()];
    assert!(matches!(interleave2d(&half), Err(Error::DType { operand: "part", .. })));
    let flat = x.get(0).unwrap();
    assert!(matches!(interleave2d(&[0; 4].map(|_| flat.clone())), Err(Error::Shape { .. })));
    let none = Tensor::zeros((2, 0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(interleave2d(&[0; 4].map(|_| none.clone())).unwrap().dims(), [2, 0, 6]);
}

#[test]
fn images_and_signals() {
    for factor in 1..5 {
        let x = tensor(&[2, 3, 61, 67], DType::F32, Data::Normal, 1);
        let want = reference::upsample_nearest(&to_f64(&x), [61, 67], [factor; 2]);
        assert_eq!(to_f64(&upsample_nearest2d(&x, factor).unwrap()), want);
        let x = tensor(&[2, 3, 40001], DType::BF16, Data::Normal, 1);
        let want = reference::upsample_nearest(&to_f64(&x), [40001], [factor]);
        assert_eq!(to_f64(&upsample_nearest(&x, [factor]).unwrap()), want);
    }
}

#[test]
fn empty_operands_give_empty_results() {
    let x = Tensor::zeros((1, 2, 0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(upsample_nearest2d(&x, 2).unwrap().dims(), [1, 2, 0, 6]);
}

#[test]
fn bad_operands_are_errors() {
    let x = tensor(&[1, 2, 3, 4], DType::F32, Data::Normal, 1);
    assert!(matches!(upsample_nearest2d(&x, 0), Err(Error::Argument { .. })));
    assert!(matches!(upsample_nearest2d(&x, usize::MAX / 2), Err(Error::Shape { .. })));
    assert!(matches!(upsample_nearest(&x, [2]), Err(Error::Shape { operand: "x", .. })));
    assert!(matches!(upsample_nearest(&x.get(0).unwrap().get(0).unwrap(), []), Err(Error::Argument { .. })));
    assert!(matches!(upsample_nearest2d(&x.to_dtype(DType::U8).unwrap(), 2), Err(Error::DType { .. })));
    assert!(matches!(upsample_nearest2d(&Var::from_tensor(&x).unwrap(), 2), Err(Error::Argument { .. })));
}
