//! What the tests of the ops share: data that is hard on them, views that are really strided, a comparator.

use candle_core::{D, DType, Device, Tensor};

/// The element types of the ops.
pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Kinds of values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Data {
    /// Mean 0, deviation near 1.
    Normal,
    /// Mean 1e3, deviation near 1.
    LargeMean,
    /// Deviation near the given factor.
    Scaled(f64),
    /// Zero but for one value in 37.
    Sparse,
}

/// Reproducible values.
pub(crate) fn values(len: usize, data: Data, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut uniform = move || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..len)
        .map(|i| {
            let normal = (uniform() + uniform() + uniform() + uniform() - 2.0) * 3f64.sqrt();
            match data {
                Data::Normal => normal,
                Data::LargeMean => 1e3 + normal,
                Data::Scaled(factor) => normal * factor,
                Data::Sparse => {
                    if i % 37 == 5 {
                        normal
                    } else {
                        0.0
                    }
                }
            }
        })
        .collect()
}

/// A contiguous tensor on the CPU.
pub(crate) fn tensor(dims: &[usize], dtype: DType, data: Data, seed: u64) -> Tensor {
    let values = values(dims.iter().product(), data, seed);
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The values that a tensor really holds.
pub(crate) fn to_f64(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The tensor itself, and views with the same values: cut from a wider one whose other columns are NaN, and with the last
/// two axes swapped in memory.
pub(crate) fn views(tensor: &Tensor) -> Vec<Tensor> {
    let mut all = vec![tensor.clone()];
    let last = tensor.dim(D::Minus1).unwrap();
    if tensor.elem_count() > last {
        let mut column = tensor.dims().to_vec();
        column[tensor.rank() - 1] = 3;
        let nan = Tensor::full(f32::NAN, column, &Device::Cpu).unwrap().to_dtype(tensor.dtype()).unwrap();
        let wide = Tensor::cat(&[&nan, tensor, &nan], D::Minus1).unwrap();
        let cut = wide.narrow(D::Minus1, 3, last).unwrap();
        assert!(!cut.is_contiguous());
        all.push(cut);
        if last > 1 && tensor.dim(D::Minus2).unwrap() > 1 {
            let swapped = tensor.t().unwrap().contiguous().unwrap().t().unwrap();
            assert!(!swapped.is_contiguous());
            all.push(swapped);
        }
    }
    all
}

/// Checks that every value is `want` after errors of at most `relative` times its entry of `terms`, rounded once to the
/// tensor's type.
pub(crate) fn assert_rounded_once(got: &Tensor, want: &[f64], terms: &[f64], relative: f64, case: &str) {
    let (mantissa, min_exponent) = match got.dtype() {
        DType::F32 => (23, -126),
        DType::F16 => (10, -14),
        DType::BF16 => (7, -126),
        other => panic!("{other:?}"),
    };
    assert!(got.is_contiguous());
    let got = to_f64(got);
    assert_eq!(got.len(), want.len(), "{case}");
    let (mut worst, mut at) = (0.0, 0);
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let exponent = (want.abs().log2().floor()).max(f64::from(min_exponent)) - f64::from(mantissa);
        let allowed = relative * terms[i].abs() + 0.501 * exponent.exp2();
        let ratio = (got - want).abs() / allowed;
        if ratio > worst || ratio.is_nan() {
            (worst, at) = (ratio, i);
        }
    }
    assert!(worst <= 1.0, "{case}: {} instead of {} at {at}, {worst} times what is allowed", got[at], want[at]);
}

/// Runs `f` on pools of several sizes; all must give the same bits.
pub(crate) fn assert_same_bits_for_all_thread_counts(f: impl Fn() -> Tensor + Send + Sync) {
    let runs: Vec<Vec<u64>> = [1, 2, 3, 7]
        .iter()
        .map(|&n| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            pool.install(|| to_f64(&f()).iter().map(|x| x.to_bits()).collect())
        })
        .collect();
    for run in &runs[1..] {
        assert!(*run == runs[0]);
    }
}
