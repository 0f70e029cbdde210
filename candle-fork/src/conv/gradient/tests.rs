//! Gradients against differences of the definition in f64, against candle's own, and in a small net.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::*;
use crate::{
    conv::{
        conv_nd_add, reference,
        tests::{Case, case},
    },
    error::Error,
    gemm::test_data::noise,
};

/// x, weight and bias of a case.
fn operands<const D: usize>(case: &Case<D>, dtype: DType) -> Result<[Tensor; 3]> {
    let (x, weight, bias) = case.tensors()?;
    Ok([x.to_dtype(dtype)?, weight.to_dtype(dtype)?, bias])
}

fn tensor(dims: Vec<usize>, seed: u64) -> Result<Tensor> {
    Tensor::from_vec(noise(dims.iter().product(), seed), dims, &Device::Cpu)
}

fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Gradients of `sum(y * factors)` with respect to all of `operands`.
fn gradients(
    operands: &[Tensor],
    factors: &Tensor,
    f: impl FnOnce(&[Tensor]) -> crate::error::Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let vars = operands.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors).unwrap();
    assert!(y.track_op());
    let grads = (y * factors)?.sum_all()?.backward()?;
    Ok(vars.iter().map(|var| grads.get(var).unwrap().clone()).collect())
}

/// The same by differences. The sum is linear in each operand, so in f64 these have no error but rounding.
fn differences<const D: usize>(case: &Case<D>, operands: &[Tensor; 3], factors: &Tensor) -> Result<Vec<Vec<f64>>> {
    let factors = values(factors);
    let sum = |operands: &[Tensor]| {
        let y = reference::conv_nd(&operands[0], &operands[1], Some(&operands[2]), &case.params).unwrap();
        values(&y).iter().zip(&factors).map(|(y, factor)| y * factor).sum::<f64>()
    };
    let mut all = Vec::new();
    for which in 0..operands.len() {
        let from = values(&operands[which]);
        let mut of_operand = Vec::new();
        for i in 0..from.len() {
            let shifted = |by: f64| {
                let mut moved = operands.to_vec();
                let mut to = from.clone();
                to[i] += by;
                moved[which] = Tensor::from_vec(to, operands[which].dims(), &Device::Cpu)?;
                Ok::<_, candle_core::Error>(sum(&moved))
            };
            of_operand.push((shifted(1.0)? - shifted(-1.0)?) / 2.0);
        }
        all.push(of_operand);
    }
    Ok(all)
}

