//! The group matrix of ConvRot and its fast transform.
//!
//! `H4 = [1 1 1 -1; 1 1 -1 1; 1 -1 1 1; -1 1 1 1] / 2`, a *regular* Hadamard matrix: every row sums to 2, not only the
//! first. Its Kronecker powers `H` are symmetric and their own inverses. Sylvester's matrix of the same size passes all
//! of these but one, regularity, and decodes garbage.

use std::ops::{Add, Sub};

use crate::error::{Error, Result};

/// Elements that are rotated together: 1 (not at all), 4, 16, 64, 256 or 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Group {
    /// Rounds of the transform: the logarithm of the size to base 4.
    rounds: u32,
}

/// Most rounds: beyond, sums of codes would leave what f32 holds exactly.
const MAX_ROUNDS: u32 = 5;

impl Group {
    /// No rotation.
    pub(crate) const NONE: Self = Self { rounds: 0 };

    /// Groups of `size` in rows of `columns`; `None` for no rotation.
    ///
    /// # Errors
    /// [`Error::Argument`] for a size that is not 4, 16, 64, 256 or 1024, or does not divide `columns`.
    pub(crate) fn new(op: &'static str, size: Option<usize>, columns: usize) -> Result<Self> {
        let Some(size) = size else { return Ok(Self::NONE) };
        let Some(rounds) = (1..=MAX_ROUNDS).find(|&rounds| size == 1 << (2 * rounds)) else {
            let what = format!("a rotation group of {size}, expected 4, 16, 64, 256 or 1024");
            return Err(Error::Argument { op, what });
        };
        if !columns.is_multiple_of(size) {
            let what = format!("{columns} columns are not whole groups of {size}");
            return Err(Error::Argument { op, what });
        }
        Ok(Self { rounds })
    }

    /// Elements.
    pub(crate) fn size(self) -> usize {
        1 << (2 * self.rounds)
    }

    /// What the transform's integer matrix is divided by, as a factor: exact.
    pub(crate) fn factor(self) -> f32 {
        1.0 / (1 << self.rounds) as f32
    }

    /// Whether anything is rotated.
    pub(crate) fn rotates(self) -> bool {
        self.rounds > 0
    }

    /// The size, or `None` for no rotation.
    pub(crate) fn get(self) -> Option<usize> {
        self.rotates().then(|| self.size())
    }
}

/// The transform of one group by the ±1 matrix `H / factor`, in place.
///
/// Rounds over strides 1, 4, 16, and so on. Each takes four elements to `y[d] = sum - 2 x[3 - d]`, with the sum
/// `(x0 + x1) + (x2 + x3)`. With integers any order gives the same; with floats this one is part of the contract with the kernels.
#[inline(always)]
pub(crate) fn transform<T: Copy + Add<Output = T> + Sub<Output = T>>(group: &mut [T]) {
    let mut stride = 1;
    while stride < group.len() {
        for block in group.chunks_exact_mut(4 * stride) {
            let (low, high) = block.split_at_mut(2 * stride);
            let ((x0, x1), (x2, x3)) = (low.split_at_mut(stride), high.split_at_mut(stride));
            for (((x0, x1), x2), x3) in x0.iter_mut().zip(x1).zip(x2).zip(x3) {
                let (a, b, c, d) = (*x0, *x1, *x2, *x3);
                let sum = (a + b) + (c + d);
                (*x0, *x1, *x2, *x3) = (sum - (d + d), sum - (c + c), sum - (b + b), sum - (a + a));
            }
        }
        stride *= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sign of element (i, j): minus for an odd number of base-4 digits that add up to 3.
    fn sign(mut i: usize, mut j: usize) -> i32 {
        let mut sign = 1;
        while i + j > 0 {
            if i % 4 + j % 4 == 3 {
                sign = -sign;
            }
            (i, j) = (i / 4, j / 4);
        }
        sign
    }

    fn signs(size: usize) -> Vec<Vec<i32>> {
        (0..size).map(|i| (0..size).map(|j| sign(i, j)).collect()).collect()
    }

    #[test]
    fn unit_vectors_become_rows_of_the_closed_form() {
        for size in [1, 4, 16, 64, 256, 1024] {
            for (i, row) in signs(size).into_iter().enumerate() {
                let mut unit = vec![0i32; size];
                unit[i] = 1;
                transform(&mut unit);
                assert_eq!(unit, row, "{size} {i}");
            }
        }
    }

    #[test]
    fn rows_sum_to_the_root_and_the_matrix_is_its_own_inverse() {
        for rounds in 0..=MAX_ROUNDS {
            let group = Group { rounds };
            let rows = signs(group.size());
            assert!(rows.iter().all(|row| row.iter().sum::<i32>() == 1 << rounds));
            let codes: Vec<i32> = (0..group.size() as i32).map(|i| i * 37 % 256 - 128).collect();
            let mut twice = codes.clone();
            transform(&mut twice);
            transform(&mut twice);
            assert!(twice.iter().zip(&codes).all(|(t, q)| *t == q * group.size() as i32));
        }
    }

    #[test]
    fn legal_groups() {
        for size in [4, 16, 64, 256, 1024] {
            let group = Group::new("test", Some(size), 2 * size).unwrap();
            assert_eq!((group.size(), group.get()), (size, Some(size)));
            assert_eq!(group.factor() * group.factor() * size as f32, 1.0);
            assert!(matches!(Group::new("test", Some(size), size + 2), Err(Error::Argument { .. })));
        }
        assert_eq!(Group::new("test", None, 7).unwrap(), Group::NONE);
        for size in [0, 1, 2, 8, 32, 128, 512, 4096, usize::MAX] {
            assert!(matches!(Group::new("test", Some(size), 4096), Err(Error::Argument { .. })), "{size}");
        }
    }
}
