use candle_core::{DType, Device, IndexOp, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::{
    AttentionMask, attention,
    testing::{DTYPES, Data, assert_rounded_once, assert_same_bits_for_all_thread_counts, tensor, to_f64, views},
};

fn operands(e: Extents, dtype: DType, data: Data) -> [Tensor; 3] {
    let [t, h, w] = e.grid;
    let of = |data, seed| tensor(&[e.batch, t, h, w, e.heads, e.width], dtype, data, seed);
    [of(data, 1), of(data, 2), of(Data::Normal, 3)]
}

/// The largest value, for every entry.
fn bound(want: &[f64]) -> Vec<f64> {
    vec![want.iter().fold(0.0, |m: f64, x| m.max(x.abs())); want.len()]
}

fn exact([q, k, v]: &[Tensor; 3], e: Extents, window: [usize; 3], scale: f32) -> Vec<f64> {
    let [q, k, v] = [to_f64(q), to_f64(k), to_f64(v)];
    reference::neighborhood_attention([&q, &k, &v], e, window, f64::from(scale))
}

fn check_case(e: Extents, window: [usize; 3], scale: f32, dtype: DType, data: Data, relative: f64) {
    let all = operands(e, dtype, data);
    let want = exact(&all, e, window, scale);
    let [q, k, v] = &all;
    let case = format!("{e:?} {window:?} {scale} {dtype:?} {data:?}");
    for ((q, k), v) in views(q).iter().zip(&views(k)).zip(views(v).iter().rev()) {
        let y = neighborhood_attention(q, k, v, window, scale).unwrap();
        assert_eq!(y.dims(), q.dims(), "{case}");
        assert_rounded_once(&y, &want, &bound(&want), relative, &case);
    }
}

/// Grid, window, batch, heads, width.
type Case = ([usize; 3], [usize; 3], usize, usize, usize);

const CASES: [Case; 27] = [
    // All axes clamped, points, windows as wide as the grid, one position more.
    ([1, 4, 4], [3, 7, 7], 2, 2, 8),
    ([1, 1, 1], [11, 11, 11], 1, 3, 16),
    ([1, 1, 1], [1, 1, 1], 1, 1, 8),
    ([3, 7, 7], [3, 7, 7], 1, 2, 8),
    ([4, 8, 8], [3, 7, 7], 1, 1, 16),
    ([12, 12, 12], [11, 11, 11], 1, 1, 8),
    // Axes clamped in part.
    ([9, 16, 16], [11, 11, 11], 1, 1, 8),
    ([2, 9, 4], [5, 3, 9], 2, 1, 8),
    // Boxes that touch no border, primes, tails.
    ([12, 20, 20], [3, 5, 5], 1, 1, 8),
    ([23, 13, 11], [5, 5, 5], 1, 1, 8),
    ([13, 15, 17], [3, 7, 7], 1, 1, 8),
    ([5, 21, 10], [3, 3, 3], 1, 2, 8),
    ([17, 5, 6], [11, 3, 3], 1, 2, 8),
    ([33, 4, 5], [11, 3, 3], 1, 1, 24),
    // Flat grids, lines.
    ([1, 24, 19], [11, 11, 11], 1, 1, 8),
    ([24, 1, 19], [11, 11, 11], 1, 1, 8),
    ([24, 19, 1], [11, 11, 11], 1, 1, 8),
    ([1, 1, 100], [1, 1, 33], 1, 2, 8),
    ([100, 1, 1], [33, 1, 1], 1, 2, 8),
    ([1, 100, 1], [1, 9, 1], 1, 2, 8),
    // Rows wider than a step, several steps to a plane.
    ([1, 3, 700], [1, 3, 601], 1, 1, 8),
    ([2, 40, 40], [1, 31, 31], 1, 1, 8),
    // One-wide windows, heads, batches.
    ([6, 7, 8], [1, 1, 1], 2, 1, 8),
    ([4, 7, 5], [3, 1, 1], 3, 4, 8),
    ([4, 7, 5], [1, 7, 7], 1, 5, 33),
    ([3, 5, 4], [3, 3, 3], 1, 2, 80),
    ([3, 5, 4], [3, 3, 3], 1, 1, 256),
];

#[test]
fn neighborhood_attention_agrees_with_f64() {
    for (grid, window, batch, heads, width) in CASES {
        let e = Extents { batch, grid, heads, width };
        check_case(e, window, (width as f32).powf(-0.5), DType::F32, Data::Normal, 2e-6);
        check_case(e, window, 1.0, DType::F32, Data::Sparse, 5e-6);
        for dtype in [DType::F16, DType::BF16] {
            check_case(e, window, (width as f32).powf(-0.5), dtype, Data::Normal, 2e-6);
        }
    }
}

#[test]
fn every_scale_is_legal() {
    let e = Extents { batch: 1, grid: [3, 9, 10], heads: 2, width: 16 };
    for scale in [0.0, -0.5, 1e-20, 2.0] {
        check_case(e, [3, 5, 5], scale, DType::F32, Data::Normal, 1e-5);
    }
}

/// Scores of thousands: one weight is nearly 1, and exponentials without the running maximum would overflow.
#[test]
fn sharp_softmax_is_finite() {
    let e = Extents { batch: 1, grid: [4, 9, 9], heads: 1, width: 32 };
    let [q, k, v] = operands(e, DType::F32, Data::Scaled(50.0));
    let largest = to_f64(&v).iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let y = to_f64(&neighborhood_attention(&q, &k, &v, [3, 5, 5], 1.0).unwrap());
    assert!(y.iter().all(|y| y.abs() <= 1.000_001 * largest));
}

/// Equal scores make the result the mean of the window; the values name their keys by powers of two along each axis.
#[test]
fn windows_hold_exactly_their_keys() {
    for (grid, window) in [([5, 9, 11], [3, 5, 7]), ([18, 6, 7], [11, 3, 5]), ([1, 19, 20], [1, 11, 9])] {
        let [t, h, w] = grid;
        let e = Extents { batch: 1, grid, heads: 1, width: 64 };
        let mut values = vec![0f32; e.positions() * 64];
        for (position, row) in values.chunks_exact_mut(64).enumerate() {
            let at = [position / (h * w), position / w % h, position % w];
            (0..3).for_each(|axis| row[20 * axis + at[axis]] = 1.0);
        }
        let v = Tensor::from_vec(values, (1, t, h, w, 1, 64), &Device::Cpu).unwrap();
        let y = neighborhood_attention(&v.zeros_like().unwrap(), &v, &v, window, 1.0).unwrap();
        for (position, row) in to_f64(&y).chunks_exact(64).enumerate() {
            let at = [position / (h * w), position / w % h, position % w];
            for (axis, windows) in e.axes(window).into_iter().enumerate() {
                for i in 0..windows.extent() {
                    let want = if windows.keys(at[axis]).contains(&i) { 1.0 / windows.window() as f64 } else { 0.0 };
                    assert!((row[20 * axis + i] - want).abs() < 1e-6, "{grid:?} {window:?} {at:?} axis {axis} {i}");
                }
            }
        }
    }
}

/// Keys outside of a query's window are NaN, and values huge: its result does not move by a bit.
#[test]
fn keys_outside_of_a_window_do_not_count() {
    let e = Extents { batch: 1, grid: [18, 7, 9], heads: 1, width: 8 };
    let window = [5, 3, 5];
    let [q, k, v] = operands(e, DType::F32, Data::Normal);
    let clean = to_f64(&neighborhood_attention(&q, &k, &v, window, 0.4).unwrap());
    let axes = e.axes(window);
    for query in (0..e.positions()).step_by(37) {
        let at = |position: usize| [position / 63, position / 9 % 7, position % 9];
        let seen = |key: usize| (0..3).all(|i| axes[i].keys(at(query)[i]).contains(&at(key)[i]));
        let poisoned = |tensor: &Tensor, poison: f32| {
            let mut values: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            for (key, row) in values.chunks_exact_mut(8).enumerate().filter(|(key, _)| !seen(*key)) {
                let _ = key;
                row.fill(poison);
            }
            Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap()
        };
        let (k, v) = (poisoned(&k, f32::NAN), poisoned(&v, 1e30));
        let y = to_f64(&neighborhood_attention(&q, &k, &v, window, 0.4).unwrap());
        assert_eq!(y[query * 8..][..8], clean[query * 8..][..8], "{query}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Windows as wide as the grid see everything.
    #[test]
    fn full_windows_are_full_attention(t in 1usize..6, h in 1usize..10, w in 1usize..10, heads in 1usize..3) {
        let e = Extents { batch: 2, grid: [t, h, w], heads, width: 8 };
        let [q, k, v] = operands(e, DType::F32, Data::Normal);
        let flat = |x: &Tensor| x.reshape((2, t * h * w, heads, 8)).unwrap();
        let full = attention(&flat(&q), &flat(&k), &flat(&v), 0.3, AttentionMask::Full).unwrap();
        let y = neighborhood_attention(&q, &k, &v, [11, 11, 11], 0.3).unwrap();
        for (a, b) in to_f64(&y).iter().zip(to_f64(&full)) {
            prop_assert!((a - b).abs() <= 1e-6, "{} {}", a, b);
        }
    }

    #[test]
    fn any_grid_and_window_agree_with_f64(
        grid in [1usize..20, 1usize..14, 1usize..14],
        halves in [0usize..7, 0usize..7, 0usize..7],
    ) {
        let e = Extents { batch: 1, grid, heads: 1, width: 8 };
        let window = halves.map(|half| 2 * half + 1);
        let all = operands(e, DType::F32, Data::Normal);
        let want = exact(&all, e, window, 0.35);
        let [q, k, v] = &all;
        let y = neighborhood_attention(q, k, v, window, 0.35).unwrap();
        for (a, b) in to_f64(&y).iter().zip(want) {
            prop_assert!((a - b).abs() <= 5e-6, "{} {}", a, b);
        }
    }
}

/// q, k and v cut from one projection share one storage.
#[test]
fn parts_of_one_projection() {
    let qkv = tensor(&[2, 3, 6, 7, 3, 2, 16], DType::F32, Data::Normal, 5);
    let part = |i: usize| qkv.i((.., .., .., .., i)).unwrap();
    assert!(!part(1).is_contiguous());
    let packed = |i: usize| part(i).contiguous().unwrap();
    let y = neighborhood_attention(&part(0), &part(1), &part(2), [3, 3, 5], 0.2).unwrap();
    let want = neighborhood_attention(&packed(0), &packed(1), &packed(2), [3, 3, 5], 0.2).unwrap();
    assert_eq!(to_f64(&y), to_f64(&want));
}

#[test]
fn items_of_a_batch_and_threads_do_not_change_bits() {
    let e = Extents { batch: 2, grid: [9, 10, 11], heads: 2, width: 16 };
    let [q, k, v] = operands(e, DType::F32, Data::Normal);
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| neighborhood_attention(q, k, v, [5, 5, 5], 0.3).unwrap();
    let whole = to_f64(&run(&q, &k, &v));
    for item in 0..2 {
        let [q, k, v] = [&q, &k, &v].map(|t| t.narrow(0, item, 1).unwrap());
        let alone = to_f64(&run(&q, &k, &v));
        assert_eq!(whole[item * alone.len()..][..alone.len()], alone);
    }
    assert_same_bits_for_all_thread_counts(|| run(&q, &k, &v));
}

#[test]
fn some_planes_have_the_bits_of_all() {
    for (grid, window, width) in [([19, 6, 7], [5, 3, 5], 16), ([37, 5, 4], [11, 3, 3], 8), ([6, 9, 9], [3, 5, 5], 24)]
    {
        let e = Extents { batch: 2, grid, heads: 2, width };
        for dtype in DTYPES {
            let [q, k, v] = operands(e, dtype, Data::Normal);
            let whole = neighborhood_attention(&q, &k, &v, window, 0.3).unwrap();
            for (first, frames) in [(0, 1), (0, 4), (1, 5), (grid[0] - 3, 3), (grid[0] - 1, 1), (2, 0), (0, grid[0])] {
                let part = q.narrow(1, first, frames).unwrap();
                let part = neighborhood_attention_of_planes(&part, &k, &v, first, window, 0.3).unwrap();
                let want = whole.narrow(1, first, frames).unwrap();
                assert_eq!(to_f64(&part), to_f64(&want), "{grid:?} {window:?} {dtype:?} {first} {frames}");
            }
        }
    }
}

/// More planes and rows than a launch has blocks along its second and third axis.
#[test]
fn long_grids() {
    for grid in [[70_000, 1, 1], [1, 70_000, 1], [300, 300, 1]] {
        let e = Extents { batch: 1, grid, heads: 1, width: 8 };
        check_case(e, [3, 5, 3], 0.3, DType::F32, Data::Normal, 2e-6);
    }
}

#[test]
fn nan_comes_through_where_it_is_seen() {
    let e = Extents { batch: 1, grid: [1, 1, 40], heads: 1, width: 8 };
    let [q, k, v] = operands(e, DType::F32, Data::Normal);
    let mut keys: Vec<f32> = k.flatten_all().unwrap().to_vec1().unwrap();
    keys[20 * 8] = f32::NAN;
    let k = Tensor::from_vec(keys, k.dims(), &Device::Cpu).unwrap();
    let y = to_f64(&neighborhood_attention(&q, &k, &v, [1, 1, 5], 0.4).unwrap());
    for (i, row) in y.chunks_exact(8).enumerate() {
        assert!(row.iter().all(|y| y.is_nan() == (18..=22).contains(&i)), "{i}");
    }
}

#[test]
fn empty_operands_give_empty_results() {
    for dims in [[0, 2, 3, 4, 1, 8], [1, 0, 3, 4, 1, 8], [1, 2, 3, 0, 1, 8], [1, 2, 3, 4, 0, 8], [1, 2, 3, 4, 1, 0]] {
        let x = Tensor::zeros(&dims, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(neighborhood_attention(&x, &x, &x, [3, 3, 3], 1.0).unwrap().dims(), dims);
    }
}

#[test]
fn bad_operands_are_errors() {
    let of = |dims: &[usize]| tensor(dims, DType::F32, Data::Normal, 1);
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| neighborhood_attention(q, k, v, [3, 3, 3], 1.0);
    let x = of(&[1, 2, 3, 4, 2, 8]);
    assert!(run(&x, &x, &x).is_ok());
    assert!(matches!(run(&x.squeeze(0).unwrap(), &x, &x), Err(Error::Shape { operand: "q", .. })));
    for bad in [&[1, 2, 3, 4, 1, 8][..], &[1, 2, 3, 5, 2, 8], &[2, 2, 3, 4, 2, 8], &[1, 2, 3, 4, 2, 16], &[3, 4, 2, 8]]
    {
        assert!(matches!(run(&x, &of(bad), &x), Err(Error::Shape { operand: "k", .. })), "{bad:?}");
        assert!(matches!(run(&x, &x, &of(bad)), Err(Error::Shape { operand: "v", .. })), "{bad:?}");
    }
    for window in [[0, 3, 3], [3, 2, 3], [3, 3, 4], [0; 3]] {
        let error = neighborhood_attention(&x, &x, &x, window, 1.0).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }), "{error}");
        assert!(error.to_string().contains("expected odd extents"), "{error}");
    }
    for (first, frames) in [(1, 2), (3, 0), (usize::MAX, 1)] {
        let part = x.narrow(1, 0, frames).unwrap();
        let error = neighborhood_attention_of_planes(&part, &x, &x, first, [3; 3], 1.0).unwrap_err();
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("planes"), "{error}");
    }
    for scale in [f32::NAN, f32::INFINITY] {
        assert!(matches!(neighborhood_attention(&x, &x, &x, [1; 3], scale), Err(Error::Argument { .. })));
    }
    let half = x.to_dtype(DType::F16).unwrap();
    assert!(matches!(run(&x, &half, &x), Err(Error::DType { operand: "k", .. })));
    assert!(matches!(run(&x, &x, &half), Err(Error::DType { operand: "v", .. })));
    let whole = x.to_dtype(DType::U32).unwrap();
    assert!(matches!(run(&whole, &whole, &whole), Err(Error::DType { operand: "q", .. })));
    assert!(matches!(run(&Var::from_tensor(&x).unwrap(), &x, &x), Err(Error::Argument { .. })));
    for dtype in DTYPES {
        let x = x.to_dtype(dtype).unwrap();
        assert!(neighborhood_attention(&x, &x, &x, [usize::MAX; 3], 1.0).is_ok(), "windows wider than anything");
    }
}
