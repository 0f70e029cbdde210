//! Red, green and blue to brightness and two colour differences, and back.

use crate::{Result, Rgb8};

/// Which brightness a colour has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Matrix {
    /// ITU-R BT.601: standard definition.
    Bt601,
    /// ITU-R BT.709: high definition.
    Bt709,
}

impl Matrix {
    /// What players take for a video that does not say it: BT.709 from 1280 columns or above 576 rows on.
    pub(super) fn of_untagged(width: usize, height: usize) -> Self {
        if width >= 1280 || height > 576 { Matrix::Bt709 } else { Matrix::Bt601 }
    }

    /// The shares of red, green and blue in the brightness, in 1/10000.
    const fn shares(self) -> [i64; 3] {
        match self {
            Matrix::Bt601 => [2990, 5870, 1140],
            Matrix::Bt709 => [2126, 7152, 722],
        }
    }
}

/// Which values stand for black and white.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Range {
    /// Brightness from 16 to 235, colour differences from 16 to 240.
    Limited,
    /// All from 0 to 255.
    Full,
}

/// Where the colour differences are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sampling {
    /// At each pixel (4:4:4).
    Full,
    /// Each second column, at its pixels (4:2:2).
    Columns,
    /// Each second column and row. Across, a sample lies between two pixels or on the left one; down, between two rows
    /// or on the upper one (4:2:0).
    Both { between_columns: bool, between_rows: bool },
    /// Nowhere: grey.
    None,
}

impl Sampling {
    /// Width and height of each plane of colour differences.
    pub(super) fn size(self, width: usize, height: usize) -> (usize, usize) {
        match self {
            Sampling::Full => (width, height),
            Sampling::Columns => (width.div_ceil(2), height),
            Sampling::Both { .. } => (width.div_ceil(2), height.div_ceil(2)),
            Sampling::None => (0, 0),
        }
    }
}

/// Brightness and colour differences of a picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Planes {
    pub(super) width: usize,
    pub(super) height: usize,
    /// `[height, width]`
    pub(super) y: Vec<u8>,
    /// As [`Sampling::size`] says.
    pub(super) cb: Vec<u8>,
    pub(super) cr: Vec<u8>,
}

/// A picture in limited range at 4:4:4.
///
/// **Formula** (ITU-R BT.709, section 3; BT.601, section 2.5), on 8-bit values with shares r, g, b of [`Matrix`]:
/// `E = (r R + g G + b B) / 255`, `Y = 16 + 219 E`, `Cb = 128 + 224 (B / 255 - E) / (2 (1 - b))`, and `Cr` with `R` and
/// `r`.
///
/// **Numerics.** In whole numbers, rounded once, halves upwards.
pub(super) fn to_444(picture: &Rgb8, matrix: Matrix) -> Planes {
    let pixels = picture.pixels().as_chunks::<3>().0;
    let y = pixels.iter().map(|&pixel| luma(pixel, matrix)).collect();
    let differences = pixels.iter().map(|&pixel| chroma(pixel.map(i64::from), 1, matrix));
    let (cb, cr) = differences.unzip();
    Planes { width: picture.width(), height: picture.height(), y, cb, cr }
}

/// A picture in limited range at 4:2:0 as H.264 and MPEG-2 have it: colour differences on even columns, between rows.
/// Sides grow to multiples of `multiple`, an even number, by repeating the last column or row.
///
/// The colour differences are taken from the mean of six pixels: two rows, and the columns left of it, at it and right
/// of it with the weights 1, 2, 1. Formula and rounding as for [`to_444`].
#[cfg_attr(not(feature = "mp4"), allow(dead_code))]
pub(super) fn to_420(picture: &Rgb8, matrix: Matrix, multiple: usize) -> Planes {
    let (width, height) = (picture.width().next_multiple_of(multiple), picture.height().next_multiple_of(multiple));
    let rows: Vec<&[[u8; 3]]> =
        picture.pixels().chunks_exact(3 * picture.width()).map(|row| row.as_chunks().0).collect();
    let (last_column, last_row) = (picture.width() - 1, picture.height() - 1);
    let pixel = |x: usize, y: usize| rows[y.min(last_row)][x.min(last_column)];

    let mut y_plane = Vec::with_capacity(width * height);
    for y in 0..height {
        y_plane.extend((0..width).map(|x| luma(pixel(x, y), matrix)));
    }
    let (mut cb, mut cr) = (Vec::with_capacity(width * height / 4), Vec::with_capacity(width * height / 4));
    for y in (0..height).step_by(2) {
        for x in (0..width).step_by(2) {
            let mut sums = [0; 3];
            for row in [y, y + 1] {
                let taps = [pixel(x.saturating_sub(1), row), pixel(x, row), pixel(x + 1, row)];
                for (channel, sum) in sums.iter_mut().enumerate() {
                    let [left, here, right] = taps.map(|tap| i64::from(tap[channel]));
                    *sum += left + 2 * here + right;
                }
            }
            let (b, r) = chroma(sums, 8, matrix);
            cb.push(b);
            cr.push(r);
        }
    }
    Planes { width, height, y: y_plane, cb, cr }
}

