//! The VAE against diffusers: every kind of block, encoder and decoder, and pictures through the demonstration model.
//!
//! The goldens come from tiny random models with unequal widths, see `reference/golden_vae.py`.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use flux2::{
    LoadOptions, VaeConfig,
    vae::{
        Channels, Downsample, Flux2Vae, MidAttention, Resnet, Upsample, from_tokens, patchify, to_tokens, unpatchify,
    },
};
use policy::Silent;
use tests::{Golden, assert_close, assert_same_bits, demo, psnr};
use weights::{Expected, Loader};

/// f32 against f32, for single blocks and for whole tiny models.
const TOLERANCE: f64 = 1e-5;
/// Encode, then decode, in decibels.
const ROUND_TRIP: f64 = 25.0;

fn vae(golden: &Golden) -> Result<Flux2Vae> {
    let config: VaeConfig = serde_json::from_value(golden.config()?)?;
    Ok(Flux2Vae::load(&config, golden.weights()?, &LoadOptions::default())?)
}

/// Loads one block and compares what it makes of its golden input.
fn block<B>(
    prefix: &str,
    expected: impl FnOnce(&str, &mut Vec<Expected>),
    load: impl FnOnce(&mut Loader, &str) -> flux2::Result<B>,
    forward: impl FnOnce(&B, Tensor) -> flux2::Result<Tensor>,
) -> Result<()> {
    let golden = Golden::open("flux2-vae")?;
    let mut plan = Vec::new();
    expected(prefix, &mut plan);
    let below = format!("{prefix}.");
    let others = |name: &str| !name.starts_with(&below);
    let mut loader = Loader::new(golden.weights()?, &plan, others, DType::F32, &Device::Cpu)?;
    let block = load(&mut loader, prefix)?;
    loader.finish()?;
    let got = forward(&block, golden.tensor(&format!("in.{prefix}.0"))?)?;
    assert_close(prefix, &got, &golden.tensor(&format!("out.{prefix}"))?, TOLERANCE)
}

/// Groups of the norms in the golden's config.
const GROUPS: usize = 4;

#[test]
fn resnet_with_a_shortcut_matches_the_reference() -> Result<()> {
    let channels = Channels { input: 20, output: 28 };
    block(
        "encoder.down_blocks.3.resnets.0",
        |prefix, plan| Resnet::expected(channels, prefix, plan),
        |loader, prefix| Resnet::load(loader, channels, GROUPS, prefix),
        |block, x| block.forward(x),
    )
}

#[test]
fn resnet_without_a_shortcut_matches_the_reference() -> Result<()> {
    let channels = Channels::same(32);
    block(
        "decoder.mid_block.resnets.1",
        |prefix, plan| Resnet::expected(channels, prefix, plan),
        |loader, prefix| Resnet::load(loader, channels, GROUPS, prefix),
        |block, x| block.forward(x),
    )
}

#[test]
fn middle_attention_matches_the_reference() -> Result<()> {
    block(
        "decoder.mid_block.attentions.0",
        |prefix, plan| MidAttention::expected(32, prefix, plan),
        |loader, prefix| MidAttention::load(loader, GROUPS, prefix),
        |block, x| block.forward(x),
    )
}

#[test]
fn downsample_matches_the_reference() -> Result<()> {
    block(
        "encoder.down_blocks.2.downsamplers.0",
        |prefix, plan| Downsample::expected(20, prefix, plan),
        Downsample::load,
        |block, x| block.forward(&x),
    )
}

#[test]
fn upsample_matches_the_reference() -> Result<()> {
    block(
        "decoder.up_blocks.0.upsamplers.0",
        |prefix, plan| Upsample::expected(32, prefix, plan),
        Upsample::load,
        |block, x| block.forward(x),
    )
}

