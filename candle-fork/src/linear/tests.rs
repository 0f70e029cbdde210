//! All kinds of weights against a sum in f64.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::{LinearWeight, linear};
use crate::{error::Error, gemm::test_data::noise, host::HostTensor};

fn tensor(dims: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(noise(dims.iter().product(), seed), dims, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The elements of `t` as host memory, `shift` bytes behind an aligned address.
fn host(t: &Tensor, shift: usize) -> HostTensor {
    let bits: Vec<u8> = match t.dtype() {
        DType::BF16 => {
            t.flatten_all().unwrap().to_vec1::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        DType::F16 => {
            t.flatten_all().unwrap().to_vec1::<half::f16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        _ => t.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let mut bytes = vec![0xff; bits.len() + 16];
    let start = bytes.as_ptr().align_offset(8) + shift;
    bytes[start..start + bits.len()].copy_from_slice(&bits);
    HostTensor::new(Arc::new(bytes), start..start + bits.len(), t.dtype(), t.dims()).unwrap()
}

fn naive(x: &Tensor, w: &Tensor, bias: &Tensor) -> Vec<f64> {
    let (m, k) = w.dims2().unwrap();
    let (x, w, bias) = (values(x), values(w), values(bias));
    let n = x.len().checked_div(k).unwrap_or(0);
    let at = |i: usize, o: usize| (0..k).map(|j| x[i * k + j] * w[o * k + j]).sum::<f64>() + bias[o];
    (0..n * m).map(|io| at(io / m, io % m)).collect()
}

#[test]
fn every_kind_of_weight_agrees_with_f64() -> Result<()> {
    for (n, k, m) in [
        (1, 1, 1),
        (1, 256, 48),
        (1, 193, 48),
        (6, 191, 20),
        (7, 192, 20),
        (8, 193, 20),
        (9, 385, 490),
        (2, 257, 49),
        (3, 255, 100),
        (4, 300, 13),
        (5, 300, 13),
        (6, 7, 97),
        (8, 64, 96),
        (15, 33, 12),
        (16, 256, 24),
        (17, 512, 11),
        (31, 100, 25),
        (32, 257, 36),
        (33, 513, 95),
        (63, 20, 97),
        (65, 40, 193),
        (7, 1, 5),
        (100, 3, 1),
        (40, 700, 60),
        (1100, 9, 14),
    ] {
        let bias = tensor(&[m], 3);
        for x_dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = tensor(&[n, k], 1).to_dtype(x_dtype)?;
            for w_dtype in [DType::F32, DType::BF16, DType::F16] {
                let w = tensor(&[m, k], 2).to_dtype(w_dtype)?;
                let want = naive(&x, &w, &bias);
                let scale = want.iter().fold(0.0f64, |s, y| s.max(y.abs()));
                let unit = match x_dtype {
                    DType::BF16 => 1.0 / 256.0,
                    DType::F16 => 1.0 / 2048.0,
                    _ => 0.0,
                };
                let weights = [
                    LinearWeight::from_tensor(w.clone()),
                    LinearWeight::from_tensor(w.t()?.contiguous()?.t()?),
                    LinearWeight::from_tensor(
                        w.pad_with_zeros(0, 1, 2)?.pad_with_zeros(1, 3, 1)?.narrow(0, 1, m)?.narrow(1, 3, k)?,
                    ),
                    LinearWeight::from_host(host(&w, 0)),
                    LinearWeight::from_host(host(&w, 1)),
                    LinearWeight::from_host(host(&w, 2)),
                ];
                let mut first: Option<Vec<f64>> = None;
                for (i, weight) in weights.into_iter().enumerate() {
                    let y = linear(&x, &weight.unwrap(), Some(&bias)).unwrap();
                    assert_eq!((y.dims(), y.dtype()), (&[n, m][..], x_dtype));
                    let got = values(&y);
                    for (j, (y, want)) in got.iter().zip(&want).enumerate() {
                        let error = (y - want).abs();
                        assert!(
                            error <= 1e-5 * scale + unit * want.abs() + 3e-8,
                            "{n} {k} {m} {x_dtype:?} {w_dtype:?} {i} {j}: {y} {want}"
                        );
                    }
                    // Where the elements lie changes nothing.
                    assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "kind {i}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_stack_is_the_concatenation() -> Result<()> {
    let (a, b, c) = (tensor(&[50, 300], 1), tensor(&[7, 300], 2), tensor(&[100, 300], 3));
    let whole = LinearWeight::from_tensor(Tensor::cat(&[&a, &b, &c], 0)?).unwrap();
    let parts = vec![
        LinearWeight::from_tensor(a).unwrap(),
        LinearWeight::from_host(host(&b, 3)).unwrap(),
        LinearWeight::from_tensor(c.t()?.contiguous()?.t()?).unwrap(),
    ];
    let stack = LinearWeight::stack(parts).unwrap();
    assert_eq!((stack.out_features(), stack.in_features(), stack.dtype()), (157, 300, DType::F32));
    let nested = LinearWeight::stack(vec![stack.clone(), stack.clone()]).unwrap();
    for n in [1, 4, 5, 40] {
        let x = tensor(&[n, 300], 4);
        let want = values(&linear(&x, &whole, None).unwrap());
        assert_eq!(values(&linear(&x, &stack, None).unwrap()), want);
        let twice = linear(&x, &nested, None).unwrap();
        assert_eq!(values(&twice.narrow(1, 157, 157)?), want);
    }
    Ok(())
}

#[test]
fn leading_axes_and_strides_of_x_are_kept() -> Result<()> {
    let weight = LinearWeight::from_tensor(tensor(&[5, 12], 1)).unwrap();
    let x = tensor(&[3, 12, 4], 2).transpose(1, 2)?;
    assert!(!x.is_contiguous());
    let y = linear(&x, &weight, None).unwrap();
    assert_eq!(y.dims(), [3, 4, 5]);
    assert_eq!(values(&y), values(&linear(&x.reshape((12, 12))?, &weight, None).unwrap()));
    assert_eq!(linear(&x.get(0)?.get(0)?, &weight, None).unwrap().dims(), [5]);
    Ok(())
}

#[test]
fn empty_extents_give_empty_or_bias() -> Result<()> {
    let bias = tensor(&[5], 1);
    let weight = LinearWeight::from_tensor(tensor(&[5, 3], 2)).unwrap();
    assert_eq!(linear(&tensor(&[0, 3], 3), &weight, Some(&bias)).unwrap().dims(), [0, 5]);
    let nothing = LinearWeight::from_tensor(tensor(&[5, 0], 2)).unwrap();
    for n in [2, 9] {
        let y = linear(&tensor(&[n, 0], 3), &nothing, Some(&bias)).unwrap();
        assert_eq!(values(&y), values(&bias).repeat(n));
    }
    let none = LinearWeight::from_tensor(tensor(&[0, 3], 2)).unwrap();
    assert_eq!(linear(&tensor(&[9, 3], 3), &none, None).unwrap().dims(), [9, 0]);
    Ok(())
}

#[test]
fn threads_do_not_change_a_bit() -> Result<()> {
    for (n, k, m) in [(100, 600, 250), (3, 600, 2000), (1100, 300, 40)] {
        let (x, bias) = (tensor(&[n, k], 1), tensor(&[m], 3));
        let weight = LinearWeight::from_tensor(tensor(&[m, k], 2).to_dtype(DType::BF16)?).unwrap();
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            values(&pool.install(|| linear(&x, &weight, Some(&bias))).unwrap())
        };
        let one = on(1);
        assert_eq!(one, on(2));
        assert_eq!(one, on(3));
    }
    Ok(())
}

#[test]
fn not_a_number_stays_where_it_is() -> Result<()> {
    let mut x = noise(20 * 40, 1);
    x[3 * 40 + 7] = f32::NAN;
    let x = Tensor::from_vec(x, (20, 40), &Device::Cpu)?;
    let y = linear(&x, &LinearWeight::from_tensor(tensor(&[30, 40], 2)).unwrap(), None).unwrap();
    for (i, row) in y.to_vec2::<f32>()?.iter().enumerate() {
        assert!(row.iter().all(|y| y.is_nan() == (i == 3)));
    }
    Ok(())
}

#[test]
fn bad_arguments_are_errors() -> Result<()> {
    let weight = LinearWeight::from_tensor(tensor(&[5, 3], 1)).unwrap();
    let shape = |e: Error, name| assert!(matches!(&e, Error::Shape { operand, .. } if *operand == name), "{e}");
    shape(LinearWeight::from_tensor(tensor(&[5], 1)).unwrap_err(), "weight");
    shape(LinearWeight::from_host(host(&tensor(&[5, 1, 2], 1), 0)).unwrap_err(), "weight");
    shape(linear(&tensor(&[2, 4], 1), &weight, None).unwrap_err(), "x");
    shape(linear(&Tensor::new(1f32, &Device::Cpu)?, &weight, None).unwrap_err(), "x");
    shape(linear(&tensor(&[2, 3], 1), &weight, Some(&tensor(&[3], 1))).unwrap_err(), "bias");
    let ints = tensor(&[5, 3], 1).to_dtype(DType::I64)?;
    assert!(matches!(LinearWeight::from_tensor(ints.clone()), Err(Error::DType { got: DType::I64, .. })));
    assert!(matches!(linear(&ints, &weight, None), Err(Error::DType { operand: "x", .. })));
    assert!(matches!(LinearWeight::stack(vec![]), Err(Error::Argument { .. })));
    let wide = LinearWeight::from_tensor(tensor(&[5, 4], 1)).unwrap();
    shape(LinearWeight::stack(vec![weight.clone(), wide]).unwrap_err(), "stacked weight");
    let half = LinearWeight::from_tensor(tensor(&[5, 3], 1).to_dtype(DType::BF16)?).unwrap();
    assert!(matches!(LinearWeight::stack(vec![weight.clone(), half]), Err(Error::DType { .. })));
    let tracked = Var::from_tensor(&tensor(&[2, 3], 1))?;
    let error = linear(tracked.as_tensor(), &weight, None).unwrap_err();
    assert!(matches!(error, Error::Argument { what, .. } if what.contains("gradients")));
    Ok(())
}
