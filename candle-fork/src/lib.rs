//! What a fork of candle would add, as a layer over the registry's unmodified `candle-core`.

pub mod activation;
pub mod attention;
mod branches;
pub mod conv;
pub mod convrot;
#[cfg(any(feature = "cuda", test))]
pub mod cuda;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the tests plan, only a device executes"))]
mod cudnn;
pub mod cudnn_policy;
pub mod diagnosis;
mod element;
pub mod error;
pub mod frames;
pub mod gemm;
pub mod host;
pub mod latents;
pub mod layout;
pub mod linear;
pub mod memory;
pub mod neighborhood_attention;
pub mod nn;
pub mod noise;
pub mod norm;
mod operand;
pub mod projection;
pub mod quant;
pub mod resample;
pub mod rope;
#[cfg(any(feature = "cuda", test))]
mod row_layout;
pub mod stream;
mod target;
#[cfg(test)]
mod testing;
pub mod token_block;

pub use activation::{Activation, gate_residual, residual, silu, swiglu, swiglu_into};
pub use attention::{AttentionMask, attention, attention_into};
pub use branches::{AttentionInto, attention_and_swiglu_into};
pub use conv::{ConvParams, conv_nd, conv_nd_add, conv1d, conv2d, conv3d};
pub use convrot::{dequantize_int8_convrot, quantize_int8_convrot};
pub use error::{Error, Result, What};
pub use host::{HostBytes, HostTensor};
pub use latents::latents_from_tokens;
pub use linear::{LinearWeight, linear, linear_into};
pub use neighborhood_attention::neighborhood_attention;
pub use norm::{
    channel_rms_norm, channel_rms_norm_after, gate_residual_modulate, group_norm, layer_norm, layer_norm_modulate,
    residual_rms_norm, rms_norm,
};
pub use quant::{QuantMode, QuantWeight};
pub use resample::{interleave2d, upsample_nearest, upsample_nearest2d};
pub use rope::{
    HeadNorm, Pairing, grouped_qk_norm_rope, heads_of, norm_rope, qk_norm_rope, rope_half, rope_interleaved,
};
