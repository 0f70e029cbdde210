use candle_core::{DType, Device, Tensor, Var};

use super::*;
use crate::testing::{DTYPES, Data, tensor, to_f64, views};

#[test]
fn every_element_is_the_formula() {
    let (batch, channels, [h, w], [p, q]) = (2, 3, [4, 5], [2, 3]);
    let width = channels * p * q;
    let tokens = tensor(&[batch, h * w, width], DType::F32, Data::Normal, 1);
    let std = tensor(&[width], DType::F32, Data::Normal, 2);
    let mean = tensor(&[width], DType::F32, Data::Normal, 3);
    let [xs, ss, ms] = [&tokens, &std, &mean].map(to_f64);
    for tokens in views(&tokens) {
        let y = latents_from_tokens(&tokens, (h, w), [p, q], &std, &mean, DType::F32).unwrap();
        assert_eq!(y.dims(), [batch, channels, h * p, w * q]);
        for (at, y) in to_f64(&y).into_iter().enumerate() {
            let (column, row) = (at % (w * q), at / (w * q) % (h * p));
            let (channel, item) = (at / (w * q * h * p) % channels, at / (w * q * h * p * channels));
            let n = (channel * p + row % p) * q + column % q;
            let token = (item * h + row / p) * w + column / q;
            let want = (xs[token * width + n] as f32 * ss[n] as f32) + ms[n] as f32;
            assert_eq!(y, f64::from(want), "{at}");
        }
    }
}

#[test]
fn dtypes_are_rounded_once() {
    let tokens = tensor(&[1, 6, 8], DType::F32, Data::Normal, 1);
    let (one, zero) =
        (Tensor::ones(8, DType::F32, &Device::Cpu).unwrap(), Tensor::zeros(8, DType::F32, &Device::Cpu).unwrap());
    for dtype in DTYPES {
        let run = |tokens: &Tensor| latents_from_tokens(tokens, (2, 3), [2, 2], &one, &zero, dtype).unwrap();
        let y = run(&tokens);
        assert_eq!(y.dtype(), dtype);
        assert_eq!(to_f64(&y), to_f64(&run(&tokens.to_dtype(dtype).unwrap())));
    }
}

#[test]
fn bad_operands_are_errors() {
    let tokens = tensor(&[1, 6, 8], DType::F32, Data::Normal, 1);
    let one = Tensor::ones(8, DType::F32, &Device::Cpu).unwrap();
    let run = |tokens: &Tensor, grid, patch, std: &Tensor, dtype| {
        latents_from_tokens(tokens, grid, patch, std, &one, dtype).unwrap_err()
    };
    assert!(matches!(run(&tokens, (2, 2), [2, 2], &one, DType::F32), Error::Shape { operand: "tokens", .. }));
    assert!(matches!(run(&tokens, (usize::MAX, 2), [2, 2], &one, DType::F32), Error::Shape { .. }));
    assert!(matches!(run(&tokens, (2, 3), [3, 1], &one, DType::F32), Error::Shape { .. }));
    assert!(matches!(run(&tokens, (2, 3), [0, 2], &one, DType::F32), Error::Argument { .. }));
    let short = one.narrow(0, 0, 4).unwrap();
    assert!(matches!(run(&tokens, (2, 3), [2, 2], &short, DType::F32), Error::Shape { operand: "std", .. }));
    let half = one.to_dtype(DType::BF16).unwrap();
    assert!(matches!(run(&tokens, (2, 3), [2, 2], &half, DType::F32), Error::DType { operand: "std", .. }));
    assert!(matches!(run(&tokens, (2, 3), [2, 2], &one, DType::U8), Error::DType { operand: "result", .. }));
    let tracked = Var::from_tensor(&tokens).unwrap();
    assert!(matches!(run(tracked.as_tensor(), (2, 3), [2, 2], &one, DType::F32), Error::Argument { .. }));
}
