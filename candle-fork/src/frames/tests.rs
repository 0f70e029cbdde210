use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::{
    layout::{channels_last, is_channels_last, memory_order},
    testing::{DTYPES, Data, assert_rounded_once, tensor, to_f64, views},
};

/// The tensor in both memory orders, and cut from a wider one.
fn orders(x: &Tensor) -> Vec<Tensor> {
    let mut all = views(x);
    all.push(channels_last(x).unwrap());
    all
}

/// Value at an index of a tensor given as values in row-major order.
fn at(values: &[f64], dims: &[usize], index: [usize; 5]) -> f64 {
    values[index.iter().zip(dims).fold(0, |place, (i, n)| place * n + i)]
}

/// All indices of a shape.
fn indices(dims: &[usize]) -> impl Iterator<Item = [usize; 5]> {
    let dims: [usize; 5] = dims.try_into().unwrap();
    (0..dims.iter().product::<usize>()).map(move |mut place| {
        let mut index = [0; 5];
        for axis in (0..5).rev() {
            index[axis] = place % dims[axis];
            place /= dims[axis];
        }
        index
    })
}

/// Checks a copy against the index in `x` that each index of the result comes from, in x's memory order.
fn assert_copied(y: &Tensor, x: &Tensor, source: impl Fn([usize; 5]) -> [usize; 5]) {
    let (got, from) = (to_f64(y), to_f64(x));
    for (index, got) in indices(y.dims()).zip(got) {
        assert_eq!(got, at(&from, x.dims(), source(index)), "{index:?} of {:?}", y.dims());
    }
    // One channel, or one position, is in both orders.
    let both = y.is_contiguous() && is_channels_last(y);
    assert!(both || (y.is_contiguous() || is_channels_last(y)) && memory_order(y) == memory_order(x));
}

#[test]
fn frames_are_joined_in_order() {
    for dtype in DTYPES {
        for (n, c, p, t) in [(1, 3, 2, 1), (2, 8, 1, 4), (1, 2, 0, 3), (1, 16, 2, 0)] {
            let past = tensor(&[n, c, p, 4, 5], dtype, Data::Normal, 1);
            let x = tensor(&[n, c, t, 4, 5], dtype, Data::Normal, 2);
            let want = to_f64(&Tensor::cat(&[&past, &x], 2).unwrap());
            for past in orders(&past) {
                for x in orders(&x) {
                    let y = cat_frames(&past, &x).unwrap();
                    assert_eq!((y.dims(), to_f64(&y)), (&[n, c, p + t, 4, 5][..], want.clone()));
                    assert_eq!(memory_order(&y), memory_order(&x));
                }
            }
        }
    }
}

#[test]
fn the_last_frames_are_kept_in_memory_of_their_own() {
    for dtype in DTYPES {
        for (n, t, count) in [(1, 4, 2), (2, 3, 1), (1, 2, 2), (2, 1, 2), (1, 3, 0)] {
            let x = tensor(&[n, 6, t, 3, 4], dtype, Data::Normal, 1);
            for x in orders(&x) {
                let kept = t.min(count);
                let tail = tail_frames(&x, count).unwrap();
                assert_eq!(tail.dims(), [n, 6, kept, 3, 4]);
                if kept > 0 {
                    assert_copied(&tail, &x, |[n, c, i, h, w]| [n, c, t - kept + i, h, w]);
                }
                let own = |t: &Tensor| std::ptr::from_ref(&*t.storage_and_layout().0).addr();
                assert!(kept == t || own(&tail) != own(&x));
            }
        }
    }
}

#[test]
fn channels_split_into_frames() {
    for dtype in DTYPES {
        for (n, c, t) in [(1, 1, 1), (1, 8, 3), (2, 5, 2)] {
            let x = tensor(&[n, 2 * c, t, 3, 2], dtype, Data::Normal, 1);
            for x in orders(&x) {
                let y = split_pairs(&x).unwrap();
                assert_eq!(y.dims(), [n, c, 2 * t, 3, 2]);
                assert_copied(&y, &x, |[n, o, f, h, w]| [n, f % 2 * c + o, f / 2, h, w]);
            }
        }
    }
}

/// Channel of a square's pixel in row q and column r.
fn packed(order: PatchOrder, c: usize, p: usize, q: usize, r: usize) -> usize {
    match order {
        PatchOrder::ColumnMajor => (c * p + r) * p + q,
        PatchOrder::RowMajor => (c * p + q) * p + r,
    }
}

