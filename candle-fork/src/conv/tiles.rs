//! How a convolution on a device is cut into matrix products whose patches fit a bounded buffer. Pure arithmetic.

use super::{ConvProblem, OP};
use crate::{
    cuda::grid::Divisor,
    error::{Error, Result},
};

/// Most bytes of patches and f32 sums that exist at a time. Large enough that a tile of the widest layers (27 taps of
/// 1024 channels) still has thousands of rows, which is what fills a device.
pub(super) const MAX_BYTES: usize = 256 << 20;

/// Tiles of more pixels than this are cut to a multiple of it, the height of the tiles of matrix products.
const GRAIN: usize = 128;

/// Most pixels of a tile, so that every index within one stays far below 2^31.
const MAX_PIXELS: usize = 1 << 28;

/// How many of `pixels` go into one tile, at `bytes` each; at least one.
fn pixels_per_tile(pixels: usize, bytes: usize) -> usize {
    let most = (MAX_BYTES / bytes.max(1)).clamp(1, MAX_PIXELS);
    if most >= pixels {
        pixels
    } else if most > GRAIN {
        most / GRAIN * GRAIN
    } else {
        most
    }
}

/// A tile of a channels-last convolution: consecutive pixels, counted over all images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowTile {
    /// First pixel over all images: row of the result.
    pub(super) first: usize,
    /// Pixels.
    pub(super) count: usize,
    /// Image of the first pixel.
    pub(super) image: usize,
    /// First pixel within that image.
    pub(super) pixel: usize,
}

/// Tiles of all pixels of all images, with `bytes` of scratch memory per pixel.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowTiles {
    step: usize,
    total: usize,
    per_image: usize,
}

impl RowTiles {
    pub(super) fn new(problem: &ConvProblem, bytes: usize) -> Self {
        let (per_image, total) = (problem.pixels(), problem.n * problem.pixels());
        Self { step: pixels_per_tile(total, bytes), total, per_image }
    }

    /// Pixels of the largest tile.
    pub(super) fn largest(&self) -> usize {
        self.step
    }

    pub(super) fn iter(self) -> impl Iterator<Item = RowTile> {
        (0..self.total).step_by(self.step).map(move |first| RowTile {
            first,
            count: self.step.min(self.total - first),
            image: first / self.per_image,
            pixel: first % self.per_image,
        })
    }
}

/// A tile of a channels-first convolution: whole images, or consecutive pixels of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlaneTile {
    pub(super) first_image: usize,
    pub(super) images: usize,
    /// First pixel of each image.
    pub(super) pixel: usize,
    /// Pixels of each image.
    pub(super) pixels: usize,
}

/// Tiles with `bytes` of scratch memory per pixel. Several images share one only without groups, since a batch of matrix
/// products runs over images or over groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlaneTiles {
    images: usize,
    pixels: usize,
    total_images: usize,
    per_image: usize,
}

impl PlaneTiles {
    pub(super) fn new(problem: &ConvProblem, bytes: usize) -> Self {
        let (per_image, total_images) = (problem.pixels(), problem.n);
        let pixels = pixels_per_tile(per_image, bytes);
        let whole = MAX_BYTES / (bytes.max(1) * per_image).max(1);
        let images = if problem.groups == 1 { whole.min(MAX_PIXELS / per_image).clamp(1, total_images) } else { 1 };
        Self { images, pixels, total_images, per_image }
    }

    /// Pixels of the largest tile.
    pub(super) fn largest(&self) -> usize {
        self.images * self.pixels
    }

    pub(super) fn iter(self) -> impl Iterator<Item = PlaneTile> {
        (0..self.total_images).step_by(self.images).flat_map(move |first_image| {
            let images = self.images.min(self.total_images - first_image);
            (0..self.per_image).step_by(self.pixels).map(move |pixel| PlaneTile {
                first_image,
                images,
                pixel,
                pixels: self.pixels.min(self.per_image - pixel),
            })
        })
    }
}

/// The window of a convolution in the integers of the kernels: `Window` of `im2col.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    input: [i32; 3],
    filter: [i32; 3],
    stride: [i32; 3],
    dilation: [i32; 3],
    padding: [i32; 3],
    channels: u32,
    /// Output pixels of an image, of a slice (P x Q), of a line (Q).
    per_image: Divisor,
    per_slice: Divisor,
    per_line: Divisor,
}

