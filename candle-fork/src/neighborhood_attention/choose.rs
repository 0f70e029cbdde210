//! Which kernel neighborhood attention takes on CUDA, and how the tiled ones cut a problem. Pure.

mod warp_groups;

use candle_core::DType;

use super::reference::Extents;
#[cfg_attr(not(feature = "cuda"), allow(unused_imports, reason = "tests plan, only a device runs"))]
pub(super) use warp_groups::{FRAMES, LONG, SIDE as WARP_GROUP_SIDE, warp_groups};
#[cfg(feature = "cuda")]
pub(super) use warp_groups::{SHARED_BYTES, THREADS};

/// Most slices of a block along T: one for each of its warps.
const SLICES: usize = 8;
/// Sides of a block's queries along H and W: a slice is the sixteen rows of a matrix of products.
const SIDE: usize = 4;
/// Most keys of a plane that offsets and masks are kept for.
const KEYS: usize = 1024;
/// Bytes of an element.
const ELEMENT: usize = 2;

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) extents: Extents,
    /// Queries along T.
    pub(super) frames: usize,
    pub(super) window: [usize; 3],
    pub(super) softmax_scale: f32,
}

/// The factor of scores in the exponent of two; `None` where larger scores do not mean larger powers.
fn factor_of_two(softmax_scale: f32) -> Option<f32> {
    let factor = (f64::from(softmax_scale) * std::f64::consts::LOG2_E) as f32;
    (factor.is_normal() && factor > 0.0).then_some(factor)
}

/// How the tiled kernel runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Plan {
    pub(super) form: Form,
    /// Parts of T.
    pub(super) tiles: usize,
    /// Patches along H and W.
    pub(super) patches: [usize; 2],
    /// Most keys that the queries of a patch see in a plane.
    pub(super) keys: usize,
    /// Warps of a block.
    pub(super) warps: usize,
    /// The factor of scores in the exponent of two.
    pub(super) factor: f32,
    pub(super) shared_bytes: usize,
}

/// An instance of the tiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    /// Widest head.
    pub(super) width: usize,
    /// Keys of every other step along a plane, and of the steps between, in sixteens; 0 if all are alike.
    pub(super) groups: [usize; 2],
}

/// What the kernel is compiled for.
pub(super) const FORMS: [Form; 3] =
    [Form { width: 64, groups: [7, 6] }, Form { width: 64, groups: [4, 0] }, Form { width: 128, groups: [4, 0] }];

impl Form {
    /// Keys of each step along a plane of `keys`, in sixteens.
    fn steps(self, keys: usize) -> impl Iterator<Item = usize> {
        let [first, second] = self.groups;
        let lengths = [first, if second == 0 { first } else { second }];
        let mut left = keys;
        lengths.into_iter().cycle().take_while(move |groups| {
            let any = left > 0;
            left = left.saturating_sub(16 * groups);
            any
        })
    }

    /// Two steps of keys and values, the queries, offsets of the keys and of the values, and for every step a mask.
    fn shared_bytes(self, keys: usize, warps: usize) -> usize {
        let pitch = self.width * ELEMENT;
        let stages = 2 * 2 * 16 * self.groups[0] * pitch;
        let masks = self.steps(keys).count() * self.groups[0].div_ceil(4) * 32 * 4;
        stages + warps * 16 * pitch + 2 * keys * 4 + masks
    }
}

