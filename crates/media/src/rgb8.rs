//! A picture in memory.

use crate::{Error, Result};

const CHANNELS: usize = 3;

/// A picture of 8-bit red, green and blue, row by row from the top, at least one pixel large.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb8 {
    width: usize,
    height: usize,
    /// `height * width * 3` values.
    pixels: Vec<u8>,
}

impl Rgb8 {
    /// A picture from interleaved values `[height, width, 3]`.
    ///
    /// # Errors
    /// - [`Error::EmptyPicture`] if a side is 0.
    /// - [`Error::PixelCount`] if there are not `height * width * 3` values.
    pub fn new(pixels: Vec<u8>, width: usize, height: usize) -> Result<Self> {
        check_len(pixels.len(), width, height)?;
        Ok(Self { width, height, pixels })
    }

    /// A picture from planes of values in 0 to 1.
    ///
    /// **Shapes.** `planes`: `[3, height, width]`, contiguous.
    ///
    /// **Formula.** `round(255 * x)`, ties to even, after clamping `x` to 0 to 1: what diffusers' `VaeImageProcessor`
    /// does.
    ///
    /// # Errors
    /// - [`Error::EmptyPicture`] if a side is 0.
    /// - [`Error::PixelCount`] if there are not `3 * height * width` values.
    /// - [`Error::NonFinite`] with the first place that holds NaN or infinity: such a picture is the sign of a broken
    ///   run, and clamping would hide it.
    pub fn from_planar_f32(planes: &[f32], width: usize, height: usize) -> Result<Self> {
        let area = check_len(planes.len(), width, height)?;
        if let Some((index, &value)) = planes.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            let (channel, place) = (index / area, index % area);
            return Err(Error::NonFinite { value, index, channel, row: place / width, column: place % width });
        }
        let mut pixels = vec![0; planes.len()];
        for (channel, plane) in planes.chunks_exact(area).enumerate() {
            for (pixel, &value) in pixels.chunks_exact_mut(CHANNELS).zip(plane) {
                pixel[channel] = (255.0 * value.clamp(0.0, 1.0)).round_ties_even() as u8;
            }
        }
        Ok(Self { width, height, pixels })
    }

    /// Planes `[3, height, width]` of values in 0 to 1: `x / 255`, rounded once to `f32`.
    #[must_use]
    pub fn to_planar_f32(&self) -> Vec<f32> {
        let plane = |channel| self.pixels.iter().skip(channel).step_by(CHANNELS).map(|&x| f32::from(x) / 255.0);
        (0..CHANNELS).flat_map(plane).collect()
    }

    /// Width in pixels.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// The interleaved values `[height, width, 3]`.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The interleaved values `[height, width, 3]`.
    #[must_use]
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }
}

/// The number of pixels, if `len` is three times it.
fn check_len(len: usize, width: usize, height: usize) -> Result<usize> {
    if width == 0 || height == 0 {
        return Err(Error::EmptyPicture { width, height });
    }
    let area = width.checked_mul(height);
    match area.and_then(|area| area.checked_mul(CHANNELS)) {
        Some(expected) if expected == len => Ok(len / CHANNELS),
        _ => Err(Error::PixelCount { width, height, len }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn planes_become_interleaved_pixels() {
        // Two pixels wide, one high: red, then a dark grey.
        let picture = Rgb8::from_planar_f32(&[1.0, 0.2, 0.0, 0.2, 0.0, 0.2], 2, 1).unwrap();
        assert_eq!(picture.pixels(), [255, 0, 0, 51, 51, 51]);
        assert_eq!((picture.width(), picture.height()), (2, 1));
        // One wide, two high: the same values, other places.
        let picture = Rgb8::from_planar_f32(&[1.0, 0.2, 0.0, 0.4, 0.0, 0.6], 1, 2).unwrap();
        assert_eq!(picture.pixels(), [255, 0, 0, 51, 102, 153]);
    }

    #[test]
    fn values_are_clamped_and_rounded_to_the_nearest() {
        let level = |value: f32| Rgb8::from_planar_f32(&[value; 3], 1, 1).unwrap().pixels()[0];
        for (value, expected) in [
            (-1.0, 0),
            (-0.0, 0),
            (f32::MIN, 0),
            (0.499 / 255.0, 0),
            (0.501 / 255.0, 1),
            // Truncation would give 254.
            (254.6 / 255.0, 255),
            (254.4 / 255.0, 254),
            (1.0, 255),
            (1.001, 255),
            (f32::MAX, 255),
            // 127.5 is a tie, and 128 is even; 0.5 * 255 is exact.
            (0.5, 128),
        ] {
            assert_eq!(level(value), expected, "{value}");
        }
    }

    #[test]
    fn not_a_number_and_infinity_name_the_first_place() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut planes = [0.5; 3 * 4 * 5];
            planes[20 + 2 * 5 + 3] = bad;
            planes[59] = f32::NAN;
            let error = Rgb8::from_planar_f32(&planes, 5, 4).unwrap_err();
            let Error::NonFinite { index, channel, row, column, .. } = error else { panic!("{error}") };
            assert_eq!((index, channel, row, column), (33, 1, 2, 3));
        }
        let message = Rgb8::from_planar_f32(&[0.0, f32::NAN, 0.0], 1, 1).unwrap_err().to_string();
        assert_eq!(message, "the picture holds NaN at channel 1, row 0, column 0 (value 1)");
    }

    #[test]
    fn sizes_that_do_not_fit_are_typed_errors() {
        for (width, height) in [(0, 4), (4, 0), (0, 0)] {
            assert!(matches!(Rgb8::from_planar_f32(&[], width, height), Err(Error::EmptyPicture { .. })));
            assert!(matches!(Rgb8::new(Vec::new(), width, height), Err(Error::EmptyPicture { .. })));
        }
        for (width, height) in [(1, 1), (2, 2), (usize::MAX, 2), (usize::MAX, usize::MAX)] {
            assert!(matches!(Rgb8::from_planar_f32(&[0.0; 6], width, height), Err(Error::PixelCount { .. })));
            assert!(matches!(Rgb8::new(vec![0; 6], width, height), Err(Error::PixelCount { .. })));
        }
    }

    proptest! {
        #[test]
        fn pixels_come_back_from_planes(width in 1..9_usize, height in 1..9_usize, seed: u8) {
            let pixels: Vec<u8> = (0..width * height * 3).map(|i| (i * 37) as u8 ^ seed).collect();
            let picture = Rgb8::new(pixels, width, height).unwrap();
            prop_assert_eq!(Rgb8::from_planar_f32(&picture.to_planar_f32(), width, height).unwrap(), picture);
        }
    }

    #[test]
    fn every_level_comes_back() {
        let picture = Rgb8::new((0..=255).flat_map(|x| [x, 255 - x, x ^ 0x55]).collect(), 16, 16).unwrap();
        assert_eq!(Rgb8::from_planar_f32(&picture.to_planar_f32(), 16, 16).unwrap(), picture);
    }
}