impl Window {
    /// # Errors
    /// [`Error::Unsupported`] if a padded extent, the pixels of an output image or the channels times the taps reach 2^30.
    /// Element counts and offsets have no such limit.
    pub(super) fn new(problem: &ConvProblem) -> Result<Self> {
        const LIMIT: usize = 1 << 30;
        let &ConvProblem { input, filter, padding, output, .. } = problem;
        // A step that is never taken may be anything.
        let taken = |steps: [usize; 3], extents: [usize; 3]| -> [usize; 3] {
            std::array::from_fn(|axis| if extents[axis] == 1 { 1 } else { steps[axis] })
        };
        let (stride, dilation) = (taken(problem.stride, output), taken(problem.dilation, filter));
        // Bounds of all positions that a tap can reach, in or out of the input.
        let reach = (0..3).map(|axis| {
            let last = (output[axis] - 1) * stride[axis] + (filter[axis] - 1) * dilation[axis];
            input[axis] + padding[axis] + last
        });
        let rows = problem.c * filter.iter().product::<usize>();
        if reach.chain([rows, problem.pixels()]).any(|extent| extent >= LIMIT) {
            return Err(Error::Unsupported {
                op: OP,
                what: format!("extents of 2^30 or more on a device: {problem:?}"),
            });
        }
        // All are summands or factors of what is below 2^30.
        let ints = |values: [usize; 3]| values.map(|v| v as i32);
        let [_, p, q] = output;
        Ok(Self {
            input: ints(input),
            filter: ints(filter),
            stride: ints(stride),
            dilation: ints(dilation),
            padding: ints(padding),
            channels: problem.c as u32,
            per_image: Divisor::new(OP, problem.pixels())?,
            per_slice: Divisor::new(OP, p * q)?,
            per_line: Divisor::new(OP, q)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::ConvParams;

    fn problem(x: [usize; 5], w: [usize; 5], groups: usize) -> ConvProblem {
        let padding = [(2, 0), (1, 1), (1, 1)];
        ConvProblem::new(&x, &w, &ConvParams { padding, groups, ..Default::default() }).unwrap()
    }

    #[test]
    fn row_tiles_cover_every_pixel_once_within_the_bound() {
        for (x, w, bytes) in [
            ([1, 96, 4, 480, 832], [96, 96, 3, 3, 3], 27 * 96 * 2 + 96 * 4),
            ([3, 16, 1, 5, 7], [8, 16, 3, 3, 3], 27 * 16 * 2),
            ([2, 8, 2, 300, 300], [8, 8, 3, 3, 3], 1 << 20),
            ([2, 8, 1, 9, 9], [8, 8, 3, 3, 3], MAX_BYTES * 2),
            ([7, 8, 1, 9, 9], [8, 8, 3, 3, 3], 0),
        ] {
            let problem = problem(x, w, 1);
            let tiles = RowTiles::new(&problem, bytes);
            let mut next = 0;
            for tile in tiles.iter() {
                assert_eq!(tile.first, next);
                assert_eq!(tile.image * problem.pixels() + tile.pixel, tile.first);
                assert!(tile.count >= 1 && tile.count <= tiles.largest() && tile.pixel < problem.pixels());
                next += tile.count;
            }
            assert_eq!(next, problem.n * problem.pixels());
            assert!(tiles.largest() == 1 || tiles.largest() * bytes <= MAX_BYTES);
        }
        let tiles = RowTiles::new(&problem([1, 96, 4, 480, 832], [96, 96, 3, 3, 3], 1), 27 * 96 * 2);
        assert!(tiles.largest().is_multiple_of(GRAIN) && tiles.largest() > 50_000);
    }

    #[test]
    fn plane_tiles_cover_every_image_and_pixel_once_within_the_bound() {
        for (x, w, groups, bytes) in [
            ([5, 8, 1, 20, 20], [8, 8, 3, 3, 3], 1, 27 * 8 * 4),
            ([5, 8, 1, 20, 20], [8, 4, 3, 3, 3], 2, 27 * 8 * 4),
            ([3, 8, 1, 400, 400], [8, 8, 3, 3, 3], 1, 4096),
            ([9, 8, 1, 100, 100], [8, 8, 3, 3, 3], 1, 8192),
            ([2, 8, 1, 3, 3], [8, 8, 3, 3, 3], 1, MAX_BYTES * 2),
        ] {
            let problem = problem(x, w, groups);
            let tiles = PlaneTiles::new(&problem, bytes);
            let mut seen = vec![0; problem.n * problem.pixels()];
            for tile in tiles.iter() {
                assert!(tile.images * tile.pixels <= tiles.largest());
                assert!(tile.images == 1 || (tile.pixels == problem.pixels() && groups == 1));
                for image in tile.first_image..tile.first_image + tile.images {
                    seen[image * problem.pixels() + tile.pixel..][..tile.pixels].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{x:?}");
            assert!(tiles.largest() == 1 || tiles.largest() * bytes <= MAX_BYTES);
        }
        let shared = PlaneTiles::new(&problem([9, 8, 1, 50, 50], [8, 8, 3, 3, 3], 1), 864);
        assert_eq!(shared.largest(), 9 * 2500);
    }

    #[test]
    fn windows_refuse_what_their_integers_cannot_hold() {
        assert!(Window::new(&problem([1, 96, 4, 480, 832], [96, 96, 3, 3, 3], 1)).is_ok());
        let params = ConvParams { padding: [(1 << 30, 0)], ..Default::default() };
        let wide = ConvProblem::new(&[1, 1, 4], &[1, 1, 1], &params).unwrap();
        assert!(matches!(Window::new(&wide), Err(Error::Unsupported { .. })));
        let params = ConvParams { dilation: [usize::MAX], stride: [usize::MAX], ..Default::default() };
        let never_taken = ConvProblem::new(&[1, 1, 4], &[1, 1, 1], &params).unwrap();
        assert!(Window::new(&never_taken).is_ok());
        let params = ConvParams { dilation: [1 << 29], padding: [(0, 1 << 30)], ..Default::default() };
        let far = ConvProblem::new(&[1, 1, 4], &[1, 1, 3], &params).unwrap();
        assert!(matches!(Window::new(&far), Err(Error::Unsupported { .. })));
    }
}