fn check<const D: usize>(case: Case<D>) -> Result<()> {
    for (dtype, unit) in [(DType::F32, 0.0), (DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
        let operands = operands(&case, dtype)?;
        let convolve = |t: &[Tensor]| conv_nd(&t[0], &t[1], Some(&t[2]), &case.params);
        let plain = convolve(&operands).unwrap();
        let factors = tensor(plain.dims().to_vec(), 4)?.to_dtype(dtype)?;
        let got = gradients(&operands, &factors, |tensors| {
            let y = convolve(tensors)?;
            assert_eq!(values(&y), values(&plain), "{case:?} {dtype:?}: the graph changes the result");
            Ok(y)
        })?;
        let want = differences(&case, &operands, &factors)?;
        for ((name, got), (want, operand)) in ["x", "weight", "bias"].iter().zip(&got).zip(want.iter().zip(&operands)) {
            assert_eq!((got.dims(), got.dtype()), (operand.dims(), operand.dtype()), "{case:?}: {name}");
            let scale = want.iter().fold(0.0f64, |m, y| m.max(y.abs()));
            for (i, (got, want)) in values(got).iter().zip(want).enumerate() {
                let allowed = 1e-5 * scale + unit * want.abs();
                let error = (got - want).abs();
                assert!(error <= allowed, "{case:?} {dtype:?}: {name} at {i}: {got} for {want}");
            }
        }
    }
    Ok(())
}

#[test]
fn one_axis() -> Result<()> {
    for c in [
        case(1, 1, 1, [1], [1]),
        case(2, 3, 5, [7], [3]),
        case(2, 3, 4, [9], [3]).pad([(1, 1)]),
        case(1, 4, 2, [9], [4]).pad([(3, 0)]).stride([2]),
        case(2, 2, 3, [11], [3]).stride([3]).pad([(0, 2)]),
        case(1, 2, 3, [12], [3]).stride([2]).dilate([3]),
        case(1, 2, 3, [12], [2]).stride([3]).dilate([2]).pad([(1, 4)]),
        case(2, 6, 6, [8], [3]).groups(6).pad([(1, 1)]),
        case(1, 4, 6, [8], [3]).groups(2).stride([2]).pad([(2, 1)]),
        // More zeros than the filter reaches, before and behind.
        case(1, 2, 3, [4], [2]).pad([(3, 0)]),
        case(1, 2, 3, [4], [2]).pad([(0, 5)]).stride([2]),
        case(1, 1, 2, [2], [1]).pad([(4, 3)]).stride([3]),
        // Elements that no patch meets, at the end and between.
        case(1, 2, 2, [10], [2]).stride([4]),
        case(1, 2, 2, [50], [2]).stride([60]).pad([(20, 3)]),
    ] {
        check(c)?;
    }
    Ok(())
}

#[test]
fn two_axes() -> Result<()> {
    for c in [
        case(2, 3, 4, [5, 4], [3, 3]).pad([(1, 1), (1, 1)]),
        case(1, 2, 3, [6, 7], [3, 2]).stride([2, 3]),
        case(1, 2, 3, [5, 6], [3, 3]).stride([2, 2]).pad([(0, 1), (0, 1)]),
        case(1, 3, 2, [7, 6], [2, 3]).dilate([3, 2]).pad([(0, 2), (3, 1)]),
        case(2, 4, 6, [5, 4], [3, 3]).groups(2).pad([(2, 0), (1, 1)]).stride([1, 2]),
        case(1, 4, 4, [5, 5], [3, 3]).groups(4).dilate([2, 1]).pad([(2, 2), (0, 1)]),
        case(1, 2, 3, [3, 4], [1, 1]),
        case(1, 2, 3, [4, 5], [1, 1]).stride([2, 3]).pad([(2, 0), (0, 1)]),
        case(1, 1, 2, [2, 2], [5, 4]).pad([(2, 2), (1, 2)]),
        case(1, 2, 2, [6, 6], [2, 2]).stride([3, 2]).dilate([2, 3]).pad([(1, 2), (4, 0)]),
    ] {
        check(c)?;
    }
    Ok(())
}

#[test]
fn three_axes() -> Result<()> {
    check(case(1, 2, 2, [3, 4, 3], [3, 2, 2]).pad([(2, 0), (1, 0), (0, 1)]))?;
    check(case(1, 2, 4, [3, 4, 5], [2, 2, 3]).groups(2).stride([1, 2, 2]).dilate([2, 1, 1]).pad([
        (1, 1),
        (0, 1),
        (1, 0),
    ]))
}

/// Filters that are large enough for Winograd's algorithm, both ways.
#[test]
fn gradients_agree_with_those_of_candle() -> Result<()> {
    for c in [case(2, 16, 20, [17, 18], [3, 3]).pad([(1, 1), (1, 1)]), case(1, 16, 16, [16, 16], [3, 3])] {
        let [x, weight, _] = operands(&c, DType::F32)?;
        let factors = tensor(conv_nd(&x, &weight, None, &c.params).unwrap().dims().to_vec(), 4)?;
        let operands = [x, weight];
        let got = gradients(&operands, &factors, |t| conv_nd(&t[0], &t[1], None, &c.params))?;
        let padding = c.params.padding[0].0;
        let want = gradients(&operands, &factors, |t| t[0].conv2d(&t[1], padding, 1, 1, 1).what("candle"))?;
        for (got, want) in got.iter().zip(&want) {
            let (got, want) = (values(got), values(want));
            let scale = want.iter().fold(0.0f64, |m, y| m.max(y.abs()));
            assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-5 * scale), "{c:?}");
        }
    }
    Ok(())
}

