//! Rotary position embedding over the axes T, H and W of a grid of tokens.

use std::cell::OnceCell;

use candle_core::{Device, Tensor};
use candle_fork::{What, token_block::TokenAngles};

use crate::error::Result;

/// Base of the frequencies.
const THETA: f64 = 10_000.0;

/// Components of a head that each axis (T, H, W) rotates: a quarter for T, the rest halved, all even.
pub(super) fn split(head_dim: usize) -> [usize; 3] {
    let t = head_dim / 4 / 2 * 2;
    let plane = (head_dim - t) / 2;
    if plane.is_multiple_of(2) {
        [t, plane, plane]
    } else {
        // Of heads that are multiples of 8 wide, only those of 8 leave nothing to T.
        let t = t - 2;
        [t, (head_dim - t) / 2, (head_dim - t) / 2]
    }
}

/// Angles of the tokens of a grid, in the forms that ops take; each is made when it is first asked for.
///
/// An axis of d components has the d / 2 frequencies `10000^(-2i/d)`, made in f64 and rounded to f32; angles are products
/// in f32, as in the reference (huggingface/diffusers: `ltx2_diffusion_decoder.py`), whose rounding is part of its results.
#[derive(Debug)]
pub(super) struct RopeTable {
    head_dim: usize,
    grid: [usize; 3],
    device: Device,
    spread: OnceCell<Angles>,
    along: OnceCell<TokenAngles>,
}

/// Cosines and sines of tokens, row by row, `[T H W, head_dim / 2]` f32 each.
#[derive(Debug, Clone)]
pub(super) struct Angles {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl RopeTable {
    pub(super) fn new(head_dim: usize, grid: [usize; 3], device: &Device) -> Self {
        Self { head_dim, grid, device: device.clone(), spread: OnceCell::new(), along: OnceCell::new() }
    }

    /// Of all tokens.
    pub(super) fn spread(&self) -> Result<&Angles> {
        made_once(&self.spread, || {
            let table = |function: fn(f64) -> f64| -> Result<Tensor> {
                let along = |axis: usize| -> candle_core::Result<Tensor> {
                    let values = self.values(axis, function);
                    let mut shape = [1, 1, 1, values.len() / self.grid[axis].max(1)];
                    shape[axis] = self.grid[axis];
                    // Small on the host, spread over the grid on the device.
                    let [t, h, w] = self.grid;
                    Tensor::from_vec(values, &shape, &self.device)?.broadcast_as((t, h, w, shape[3]))
                };
                let spread = || Tensor::cat(&[along(0)?, along(1)?, along(2)?], 3)?.flatten(0, 2);
                Ok(spread().what("rope table")?)
            };
            Ok(Angles { cos: table(f64::cos)?, sin: table(f64::sin)? })
        })
    }

    /// Along each axis.
    pub(super) fn along(&self) -> Result<&TokenAngles> {
        made_once(&self.along, || {
            let table = |axis: usize| -> Result<Tensor> {
                let (cos, sin) = (self.values(axis, f64::cos), self.values(axis, f64::sin));
                let values: Vec<f32> = cos.into_iter().zip(sin).flat_map(|(cos, sin)| [cos, sin]).collect();
                Ok(Tensor::from_vec(values, (self.grid[axis], (), 2), &self.device).what("rope table")?)
            };
            Ok(TokenAngles::new([&table(0)?, &table(1)?, &table(2)?])?)
        })
    }

    /// `function` of the angles of an axis, position by position.
    fn values(&self, axis: usize, function: fn(f64) -> f64) -> Vec<f32> {
        let d = split(self.head_dim)[axis];
        let frequencies: Vec<f32> = (0..d / 2).map(|i| THETA.powf(-((2 * i) as f64) / d as f64) as f32).collect();
        // The product is rounded, its cosine is that of the rounded angle.
        let row = |p: usize| frequencies.iter().map(move |f| function(f64::from(p as f32 * f)) as f32);
        (0..self.grid[axis]).flat_map(row).collect()
    }
}

impl Angles {
    /// Those of `len` tokens from `start` on.
    pub(super) fn tokens(&self, start: usize, len: usize) -> Result<Self> {
        let part = |t: &Tensor| t.narrow(0, start, len).what("rope table of some tokens");
        Ok(Self { cos: part(&self.cos)?, sin: part(&self.sin)? })
    }
}

fn made_once<T>(cell: &OnceCell<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(made) = cell.get() {
        return Ok(made);
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_split_as_published() {
        assert_eq!(split(64), [16, 24, 24]);
        assert_eq!(split(16), [4, 6, 6]);
        for head_dim in (8..=128).step_by(8) {
            let split = split(head_dim);
            assert_eq!(split.iter().sum::<usize>(), head_dim);
            assert!(split.iter().all(|d| d % 2 == 0), "{head_dim}: {split:?}");
        }
    }

    #[test]
    fn angles_are_position_times_frequency_axis_after_axis() {
        let table = RopeTable::new(64, [2, 3, 4], &Device::Cpu);
        table.along().unwrap();
        let table = table.spread().unwrap();
        assert_eq!(table.cos.dims(), [24, 32]);
        let (cos, sin) = (table.cos.to_vec2::<f32>().unwrap(), table.sin.to_vec2::<f32>().unwrap());
        // Token (1, 2, 3): the frequencies .1 of T (third pair), .46415888 of H (second) and .21544347 of W (third).
        let token = 12 + 2 * 4 + 3;
        for (column, angle) in [(0, 1.0), (2, 0.1), (8, 2.0), (9, 2.0 * 0.464_158_88), (22, 3.0 * 0.215_443_47)] {
            let angle: f64 = angle;
            assert!((f64::from(cos[token][column]) - angle.cos()).abs() < 2e-7, "{column}");
            assert!((f64::from(sin[token][column]) - angle.sin()).abs() < 2e-7, "{column}");
        }
        let part = table.tokens(12, 5).unwrap();
        assert_eq!(part.cos.to_vec2::<f32>().unwrap(), cos[12..17]);
    }
}