proptest! {
    #[test]
    fn squares_become_channels_and_come_back(
        n in 1usize..3, c in 1usize..4, t in 1usize..3, h in 1usize..4, w in 1usize..4, p in 1usize..4, rows: bool,
    ) {
        let order = if rows { PatchOrder::RowMajor } else { PatchOrder::ColumnMajor };
        let x = tensor(&[n, c, t, h * p, w * p], DType::BF16, Data::Normal, 1);
        for x in orders(&x) {
            let y = patchify(&x, p, order).unwrap();
            prop_assert_eq!(y.dims(), [n, c * p * p, t, h, w]);
            let back = unpatchify(&y, p, order).unwrap();
            prop_assert_eq!(to_f64(&back), to_f64(&x));
            if p > 1 {
                assert_copied(&back, &y, |[n, c, t, y, x]| [n, packed(order, c, p, y % p, x % p), t, y / p, x / p]);
            }
        }
    }
}

/// Shortcuts of the published networks, one that repeats unevenly, and one without factors: channels of x, channels of
/// main, factors in time and space.
const DUP_UPS: [(usize, usize, usize, usize); 5] =
    [(8, 8, 2, 2), (16, 8, 1, 2), (6, 3, 2, 2), (8, 3, 2, 2), (4, 4, 1, 1)];
const AVG_DOWNS: [(usize, usize, usize, usize); 5] =
    [(8, 8, 1, 2), (4, 8, 2, 2), (3, 8, 2, 2), (8, 8, 1, 1), (6, 3, 2, 1)];

#[test]
fn repeated_channels_are_added() {
    for dtype in DTYPES {
        for (a, b, ft, fs) in DUP_UPS {
            for (n, t, skipped) in [(1, 1, 0), (1, 1, ft - 1), (2, 3, 0), (1, 2, ft - 1)] {
                let x = tensor(&[n, a, t, 2, 3], dtype, Data::Normal, 1);
                let main = tensor(&[n, b, t * ft - skipped, 2 * fs, 3 * fs], dtype, Data::LargeMean, 2);
                let (xs, mains) = (to_f64(&x), to_f64(&main));
                let repeats = b * ft * fs * fs / a;
                let want: Vec<f64> = indices(main.dims())
                    .zip(&mains)
                    .map(|([n, o, f, y, x_], main)| {
                        let f = f + skipped;
                        let channel = (((o * ft + f % ft) * fs + y % fs) * fs + x_ % fs) / repeats;
                        main + at(&xs, x.dims(), [n, channel, f / ft, y / fs, x_ / fs])
                    })
                    .collect();
                for (main, x) in orders(&main).iter().zip(orders(&x).iter().rev()) {
                    let y = dup_up_add(main, x, ft, fs).unwrap();
                    assert_eq!(memory_order(&y), memory_order(main));
                    let case = format!("{dtype:?} {a} {b} {ft} {fs} {t} {skipped}");
                    assert_rounded_once(&y.contiguous().unwrap(), &want, &want, 0.0, &case);
                }
            }
        }
    }
}

#[test]
fn means_of_cells_are_added() {
    for dtype in DTYPES {
        for (a, b, ft, fs) in AVG_DOWNS {
            for (n, t) in [(1, 1), (2, 2), (1, 4), (1, 3)] {
                let x = tensor(&[n, a, t, 2 * fs, 3 * fs], dtype, Data::Normal, 1);
                let main = tensor(&[n, b, t.div_ceil(ft), 2, 3], dtype, Data::Normal, 2);
                let (xs, mains) = (to_f64(&x), to_f64(&main));
                let (cell, before) = (ft * fs * fs, t.next_multiple_of(ft) - t);
                let group = a * cell / b;
                let mut terms = Vec::new();
                let want: Vec<f64> = indices(main.dims())
                    .zip(&mains)
                    .map(|([n, o, f, y, x_], main)| {
                        let value = |i: usize| {
                            let (u, q, r) = (i / (fs * fs) % ft, i / fs % fs, i % fs);
                            let frame = (f * ft + u).checked_sub(before)?;
                            Some(at(&xs, x.dims(), [n, i / cell, frame, y * fs + q, x_ * fs + r]))
                        };
                        let values: Vec<f64> = (o * group..(o + 1) * group).filter_map(value).collect();
                        terms.push(main.abs() + values.iter().map(|v| v.abs()).sum::<f64>());
                        main + values.iter().sum::<f64>() / group as f64
                    })
                    .collect();
                for (main, x) in orders(&main).iter().zip(orders(&x).iter().rev()) {
                    let y = avg_down_add(main, x, ft, fs).unwrap();
                    assert_eq!(memory_order(&y), memory_order(main));
                    let case = format!("{dtype:?} {a} {b} {ft} {fs} {t}");
                    assert_rounded_once(&y.contiguous().unwrap(), &want, &terms, 1e-6, &case);
                }
            }
        }
    }
}