fn luma(pixel: [u8; 3], matrix: Matrix) -> u8 {
    const SCALE: i64 = 10_000 * 255;
    let weighted = weigh(pixel.map(i64::from), matrix);
    // 16 to 235.
    (16 + (219 * weighted + SCALE / 2) / SCALE) as u8
}

/// Colour differences of the mean of `count` pixels, given their sums.
fn chroma(sums: [i64; 3], count: i64, matrix: Matrix) -> (u8, u8) {
    let [red_share, _, blue_share] = matrix.shares();
    let weighted = weigh(sums, matrix);
    let difference = |sum: i64, share: i64| {
        let (numerator, scale) = (112 * (10_000 * sum - weighted), 255 * count * (10_000 - share));
        // 16 to 240.
        (128 + (2 * numerator + scale).div_euclid(2 * scale)) as u8
    };
    (difference(sums[2], blue_share), difference(sums[0], red_share))
}

fn weigh([red, green, blue]: [i64; 3], matrix: Matrix) -> i64 {
    let [r, g, b] = matrix.shares();
    r * red + g * green + b * blue
}

/// The picture in the first `width` columns and `height` rows of planes.
///
/// The inverse of [`to_444`]; colour differences between their samples are interpolated linearly, and the outermost
/// ones continue to the edge.
///
/// # Errors
/// Those of [`Rgb8::new`].
pub(super) fn to_rgb(planes: &Planes, sampling: Sampling, matrix: Matrix, range: Range) -> Result<Rgb8> {
    let (width, height) = (planes.width, planes.height);
    let colours = Colours::new(matrix, range);
    let (across, down) = match sampling {
        Sampling::Full | Sampling::None => (Axis::Each, Axis::Each),
        Sampling::Columns => (Axis::On, Axis::Each),
        Sampling::Both { between_columns, between_rows } => (Axis::halved(between_columns), Axis::halved(between_rows)),
    };
    let (chroma_width, chroma_height) = sampling.size(width, height);
    let columns: Vec<_> = (0..width).map(|x| across.taps(x, chroma_width)).collect();

    let mut pixels = Vec::with_capacity(3 * width * height);
    for y in 0..height {
        let rows = down.taps(y, chroma_height);
        // In sixteenths.
        let sample = |plane: &[u8], x: usize| -> u16 {
            let mut sum = 0;
            for (row, row_weight) in rows {
                for (column, column_weight) in columns[x] {
                    sum += row_weight * column_weight * u16::from(plane[row * chroma_width + column]);
                }
            }
            sum
        };
        for x in 0..width {
            let (cb, cr) = match sampling {
                Sampling::None => (128 * 16, 128 * 16),
                _ => (sample(&planes.cb, x), sample(&planes.cr, x)),
            };
            pixels.extend(colours.rgb(planes.y[y * width + x], cb, cr));
        }
    }
    Rgb8::new(pixels, width, height)
}

/// How the samples of colour lie along rows or columns.
#[derive(Debug, Clone, Copy)]
enum Axis {
    /// One for each pixel.
    Each,
    /// On each second pixel, beginning with the first.
    On,
    /// Between the first and the second pixel, and so on.
    Between,
}

impl Axis {
    fn halved(between: bool) -> Self {
        if between { Axis::Between } else { Axis::On }
    }

    /// The two samples, of `len`, that the colour at a pixel is a mean of, and their weights in quarters.
    fn taps(self, at: usize, len: usize) -> [(usize, u16); 2] {
        let (half, odd) = (at / 2, at % 2 == 1);
        let (first, second, weight) = match (self, odd) {
            (Axis::Each, _) => (at, at, 4),
            (Axis::On, false) => (half, half, 4),
            (Axis::On, true) => (half, half + 1, 2),
            (Axis::Between, false) => (half, half.saturating_sub(1), 3),
            (Axis::Between, true) => (half, half + 1, 3),
        };
        let last = len.saturating_sub(1);
        [(first.min(last), weight), (second.min(last), 4 - weight)]
    }
}

