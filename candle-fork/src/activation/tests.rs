use candle_core::{DType, Device, Tensor, Var};

use super::*;
use crate::{
    Error,
    testing::{DTYPES, Data, assert_rounded_once, tensor, to_f64, views},
};

const KINDS: [Data; 5] = [Data::Normal, Data::LargeMean, Data::Scaled(30.0), Data::Scaled(1e-30), Data::Sparse];

/// candle's silu gives -0 where `exp(-x)` overflows.
fn composition_is_accurate(data: Data) -> bool {
    data != Data::Scaled(30.0)
}

#[test]
fn silu_agrees_with_f64() {
    for dtype in DTYPES {
        for (seed, data) in KINDS.into_iter().enumerate() {
            for dims in [&[1][..], &[7, 13], &[2, 1021], &[3, 5, 1025]] {
                let x = tensor(dims, dtype, data, seed as u64);
                let want: Vec<f64> = to_f64(&x).into_iter().map(reference::silu).collect();
                for x in views(&x) {
                    let case = format!("{dtype:?} {data:?} {dims:?}");
                    assert_rounded_once(&silu(&x).unwrap(), &want, &want, 5e-7, &case);
                }
                if composition_is_accurate(data) {
                    assert_rounded_once(&device::silu(&x).unwrap(), &want, &want, 1e-6, "composition");
                }
            }
        }
    }
    assert_eq!(silu(&Tensor::new(0f32, &Device::Cpu).unwrap()).unwrap().rank(), 0);
}

#[test]
fn swiglu_agrees_with_f64() {
    for dtype in DTYPES {
        for (seed, data) in KINDS.into_iter().enumerate() {
            for dims in [&[2][..], &[7, 26], &[2, 3, 34], &[5, 9000]] {
                let x = tensor(dims, dtype, data, seed as u64);
                let n = dims[dims.len() - 1] / 2;
                let want = reference::swiglu(&to_f64(&x), n);
                if dtype == DType::F16 && want.iter().any(|y| y.abs() > 65000.0) {
                    continue;
                }
                for x in views(&x) {
                    let case = format!("{dtype:?} {data:?} {dims:?}");
                    assert_rounded_once(&swiglu(&x).unwrap(), &want, &want, 6e-7, &case);
                }
                if composition_is_accurate(data) {
                    assert_rounded_once(&device::swiglu(&x).unwrap(), &want, &want, 1e-6, "composition");
                }
            }
        }
    }
}

#[test]
fn gate_residual_agrees_with_f64() {
    for dtype in DTYPES {
        for gate_dtype in DTYPES {
            for (b, s, h) in [(1, 1, 1), (2, 3, 13), (3, 17, 97), (2, 5, 4099)] {
                let x = tensor(&[b, s, h], dtype, Data::Normal, 1);
                let y = tensor(&[b, s, h], dtype, Data::Normal, 2);
                let gate = tensor(&[b, h], gate_dtype, Data::Normal, 3);
                let (xs, ys, gs) = (to_f64(&x), to_f64(&y), to_f64(&gate));
                let want = reference::gate_residual(&xs, &gs, &ys, s, h);
                let terms: Vec<f64> = want.iter().zip(&xs).map(|(w, x)| w.abs() + x.abs()).collect();
                let case = format!("{dtype:?} {gate_dtype:?} {b} {s} {h}");
                for ((x, y), gate) in views(&x).iter().zip(&views(&y)).zip(views(&gate).iter().cycle()) {
                    assert_rounded_once(&gate_residual(x, gate, y).unwrap(), &want, &terms, 3e-7, &case);
                }
                let composed = device::gate_residual(&x, &gate, &y).unwrap();
                assert_rounded_once(&composed, &want, &terms, 3e-7, "composition");
            }
        }
    }
}

#[test]
fn residual_agrees_with_f64() {
    for dtype in DTYPES {
        for dims in [&[1][..], &[7, 13], &[2, 1024], &[3, 5, 1025]] {
            let (x, y) = (tensor(dims, dtype, Data::Normal, 1), tensor(dims, dtype, Data::LargeMean, 2));
            let want: Vec<f64> = to_f64(&x).iter().zip(to_f64(&y)).map(|(x, y)| x + y).collect();
            for (x, y) in views(&x).iter().zip(views(&y).iter().rev()) {
                assert_rounded_once(&residual(x, y).unwrap(), &want, &want, 0.0, &format!("{dtype:?} {dims:?}"));
            }
            assert_rounded_once(&device::residual(&x, &y).unwrap(), &want, &want, 0.0, "composition");
            assert_eq!(to_f64(&residual(&x, &x).unwrap()), to_f64(&(&x + &x).unwrap()));
        }
    }
}

#[test]
fn empty_operands_give_empty_results() {
    let x = Tensor::zeros((2, 0, 4), DType::BF16, &Device::Cpu).unwrap();
    let gate = Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(silu(&x).unwrap().dims(), [2, 0, 4]);
    assert_eq!(residual(&x, &x).unwrap().dims(), [2, 0, 4]);
    assert_eq!(swiglu(&x).unwrap().dims(), [2, 0, 2]);
    assert_eq!(gate_residual(&x, &gate, &x).unwrap().dims(), [2, 0, 4]);
    let none = Tensor::zeros((2, 3, 0), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(swiglu(&none).unwrap().dims(), [2, 3, 0]);
}

#[test]
fn bad_operands_are_errors() {
    let x = tensor(&[2, 3, 5], DType::F32, Data::Normal, 1);
    let gate = tensor(&[2, 5], DType::F32, Data::Normal, 1);
    assert!(matches!(swiglu(&x), Err(Error::Shape { operand: "x", .. })));
    assert!(matches!(swiglu(&Tensor::new(1f32, &Device::Cpu).unwrap()), Err(Error::Shape { .. })));
    assert!(matches!(silu(&x.to_dtype(DType::F64).unwrap()), Err(Error::DType { got: DType::F64, .. })));
    assert!(matches!(gate_residual(&gate, &gate, &gate), Err(Error::Shape { operand: "x", .. })));
    assert!(matches!(gate_residual(&x, &gate.t().unwrap(), &x), Err(Error::Shape { operand: "gate", .. })));
    assert!(matches!(gate_residual(&x, &gate, &x.narrow(1, 0, 2).unwrap()), Err(Error::Shape { operand: "y", .. })));
    let half = x.to_dtype(DType::F16).unwrap();
    assert!(matches!(gate_residual(&x, &gate, &half), Err(Error::DType { operand: "y", .. })));
    assert!(matches!(residual(&x, &gate), Err(Error::Shape { operand: "y", .. })));
    assert!(matches!(residual(&x, &half), Err(Error::DType { operand: "y", .. })));
    let tracked = Var::from_tensor(&x).unwrap();
    assert!(matches!(silu(&tracked), Err(Error::Argument { .. })));
}
