//! Whole Wan VAEs against diffusers: the trained miniature, and tiny random networks of the Wan 2.2 and the Qwen-Image
//! kind, whole and in overlapping tiles. Single layers: `wan-vae`, `layers/goldens.rs`.
//!
//! The goldens come from `reference/wan_demo.py` and `reference/wan_goldens.py`.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use policy::Silent;
use tests::{Container, Golden, Stored, assert_close, data, psnr, rel_l2};
use wan_vae::{
    BlendedTiles, DecodeOptions, DecoderState, EncodeOptions, EncoderState, LoadOptions, RawLatents, Tiling, VaeConfig,
    WanVae,
};
use weights::Safetensors;

/// f32 against f32 over whole networks.
const TOLERANCE: f64 = 1e-5;

/// Tiny random networks.
const TINY: [&str; 2] = ["wan-22", "wan-qwen"];

fn demo() -> Result<WanVae> {
    Ok(WanVae::open(data("models/wan-vae-demo"), &LoadOptions::default())?)
}

/// The network of a golden, its weights changed by `change`.
fn tiny(golden: &Golden, change: impl FnOnce(&mut Container)) -> Result<WanVae> {
    let config: VaeConfig = serde_json::from_value(golden.config()?)?;
    let mut container = golden.container();
    change(&mut container);
    let source = Safetensors::from_bytes(Arc::new(container.to_bytes()), "tiny")?;
    Ok(WanVae::load(Arc::new(source), Some(&config), &LoadOptions::default())?)
}

fn encode(vae: &WanVae, frames: &Tensor) -> Result<Tensor> {
    let latents = vae.encode(&mut EncoderState::new(vae), frames)?.context("no latents")?;
    Ok(latents.into_tensor())
}

fn decode(vae: &WanVae, latents: Tensor) -> Result<Tensor> {
    Ok(vae.decode(&mut DecoderState::new(vae), &RawLatents::new(latents)?)?)
}

/// Bytes as the networks take pixels.
fn pixels(bytes: &Tensor) -> Result<Tensor> {
    Ok(bytes.to_dtype(DType::F32)?.affine(1.0 / 127.5, -1.0)?)
}