#[test]
fn pixels_become_bytes() {
    for dtype in DTYPES {
        for (c, p, t, h, w) in [(3, 1, 2, 4, 5), (3, 2, 1, 3, 4), (4, 1, 1, 2, 2), (1, 3, 2, 1, 2), (3, 1, 1, 33, 1000)]
        {
            // Deviations of 0.7: about a seventh lies outside of -1..=1.
            let x = tensor(&[1, c * p * p, t, h, w], dtype, Data::Scaled(0.7), 1);
            for order in [PatchOrder::ColumnMajor, PatchOrder::RowMajor] {
                let frames = unpatchify(&x, p, order).unwrap().to_dtype(DType::F32).unwrap();
                let planes = frames.squeeze(0).unwrap().permute((1, 2, 3, 0)).unwrap();
                let want: Vec<u8> = planes
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
                    .iter()
                    .map(|v| ((v + 1.0) / 2.0).clamp(0.0, 1.0) * 255.0)
                    .map(|v| v.round_ties_even() as u8)
                    .collect();
                for x in orders(&x) {
                    let y = frames_to_rgb8(&x, p, order).unwrap();
                    assert_eq!(y.pixels().dims(), [t, h * p, w * p, c]);
                    assert_eq!(y.pixels().flatten_all().unwrap().to_vec1::<u8>().unwrap(), want);
                    assert!(y.all_finite().unwrap());
                }
            }
        }
    }
}

#[test]
fn every_level_has_its_byte() {
    let levels: Vec<f32> = (0..=255).map(|level| level as f32 / 127.5 - 1.0).collect();
    let x = Tensor::from_vec(levels, (1, 1, 1, 16, 16), &Device::Cpu).unwrap();
    let y = frames_to_rgb8(&x, 1, PatchOrder::RowMajor).unwrap();
    assert_eq!(y.pixels().flatten_all().unwrap().to_vec1::<u8>().unwrap(), (0..=255).collect::<Vec<u8>>());
}

#[test]
fn what_is_not_finite_is_reported() {
    for (bad, byte) in [(f32::NAN, 0), (f32::INFINITY, 255), (f32::NEG_INFINITY, 0)] {
        let mut values = vec![0.25f32; 3 * 2 * 300 * 2];
        values[3 * 2 * 300 * 2 - 1] = bad;
        let x = Tensor::from_vec(values, (1, 3, 2, 300, 2), &Device::Cpu).unwrap();
        let y = frames_to_rgb8(&x, 1, PatchOrder::RowMajor).unwrap();
        assert!(!y.all_finite().unwrap());
        let bytes = y.pixels().flatten_all().unwrap().to_vec1::<u8>().unwrap();
        assert_eq!(bytes.last(), Some(&byte));
        assert!(bytes[..bytes.len() - 1].iter().all(|&byte| byte == 159));
    }
}

