//! Rotary position embedding over the four axes of a token: image index T, row H, column W, text index L.

use std::ops::Range;

use candle_core::{Device, Tensor};
use candle_fork::What;

use crate::error::{Error, Result};

/// Position of a token: (T, H, W, L).
pub type Position = [u32; 4];

/// Cosines and sines of a token sequence; shared by all heads, blocks and steps.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
}

/// Distance of pictures on the axis T; the picture that is made is at 0.
const REFERENCE_STEP: u32 = 10;

/// Positions of `length` text tokens followed by the cells of a `(rows, columns)` grid, row by row.
pub fn positions(length: usize, grid: (usize, usize)) -> Vec<Position> {
    // Counts of tokens that fit in memory fit in u32.
    (0..length).map(|l| [0, 0, 0, l as u32]).chain(cells(0, grid)).collect()
}

/// Positions of the cells of reference pictures, each a grid `(rows, columns)` of its own.
pub fn reference_positions(grids: &[(usize, usize)]) -> Vec<Position> {
    let pictures = (1..).map(|number| number * REFERENCE_STEP).zip(grids);
    pictures.flat_map(|(picture, &grid)| cells(picture, grid)).collect()
}

fn cells(picture: u32, (rows, columns): (usize, usize)) -> impl Iterator<Item = Position> {
    (0..rows).flat_map(move |y| (0..columns).map(move |x| [picture, y as u32, x as u32, 0]))
}

impl RopeTable {
    /// Tables for tokens at `positions`; `axes` are the channels of a head that each axis rotates.
    ///
    /// An axis of d channels has the d/2 frequencies `theta^(-2i/d)`; axes lie one after another in the head. Angles are
    /// made in f64 and kept as f32 cosines and sines of shape `[S, D / 2]` (the reference: huggingface/diffusers,
    /// `transformer_flux2.py`).
    ///
    /// # Errors
    /// [`Error::Config`] if there are not four axes of even widths or theta is not positive.
    pub fn new(axes: &[usize], theta: f64, positions: &[Position], device: &Device) -> Result<Self> {
        let invalid = |field, value, expected: &str| {
            Err(Error::Config { component: "transformer", field, value, expected: expected.to_owned() })
        };
        if axes.len() != 4 || axes.iter().any(|d| d % 2 != 0) {
            return invalid("axes_dims_rope", format!("{axes:?}"), "four even numbers");
        }
        if !(theta.is_finite() && theta > 0.0) {
            return invalid("rope_theta", theta.to_string(), "a positive number");
        }
        let frequencies: Vec<Vec<f64>> =
            axes.iter().map(|&d| (0..d / 2).map(|i| theta.powf(-((2 * i) as f64) / d as f64)).collect()).collect();
        let half = axes.iter().sum::<usize>() / 2;
        let mut cos = Vec::with_capacity(positions.len() * half);
        let mut sin = Vec::with_capacity(positions.len() * half);
        for position in positions {
            for (&coordinate, frequencies) in position.iter().zip(&frequencies) {
                for frequency in frequencies {
                    let angle = f64::from(coordinate) * frequency;
                    cos.push(angle.cos() as f32);
                    sin.push(angle.sin() as f32);
                }
            }
        }
        let table = |values| Tensor::from_vec(values, (positions.len(), half), device).what("rope table");
        Ok(Self { cos: table(cos)?, sin: table(sin)? })
    }

    /// Cosines, `[S, D / 2]` f32.
    pub fn cos(&self) -> &Tensor {
        &self.cos
    }

    /// Sines, `[S, D / 2]` f32.
    pub fn sin(&self) -> &Tensor {
        &self.sin
    }

    /// The tables of some of the tokens.
    pub(super) fn part(&self, tokens: &Range<usize>) -> Result<Self> {
        let part = |t: &Tensor| t.narrow(0, tokens.start, tokens.len()).what("rope table of some tokens");
        Ok(Self { cos: part(&self.cos)?, sin: part(&self.sin)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_counts_on_the_last_axis_and_the_image_on_rows_then_columns() {
        assert_eq!(
            positions(2, (2, 3)),
            [
                [0, 0, 0, 0],
                [0, 0, 0, 1],
                [0, 0, 0, 0],
                [0, 0, 1, 0],
                [0, 0, 2, 0],
                [0, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 1, 2, 0],
            ]
        );
    }

    #[test]
    fn references_count_from_ten_with_grids_of_their_own() {
        assert_eq!(
            reference_positions(&[(1, 2), (2, 1)]),
            [[10, 0, 0, 0], [10, 0, 1, 0], [20, 0, 0, 0], [20, 1, 0, 0]]
        );
        assert!(reference_positions(&[]).is_empty());
    }

    #[test]
    fn angles_are_position_times_frequency_axis_after_axis() {
        let axes = [2, 4, 6, 8];
        let table = RopeTable::new(&axes, 2000.0, &[[3, 5, 7, 11], [0, 1, 0, 2]], &Device::Cpu).unwrap();
        assert_eq!(table.cos().dims(), [2, 10]);
        let cos = table.cos().to_vec2::<f32>().unwrap();
        let sin = table.sin().to_vec2::<f32>().unwrap();
        for (row, position) in [[3.0, 5.0, 7.0, 11.0], [0.0, 1.0, 0.0, 2.0]].into_iter().enumerate() {
            let mut column = 0;
            for (axis, d) in axes.into_iter().enumerate() {
                for i in 0..d / 2 {
                    let angle = position[axis] * (-(2.0 * i as f64 / d as f64) * 2000f64.ln()).exp();
                    assert!((f64::from(cos[row][column]) - angle.cos()).abs() < 1e-7, "{row} {axis} {i}");
                    assert!((f64::from(sin[row][column]) - angle.sin()).abs() < 1e-7, "{row} {axis} {i}");
                    column += 1;
                }
            }
        }
    }

    #[test]
    fn odd_axes_and_bad_theta_are_refused() {
        for (axes, theta) in [(&[2, 4, 6][..], 1e3), (&[2, 4, 5, 1], 1e3), (&[2; 4], 0.0), (&[2; 4], f64::NAN)] {
            let table = RopeTable::new(axes, theta, &[[0; 4]], &Device::Cpu);
            assert!(matches!(table, Err(Error::Config { .. })), "{axes:?} {theta}");
        }
    }
}
