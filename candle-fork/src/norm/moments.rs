//! Sums over a slice in f64, in an order that vectorises and never depends on the machine.

use crate::element::Element;

/// Independent partial sums: enough for two of the widest vectors of f64.
const LANES: usize = 16;

/// Count, mean, and sum of squared distances from the mean, of a run of values.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moments {
    pub(super) count: f64,
    pub(super) mean: f64,
    pub(super) squares: f64,
}

impl Moments {
    /// Two passes: the mean first, then distances from it, so a large mean costs no digits.
    #[inline(always)]
    pub(super) fn of<T: Element>(x: &[T]) -> Self {
        let count = x.len() as f64;
        let mean = sum(x, 0.0, false) / count;
        Self { count, mean, squares: sum(x, mean, true) }
    }

    /// Moments of both runs together (Chan, Golub and LeVeque 1979).
    pub(super) fn merge(self, other: Self) -> Self {
        let count = self.count + other.count;
        if count == 0.0 {
            return self;
        }
        let distance = other.mean - self.mean;
        Self {
            count,
            mean: self.mean + distance * (other.count / count),
            squares: self.squares + other.squares + distance * distance * (self.count * other.count / count),
        }
    }

    /// `1 / sqrt(variance + eps)`.
    pub(super) fn inverse_deviation(&self, eps: f64) -> f64 {
        1.0 / (self.squares / self.count + eps).sqrt()
    }
}

/// Sum of squares.
#[inline(always)]
pub(crate) fn sum_of_squares<T: Element>(x: &[T]) -> f64 {
    sum(x, 0.0, true)
}

/// Sum of `x - center`, or of its square.
#[inline(always)]
fn sum<T: Element>(x: &[T], center: f64, squared: bool) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            let distance = f64::from(chunk[i].widen()) - center;
            lanes[i] += if squared { distance * distance } else { distance };
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        let distance = f64::from(x.widen()) - center;
        *lane += if squared { distance * distance } else { distance };
    }
    lanes.iter().sum()
}

/// `x - mean` for an f64 mean, within an ulp, in f32 arithmetic: the mean in two parts.
///
/// With a mean of 1e3 and deviations of 1, the f32 nearest to the mean alone would be off by 3e-5.
#[derive(Clone, Copy)]
pub(super) struct Center {
    high: f32,
    low: f32,
}

impl Center {
    pub(super) fn new(mean: f64) -> Self {
        let high = mean as f32;
        Self { high, low: (mean - f64::from(high)) as f32 }
    }

    #[inline(always)]
    pub(super) fn distance(self, x: f32) -> f32 {
        (x - self.high) - self.low
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn merged_parts_equal_the_whole(
            x in prop::collection::vec(-1e3f32..1e3, 1..300),
            offset in prop_oneof![Just(0f32), Just(1e3), Just(-1e6)],
            cut in 0usize..300,
        ) {
            let x: Vec<f32> = x.iter().map(|v| v + offset).collect();
            let cut = cut.min(x.len());
            let parts = [&x[..cut], &x[cut..]];
            let merged = parts
                .iter()
                .filter(|p| !p.is_empty())
                .fold(Moments::default(), |all, p| all.merge(Moments::of(p)));
            let wide: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
            let (mean, variance) = super::super::reference::moments(&wide);
            prop_assert!((merged.mean - mean).abs() <= 1e-12 * (1.0 + mean.abs()));
            let got = merged.squares / merged.count;
            prop_assert!((got - variance).abs() <= 1e-10 * variance + 1e-12 * mean.abs());
        }
    }
}