/// How the tiled kernel would run on a device whose blocks may have `shared_limit` bytes of shared memory; `None` where it
/// does not serve.
pub(super) fn tiled(shape: Shape, shared_limit: usize) -> Option<Plan> {
    let Shape { dtype, extents, frames, window, softmax_scale } = shape;
    let factor = factor_of_two(softmax_scale)?;
    if dtype == DType::F32 || !extents.width.is_multiple_of(8) {
        return None;
    }
    let [_, h, w] = extents.axes(window);
    let keys = h.widest_panel(SIDE) * w.widest_panel(SIDE);
    let tiles = frames.div_ceil(SLICES);
    let warps = frames.div_ceil(tiles);
    let serves = |form: &Form| extents.width <= form.width && form.shared_bytes(keys, warps) <= shared_limit;
    let cost = |form: &Form| (form.width, form.steps(keys).sum::<usize>());
    let form = FORMS.into_iter().filter(serves).min_by_key(cost)?;
    (keys <= KEYS).then(|| Plan {
        form,
        tiles,
        patches: [h, w].map(|axis| axis.extent().div_ceil(SIDE)),
        keys,
        warps,
        factor,
        shared_bytes: form.shared_bytes(keys, warps),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: usize = 227 << 10;
    const ADA: usize = 99 << 10;

    fn plan(
        dtype: DType,
        grid: [usize; 3],
        width: usize,
        window: [usize; 3],
        scale: f32,
        limit: usize,
    ) -> Option<Plan> {
        let extents = Extents { batch: 1, grid, heads: 4, width };
        tiled(Shape { dtype, extents, frames: grid[0], window, softmax_scale: scale }, limit)
    }

    fn usual(grid: [usize; 3], width: usize, window: [usize; 3]) -> Option<Plan> {
        plan(DType::BF16, grid, width, window, 1.0, ADA)
    }

    #[test]
    fn steps_cover_a_plane() {
        for form in FORMS {
            for keys in 1..600 {
                let steps: Vec<usize> = form.steps(keys).collect();
                let covered: usize = steps.iter().sum();
                assert!(16 * covered >= keys && 16 * (covered - steps[steps.len() - 1]) < keys, "{form:?} {keys}");
            }
        }
        assert_eq!(FORMS[0].steps(196).collect::<Vec<_>>(), [7, 6]);
        assert_eq!(FORMS[0].steps(209).collect::<Vec<_>>(), [7, 6, 7]);
    }

    #[test]
    fn windows_choose_the_form_that_wastes_least() {
        let groups = |window| usual([121, 128, 192], 64, window).unwrap().form.groups;
        assert_eq!(groups([11, 11, 11]), [7, 6]);
        assert_eq!(groups([3, 7, 7]), [7, 6]);
        assert_eq!(groups([3, 5, 5]), [4, 0]);
        let decoder = usual([121, 128, 192], 64, [11, 11, 11]).unwrap();
        assert_eq!((decoder.tiles, decoder.warps, decoder.patches, decoder.keys), (16, 8, [32, 48], 196));
        // Two blocks of a multiprocessor of 228 KiB.
        assert!(2 * decoder.shared_bytes <= HOPPER, "{decoder:?}");
        let short = usual([9, 64, 64], 64, [11, 11, 11]).unwrap();
        assert_eq!((short.tiles, short.warps), (2, 5));
    }

    #[test]
    fn the_tiled_kernel_serves_half_precision_in_whole_vectors() {
        let grid = [5, 20, 20];
        for (dtype, width, window, scale, serves) in [
            (DType::BF16, 64, [3, 7, 7], 1.0, true),
            (DType::F16, 8, [1, 1, 1], 0.125, true),
            (DType::BF16, 128, [11, 11, 11], 0.088, true),
            (DType::BF16, 72, [3, 3, 3], 1.0, true),
            (DType::F32, 64, [3, 7, 7], 1.0, false),
            (DType::BF16, 60, [3, 7, 7], 1.0, false),
            (DType::BF16, 136, [3, 7, 7], 1.0, false),
            (DType::BF16, 64, [3, 7, 7], 0.0, false),
            (DType::BF16, 64, [3, 7, 7], -1.0, false),
        ] {
            let found = plan(dtype, grid, width, window, scale, ADA);
            assert_eq!(found.is_some(), serves, "{dtype:?} {width} {window:?} {scale}");
        }
        assert_eq!(plan(DType::BF16, grid, 64, [3, 7, 7], std::f32::consts::LN_2, ADA).unwrap().factor, 1.0);
        assert!(usual([1, 28, 28], 64, [1, 29, 29]).is_some());
        assert!(usual([1, 64, 64], 64, [1, 33, 33]).is_none(), "1296 keys");
        assert!(plan(DType::BF16, grid, 64, [3, 7, 7], 1.0, 16 << 10).is_none());
    }

    /// Every form within the memory of the smallest device that has the instructions.
    #[test]
    fn plans_stay_within_shared_memory() {
        for width in [64, 128] {
            for side in (1..=27).step_by(2) {
                for t in 1..20 {
                    if let Some(plan) = usual([t, 40, 40], width, [side; 3]) {
                        assert!(plan.shared_bytes <= ADA && plan.warps <= SLICES && plan.warps * plan.tiles >= t);
                    }
                }
            }
        }
    }
}
