use candle_core::{DType, Device, Tensor, Var};

use super::*;
use crate::testing::{
    DTYPES, Data, assert_rounded_once, assert_same_bits_for_all_thread_counts, tensor, to_f64, views,
};

/// Deviations of 1e-18 need an eps far below theirs to be normalised; 1e18 squared does not fit in f32.
const KINDS: [(Data, f64); 6] = [
    (Data::Normal, 1e-6),
    (Data::LargeMean, 1e-6),
    (Data::Scaled(1e18), 1e-6),
    (Data::Scaled(1e-18), 1e-40),
    (Data::Sparse, 1e-6),
    (Data::Normal, 0.0),
];

/// The largest value, for every entry: what the error of a mean in f32 is relative to.
fn largest(want: &[f64]) -> Vec<f64> {
    vec![want.iter().fold(0.0, |m: f64, x| m.max(x.abs())); want.len()]
}

/// f16 holds nothing of some kinds.
fn representable(dtype: DType, data: Data) -> bool {
    !(dtype == DType::F16 && matches!(data, Data::Scaled(_)))
}

#[test]
fn group_norm_agrees_with_f64() {
    // Shapes: one value per group, odd, prime, groups above and beside the block of 16384, no spatial axis, 3 channels
    // per group as in the 96-channel decoder.
    let shapes: [(&[usize], usize); 9] = [
        (&[1, 1, 2], 1),
        (&[2, 6], 3),
        (&[2, 6, 7], 2),
        (&[3, 4, 5, 7], 4),
        (&[1, 96, 3, 5], 32),
        (&[2, 2, 131, 127], 1),
        (&[1, 2, 128, 128], 2),
        (&[1, 3, 1, 16387], 3),
        (&[2, 4, 2, 3, 5], 2),
    ];
    for dtype in DTYPES {
        for (data, eps) in KINDS.into_iter().filter(|k| representable(dtype, k.0)) {
            for (dims, groups) in shapes {
                let x = tensor(dims, dtype, data, 1);
                let (c, extent) = (dims[1], dims[2..].iter().product());
                let weight = tensor(&[c], DType::F32, Data::Normal, 2);
                let bias = tensor(&[c], DType::BF16, Data::Normal, 3);
                let (xs, ws, bs) = (to_f64(&x), to_f64(&weight), to_f64(&bias));
                // Half precision may make a group of equal values; 0 / 0 has no reference.
                let affine = reference::group_norm(&xs, extent, &ws, &bs, groups, eps, Activation::None);
                if affine.iter().any(|y| y.is_nan()) {
                    continue;
                }
                let terms: Vec<f64> =
                    affine.iter().enumerate().map(|(i, y)| y.abs() + 2.0 * bs[i / extent % c].abs()).collect();
                for activation in [Activation::None, Activation::Silu] {
                    let want = reference::group_norm(&xs, extent, &ws, &bs, groups, eps, activation);
                    let case = format!("{dtype:?} {data:?} {dims:?} {groups} {activation:?}");
                    for x in views(&x) {
                        let y = group_norm(&x, &weight, &bias, groups, eps, activation).unwrap();
                        assert_rounded_once(&y, &want, &terms, 1e-6, &case);
                    }
                    if matches!(data, Data::Normal) && eps > 0.0 {
                        let composed = device::group_norm(&x, &weight, &bias, groups, eps, activation).unwrap();
                        assert_rounded_once(&composed, &want, &largest(&want), 1e-6, &format!("composition {case}"));
                    }
                }
            }
        }
    }
}

#[test]
fn rms_norm_agrees_with_f64() {
    for dtype in DTYPES {
        for (data, eps) in KINDS.into_iter().filter(|k| representable(dtype, k.0)) {
            for dims in [&[1][..], &[3, 13], &[2, 3, 4, 128], &[2, 129], &[5, 4099]] {
                let x = tensor(dims, dtype, data, 1);
                for weight_dtype in DTYPES {
                    let weight = tensor(&dims[dims.len() - 1..], weight_dtype, Data::Normal, 2);
                    let want = reference::rms_norm(&to_f64(&x), &to_f64(&weight), eps);
                    if want.iter().any(|y| y.is_nan()) {
                        continue;
                    }
                    let case = format!("{dtype:?} {data:?} {dims:?} {weight_dtype:?}");
                    for x in views(&x) {
                        assert_rounded_once(&rms_norm(&x, &weight, eps).unwrap(), &want, &want, 3e-7, &case);
                    }
                    if matches!(data, Data::Normal) {
                        let composed = device::rms_norm(&x, &weight, eps).unwrap();
                        assert_rounded_once(&composed, &want, &want, 1e-6, "composition");
                    }
                }
            }
        }
    }
}

