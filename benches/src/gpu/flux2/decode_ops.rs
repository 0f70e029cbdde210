//! The ops of a VAE decode to 1024x1024, each alone.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{
    Activation, AttentionMask, attention,
    conv::{ConvParams, conv_nd},
    cudnn_policy::{Backend, Policy, scope},
    group_norm,
    layout::channels_last,
    linear,
};
use flux2::LoadOptions;

use super::{
    super::{Gpu, floors::Floors},
    STD,
    ops::{DTYPE, EPS, matrix},
    table::{self, Op},
};

/// Prints a table for each kind of convolution.
///
/// # Errors
/// If memory is short.
pub(super) fn print(gpu: &Gpu, floors: Floors) -> Result<()> {
    for backend in [Backend::Im2col, Backend::Auto] {
        let title = format!("vae decode, convolutions {backend:?}");
        let mut policy = Policy::new(backend);
        policy.choice = LoadOptions::default().plans;
        scope(policy, || -> Result<()> {
            table::print(gpu, floors, &title, &decode_ops(gpu)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// A convolution of the decoder: channels in and out, side of the filter, side of its result, how many there are.
const CONVOLUTIONS: [(&str, [usize; 2], usize, usize, usize); 14] = [
    ("post_quant_conv", [32, 32], 1, 128, 1),
    ("conv_in", [32, 512], 3, 128, 1),
    ("middle, up 0", [512, 512], 3, 128, 10),
    ("up 0 upsampler", [512, 512], 3, 256, 1),
    ("up 1", [512, 512], 3, 256, 6),
    ("up 1 upsampler", [512, 512], 3, 512, 1),
    ("up 2 first", [512, 256], 3, 512, 1),
    ("up 2 shortcut", [512, 256], 1, 512, 1),
    ("up 2", [256, 256], 3, 512, 5),
    ("up 2 upsampler", [256, 256], 3, 1024, 1),
    ("up 3 first", [256, 128], 3, 1024, 1),
    ("up 3 shortcut", [256, 128], 1, 1024, 1),
    ("up 3", [128, 128], 3, 1024, 5),
    ("conv_out", [128, 3], 3, 1024, 1),
];

/// Channels, side, how many norms with SiLU.
const NORMS: [(usize, usize, usize); 6] =
    [(512, 128, 11), (512, 256, 6), (512, 512, 1), (256, 512, 5), (256, 1024, 1), (128, 1024, 6)];

/// Tokens and width of the middle attention.
const MIDDLE: [usize; 2] = [128 * 128, 512];

fn decode_ops(gpu: &Gpu) -> Result<Vec<Op<'static>>> {
    let field =
        |c: usize, side: usize| -> Result<Tensor> { Ok(channels_last(&gpu.noise(1.0, &[1, c, side, side], DTYPE)?)?) };
    let mut ops = Vec::new();
    for (name, [input, output], filter, side, count) in CONVOLUTIONS {
        let x = field(input, side)?;
        let weight = channels_last(&gpu.noise(STD, &[output, input, filter, filter], DTYPE)?)?;
        let bias = gpu.noise(0.1, &[output], DTYPE)?;
        let params = ConvParams::<2> { padding: [(filter / 2, filter / 2); 2], ..ConvParams::default() };
        let name = format!("{name}, {input}>{output} at {side}");
        ops.push(Op::product(name, count, [side * side, output, input * filter * filter], move || {
            Ok(conv_nd(&x, &weight, Some(&bias), &params).map(drop)?)
        }));
    }
    for (channels, side, count) in NORMS {
        let x = field(channels, side)?;
        let (weight, bias) = (gpu.noise(1.0, &[channels], DType::F32)?, gpu.noise(1.0, &[channels], DType::F32)?);
        ops.push(Op::traffic(
            format!("norm and silu, {channels} at {side}"),
            count,
            3 * channels * side * side,
            move || Ok(group_norm(&x, &weight, &bias, 32, EPS, Activation::Silu).map(drop)?),
        ));
    }
    let [tokens, width] = MIDDLE;
    let q = gpu.noise(1.0, &[1, tokens, 1, width], DTYPE)?;
    ops.push(Op::product("middle attention", 1, [2 * tokens, tokens, width], move || {
        Ok(attention(&q, &q, &q, (width as f32).powf(-0.5), AttentionMask::Full).map(drop)?)
    }));
    let (x, weight) = (gpu.noise(1.0, &[1, tokens, width], DTYPE)?, matrix(gpu, width, width)?);
    ops.push(Op::product("middle attention, projections", 4, [tokens, width, width], move || {
        Ok(linear(&x, &weight, None).map(drop)?)
    }));
    Ok(ops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flux2::DECODE_1024_FLOP;

    #[test]
    fn the_convolutions_and_the_attention_are_the_whole_decoder() {
        let convolutions: f64 = CONVOLUTIONS
            .iter()
            .map(|&(_, [input, output], filter, side, count)| {
                (2 * count * side * side * output * input * filter * filter) as f64
            })
            .sum();
        let [tokens, width] = MIDDLE;
        let attention = (4 * tokens * tokens * width + 4 * 2 * tokens * width * width) as f64;
        assert!(((convolutions + attention) / DECODE_1024_FLOP - 1.0).abs() < 2e-3, "{convolutions:e} {attention:e}");
    }
}
