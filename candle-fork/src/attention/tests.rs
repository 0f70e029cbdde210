use candle_core::{D, DType, Device, IndexOp, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::{
    DTYPES, Data, assert_rounded_once, assert_same_bits_for_all_thread_counts, tensor, to_f64, views,
};

fn operands(e: Extents, dtype: DType, data: Data) -> [Tensor; 3] {
    [
        tensor(&[e.batch, e.q_len, e.heads, e.width], dtype, data, 1),
        tensor(&[e.batch, e.k_len, e.kv_heads, e.width], dtype, data, 2),
        tensor(&[e.batch, e.k_len, e.kv_heads, e.width], dtype, Data::Normal, 3),
    ]
}

/// The largest value, for every entry.
fn bound(want: &[f64]) -> Vec<f64> {
    vec![want.iter().fold(0.0, |m: f64, x| m.max(x.abs())); want.len()]
}

fn check_case(e: Extents, dtype: DType, data: Data, mask: AttentionMask, strided: bool) {
    let [q, k, v] = operands(e, dtype, data);
    let scale = (e.width as f32).powf(-0.5);
    let want = reference::attention(&to_f64(&q), &to_f64(&k), &to_f64(&v), e, f64::from(scale), mask);
    let terms = bound(&want);
    let case = format!("{e:?} {dtype:?} {data:?} {mask:?}");
    let y = attention(&q, &k, &v, scale, mask).unwrap();
    assert_eq!(y.dims(), [e.batch, e.q_len, e.heads, e.width]);
    assert_rounded_once(&y, &want, &terms, 2e-6, &case);
    if strided {
        for ((q, k), v) in views(&q).iter().zip(&views(&k)).zip(views(&v).iter().rev()) {
            assert_rounded_once(&attention(q, k, v, scale, mask).unwrap(), &want, &terms, 2e-6, &case);
        }
    }
    let composed = device::attention([&q, &k, &v], e, scale, mask).unwrap();
    assert_rounded_once(&composed, &want, &terms, 2e-6, &format!("composition {case}"));
}

#[test]
fn attention_agrees_with_f64() {
    // Extents: 1, odd, prime, beside the blocks of 24 to 192 queries and 128 or 256 keys, wide heads, shared key heads.
    let cases = [
        (1, 1, 1, 1, 1, 8),
        (2, 3, 5, 2, 1, 8),
        (1, 1, 257, 4, 2, 20),
        (2, 25, 31, 6, 3, 20),
        (1, 131, 259, 3, 3, 96),
        (1, 193, 255, 2, 1, 128),
        (3, 24, 256, 4, 4, 33),
        (1, 60, 513, 1, 1, 512),
        (1, 129, 129, 1, 1, 300),
    ];
    for (batch, q_len, k_len, heads, kv_heads, width) in cases {
        let e = Extents { batch, q_len, k_len, heads, kv_heads, width };
        for mask in [AttentionMask::Full, AttentionMask::Causal, AttentionMask::Prefix] {
            check_case(e, DType::F32, Data::Normal, mask, true);
        }
        check_case(e, DType::F32, Data::Sparse, AttentionMask::Full, false);
        check_case(e, DType::F32, Data::Scaled(1e-12), AttentionMask::Causal, false);
        for dtype in [DType::F16, DType::BF16] {
            check_case(e, dtype, Data::Normal, AttentionMask::Causal, q_len < 100);
        }
    }
}

/// A text before padding: rows beyond the keys see all of them. Keys around the blocks of keys.
#[test]
fn padding_sees_the_whole_text() {
    for (q_len, k_len, width) in [(7, 1, 8), (70, 52, 20), (600, 256, 40), (300, 257, 12), (40, 39, 300)] {
        let e = Extents { batch: 2, q_len, k_len, heads: 4, kv_heads: 2, width };
        check_case(e, DType::F32, Data::Normal, AttentionMask::Prefix, q_len < 100);
        check_case(e, DType::BF16, Data::Normal, AttentionMask::Prefix, false);
        let [q, k, v] = operands(e, DType::F32, Data::Normal);
        let prefix = attention(&q, &k, &v, 0.3, AttentionMask::Prefix).unwrap();
        let text = attention(&q.narrow(1, 0, k_len).unwrap(), &k, &v, 0.3, AttentionMask::Causal).unwrap();
        assert_eq!(to_f64(&prefix.narrow(1, 0, k_len).unwrap()), to_f64(&text), "{e:?}");
    }
}

/// Scores of hundreds: one weight is nearly 1, and exponentials without the running maximum would overflow.
#[test]
fn sharp_softmax_agrees_with_f64() {
    let e = Extents { batch: 1, q_len: 40, k_len: 600, heads: 2, kv_heads: 2, width: 64 };
    let [q, k, v] = operands(e, DType::F32, Data::Scaled(15.0));
    let want = reference::attention(&to_f64(&q), &to_f64(&k), &to_f64(&v), e, 0.125, AttentionMask::Full);
    let y = attention(&q, &k, &v, 0.125, AttentionMask::Full).unwrap();
    // A score near 500 is off by an ulp of about 3e-5 for every few roundings.
    assert_rounded_once(&y, &want, &bound(&want), 3e-4, "sharp");
}

#[test]
fn weights_sum_to_one() {
    for mask in [AttentionMask::Full, AttentionMask::Causal] {
        let e = Extents { batch: 2, q_len: 150, k_len: 700, heads: 2, kv_heads: 1, width: 40 };
        let [q, k, v] = operands(e, DType::F32, Data::Scaled(3.0));
        let ones = v.ones_like().unwrap();
        for y in to_f64(&attention(&q, &k, &ones, 0.3, mask).unwrap()) {
            assert!((y - 1.0).abs() <= 5e-7, "{y}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// A causal row is full attention over the keys up to its own.
    #[test]
    fn causal_rows_see_their_prefix(q_len in 1usize..60, more in 0usize..300, width in 1usize..40, row in 0usize..60) {
        let (e, row) = (Extents { batch: 1, q_len, k_len: q_len + more, heads: 2, kv_heads: 2, width }, row % q_len);
        let [q, k, v] = operands(e, DType::F32, Data::Normal);
        let causal = attention(&q, &k, &v, 0.5, AttentionMask::Causal).unwrap().narrow(1, row, 1).unwrap();
        let seen = row + 1 + more;
        let prefix = |t: &Tensor| t.narrow(1, 0, seen).unwrap();
        let full = attention(&q.narrow(1, row, 1).unwrap(), &prefix(&k), &prefix(&v), 0.5, AttentionMask::Full).unwrap();
        for (a, b) in to_f64(&causal).iter().zip(to_f64(&full)) {
            prop_assert!((a - b).abs() <= 1e-6, "{} {}", a, b);
        }
    }
}

/// q, k and v cut from one projection share one storage.
#[test]
fn parts_of_one_projection() {
    let (s, h, d) = (37, 3, 20);
    let qkv = tensor(&[2, s, 3, h, d], DType::F32, Data::Normal, 5);
    let part = |i: usize| qkv.i((.., .., i)).unwrap();
    assert!(!part(1).is_contiguous());
    let packed = |i: usize| part(i).contiguous().unwrap();
    let y = attention(&part(0), &part(1), &part(2), 0.2, AttentionMask::Causal).unwrap();
    let want = attention(&packed(0), &packed(1), &packed(2), 0.2, AttentionMask::Causal).unwrap();
    assert_eq!(to_f64(&y), to_f64(&want));
}

/// Into columns of a wider buffer: the bits of the result, and the rest untouched.
#[test]
fn parts_of_a_buffer_are_written() {
    for dtype in DTYPES {
        let e = Extents { batch: 2, q_len: 9, k_len: 11, heads: 4, kv_heads: 2, width: 12 };
        let [q, k, v] = operands(e, dtype, Data::Normal);
        let buffer = tensor(&[2, 9, 4, 20], dtype, Data::LargeMean, 7);
        let before = to_f64(&buffer);
        let out = buffer.narrow(3, 5, 12).unwrap();
        attention_into(&q, &k, &v, 0.3, AttentionMask::Causal, &out).unwrap();
        let want = attention(&q, &k, &v, 0.3, AttentionMask::Causal).unwrap();
        assert_eq!(to_f64(&out), to_f64(&want), "{dtype:?}");
        let rest = |values: Vec<f64>| -> Vec<f64> {
            values.chunks(20).flat_map(|row| row[..5].iter().chain(&row[17..])).copied().collect()
        };
        assert_eq!(rest(to_f64(&buffer)), rest(before), "{dtype:?}");
    }
}

#[test]
fn bad_targets_are_errors() {
    let of = |dims: &[usize]| tensor(dims, DType::F32, Data::Normal, 1);
    let (q, k) = (of(&[1, 3, 4, 8]), of(&[1, 5, 2, 8]));
    let into = |out: &Tensor| attention_into(&q, &k, &k, 1.0, AttentionMask::Full, out);
    assert!(into(&of(&[1, 3, 4, 8])).is_ok());
    assert!(matches!(into(&of(&[1, 4, 3, 8])), Err(Error::Shape { operand: "out", .. })));
    assert!(matches!(into(&of(&[1, 3, 8, 4]).t().unwrap()), Err(Error::Shape { operand: "out", .. })));
    let half = of(&[1, 3, 4, 8]).to_dtype(DType::BF16).unwrap();
    assert!(matches!(into(&half), Err(Error::DType { operand: "out", .. })));
    assert!(matches!(into(&q), Err(Error::Argument { .. })));
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for (width, mask) in [(20, AttentionMask::Causal), (264, AttentionMask::Full)] {
        let e = Extents { batch: 2, q_len: 211, k_len: 307, heads: 2, kv_heads: 1, width };
        let [q, k, v] = operands(e, DType::F32, Data::Normal);
        assert_same_bits_for_all_thread_counts(|| attention(&q, &k, &v, 0.3, mask).unwrap());
    }
}

#[test]
fn nan_comes_through_in_its_row_alone() {
    let e = Extents { batch: 1, q_len: 30, k_len: 300, heads: 1, kv_heads: 1, width: 16 };
    let [q, k, v] = operands(e, DType::F32, Data::Normal);
    let nan = Tensor::full(f32::NAN, (1, 1, 1, 16), &Device::Cpu).unwrap();
    let poisoned = Tensor::cat(&[q.narrow(1, 0, 7).unwrap(), nan, q.narrow(1, 8, 22).unwrap()], 1).unwrap();
    let y = to_f64(&attention(&poisoned, &k, &v, 0.25, AttentionMask::Full).unwrap());
    for (i, row) in y.chunks(16).enumerate() {
        assert!(row.iter().all(|y| y.is_nan() == (i == 7)), "{i}");
    }
}

#[test]
fn empty_operands_give_empty_results() {
    let q = Tensor::zeros((2, 0, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let k = Tensor::zeros((2, 5, 3, 4), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(attention(&q, &k, &k, 1.0, AttentionMask::Full).unwrap().dims(), [2, 0, 3, 4]);
    let none = Tensor::zeros((2, 5, 3, 0), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(attention(&none, &none, &none, 1.0, AttentionMask::Full).unwrap().dims(), [2, 5, 3, 0]);
}

#[test]
fn bad_operands_are_errors() {
    let of = |dims: &[usize]| tensor(dims, DType::F32, Data::Normal, 1);
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, 1.0, AttentionMask::Causal);
    let (q, k) = (of(&[1, 3, 4, 8]), of(&[1, 5, 2, 8]));
    assert!(run(&q, &k, &k).is_ok());
    assert!(matches!(run(&q.squeeze(0).unwrap(), &k, &k), Err(Error::Shape { operand: "q", .. })));
    for bad in [&[2, 5, 2, 8][..], &[1, 5, 2, 9], &[1, 5, 3, 8], &[1, 5, 0, 8], &[1, 0, 2, 8], &[5, 2, 8]] {
        assert!(matches!(run(&q, &of(bad), &of(bad)), Err(Error::Shape { operand: "k", .. })), "{bad:?}");
    }
    assert!(matches!(run(&q, &k, &of(&[1, 6, 2, 8])), Err(Error::Shape { operand: "v", .. })));
    assert!(matches!(run(&of(&[1, 6, 4, 8]), &k, &k), Err(Error::Shape { operand: "q", .. })));
    for scale in [f32::NAN, f32::INFINITY] {
        assert!(matches!(attention(&q, &k, &k, scale, AttentionMask::Full), Err(Error::Argument { .. })));
    }
    let half = k.to_dtype(DType::F16).unwrap();
    assert!(matches!(run(&q, &half, &k), Err(Error::DType { operand: "k", .. })));
    assert!(matches!(run(&q, &k, &half), Err(Error::DType { operand: "v", .. })));
    assert!(matches!(run(&Var::from_tensor(&q).unwrap(), &k, &k), Err(Error::Argument { .. })));
    // Keys of one head and of one position broadcast in other libraries; here they must fit.
    assert!(matches!(run(&q, &k.narrow(D::Minus1, 0, 1).unwrap(), &k), Err(Error::Shape { .. })));
    for dtype in DTYPES {
        assert!(run(&q.to_dtype(dtype).unwrap(), &k.to_dtype(dtype).unwrap(), &k.to_dtype(dtype).unwrap()).is_ok());
    }
}
