//! Which path a convolution on a CUDA device takes.

use candle_core::DType;

use super::{ConvProblem, few_filters};
use crate::cudnn_policy::Backend;

/// Bytes of patches from which cuDNN is worth the asking in single precision over one or two axes. The cost that it saves
/// is that of writing and reading them, so their size decides and not that of the result: 96 channels to 3 at 480x832
/// writes 5 MB and has 690 MB of patches, and is there 6.9 times faster than im2col (utensils/candle#11).
const MANY_PATCHES: u128 = 16 << 20;

/// A path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Our own: patches, or one product where each patch is a pixel.
    Own,
    /// cuDNN, with our own behind it.
    Cudnn,
}

/// The path that `backend` means for `problem`, whose x has `axes` axes of space and elements of `dtype`.
///
/// - A pointwise convolution is a matrix product for every backend.
/// - Many channels into few filters are quickest by a kernel of our own, which adds no residual.
/// - Half precision runs channels-last, where cuDNN needs no scratch: always. So do problems over three axes and with
///   groups, which cost the own path most.
/// - Else cuDNN if there are [`MANY_PATCHES`].
pub(super) fn choose(problem: &ConvProblem, axes: usize, dtype: DType, residual: bool, backend: Backend) -> Path {
    if problem.is_pointwise() {
        return Path::Own;
    }
    match backend {
        Backend::Im2col => Path::Own,
        Backend::Required => Path::Cudnn,
        Backend::Auto if !residual && few_filters::serves(problem, dtype) => Path::Own,
        Backend::Auto => {
            let half = dtype != DType::F32;
            if half || axes == 3 || problem.groups > 1 || patch_bytes(problem, dtype) >= MANY_PATCHES {
                Path::Cudnn
            } else {
                Path::Own
            }
        }
    }
}

/// Bytes of the patches of all outputs. In 128 bits, because the product of what fits may not.
fn patch_bytes(problem: &ConvProblem, dtype: DType) -> u128 {
    let outputs = problem.n as u128 * problem.pixels() as u128;
    outputs * (problem.depth() * dtype.size_in_bytes()) as u128
}

#[cfg(test)]
mod tests {
    use super::{super::ConvParams, *};

    /// Filters of extent 3 (or `taps`) with padding 1.
    fn problem<const D: usize>(x: [usize; D], c: usize, k: usize, taps: [usize; D]) -> ConvProblem {
        let padding = taps.map(|t| ((t - 1) / 2, (t - 1) / 2));
        let input: Vec<usize> = [1, c].into_iter().chain(x).collect();
        let weight: Vec<usize> = [k, c].into_iter().chain(taps).collect();
        ConvProblem::new(&input, &weight, &ConvParams { padding, ..Default::default() }).unwrap()
    }

    #[test]
    fn the_default_never_leaves_our_own_path() {
        for dtype in [DType::F32, DType::BF16] {
            let large = problem([4, 480, 832], 96, 96, [3, 3, 3]);
            assert_eq!(choose(&large, 3, dtype, false, Backend::Im2col), Path::Own);
        }
    }

    #[test]
    fn pointwise_is_a_product_for_everybody() {
        let pointwise = problem([4, 60, 104], 384, 768, [1, 1, 1]);
        for backend in [Backend::Im2col, Backend::Auto, Backend::Required] {
            assert_eq!(choose(&pointwise, 3, DType::BF16, false, backend), Path::Own);
        }
        // Steps leave pixels out: no product of the whole.
        let params = ConvParams { stride: [2, 2], ..Default::default() };
        let stepped = ConvProblem::new(&[1, 8, 9, 9], &[8, 8, 1, 1], &params).unwrap();
        assert_eq!(choose(&stepped, 2, DType::BF16, false, Backend::Auto), Path::Cudnn);
        // A border of zeros gives outputs without a pixel.
        let params = ConvParams { padding: [(0, 0), (0, 1)], ..Default::default() };
        let padded = ConvProblem::new(&[1, 8, 9, 9], &[8, 8, 1, 1], &params).unwrap();
        assert_eq!(choose(&padded, 2, DType::BF16, false, Backend::Auto), Path::Cudnn);
    }

    #[test]
    fn half_three_axes_and_groups_go_to_cudnn_whatever_their_size() {
        let small = problem([8, 8], 4, 4, [3, 3]);
        assert_eq!(choose(&small, 2, DType::F16, false, Backend::Auto), Path::Cudnn);
        assert_eq!(choose(&small, 2, DType::F32, false, Backend::Auto), Path::Own);
        assert_eq!(choose(&small, 2, DType::F32, false, Backend::Required), Path::Cudnn);
        let deep = problem([2, 8, 8], 4, 4, [3, 3, 3]);
        assert_eq!(choose(&deep, 3, DType::F32, false, Backend::Auto), Path::Cudnn);
        let params = ConvParams { groups: 2, padding: [(1, 1), (1, 1)], ..Default::default() };
        let grouped = ConvProblem::new(&[1, 4, 8, 8], &[4, 2, 3, 3], &params).unwrap();
        assert_eq!(choose(&grouped, 2, DType::F32, false, Backend::Auto), Path::Cudnn);
    }

    #[test]
    fn few_filters_are_ours_unless_cudnn_is_required_or_there_is_a_residual() {
        let head = problem([4, 480, 832], 96, 3, [3, 3, 3]);
        let path = |residual, backend| choose(&head, 3, DType::BF16, residual, backend);
        assert_eq!(path(false, Backend::Auto), Path::Own);
        assert_eq!(path(true, Backend::Auto), Path::Cudnn);
        assert_eq!(path(false, Backend::Required), Path::Cudnn);
    }

    #[test]
    fn single_precision_over_two_axes_goes_by_the_patches_and_not_by_the_result() {
        // 5 MB of result, 1.4 GB of patches.
        let head = problem([480, 832], 96, 3, [3, 3]);
        assert_eq!(patch_bytes(&head, DType::F32), 480 * 832 * 96 * 9 * 4);
        assert_eq!(choose(&head, 2, DType::F32, false, Backend::Auto), Path::Cudnn);
        // 512 MB of result, 9 MB of patches.
        let wide = problem([512, 512], 1, 512, [3, 3]);
        assert_eq!(choose(&wide, 2, DType::F32, false, Backend::Auto), Path::Own);
        // The limit itself: 2^22 floats.
        let at = problem([1 << 14], 128, 8, [2]);
        assert_eq!(at.pixels(), (1 << 14) - 1);
        assert_eq!(choose(&at, 1, DType::F32, false, Backend::Auto), Path::Own);
        let above = problem([(1 << 14) + 1], 128, 8, [2]);
        assert_eq!(choose(&above, 1, DType::F32, false, Backend::Auto), Path::Cudnn);
    }

    #[test]
    fn sizes_beyond_64_bits_do_not_wrap() {
        let huge = problem([1 << 31, 1 << 20], 1 << 7, 1, [3, 3]);
        assert!(patch_bytes(&huge, DType::F32) > 1 << 60);
        assert_eq!(choose(&huge, 2, DType::F32, false, Backend::Auto), Path::Cudnn);
    }
}
