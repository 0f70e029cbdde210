//! The composed path; `tests/gpu/projection.rs` holds the kernel against it.

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::testing::{Data, tensor, to_f64};

/// Two heads of 8, a branch of 24, rows of 16.
struct Case {
    x: Tensor,
    weight: LinearWeight,
    norms: [Tensor; 2],
    tables: [Tensor; 2],
}

impl Case {
    fn new(rows: usize) -> Self {
        let of = |dims: &[usize], seed| tensor(dims, DType::F32, Data::Normal, seed);
        Self {
            x: of(&[2, 5, 16], 1),
            weight: LinearWeight::from_tensor(of(&[rows, 16], 2)).unwrap(),
            norms: [of(&[8], 3), of(&[8], 4)],
            tables: [of(&[5, 4], 5), of(&[5, 4], 6)],
        }
    }

    fn run(&self, branch: &Tensor) -> Result<[Tensor; 3]> {
        let ([query, key], [cos, sin]) = (&self.norms, &self.tables);
        let norm = HeadNorm { tokens: 5, query, key };
        heads_and_swiglu_into(&self.x, &self.weight, &Heads { count: 2, norm, cos, sin, eps: 1e-6 }, branch)
    }
}

#[test]
fn results_are_those_of_the_ops_one_by_one() {
    let case = Case::new(3 * 16 + 2 * 24);
    let joined = Tensor::zeros((2, 5, 16 + 24), DType::F32, &Device::Cpu).unwrap();
    let [q, k, v] = case.run(&joined.narrow(2, 16, 24).unwrap()).unwrap();
    let z = linear(&case.x, &case.weight, None).unwrap();
    let norm = HeadNorm { tokens: 5, query: &case.norms[0], key: &case.norms[1] };
    let (want_q, want_k) = qk_norm_rope(&z, 2, &[norm], &case.tables[0], &case.tables[1], 1e-6).unwrap();
    let want_branch = crate::swiglu(&z.narrow(2, 48, 48).unwrap()).unwrap();
    assert_eq!((to_f64(&q), to_f64(&k)), (to_f64(&want_q), to_f64(&want_k)));
    assert_eq!(to_f64(&v.flatten(2, 3).unwrap()), to_f64(&z.narrow(2, 32, 16).unwrap()));
    assert_eq!(to_f64(&joined.narrow(2, 16, 24).unwrap()), to_f64(&want_branch));
    assert!(to_f64(&joined.narrow(2, 0, 16).unwrap()).iter().all(|&rest| rest == 0.0));
}

#[test]
fn a_weight_of_other_rows_is_refused() {
    let branch = Tensor::zeros((2, 5, 24), DType::F32, &Device::Cpu).unwrap();
    let error = Case::new(3 * 16 + 2 * 23).run(&branch).unwrap_err().to_string();
    assert!(error.contains("[96, K]"), "{error}");
}

#[test]
fn a_branch_in_the_memory_of_an_operand_is_refused() {
    let case = Case::new(3 * 16 + 2 * 6);
    let error = case.run(&case.x.narrow(2, 0, 6).unwrap()).unwrap_err().to_string();
    assert!(error.contains("shares its memory"), "{error}");
}

#[test]
fn branches_of_products_are_those_of_the_ops() {
    let of = |dims: &[usize], seed| tensor(dims, DType::F32, Data::Normal, seed);
    let (a, b) = (of(&[2, 5, 16], 1), of(&[2, 3, 16], 2));
    let [first, second] = [3, 4].map(|seed| LinearWeight::from_tensor(of(&[2 * 12, 16], seed)).unwrap());
    let got = linear_swiglu([(&a, &first), (&b, &second)]).unwrap();
    let want = [(&a, &first), (&b, &second)].map(|(x, w)| crate::swiglu(&linear(x, w, None).unwrap()).unwrap());
    assert_eq!(got.each_ref().map(to_f64), want.each_ref().map(to_f64));
    let odd = LinearWeight::from_tensor(of(&[13, 16], 5)).unwrap();
    assert!(linear_swiglu([(&a, &odd)]).is_err());
    assert!(linear_swiglu([(&a, &first), (&of(&[2, 3, 8], 6), &second)]).is_err());
}
