//! The steps of the Wan 2.1 decoder between its convolutions, at 832x480, one latent frame: how near they come to the speed
//! of a copy.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{
    Activation, AttentionMask, attention, channel_rms_norm_after,
    conv::{ConvParams, conv_nd, conv_nd_add},
    cudnn_policy::{Backend, Policy, scope},
    frames::{PatchOrder, cat_frames, frames_to_rgb8, split_pairs, tail_frames},
    interleave2d,
    layout::channels_last,
};
use wan_vae::LoadOptions;

use super::{Gpu, floors::Floors};

const DTYPE: DType = DType::BF16;

/// Prints a table.
///
/// # Errors
/// If an op fails.
pub fn print(gpu: &Gpu) -> Result<()> {
    let floors = Floors::measure(gpu)?;
    let field = |c: usize, [t, h, w]: [usize; 3]| -> Result<Tensor> {
        Ok(channels_last(&gpu.noise(1.0, &[1, c, t, h, w], DTYPE)?)?)
    };
    println!("{:<44} {:>9} {:>9} {:>7}", "step", "ms", "GB/s", "of copy");
    let line = |name: &str, bytes: usize, f: &dyn Fn() -> Result<()>| -> Result<()> {
        let ms = gpu.time(3, 15, |_| f())?;
        let rate = bytes as f64 / ms / 1e6;
        println!("{name:<44} {ms:>9.4} {rate:>9.0} {:>6.0}%", 100.0 * rate / floors.copy);
        Ok(())
    };
    let bytes = |c: usize, [t, h, w]: [usize; 3]| 2 * c * t * h * w;
    for (c, [t, h, w]) in [(384, [1, 60, 104]), (384, [2, 120, 208]), (192, [4, 240, 416]), (96, [4, 480, 832])] {
        let (x, past) = (field(c, [t, h, w])?, field(c, [2, h, w])?);
        let gamma = gpu.noise(1.0, &[c, 1, 1, 1], DTYPE)?;
        let at = format!("{c} at {t}x{h}x{w}");
        line(&format!("norm behind past, {at}"), 2 * bytes(c, [t + 2, h, w]), &|| {
            Ok(channel_rms_norm_after(Some(&past), &x, &gamma, Activation::Silu).map(drop)?)
        })?;
        line(&format!("last two frames, {at}"), 2 * bytes(c, [2, h, w]), &|| {
            Ok(tail_frames(&cat_frames(&past, &x)?, 2).map(drop)?)
        })?;
        line(&format!("join with past, {at}"), 2 * bytes(c, [t + 2, h, w]), &|| Ok(cat_frames(&past, &x).map(drop)?))?;
        let buffer = cat_frames(&past, &x)?;
        let scale = ((27 * c) as f32).powf(-0.5);
        let weight = channels_last(&gpu.noise(scale, &[c, c, 3, 3, 3], DTYPE)?)?;
        let bias = gpu.noise(0.1, &[c], DTYPE)?;
        let params = ConvParams::<3> { padding: [(0, 0), (1, 1), (1, 1)], ..ConvParams::default() };
        let mut policy = Policy::new(Backend::Auto);
        policy.choice = LoadOptions::default().plans;
        scope(policy, || {
            line(&format!("3x3x3 convolution, {at}"), bytes(c, [2 * t + 2, h, w]), &|| {
                Ok(conv_nd(&buffer, &weight, Some(&bias), &params).map(drop)?)
            })?;
            line(&format!("with residual, {at}"), bytes(c, [3 * t + 2, h, w]), &|| {
                Ok(conv_nd_add(&buffer, &weight, Some(&bias), &x, &params).map(drop)?)
            })
        })?;
    }
    for (c, [t, h, w]) in [(192, [2, 60, 104]), (192, [4, 120, 208]), (96, [4, 240, 416])] {
        let parts = [(); 4].map(|()| field(c, [t, h, w]));
        let [a, b, c4, d] = parts;
        let parts = [a?, b?, c4?, d?];
        line(&format!("four pictures into one, {c} at {t}x{h}x{w}"), 8 * bytes(c, [t, h, w]), &|| {
            Ok(interleave2d(&parts).map(drop)?)
        })?;
    }
    let x = field(768, [2, 120, 208])?;
    line("channels into frames, 768 at 2x120x208", 2 * bytes(768, [2, 120, 208]), &|| Ok(split_pairs(&x).map(drop)?))?;
    let x = field(8, [4, 480, 832])?.narrow(1, 0, 3)?;
    line("bytes, 4x480x832", 4 * 480 * 832 * 19, &|| Ok(frames_to_rgb8(&x, 1, PatchOrder::RowMajor).map(drop)?))?;
    let q = gpu.noise(1.0, &[10, 6240, 1, 384], DTYPE)?;
    line("attention, 10 x 6240 x 384", 8 * 10 * 6240 * 384, &|| {
        Ok(attention(&q, &q, &q, 384f32.powf(-0.5), AttentionMask::Full).map(drop)?)
    })
}