#[test]
fn whole_encoder_and_decoder_match_the_reference() -> Result<()> {
    for name in ["flux2-vae", "flux2-vae-plain"] {
        let golden = Golden::open(name)?;
        let vae = vae(&golden)?;
        let latents = vae.encode(&golden.tensor("in.picture")?)?;
        assert_close(&format!("{name}, encode"), &latents, &golden.tensor("out.latents")?, TOLERANCE)?;
        let picture = vae.decode(&golden.tensor("in.latents")?, &Silent)?;
        assert_close(&format!("{name}, decode"), &picture, &golden.tensor("out.picture")?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn an_item_of_a_batch_has_the_bytes_of_the_item_alone() -> Result<()> {
    let golden = Golden::open("flux2-vae")?;
    let vae = vae(&golden)?;
    let latents = golden.tensor("in.latents")?;
    let together = vae.decode(&latents, &Silent)?;
    assert_eq!(latents.dim(0)?, 2);
    for item in 0..2 {
        let alone = vae.decode(&latents.narrow(0, item, 1)?.contiguous()?, &Silent)?;
        assert_same_bits(&format!("item {item}"), &alone, &together.narrow(0, item, 1)?.contiguous()?)?;
    }
    Ok(())
}

#[test]
fn coloured_shapes_survive_encoding_and_decoding() -> Result<()> {
    let golden = Golden::open("flux2-demo-vae")?;
    let folder = demo();
    let config: VaeConfig = folder.json("vae/config.json")?;
    let vae = Flux2Vae::load(&config, folder.tensors("vae")?, &LoadOptions::default())?;
    let picture = golden.tensor("in.pixels")?.to_dtype(DType::F32)?.affine(1.0 / 127.5, -1.0)?;
    let latents = vae.encode(&picture)?;
    assert_close("latents of the demonstration vae", &latents, &golden.tensor("out.latents")?, TOLERANCE)?;
    let back = vae.decode(&latents, &Silent)?.clamp(-1f32, 1f32)?;
    for item in 0..picture.dim(0)? {
        let quality = psnr(&back.narrow(0, item, 1)?, &picture.narrow(0, item, 1)?, 2.0)?;
        println!("picture {item}: {quality:.1} dB");
        assert!(quality >= ROUND_TRIP, "picture {item} comes back with {quality:.1} dB");
    }
    Ok(())
}

#[test]
fn a_checkpoint_without_statistics_is_refused() -> Result<()> {
    let golden = Golden::open("flux2-vae")?;
    let config: VaeConfig = serde_json::from_value(golden.config()?)?;
    for name in ["bn.running_mean", "bn.running_var"] {
        let mut container = golden.container();
        container.tensors.remove(name);
        let source = weights::Safetensors::from_bytes(std::sync::Arc::new(container.to_bytes()), "vae")?;
        let error = Flux2Vae::load(&config, std::sync::Arc::new(source), &LoadOptions::default()).map(|_| ());
        let message = error.expect_err("the statistics are missing").to_string();
        assert!(message.contains(name), "{message}");
    }
    Ok(())
}

#[test]
fn packing_is_a_permutation_with_the_documented_order() -> Result<()> {
    let (c, h, w) = (3, 2, 4);
    let x = Tensor::arange(0f32, (c * 2 * h * 2 * w) as f32, &Device::Cpu)?.reshape((1, c, 2 * h, 2 * w))?;
    let packed = patchify(&x, [2, 2])?;
    for (channel, py, px, y, column) in [(0, 0, 0, 0, 0), (2, 1, 0, 1, 3), (1, 0, 1, 0, 2)] {
        let got = packed.get(0)?.get(channel * 4 + py * 2 + px)?.get(y)?.get(column)?.to_scalar::<f32>()?;
        let want = x.get(0)?.get(channel)?.get(2 * y + py)?.get(2 * column + px)?.to_scalar::<f32>()?;
        assert_eq!(got, want);
    }
    let tokens = to_tokens(&packed)?;
    assert_eq!(tokens.dims(), [1, h * w, 4 * c]);
    assert_same_bits("tokens", &from_tokens(&tokens, (h, w))?, &packed)?;
    assert_same_bits("patches", &unpatchify(&packed, [2, 2])?, &x)
}
