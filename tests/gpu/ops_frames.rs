//! What stands around the convolutions of LTX-2's VAE: borders and norms, channels that become frames and pixels.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_fork::{
    Activation,
    cuda::paths::{Path, taken},
    frames::{Downloads, PatchOrder, PixelNorm, Surround, clamped_frames, depth_to_space, frames_to_rgb8, surround},
    layout::channels_last,
};
use tests::gpu::{Failures, cuda, noise, seed};

use crate::{Op, Role, run};

#[test]
fn surroundings_of_a_convolution() -> Result<()> {
    let mut ops = Vec::new();
    let plain = Surround::default();
    // Channels for every kernel, with lanes that hold less than others, and for none.
    for [n, c, t, h, w] in [
        [1, 8, 1, 2, 2],
        [2, 16, 3, 4, 6],
        [1, 24, 2, 3, 5],
        [1, 128, 3, 9, 17],
        [2, 256, 2, 5, 3],
        [1, 1024, 1, 4, 3],
        [1, 1000, 2, 3, 4],
        [1, 2048, 2, 2, 3],
        [1, 98, 2, 3, 4],
        [1, 3, 2, 5, 4],
        [1, 4096, 1, 2, 2],
    ] {
        for (norm, around) in [
            (Some(Activation::Silu), Surround { before: 1, after: 1, mirrored: 1 }),
            (Some(Activation::None), Surround { before: 2, ..plain }),
            (None, Surround { after: 1, mirrored: 1, ..plain }),
            (Some(Activation::Silu), plain),
        ] {
            let x = &[n, c, t, h, w][..];
            let norm = norm.map(|activation| PixelNorm { eps: 1e-8, activation });
            let done = |op: Op| if norm.is_none() { op.keeps_order().exact() } else { op.keeps_order() };
            let name = format!("surround {norm:?} {around:?}");
            ops.push(done(Op::new(name.clone(), [(Role::Main, x)], move |[x]| surround(None, x, norm, around))));
            let m = 2 * around.mirrored;
            let operands = [(Role::Main, x), (Role::Main, &[n, c, 2, h + m, w + m][..])];
            let behind = Surround { before: 0, ..around };
            ops.push(done(Op::new(name, operands, move |[x, past]| surround(Some(past), x, norm, behind))));
        }
    }
    run("surroundings of a convolution", ops)
}

#[test]
fn channels_become_frames_and_pixels() -> Result<()> {
    let mut ops = Vec::new();
    for (factor, c, run, drop) in [
        ([2, 2, 2], 128, 32, 1),
        ([2, 2, 2], 8, 8, 0),
        ([2, 1, 1], 16, 2, 1),
        ([1, 2, 2], 24, 3, 0),
        ([2, 2, 2], 5, 1, 1),
    ] {
        let cells: usize = factor.iter().product();
        for [n, t, h, w] in [[1, 1, 2, 2], [2, 3, 5, 4]] {
            let main = &[n, cells * c, t, h, w][..];
            let name = format!("depth_to_space {factor:?}");
            let moved = Op::new(name.clone(), [(Role::Main, main)], move |[x]| depth_to_space(x, factor, None, drop));
            ops.push(moved.keeps_order().exact());
            let operands = [(Role::Main, main), (Role::Main, &[n, cells * run, t, h, w][..])];
            ops.push(
                Op::new(name, operands, move |[x, shortcut]| depth_to_space(x, factor, Some(shortcut), drop))
                    .keeps_order(),
            );
        }
    }
    run("channels become frames and pixels", ops)
}

#[test]
fn frames_in_their_range() -> Result<()> {
    let mut ops = Vec::new();
    for (channels, side) in [(1, 1), (3, 1), (3, 4), (4, 2), (3, 3)] {
        for order in [PatchOrder::ColumnMajor, PatchOrder::RowMajor] {
            // f32 whatever x is: the table of ops wants x's type.
            let call = move |[x]: &[Tensor; 1]| {
                let clamped = clamped_frames(x, side, order)?;
                let frames = clamped.frames().to_dtype(x.dtype());
                frames.map_err(|source| candle_fork::Error::Candle { what: "test", source: Box::new(source) })
            };
            let operand = [(Role::Main, &[1, channels * side * side, 3, 5, 7][..])];
            ops.push(Op::new(format!("clamped_frames {channels} {side} {order:?}"), operand, call).exact());
        }
    }
    run("frames in their range", ops)?;
    let Some(device) = cuda("frames in their range")? else { return Ok(()) };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let x = Tensor::cat(
            &[&Tensor::zeros((1, 3, 1, 5, 7), DType::F32, &device)?, &Tensor::full(bad, (1, 3, 1, 5, 7), &device)?],
            2,
        )?;
        anyhow::ensure!(!clamped_frames(&x, 1, PatchOrder::RowMajor)?.all_finite()?, "{bad} is not told");
    }
    Ok(())
}

/// A buffer that was made for more is used again for less: no more is copied than there is.
#[test]
fn downloads_of_any_sizes() -> Result<()> {
    let suite = "downloads of any sizes";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let mut failures = Failures::default();
    let mut downloads = Downloads::default();
    let counts = [90, 1, 40, 3, 2, 90];
    let mut wanted = Vec::new();
    let mut got = Vec::new();
    for (i, &count) in counts.iter().enumerate() {
        let x = Tensor::full((i as f32 - 2.0) / 4.0, (1, 3, count, 256, 512), &device)?;
        let frames = frames_to_rgb8(&x, 1, PatchOrder::RowMajor)?;
        wanted.push(frames.pixels().flatten_all()?.to_vec1::<u8>()?);
        got.extend(failures.take(downloads.push(frames), || format!("push {i} of {count} frames")).flatten());
    }
    got.extend(downloads.finish()?);
    failures.check(got.len() == counts.len(), || format!("{} of {} came", got.len(), counts.len()));
    for (i, (got, want)) in got.iter().zip(&wanted).enumerate() {
        failures.check(got.pixels == *want && got.all_finite, || format!("push {i} differs"));
    }
    failures.finish(suite)
}

/// Channels-last halves of whole vectors are served by the kernels, others are not.
#[test]
fn the_kernels_run() -> Result<()> {
    let suite = "kernels around a convolution";
    let Some(device) = cuda(suite)? else { return Ok(()) };
    let seed = seed(suite);
    let mut failures = Failures::default();
    for (dtype, channels, served) in
        [(DType::BF16, 64, true), (DType::F16, 2048, true), (DType::BF16, 12, false), (DType::F32, 64, false)]
    {
        let x = channels_last(&noise(seed, 1.0, &[1, channels, 2, 4, 6], dtype)?.to_device(&device)?)?;
        let before = [taken(Path::Surround), taken(Path::DepthToSpace)];
        surround(None, &x, None, Surround { before: 1, ..Surround::default() })?;
        depth_to_space(&x, [2, 2, 1], None, 0)?;
        let took = [taken(Path::Surround) - before[0], taken(Path::DepthToSpace) - before[1]];
        failures.check(took == [u64::from(served); 2], || format!("{dtype:?}, {channels} channels: {took:?}"));
    }
    failures.finish(suite)
}
