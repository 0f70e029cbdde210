//! Which path attention takes on CUDA. Pure.

use candle_core::DType;

use super::AttentionMask;
use crate::cudnn_policy::Attention;

/// Widest head of the fused kernel.
const WIDEST: usize = 128;

/// Whether `policy` sends a problem to cuDNN first, which has no mask and nothing for f32: under
/// [`Attention::Auto`] it is not even asked for them, and that is no fallback.
pub(super) fn asks_cudnn(policy: Attention, dtype: DType, mask: AttentionMask) -> bool {
    match policy {
        Attention::Math => false,
        Attention::Auto => dtype != DType::F32 && mask == AttentionMask::Full,
        Attention::Required => mask == AttentionMask::Full,
    }
}

/// The factor of scores in the exponent of two, if the fused kernel serves the problem: half precision, heads of whole
/// vectors that fit, and a factor that keeps the order of scores and is a normal number.
pub(super) fn fused_factor(dtype: DType, width: usize, softmax_scale: f32) -> Option<f32> {
    let factor = (f64::from(softmax_scale) * std::f64::consts::LOG2_E) as f32;
    let ordered = factor.is_normal() && factor > 0.0;
    (dtype != DType::F32 && width.is_multiple_of(8) && width <= WIDEST && ordered).then_some(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_never_asks_cudnn() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for mask in [AttentionMask::Full, AttentionMask::Causal, AttentionMask::Prefix] {
                assert!(!asks_cudnn(Attention::Math, dtype, mask));
            }
        }
    }

    #[test]
    fn cudnn_is_asked_for_half_precision_without_a_mask() {
        for (policy, dtype, mask, asked) in [
            (Attention::Auto, DType::BF16, AttentionMask::Full, true),
            (Attention::Auto, DType::F16, AttentionMask::Full, true),
            (Attention::Auto, DType::F32, AttentionMask::Full, false),
            (Attention::Auto, DType::BF16, AttentionMask::Causal, false),
            (Attention::Auto, DType::BF16, AttentionMask::Prefix, false),
            // So that the refusal is cuDNN's, with its reason.
            (Attention::Required, DType::F32, AttentionMask::Full, true),
            (Attention::Required, DType::BF16, AttentionMask::Causal, false),
        ] {
            assert_eq!(asks_cudnn(policy, dtype, mask), asked, "{policy:?} {dtype:?} {mask:?}");
        }
    }

    #[test]
    fn the_fused_kernel_serves_half_precision_in_whole_vectors() {
        for (dtype, width, scale, serves) in [
            (DType::BF16, 128, 0.088, true),
            (DType::F16, 8, 1.0, true),
            (DType::BF16, 72, 1e-30, true),
            (DType::F32, 128, 0.088, false),
            (DType::BF16, 136, 0.088, false),
            (DType::BF16, 512, 0.044, false),
            (DType::BF16, 60, 0.1, false),
            (DType::BF16, 64, -0.125, false),
            (DType::BF16, 64, 0.0, false),
            (DType::BF16, 64, f32::MIN_POSITIVE / 8.0, false),
            (DType::BF16, 64, f32::MAX, false),
        ] {
            assert_eq!(fused_factor(dtype, width, scale).is_some(), serves, "{dtype:?} {width} {scale}");
        }
        assert_eq!(fused_factor(DType::F16, 64, std::f32::consts::LN_2), Some(1.0));
    }
}
