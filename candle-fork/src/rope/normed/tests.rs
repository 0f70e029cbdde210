use candle_core::{DType, Device, Tensor, Var};

use super::*;
use crate::{
    norm::reference::rms_norm as normed,
    rope::{reference, rope_half, rope_interleaved},
    testing::{DTYPES, Data, assert_rounded_once, tensor, to_f64, values, views},
};

const EPS: f64 = 1e-6;

fn tables(rows: usize, n: usize) -> (Tensor, Tensor) {
    let angles = values(rows * n, Data::Scaled(3.0), 9);
    let table = |f: fn(f64) -> f64| {
        let entries: Vec<f32> = angles.iter().map(|&a| f(a) as f32).collect();
        Tensor::from_vec(entries, (rows, n), &Device::Cpu).unwrap()
    };
    (table(f64::cos), table(f64::sin))
}

/// The largest entry of a head after the norm bounds the length of its pairs.
fn terms(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let normed = normed(x, weight, EPS);
    let d = weight.len();
    normed.chunks(d).flat_map(|head| vec![head.iter().fold(0.0, |m: f64, x| m.max(x.abs())); d]).collect()
}

#[test]
fn norm_rope_agrees_with_f64() {
    for dtype in DTYPES {
        for data in [Data::Normal, Data::LargeMean, Data::Scaled(1e-3), Data::Sparse] {
            for (b, s, h, d) in [(1, 1, 1, 2), (2, 3, 2, 6), (2, 7, 3, 20), (1, 5, 24, 128), (1, 40, 5, 34)] {
                let x = tensor(&[b, s, h, d], dtype, data, 1);
                let weight = tensor(&[d], dtype, Data::Normal, 2);
                let (cos, sin) = tables(s, d / 2);
                let [xs, ws, cs, ss] = [&x, &weight, &cos, &sin].map(to_f64);
                for pairing in [Pairing::Interleaved, Pairing::Half] {
                    let want = reference::rope(&normed(&xs, &ws, EPS), &cs, &ss, h, d / 2, pairing);
                    for x in views(&x) {
                        let y = norm_rope(&x, &weight, &cos, &sin, EPS, pairing).unwrap();
                        let case = format!("{dtype:?} {data:?} {b} {s} {h} {d} {pairing:?}");
                        assert_rounded_once(&y, &want, &terms(&xs, &ws), 1e-6, &case);
                    }
                }
            }
        }
    }
}

/// Queries and keys of two runs of tokens, with two weights each, behind one another in the rows of a wider projection.
#[test]
fn fused_is_the_composition_in_single_precision() {
    let (b, text, image, h, d) = (2, 3, 5, 3, 8);
    let (s, columns) = (text + image, 2 * h * d + 11);
    let projected = tensor(&[b, s, columns], DType::F32, Data::Normal, 1);
    let weights: Vec<Tensor> = (2..6).map(|seed| tensor(&[d], DType::BF16, Data::Normal, seed)).collect();
    let (cos, sin) = tables(s, d / 2);
    let norms = [
        HeadNorm { tokens: text, query: &weights[0], key: &weights[1] },
        HeadNorm { tokens: image, query: &weights[2], key: &weights[3] },
    ];
    let composed = |start: usize, weights: [&Tensor; 2]| {
        let heads = heads_of(&projected, start, h, d).unwrap();
        let run = |first, tokens, weight| rms_norm(&heads.narrow(1, first, tokens).unwrap(), weight, EPS).unwrap();
        let normed = Tensor::cat(&[run(0, text, weights[0]), run(text, image, weights[1])], 1).unwrap();
        rope_interleaved(&normed, &cos, &sin).unwrap()
    };
    let want = [composed(0, [&weights[0], &weights[2]]), composed(h * d, [&weights[1], &weights[3]])];
    for projected in views(&projected) {
        let (q, k) = qk_norm_rope(&projected, h, &norms, &cos, &sin, EPS).unwrap();
        assert_eq!((q.dims(), k.dims()), (&[b, s, h, d][..], &[b, s, h, d][..]));
        assert_eq!(q.stride()[3], 1);
        assert_eq!([to_f64(&q), to_f64(&k)], [to_f64(&want[0]), to_f64(&want[1])]);
    }
    let x = projected.narrow(2, 0, h * d).unwrap().reshape((b, s, h, d)).unwrap();
    let half = norm_rope(&x, &weights[0], &cos, &sin, EPS, Pairing::Half).unwrap();
    let want = rope_half(&rms_norm(&x, &weights[0], EPS).unwrap(), &cos, &sin).unwrap();
    assert_eq!(to_f64(&half), to_f64(&want));
}

/// Several query heads to a key head: each part with its own weight.
#[test]
fn grouped_queries_and_keys_are_the_composition() {
    let (b, s, h, kv, d) = (2, 5, 6, 2, 8);
    let projected = tensor(&[b, s, (h + 2 * kv) * d], DType::F32, Data::Normal, 1);
    let [query, key] = [2, 3].map(|seed| tensor(&[d], DType::F32, Data::Normal, seed));
    let (cos, sin) = tables(s, d / 2);
    let norms = [HeadNorm { tokens: s, query: &query, key: &key }];
    for pairing in [Pairing::Half, Pairing::Interleaved] {
        let alone = |start, heads, weight| {
            let heads = heads_of(&projected, start, heads, d).unwrap();
            norm_rope(&heads, weight, &cos, &sin, EPS, pairing).unwrap()
        };
        for x in views(&projected) {
            let (q, k) = grouped_qk_norm_rope(&x, [h, kv], &norms, &cos, &sin, EPS, pairing).unwrap();
            assert_eq!((q.dims(), k.dims()), (&[b, s, h, d][..], &[b, s, kv, d][..]));
            assert_eq!(to_f64(&q), to_f64(&alone(0, h, &query)), "{pairing:?}");
            assert_eq!(to_f64(&k), to_f64(&alone(h * d, kv, &key)), "{pairing:?}");
        }
    }
    for heads in [[6, 0], [0, 2], [6, 5], [usize::MAX, 1]] {
        assert!(grouped_qk_norm_rope(&projected, heads, &norms, &cos, &sin, EPS, Pairing::Half).is_err(), "{heads:?}");
    }
}