#[test]
fn empty_operands_give_empty_results() {
    let none = Tensor::zeros((1, 4, 0, 2, 2), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(cat_frames(&none, &none).unwrap().dims(), [1, 4, 0, 2, 2]);
    assert_eq!(tail_frames(&none, 2).unwrap().dims(), [1, 4, 0, 2, 2]);
    assert_eq!(split_pairs(&none).unwrap().dims(), [1, 2, 0, 2, 2]);
    assert_eq!(patchify(&none, 2, PatchOrder::RowMajor).unwrap().dims(), [1, 16, 0, 1, 1]);
    assert_eq!(unpatchify(&none, 2, PatchOrder::RowMajor).unwrap().dims(), [1, 1, 0, 4, 4]);
    assert_eq!(dup_up_add(&none, &none, 1, 1).unwrap().dims(), [1, 4, 0, 2, 2]);
    assert_eq!(avg_down_add(&none, &none, 1, 1).unwrap().dims(), [1, 4, 0, 2, 2]);
    let y = frames_to_rgb8(&none, 1, PatchOrder::RowMajor).unwrap();
    assert_eq!(y.pixels().dims(), [0, 2, 2, 4]);
    assert!(y.all_finite().unwrap());
}

#[test]
fn bad_operands_are_errors() {
    let x = tensor(&[1, 4, 2, 6, 6], DType::F32, Data::Normal, 1);
    let flat = x.squeeze(0).unwrap();
    let shape = |result: Result<Tensor>, name: &str| match result {
        Err(Error::Shape { operand, .. }) => assert_eq!(operand, name),
        other => panic!("{other:?}"),
    };
    shape(cat_frames(&x, &flat), "x");
    shape(cat_frames(&flat, &x), "past");
    shape(cat_frames(&x.narrow(1, 0, 3).unwrap(), &x), "past");
    shape(cat_frames(&x.narrow(4, 0, 3).unwrap(), &x), "past");
    shape(tail_frames(&flat, 1), "x");
    shape(split_pairs(&x.narrow(1, 0, 3).unwrap()), "x");
    shape(patchify(&x, 4, PatchOrder::RowMajor), "x");
    shape(unpatchify(&x, 3, PatchOrder::RowMajor), "x");
    shape(dup_up_add(&x, &x, 2, 1), "main");
    shape(dup_up_add(&x, &x, 1, 2), "main");
    let three = x.narrow(1, 0, 3).unwrap();
    shape(dup_up_add(&three, &x, 1, 1), "x");
    shape(avg_down_add(&three, &x, 1, 1), "x");
    shape(avg_down_add(&x, &x, 1, 4), "x");
    shape(avg_down_add(&x, &x, 2, 1), "main");
    let shape = |x: &Tensor, side| {
        let result = frames_to_rgb8(x, side, PatchOrder::RowMajor);
        assert!(matches!(result, Err(Error::Shape { operand: "x", .. })), "{:?} {side}", x.dims());
    };
    shape(&flat, 1);
    shape(&x, 3);
    shape(&Tensor::cat(&[&x, &x], 1).unwrap(), 1);
    shape(&Tensor::cat(&[&x, &x], 0).unwrap(), 1);
    for result in [
        patchify(&x, 0, PatchOrder::RowMajor),
        unpatchify(&x, 0, PatchOrder::RowMajor),
        dup_up_add(&x, &x, 0, 1),
        avg_down_add(&x, &x, 1, 0),
        tail_frames(&Var::from_tensor(&x).unwrap(), 1),
    ] {
        assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
    }
    assert!(matches!(frames_to_rgb8(&x, 0, PatchOrder::RowMajor), Err(Error::Argument { .. })));
    let half = x.to_dtype(DType::F16).unwrap();
    assert!(matches!(cat_frames(&half, &x), Err(Error::DType { operand: "past", .. })));
    assert!(matches!(dup_up_add(&x, &half, 1, 1), Err(Error::DType { operand: "x", .. })));
    assert!(matches!(
        frames_to_rgb8(&x.to_dtype(DType::U8).unwrap(), 1, PatchOrder::RowMajor),
        Err(Error::DType { .. })
    ));
}

#[test]
fn shortcuts_are_what_the_networks_composed() {
    // The last stage with a shortcut of the Wan 2.2 decoder, and the second of its encoder, narrowed.
    let (x, main) = (
        tensor(&[1, 16, 4, 3, 5], DType::F32, Data::Normal, 1),
        tensor(&[1, 8, 4, 6, 10], DType::F32, Data::Normal, 2),
    );
    let rows = x.reshape(vec![8, 1, 2, 1, 4, 3, 5]).unwrap().broadcast_as(vec![8, 1, 2, 2, 4, 3, 5]).unwrap();
    let cells = rows.permute(vec![0, 4, 1, 5, 2, 6, 3]).unwrap();
    let sum =
        (main.reshape(cells.shape()).unwrap() + cells.contiguous().unwrap()).unwrap().reshape(main.shape()).unwrap();
    assert_eq!(to_f64(&dup_up_add(&main, &x, 1, 2).unwrap()), to_f64(&sum));

    let (x, main) =
        (tensor(&[1, 4, 3, 6, 10], DType::F32, Data::Normal, 1), tensor(&[1, 8, 2, 3, 5], DType::F32, Data::Normal, 2));
    let cells = x.pad_with_zeros(2, 1, 0).unwrap().reshape(vec![4, 2, 2, 3, 2, 5, 2]).unwrap();
    let grouped = cells.permute(vec![0, 2, 4, 6, 1, 3, 5]).unwrap().reshape(vec![8, 4, 2, 3, 5]).unwrap();
    let sum = (&main + grouped.mean(1).unwrap().unsqueeze(0).unwrap()).unwrap();
    assert_eq!(to_f64(&avg_down_add(&main, &x, 2, 2).unwrap()), to_f64(&sum));
}