/// The coefficients of the way back.
struct Colours {
    black: f32,
    gain: f32,
    red_cr: f32,
    green_cb: f32,
    green_cr: f32,
    blue_cb: f32,
}

impl Colours {
    fn new(matrix: Matrix, range: Range) -> Self {
        let [r, g, b] = matrix.shares().map(|share| share as f32 / 10_000.0);
        let (black, luma_steps, chroma_steps) = match range {
            Range::Limited => (16.0, 219.0, 224.0),
            Range::Full => (0.0, 255.0, 255.0),
        };
        let (red_cr, blue_cb) = (2.0 * (1.0 - r) * 255.0 / chroma_steps, 2.0 * (1.0 - b) * 255.0 / chroma_steps);
        Self { black, gain: 255.0 / luma_steps, red_cr, green_cb: -blue_cb * b / g, green_cr: -red_cr * r / g, blue_cb }
    }

    /// `cb` and `cr` in sixteenths.
    fn rgb(&self, y: u8, cb: u16, cr: u16) -> [u8; 3] {
        let y = (f32::from(y) - self.black) * self.gain;
        let (cb, cr) = (f32::from(cb) / 16.0 - 128.0, f32::from(cr) / 16.0 - 128.0);
        // The cast cuts off what is below 0 or above 255.
        [y + self.red_cr * cr, y + self.green_cb * cb + self.green_cr * cr, y + self.blue_cb * cb]
            .map(|value| value.round() as u8)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEFT: Sampling = Sampling::Both { between_columns: false, between_rows: true };
    const CENTRE: Sampling = Sampling::Both { between_columns: true, between_rows: true };

    fn flat(pixel: [u8; 3]) -> Rgb8 {
        Rgb8::new(pixel.repeat(6), 3, 2).unwrap()
    }

    /// Straight from the recommendations, in floating point.
    fn formula([r, g, b]: [f64; 3], [red, green, blue]: [f64; 3]) -> [f64; 3] {
        let brightness = r * red + g * green + b * blue;
        [
            16.0 + 219.0 * brightness / 255.0,
            128.0 + 224.0 * (blue - brightness) / (2.0 * (1.0 - b) * 255.0),
            128.0 + 224.0 * (red - brightness) / (2.0 * (1.0 - r) * 255.0),
        ]
    }

    #[test]
    fn primary_colours_have_the_published_values() {
        // Y, Cb and Cr of full red, green, blue, white and black, as in test charts.
        for (pixel, bt709, bt601) in [
            ([255, 0, 0], [63, 102, 240], [81, 90, 240]),
            ([0, 255, 0], [173, 42, 26], [145, 54, 34]),
            ([0, 0, 255], [32, 240, 118], [41, 240, 110]),
            ([255, 255, 255], [235, 128, 128], [235, 128, 128]),
            ([0, 0, 0], [16, 128, 128], [16, 128, 128]),
        ] {
            for (matrix, expected) in [(Matrix::Bt709, bt709), (Matrix::Bt601, bt601)] {
                for planes in [to_444(&flat(pixel), matrix), to_420(&flat(pixel), matrix, 2)] {
                    let found = [planes.y[0], planes.cb[0], planes.cr[0]];
                    assert_eq!(found, expected, "{pixel:?} {matrix:?}");
                }
            }
        }
    }

    #[test]
    fn conversion_is_the_formula_rounded_once() {
        for (matrix, shares) in [(Matrix::Bt709, [0.2126, 0.7152, 0.0722]), (Matrix::Bt601, [0.299, 0.587, 0.114])] {
            let levels = [0, 1, 2, 63, 64, 127, 128, 129, 200, 254, 255];
            for pixel in
                levels.into_iter().flat_map(|r| levels.map(|g| (r, g))).flat_map(|(r, g)| levels.map(|b| [r, g, b]))
            {
                let planes = to_444(&flat(pixel), matrix);
                let exact = formula(shares, pixel.map(f64::from));
                for (found, exact) in [planes.y[0], planes.cb[0], planes.cr[0]].into_iter().zip(exact) {
                    assert!((f64::from(found) - exact).abs() <= 0.5 + 1e-9, "{pixel:?}: {found}, exactly {exact}");
                }
            }
        }
    }

    #[test]
    fn halves_are_rounded_upwards() {
        // Brightness 219 / 6 = 36.5 above black, exactly.
        let is_half = |&[r, g, b]: &[u8; 3]| weigh([r, g, b].map(i64::from), Matrix::Bt709) == 425_000;
        let pixels = (0..=255).flat_map(|r| (0..=255).flat_map(move |g| (0..=255).map(move |b| [r, g, b])));
        let found: Vec<_> = pixels.filter(is_half).take(3).collect();
        assert!(!found.is_empty());
        for pixel in found {
            assert_eq!(luma(pixel, Matrix::Bt709), 16 + 37, "{pixel:?}");
        }
    }

    #[test]
    fn colour_samples_lie_on_even_columns_and_between_rows() {
        // One row of black with one red pixel: sample 1 lies on column 2, its neighbours are columns 1 and 3.
        let share = |red_at: usize| {
            let mut pixels = vec![0; 3 * 6];
            pixels[3 * red_at] = 255;
            to_420(&Rgb8::new(pixels, 6, 1).unwrap(), Matrix::Bt709, 2).cr
        };
        let level = |quarters: i64| chroma([quarters * 255, 0, 0], 4, Matrix::Bt709).1;
        assert_eq!(share(2), [128, level(2), 128]);
        assert_eq!(share(1), [level(1), level(1), 128]);
        assert_eq!(share(3), [128, level(1), level(1)]);
        // The edges are doubled.
        assert_eq!(share(0), [level(3), 128, 128]);
        assert_eq!(share(5), [128, 128, level(1)]);
    }

    #[test]
    fn sides_grow_by_the_last_column_and_row() {
        let pixels: Vec<u8> = (0..27).map(|i| i * 9).collect();
        let planes = to_420(&Rgb8::new(pixels, 3, 3).unwrap(), Matrix::Bt709, 4);
        assert_eq!((planes.width, planes.height, planes.y.len(), planes.cb.len()), (4, 4, 16, 4));
        for row in planes.y.chunks(4) {
            assert_eq!(row[2], row[3]);
        }
        assert_eq!(planes.y[8..12], planes.y[12..]);
    }

    #[test]
    fn interpolation_follows_the_places_of_the_samples() {
        let quarters = |axis: Axis, at| {
            let [(first, a), (second, b)] = axis.taps(at, 4);
            // The place of the mean, in quarters of a sample.
            first * usize::from(a) + second * usize::from(b)
        };
        assert_eq!([0, 1, 2, 3, 4, 5].map(|x| quarters(Axis::On, x)), [0, 2, 4, 6, 8, 10]);
        // Pixel 0 lies a quarter of a sample before sample 0, which is continued; pixel 7 behind sample 3.
        assert_eq!([0, 1, 2, 3, 4, 7].map(|x| quarters(Axis::Between, x)), [0, 1, 3, 5, 7, 12]);
        assert_eq!([0, 1, 2, 3].map(|x| quarters(Axis::Each, x)), [0, 4, 8, 12]);
    }

    #[test]
    fn full_range_and_grey_are_read() {
        let planes = Planes { width: 1, height: 3, y: vec![0, 128, 255], cb: Vec::new(), cr: Vec::new() };
        let read = |range| to_rgb(&planes, Sampling::None, Matrix::Bt601, range).unwrap().into_pixels();
        assert_eq!(read(Range::Full), [0, 0, 0, 128, 128, 128, 255, 255, 255]);
        assert_eq!(read(Range::Limited), [0, 0, 0, 130, 130, 130, 255, 255, 255]);
    }

    proptest! {
        #[test]
        fn pixels_come_back_nearly(pixel: [u8; 3], bt709: bool) {
            let matrix = if bt709 { Matrix::Bt709 } else { Matrix::Bt601 };
            for (planes, sampling) in [
                (to_444(&flat(pixel), matrix), Sampling::Full),
                (to_420(&flat(pixel), matrix, 2), LEFT),
                (to_420(&flat(pixel), matrix, 2), CENTRE),
            ] {
                let back = to_rgb(&planes, sampling, matrix, Range::Limited).unwrap();
                for (a, b) in back.pixels().iter().zip(pixel.iter().cycle()) {
                    prop_assert!(a.abs_diff(*b) <= 2, "{:?} became {:?}", pixel, &back.pixels()[..3]);
                }
            }
        }
    }
}