#[test]
fn channel_rms_norm_agrees_with_f64() {
    // Below, at and above the blocks of positions and of 16 channels; more channels than a block has room for.
    let shapes: [&[usize]; 7] = [
        &[1, 1, 1],
        &[2, 3, 5],
        &[1, 16, 1, 8, 8],
        &[2, 17, 3, 5, 7],
        &[1, 96, 2, 33, 35],
        &[1, 65, 1025],
        &[1, 2049, 3],
    ];
    for dtype in DTYPES {
        for data in [Data::Normal, Data::LargeMean, Data::Scaled(1e15), Data::Scaled(1e-15), Data::Sparse] {
            for dims in shapes.into_iter().filter(|_| representable(dtype, data)) {
                let x = tensor(dims, dtype, data, 1);
                let mut gamma_dims = vec![dims[1]];
                gamma_dims.resize(dims.len() - 1, 1);
                let gamma = tensor(&gamma_dims, DType::BF16, Data::Normal, 2);
                let past_dims: Vec<_> = dims.iter().enumerate().map(|(i, &n)| if i == 2 { 2 } else { n }).collect();
                let past = tensor(&past_dims, dtype, Data::LargeMean, 3);
                let extent = dims[2..].iter().product();
                for activation in [Activation::None, Activation::Silu] {
                    let formula =
                        |activation| reference::channel_rms_norm(&to_f64(&x), extent, &to_f64(&gamma), activation);
                    let want = formula(activation);
                    // SiLU of a large negative number multiplies relative errors by that number.
                    let silu = |(y, x): (&f64, &f64)| y * (1.0 + x.abs());
                    let terms: Vec<f64> = match activation {
                        Activation::None => want.clone(),
                        Activation::Silu => want.iter().zip(&formula(Activation::None)).map(silu).collect(),
                    };
                    let case = format!("{dtype:?} {data:?} {dims:?} {activation:?}");
                    for x in views(&x) {
                        let y = channel_rms_norm(&x, &gamma, activation).unwrap();
                        assert_rounded_once(&y, &want, &terms, 2e-6, &case);
                        let after = channel_rms_norm_after(Some(&past), &x, &gamma, activation).unwrap();
                        assert_eq!(to_f64(&after), to_f64(&Tensor::cat(&[&past, &y], 2).unwrap()), "{case}");
                    }
                    if data == Data::Normal && activation == Activation::None {
                        let composed = device::channel_rms_norm(None, &x, &gamma, activation).unwrap();
                        assert_rounded_once(&composed, &want, &want, 2e-6, &format!("composition {case}"));
                    }
                }
            }
        }
    }
}