#[test]
fn only_what_is_tracked_has_a_gradient() -> Result<()> {
    let c = case(1, 2, 3, [4, 5], [3, 3]).pad([(1, 1), (1, 1)]);
    let [x, weight, bias] = operands(&c, DType::F32)?;
    let residual = tensor(vec![1, 3, 4, 5], 5)?;
    for tracked in 0..4 {
        let mut operands = [&x, &weight, &bias, &residual].map(Clone::clone);
        let var = Var::from_tensor(&operands[tracked])?;
        operands[tracked] = var.as_tensor().clone();
        let y = conv_nd_add(&operands[0], &operands[1], Some(&operands[2]), &operands[3], &c.params).unwrap();
        let plain = conv_nd_add(&x, &weight, Some(&bias), &residual, &c.params).unwrap();
        assert_eq!(values(&y), values(&plain));
        let grads = y.sum_all()?.backward()?;
        // The residual is added by an op of candle, which asks neither operand.
        for (i, operand) in operands[..3].iter().enumerate() {
            assert_eq!(grads.get(operand).is_some(), i == tracked, "operand {i} with {tracked} tracked");
        }
        if tracked == 3 {
            assert_eq!(values(grads.get(&operands[3]).unwrap()), vec![1.0; 60]);
        }
    }
    Ok(())
}

#[test]
fn what_is_used_twice_gets_both_gradients() -> Result<()> {
    let [x, weight, _] = operands(&case(1, 3, 3, [6], [3]), DType::F32)?;
    let params = ConvParams { padding: [(2, 0)], ..Default::default() };
    let shared = Var::from_tensor(&weight)?;
    let once = conv_nd(&x, shared.as_tensor(), None, &params).unwrap();
    let got = conv_nd(&once, shared.as_tensor(), None, &params).unwrap().sum_all()?.backward()?;
    // The same net with the weights apart.
    let (first, second) = (Var::from_tensor(&weight)?, Var::from_tensor(&weight)?);
    let once = conv_nd(&x, first.as_tensor(), None, &params).unwrap();
    let grads = conv_nd(&once, second.as_tensor(), None, &params).unwrap().sum_all()?.backward()?;
    let sum = (grads.get(&first).unwrap() + grads.get(&second).unwrap())?;
    assert_eq!(values(got.get(&shared).unwrap()), values(&sum));
    Ok(())
}

/// Two layers learn the filters of two others.
#[test]
fn a_net_learns() -> Result<()> {
    let params = ConvParams { padding: [(1, 1), (1, 1)], ..Default::default() };
    let net = |x: &Tensor, w: &[Tensor]| -> Result<Tensor> {
        let hidden = conv_nd(x, &w[0], Some(&w[1]), &params).map_err(carried)?.tanh()?;
        conv_nd(&hidden, &w[2], Some(&w[3]), &params).map_err(carried)
    };
    let shapes = [vec![6, 2, 3, 3], vec![6], vec![1, 6, 3, 3], vec![1]];
    let random = |seed| -> Result<Vec<Tensor>> {
        shapes.iter().zip(seed..).map(|(dims, seed)| tensor(dims.clone(), seed)? * 0.4).collect()
    };
    let x = tensor(vec![4, 2, 8, 8], 1)?;
    let target = net(&x, &random(10)?)?;
    let vars = random(20)?.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let weights: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let mut losses = Vec::new();
    for _ in 0..200 {
        let loss = (net(&x, &weights)? - &target)?.sqr()?.mean_all()?;
        losses.push(loss.to_scalar::<f32>()?);
        let grads = loss.backward()?;
        for var in &vars {
            var.set(&(var.as_tensor() - (grads.get(var).unwrap() * 0.2)?)?)?;
        }
    }
    assert!(losses[199] < 0.05 * losses[0], "from {} to {}", losses[0], losses[199]);
    Ok(())
}

#[test]
fn second_derivatives_are_refused() -> Result<()> {
    let [x, weight, _] = operands(&case(1, 1, 1, [3], [1]), DType::F32)?;
    let x = Var::from_tensor(&x)?;
    let op =
        Convolution { result: Mutex::new(None), order: MemoryOrder::ChannelsFirst, params: ConvParams::<1>::default() };
    let error = op.gradients(x.as_tensor(), &weight, None, x.as_tensor()).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == "second derivatives"), "{error}");
    Ok(())
}
