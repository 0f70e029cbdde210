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
