use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::{DTYPES, Data, assert_rounded_once, tensor, to_f64, values, views};

fn tables(rows: usize, n: usize) -> (Tensor, Tensor) {
    let angles = values(rows * n, Data::Scaled(3.0), 9);
    let table = |f: fn(f64) -> f64| {
        let entries: Vec<f32> = angles.iter().map(|&a| f(a) as f32).collect();
        Tensor::from_vec(entries, (rows, n), &Device::Cpu).unwrap()
    };
    (table(f64::cos), table(f64::sin))
}

#[test]
fn ropes_agree_with_f64() {
    for dtype in DTYPES {
        for data in [Data::Normal, Data::LargeMean, Data::Scaled(1e-3), Data::Sparse] {
            for (b, s, h, d) in
                [(1, 1, 1, 2), (2, 3, 2, 6), (2, 7, 3, 20), (1, 5, 24, 128), (3, 2, 1, 1030), (1, 300, 5, 34)]
            {
                let x = tensor(&[b, s, h, d], dtype, data, 1);
                let (cos, sin) = tables(s, d / 2);
                for pairing in [Pairing::Interleaved, Pairing::Half] {
                    let xs = to_f64(&x);
                    let want = reference::rope(&xs, &to_f64(&cos), &to_f64(&sin), h, d / 2, pairing);
                    // An error is relative to the length of the pair, which the largest entry of a head bounds.
                    let terms: Vec<f64> = xs
                        .chunks(d)
                        .flat_map(|head| vec![head.iter().fold(0.0, |m: f64, x| m.max(x.abs())); d])
                        .collect();
                    let case = format!("{dtype:?} {data:?} {b} {s} {h} {d} {pairing:?}");
                    for x in views(&x) {
                        for (cos, sin) in views(&cos).iter().zip(views(&sin).iter().rev()) {
                            let y = match pairing {
                                Pairing::Interleaved => rope_interleaved(&x, cos, sin),
                                Pairing::Half => rope_half(&x, cos, sin),
                            };
                            assert_rounded_once(&y.unwrap(), &want, &terms, 2e-7, &case);
                        }
                    }
                    let composed = device::rope(&x, &cos, &sin, pairing).unwrap();
                    assert_rounded_once(&composed, &want, &terms, 2e-7, "composition");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn rotation_keeps_norms(s in 1usize..9, h in 1usize..4, n in 1usize..40, seed in 0u64..1000, half: bool) {
        let x = tensor(&[1, s, h, 2 * n], DType::F32, Data::Normal, seed);
        let (cos, sin) = tables(s, n);
        let y = if half { rope_half(&x, &cos, &sin) } else { rope_interleaved(&x, &cos, &sin) }.unwrap();
        for (x, y) in to_f64(&x).chunks(2 * n).zip(to_f64(&y).chunks(2 * n)) {
            let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
            prop_assert!((norm(x) - norm(y)).abs() <= 3e-7 * norm(x));
        }
    }
}

#[test]
fn empty_operands_give_empty_results() {
    let x = Tensor::zeros((2, 0, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let table = Tensor::zeros((0, 2), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(rope_half(&x, &table, &table).unwrap().dims(), [2, 0, 3, 4]);
}

#[test]
fn bad_operands_are_errors() {
    let x = tensor(&[1, 3, 2, 6], DType::F32, Data::Normal, 1);
    let (cos, sin) = tables(3, 3);
    assert!(matches!(rope_half(&cos, &cos, &sin), Err(Error::Shape { operand: "x", .. })));
    assert!(matches!(rope_half(&x.narrow(3, 0, 5).unwrap(), &cos, &sin), Err(Error::Shape { operand: "x", .. })));
    let (short, _) = tables(2, 3);
    assert!(matches!(rope_half(&x, &short, &sin), Err(Error::Shape { operand: "cos", .. })));
    assert!(matches!(rope_interleaved(&x, &cos, &short), Err(Error::Shape { operand: "sin", .. })));
    let half = sin.to_dtype(DType::BF16).unwrap();
    assert!(matches!(rope_interleaved(&x, &cos, &half), Err(Error::DType { operand: "sin", .. })));
    assert!(matches!(rope_interleaved(&Var::from_tensor(&x).unwrap(), &cos, &sin), Err(Error::Argument { .. })));
}