#[test]
fn positions_without_anything_stay_empty_and_nan_stays_at_its_position() {
    for dtype in DTYPES {
        let mut values = vec![0f32; 3 * 4];
        values[1] = f32::NAN;
        values[2] = 2.0;
        let x = Tensor::from_vec(values, (1, 3, 4), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let gamma = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
        let y = to_f64(&channel_rms_norm(&x, &gamma, Activation::Silu).unwrap());
        for (i, y) in y.iter().enumerate() {
            match i % 4 {
                1 => assert!(y.is_nan()),
                2 if i == 2 => assert!(*y > 1.0),
                _ => assert_eq!(*y, 0.0),
            }
        }
    }
}

#[test]
fn channel_rms_norm_refuses_what_does_not_fit() {
    let x = tensor(&[1, 4, 3, 5], DType::F32, Data::Normal, 1);
    let gamma = tensor(&[4], DType::F32, Data::Normal, 2);
    let after = |past: &Tensor| channel_rms_norm_after(Some(past), &x, &gamma, Activation::None);
    for dims in [&[1, 4, 3][..], &[1, 3, 2, 5], &[2, 4, 2, 5], &[1, 4, 2, 6]] {
        let past = tensor(dims, DType::F32, Data::Normal, 3);
        assert!(matches!(after(&past), Err(Error::Shape { operand: "past", .. })), "{dims:?}");
    }
    let past = tensor(&[1, 4, 2, 5], DType::BF16, Data::Normal, 3);
    assert!(matches!(after(&past), Err(Error::DType { operand: "past", .. })));
    for dims in [&[5][..], &[1, 4], &[4, 2]] {
        let gamma = tensor(dims, DType::F32, Data::Normal, 3);
        let result = channel_rms_norm(&x, &gamma, Activation::None);
        assert!(matches!(result, Err(Error::Shape { operand: "gamma", .. })), "{dims:?}");
    }
    let flat = tensor(&[4, 4], DType::F32, Data::Normal, 1);
    assert!(matches!(channel_rms_norm(&flat, &gamma, Activation::None), Err(Error::Shape { operand: "x", .. })));
    let none = Tensor::zeros((0, 4, 3, 5), DType::F16, &Device::Cpu).unwrap();
    assert_eq!(channel_rms_norm(&none, &gamma, Activation::None).unwrap().dims(), [0, 4, 3, 5]);
    let none = Tensor::zeros((1, 4, 0, 5), DType::F32, &Device::Cpu).unwrap();
    let past = tensor(&[1, 4, 2, 5], DType::F32, Data::Normal, 3);
    let y = channel_rms_norm_after(Some(&past), &none, &gamma, Activation::None).unwrap();
    assert_eq!(to_f64(&y), to_f64(&past));
}

#[test]
fn layer_norms_agree_with_f64() {
    for dtype in DTYPES {
        for (data, eps) in KINDS.into_iter().filter(|k| representable(dtype, k.0) && k.1 > 0.0) {
            for (b, s, h) in [(1, 1, 2), (2, 3, 13), (3, 7, 128), (2, 5, 4099)] {
                let x = tensor(&[b, s, h], dtype, data, 1);
                let shift = tensor(&[b, h], DType::F32, Data::Normal, 2);
                let scale = tensor(&[b, h], DType::F16, Data::Normal, 3);
                let (xs, shifts, scales) = (to_f64(&x), to_f64(&shift), to_f64(&scale));
                let factors: Vec<f64> = scales.iter().map(|s| 1.0 + s).collect();
                let batch = |v: &'_ [f64], row: usize| row / s * h..row / s * h + v.len() / b;
                let want = reference::layer_norm(
                    &xs,
                    h,
                    |r| &factors[batch(&factors, r)],
                    |r| &shifts[batch(&shifts, r)],
                    eps,
                );
                let terms = |shifts: &[f64], want: &[f64], rows: usize| -> Vec<f64> {
                    want.iter()
                        .enumerate()
                        .map(|(i, y)| y.abs() + 2.0 * shifts[i / h / rows * h + i % h].abs())
                        .collect()
                };
                let modulated = terms(&shifts, &want, s);
                let case = format!("{dtype:?} {data:?} {b} {s} {h}");
                for x in views(&x) {
                    let y = layer_norm_modulate(&x, &shift, &scale, eps).unwrap();
                    assert_rounded_once(&y, &want, &modulated, 1e-6, &case);
                }

                let (weight, bias) = (scale.get(0).unwrap(), shift.get(0).unwrap());
                let (one, zero) = (vec![1.0; h], vec![0.0; h]);
                for (weight, bias) in
                    [(None, None), (Some(&weight), None), (None, Some(&bias)), (Some(&weight), Some(&bias))]
                {
                    let w = weight.map_or(one.clone(), to_f64);
                    let shifts = bias.map_or(zero.clone(), to_f64);
                    let want = reference::layer_norm(&xs, h, |_| &w, |_| &shifts, eps);
                    let terms = terms(&shifts, &want, usize::MAX / h);
                    let y = layer_norm(&x, weight, bias, eps).unwrap();
                    assert_rounded_once(&y, &want, &terms, 1e-6, &case);
                    if matches!(data, Data::Normal) {
                        let y = device::layer_norm(&x, weight, bias, eps).unwrap();
                        assert_rounded_once(&y, &want, &largest(&want), 1e-6, "composition");
                    }
                }
                if matches!(data, Data::Normal) {
                    let y = device::layer_norm_modulate(&x, &shift, &scale, eps).unwrap();
                    assert_rounded_once(&y, &want, &largest(&want), 1e-6, "composition");
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let x = tensor(&[2, 4, 150, 151], DType::F32, Data::LargeMean, 1);
    let (weight, bias) = (tensor(&[4], DType::F32, Data::Normal, 2), tensor(&[4], DType::F32, Data::Normal, 3));
    assert_same_bits_for_all_thread_counts(|| group_norm(&x, &weight, &bias, 2, 1e-6, Activation::Silu).unwrap());
    let rows = x.reshape((2, 600, 151)).unwrap();
    let weight = tensor(&[151], DType::F32, Data::Normal, 2);
    assert_same_bits_for_all_thread_counts(|| rms_norm(&rows, &weight, 1e-6).unwrap());
    assert_same_bits_for_all_thread_counts(|| layer_norm(&rows, Some(&weight), None, 1e-6).unwrap());
    let video = tensor(&[2, 33, 3, 19, 23], DType::F32, Data::Normal, 1);
    let gamma = tensor(&[33], DType::F32, Data::Normal, 2);
    assert_same_bits_for_all_thread_counts(|| channel_rms_norm(&video, &gamma, Activation::Silu).unwrap());
}

#[test]
fn nan_stays_in_its_group() {
    let mut values = vec![1f32, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0];
    values[1] = f32::NAN;
    let x = Tensor::from_vec(values, (1, 4, 2), &Device::Cpu).unwrap();
    let one = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let y = to_f64(&group_norm(&x, &one, &one, 2, 1e-6, Activation::Silu).unwrap());
    assert!(y[..4].iter().all(|y| y.is_nan()) && y[4..].iter().all(|y| y.is_finite()));
}

#[test]
fn empty_operands_give_empty_results() {
    let x = Tensor::zeros((0, 4, 3), DType::BF16, &Device::Cpu).unwrap();
    let (w4, w3) =
        (Tensor::ones(4, DType::F32, &Device::Cpu).unwrap(), Tensor::ones(3, DType::F32, &Device::Cpu).unwrap());
    assert_eq!(group_norm(&x, &w4, &w4, 2, 1e-6, Activation::None).unwrap().dims(), [0, 4, 3]);
    assert_eq!(rms_norm(&x, &w3, 1e-6).unwrap().dims(), [0, 4, 3]);
    let none = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(layer_norm_modulate(&x, &none, &none, 1e-6).unwrap().dims(), [0, 4, 3]);
    let flat = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(layer_norm(&flat, None, None, 1e-6).unwrap().dims(), [2, 0]);
}

#[test]
fn bad_operands_are_errors() {
    let x = tensor(&[2, 6, 5], DType::F32, Data::Normal, 1);
    let (w6, w5) = (tensor(&[6], DType::F32, Data::Normal, 1), tensor(&[5], DType::F32, Data::Normal, 1));
    let gn = |x: &Tensor, w: &Tensor, b: &Tensor, groups, eps| group_norm(x, w, b, groups, eps, Activation::None);
    assert!(matches!(gn(&w6, &w6, &w6, 1, 1e-6), Err(Error::Shape { operand: "x", .. })));
    assert!(matches!(gn(&x, &w5, &w6, 2, 1e-6), Err(Error::Shape { operand: "weight", .. })));
    assert!(matches!(gn(&x, &w6, &w5, 2, 1e-6), Err(Error::Shape { operand: "bias", .. })));
    for (groups, eps) in [(0, 1e-6), (4, 1e-6), (2, -1.0), (2, f64::NAN), (2, f64::INFINITY)] {
        assert!(matches!(gn(&x, &w6, &w6, groups, eps), Err(Error::Argument { .. })), "{groups} {eps}");
    }
    assert!(matches!(rms_norm(&x, &w6, 1e-6), Err(Error::Shape { operand: "weight", .. })));
    assert!(matches!(rms_norm(&x.to_dtype(DType::F64).unwrap(), &w5, 1e-6), Err(Error::DType { .. })));
    assert!(matches!(
        rms_norm(&x, &w5.to_dtype(DType::U32).unwrap(), 1e-6),
        Err(Error::DType { operand: "weight", .. })
    ));
    assert!(matches!(layer_norm(&x, None, Some(&w6), 1e-6), Err(Error::Shape { operand: "bias", .. })));
    let m = tensor(&[2, 5], DType::F32, Data::Normal, 1);
    let m1 = m.narrow(0, 0, 1).unwrap();
    assert!(matches!(layer_norm_modulate(&x, &m1, &m, 1e-6), Err(Error::Shape { operand: "shift", .. })));
    assert!(matches!(layer_norm_modulate(&x, &m, &m1, 1e-6), Err(Error::Shape { operand: "scale", .. })));
    assert!(matches!(layer_norm_modulate(&m, &m, &m, 1e-6), Err(Error::Shape { operand: "x", .. })));
    let tracked = Var::from_tensor(&w5).unwrap();
    assert!(matches!(rms_norm(&x, &tracked, 1e-6), Err(Error::Argument { .. })));
}