/// What devices without a kernel run.
#[test]
fn compositions_agree() {
    let (b, s, h, d) = (1, 4, 2, 6);
    let projected = tensor(&[b, s, 2 * h * d], DType::F32, Data::Normal, 1);
    let weight = tensor(&[d], DType::F32, Data::Normal, 2);
    let (cos, sin) = tables(s, d / 2);
    let other = tensor(&[d], DType::F32, Data::Normal, 3);
    let run = || Run { tokens: s / 2, weights: vec![&weight, &other] };
    let x = projected.reshape((b, s, 2 * h, d)).unwrap();
    let problem = |x, heads| Problem {
        op: "test",
        x,
        layout: Layout::contiguous((b, s, 2 * h, d)),
        heads,
        runs: vec![run(), run()],
        cos: &cos,
        sin: &sin,
        eps: EPS,
        pairing: Pairing::Interleaved,
    };
    for x in [&projected, &x] {
        for heads in [h, 2 * h - 1] {
            assert_eq!(to_f64(&problem(x, heads).run().unwrap()), to_f64(&problem(x, heads).composed().unwrap()));
        }
    }
}

#[test]
fn heads_are_views_where_they_can_be() {
    let x = tensor(&[2, 3, 24], DType::F32, Data::Normal, 1);
    let view = heads_of(&x, 8, 3, 4).unwrap();
    assert_eq!((view.dims(), view.stride(), view.layout().start_offset()), (&[2, 3, 3, 4][..], &[72, 24, 4, 1][..], 8));
    let copy = heads_of(&x, 3, 3, 5).unwrap();
    assert!(copy.is_contiguous());
    assert_eq!(to_f64(&copy), to_f64(&x.narrow(2, 3, 15).unwrap()));
    assert!(matches!(heads_of(&x, 8, 5, 4), Err(Error::Shape { .. })));
    assert!(matches!(heads_of(&x, usize::MAX, 1, 4), Err(Error::Shape { .. })));
}

#[test]
fn bad_operands_are_errors() {
    let (s, d) = (4, 6);
    let projected = tensor(&[1, s, 30], DType::F32, Data::Normal, 1);
    let weight = tensor(&[d], DType::F32, Data::Normal, 2);
    let (cos, sin) = tables(s, d / 2);
    let run = |tokens, query, key| HeadNorm { tokens, query, key };
    let both = run(s, &weight, &weight);
    let error = |projected: &Tensor, heads, norms: &[HeadNorm<'_>], eps| {
        qk_norm_rope(projected, heads, norms, &cos, &sin, eps).unwrap_err()
    };
    assert!(matches!(error(&projected, 3, &[both], EPS), Error::Shape { operand: "projected", .. }));
    assert!(matches!(error(&projected, usize::MAX, &[both], EPS), Error::Shape { operand: "projected", .. }));
    assert!(matches!(error(&projected, 0, &[both], EPS), Error::Argument { .. }));
    assert!(matches!(error(&projected, 2, &[], EPS), Error::Argument { .. }));
    assert!(matches!(error(&projected, 2, &[run(3, &weight, &weight)], EPS), Error::Argument { .. }));
    assert!(matches!(error(&projected, 2, &[both], f64::NAN), Error::Argument { .. }));
    let short = weight.narrow(0, 0, 4).unwrap();
    assert!(matches!(error(&projected, 2, &[run(s, &weight, &short)], EPS), Error::Shape { operand: "weight", .. }));
    let odd = weight.narrow(0, 0, 5).unwrap();
    assert!(matches!(error(&projected, 2, &[run(s, &odd, &odd)], EPS), Error::Shape { .. }));
    let tracked = Var::from_tensor(&projected).unwrap();
    assert!(matches!(error(tracked.as_tensor(), 2, &[both], EPS), Error::Argument { .. }));
    let x = projected.reshape((1, s, 5, d)).unwrap();
    let table = sin.to_dtype(DType::BF16).unwrap();
    let wrong = norm_rope(&x, &weight, &cos, &table, EPS, Pairing::Half);
    assert!(matches!(wrong, Err(Error::DType { operand: "sin", .. })));
    let wrong = norm_rope(&projected, &weight, &cos, &sin, EPS, Pairing::Half);
    assert!(matches!(wrong, Err(Error::Shape { operand: "x", .. })));
}

#[test]
fn empty_operands_give_empty_results() {
    let x = Tensor::zeros((2, 0, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let table = Tensor::zeros((0, 2), DType::F32, &Device::Cpu).unwrap();
    let weight = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(norm_rope(&x, &weight, &table, &table, EPS, Pairing::Half).unwrap().dims(), [2, 0, 3, 4]);
}