#[test]
fn the_demonstration_vae_matches_the_reference() -> Result<()> {
    let vae = demo()?;
    for name in ["wan-a", "wan-b", "wan-c"] {
        let golden = Golden::open(name)?;
        let tensor = |name: &str| -> Result<Tensor> { Ok(golden.tensor(name)?.squeeze(0)?) };
        let latents = tensor("latent_mean")?;
        assert_close(&format!("{name}, encode"), &encode(&vae, &tensor("video")?)?, &latents, TOLERANCE)?;
        assert_close(&format!("{name}, decode"), &decode(&vae, latents)?, &tensor("decoded")?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn tiny_networks_match_the_reference() -> Result<()> {
    for name in TINY {
        let golden = Golden::open(name)?;
        let vae = tiny(&golden, |_| ())?;
        for n in 1..=3 {
            let tensor = |name: &str| golden.tensor(&format!("{name}.{n}"));
            let what = |what: &str, count| format!("{name}, {what} of {count}");
            let latents = encode(&vae, &pixels(&tensor("in.video")?)?)?;
            let want = tensor("out.latents")?.squeeze(0)?;
            assert_close(&what("encode", 4 * n - 3), &latents, &want, TOLERANCE)?;
            let video = decode(&vae, tensor("in.latents")?)?;
            let want = tensor("out.video")?.squeeze(0)?;
            assert_close(&what("decode", n), &video, &want, TOLERANCE)?;
        }
    }
    Ok(())
}

/// The reference normalises with the numbers of its configuration.
#[test]
fn normalised_latents_follow_from_the_configuration() -> Result<()> {
    for name in TINY {
        let golden = Golden::open(name)?;
        let vae = tiny(&golden, |_| ())?;
        let config = golden.config()?;
        let numbers = |key: &str| -> Result<Vec<f64>> { Ok(serde_json::from_value(config[key].clone())?) };
        let (mean, std) = (numbers("latents_mean")?, numbers("latents_std")?);
        let raw = golden.tensor("in.latents.3")?.squeeze(0)?;
        let normalized = vae.normalize(&RawLatents::new(raw.clone())?)?;
        for (channel, (mean, std)) in mean.iter().zip(&std).enumerate() {
            let want = raw.get(channel)?.affine(1.0 / std, -mean / std)?;
            assert_close(&format!("{name}, channel {channel}"), &normalized.tensor().get(channel)?, &want, 1e-6)?;
        }
        assert_close(&format!("{name}, back"), vae.denormalize(&normalized)?.tensor(), &raw, 1e-6)?;
    }
    Ok(())
}

#[test]
fn blended_tiles_match_the_reference() -> Result<()> {
    for name in TINY {
        let vae = tiny(&Golden::open(name)?, |_| ())?;
        let golden = Golden::open(&format!("{name}-tiles"))?;
        let tiles = BlendedTiles { tile: golden.number("tile")?, stride: golden.number("stride")? };
        let tiling = Tiling::Blended(tiles);

        let mut parts = Vec::new();
        let latents = RawLatents::new(golden.tensor("in.latents")?)?;
        vae.decode_clip(&latents, &DecodeOptions::default().with_tiling(tiling), &Silent, &mut |frames| {
            parts.push(frames);
            Ok(())
        })?;
        let want = golden.tensor("out.video")?.squeeze(0)?;
        assert_close(&format!("{name}, decode in tiles"), &Tensor::cat(&parts, 1)?, &want, TOLERANCE)?;

        let frames = pixels(&golden.tensor("in.video")?)?;
        let count = frames.dim(1)?;
        // In two pieces, as a reader may give them.
        let mut pieces =
            [(0, 2), (2, count - 2)].into_iter().map(|(first, len)| Ok(frames.narrow(1, first, len).expect("frames")));
        let mut parts = Vec::new();
        vae.encode_clip(&mut pieces, &EncodeOptions::default().with_tiling(tiling), &Silent, &mut |latents| {
            parts.push(latents.into_tensor());
            Ok(())
        })?;
        let want = golden.tensor("out.latents")?.squeeze(0)?;
        assert_close(&format!("{name}, encode in tiles"), &Tensor::cat(&parts, 1)?, &want, TOLERANCE)?;
    }
    Ok(())
}

/// Weights of half the width: the reference computes with the same rounded numbers in f32.
#[test]
fn weights_of_half_the_width_match_the_reference() -> Result<()> {
    for name in TINY {
        let golden = Golden::open(name)?;
        for (dtype, key) in [("F16", "float16"), ("BF16", "bfloat16")] {
            let vae = tiny(&golden, |container| {
                for stored in container.tensors.values_mut() {
                    *stored = narrow(stored, dtype);
                }
            })?;
            let what = |what: &str| format!("{name}, {what} with {dtype} weights");
            let tensor =
                |name: &str| -> Result<Tensor> { Ok(golden.tensor(&format!("out.{name}.2.{key}"))?.squeeze(0)?) };
            let latents = encode(&vae, &pixels(&golden.tensor("in.video.2")?)?)?;
            assert_close(&what("encode"), &latents, &tensor("latents")?, TOLERANCE)?;
            let video = decode(&vae, golden.tensor("in.latents.2")?)?;
            assert_close(&what("decode"), &video, &tensor("video")?, TOLERANCE)?;
            let rounding = rel_l2(&video, &golden.tensor("out.video.2")?.squeeze(0)?)?;
            println!("{name}: the frames differ by {rounding:.1e} from those of f32 weights");
            assert!(rounding > 10.0 * TOLERANCE, "nothing was rounded");
        }
    }
    Ok(())
}

/// Floats in another element type, to the nearest.
fn narrow(stored: &Stored, dtype: &str) -> Stored {
    let floats = stored.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let bytes = match dtype {
        "F16" => floats.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
        _ => floats.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect(),
    };
    Stored { dtype: dtype.to_owned(), shape: stored.shape.clone(), bytes }
}

/// What comes back from the latents of a clip is the clip, within what training reached.
#[test]
fn clips_survive_encoding_and_decoding() -> Result<()> {
    let vae = demo()?;
    for name in ["wan-a", "wan-c"] {
        let golden = Golden::open(name)?;
        let video = golden.tensor("video")?.squeeze(0)?;
        let back = decode(&vae, encode(&vae, &video)?)?;
        let reference = golden.tensor("decoded")?.squeeze(0)?;
        let (quality, want) = (psnr(&back, &video, 2.0)?, psnr(&reference, &video, 2.0)?);
        println!("{name}: {quality:.2} dB, the reference {want:.2} dB");
        assert!((quality - want).abs() < 0.01 && quality > 20.0, "{name}: {quality} dB, the reference {want} dB");
    }
    Ok(())
}
