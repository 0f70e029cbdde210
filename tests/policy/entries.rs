//! Every entry of the model crates runs under the policies that its model was loaded with, on its own thread only.
//!
//! Observed from inside: an entry's observer, sinks and sources are called on the thread that works. Entries without any
//! of them call those that have one.

use std::{cell::RefCell, ops::ControlFlow, sync::Barrier, thread};

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_fork::cudnn_policy::{Attention, Backend, attention, backend};
use flux2::{DenoiseInput, Flux2Pipeline, GenerateOptions};
use ltx::{
    ConvVae, DiffusionDecoder, DiffusionDecoderConfig,
    conv_vae::{ConvDecodeOptions, ConvEncodeOptions},
    diffusion_decoder,
};
use policy::{AttentionPolicy, ConvPolicy, Event};
use sampling::NoiseGenerator;
use tests::{Golden, data, demo};
use wan_vae::{DecodeOptions, EncodeOptions, RawLatents, Tiling, WanVae};

type Policies = (ConvPolicy, AttentionPolicy);
type InForce = (Backend, Attention);

const FAST: Policies = (ConvPolicy::CudnnAuto, AttentionPolicy::FusedAuto);
const REPRODUCIBLE: Policies = (ConvPolicy::Im2col, AttentionPolicy::Math);

fn in_force() -> InForce {
    (backend(), attention())
}

/// What a thread should see under `policies`.
fn expected((conv, attention): Policies) -> InForce {
    conv.scope(|| attention.scope(in_force))
}

/// What was in force at each callback of an entry.
#[derive(Default)]
struct Seen(RefCell<Vec<InForce>>);

impl Seen {
    fn note(&self) {
        self.0.borrow_mut().push(in_force());
    }

    fn observer(&self) -> impl Fn(&Event<'_>) -> ControlFlow<()> {
        |_| {
            self.note();
            ControlFlow::Continue(())
        }
    }

    /// Runs an entry, holds what it saw to `policies`, and what is in force behind it to what was before.
    fn check<R>(&self, entry: &str, policies: Policies, run: impl FnOnce() -> R) -> Result<R> {
        let before = in_force();
        let result = run();
        ensure!(in_force() == before, "{entry} leaves {:?} behind", in_force());
        let seen = self.0.take();
        let want = expected(policies);
        ensure!(!seen.is_empty(), "{entry} has called nobody");
        ensure!(seen.iter().all(|&seen| seen == want), "{entry}: {seen:?}, expected {want:?}");
        Ok(result)
    }
}

fn noise(dims: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_vec(NoiseGenerator::Philox.normal(1, dims.iter().product()), dims, &Device::Cpu)?)
}

/// The entries of FLUX.2; gives the picture.
fn flux2(policies: Policies) -> Result<Vec<f32>> {
    let options = flux2::LoadOptions::default().with_backends(policies.0, policies.1);
    let pipeline = Flux2Pipeline::load(&demo(), &options)?;
    let seen = Seen::default();
    let tokens = pipeline.tokenizer().encode("a red circle")?;
    let text = seen.check("Qwen3Encoder::forward_observed", policies, || {
        pipeline.text_encoder()?.forward_observed(&tokens.ids, tokens.n_real, &seen.observer())
    })??;
    let transformer = pipeline.transformer()?;
    let channels = transformer.config().in_channels;
    let prepared = transformer.prepare(&text, (4, 4))?;
    seen.check("Flux2Transformer::forward", policies, || {
        transformer
            .forward(&noise(&[1, 16, channels])?, 0.5, None, &prepared, &seen.observer())
            .map_err(anyhow::Error::from)
    })??;
    let latents = noise(&[1, channels, 4, 4])?;
    seen.check("Flux2Vae::decode", policies, || pipeline.vae()?.decode(&latents, &seen.observer()))??;
    let input = DenoiseInput {
        prompt_embeds: &text,
        negative_prompt_embeds: None,
        latents: &latents,
        num_inference_steps: 1,
        guidance_scale: 1.0,
    };
    let denoised = seen.check("Flux2Pipeline::denoise", policies, || {
        pipeline.denoise(&input, &seen.observer(), &mut |_| seen.note())
    })??;
    seen.check("Flux2Pipeline::decode", policies, || pipeline.decode(&denoised, &seen.observer()))??;
    let options = GenerateOptions {
        prompt: "a red circle".to_owned(),
        height: Some(64),
        width: Some(64),
        num_inference_steps: Some(1),
        ..GenerateOptions::default()
    };
    let generated =
        seen.check("Flux2Pipeline::generate", policies, || pipeline.generate(&options, &seen.observer()))??;
    Ok(generated.image.flatten_all()?.to_vec1()?)
}

/// The entries of the Wan VAEs; gives the frames.
fn wan(policies: Policies) -> Result<Vec<f32>> {
    let mut options = wan_vae::LoadOptions::default();
    (options.conv, options.attention) = policies;
    let vae = WanVae::open(data("models/wan-vae-demo"), &options)?;
    let seen = Seen::default();
    let extents = (3, 4, 4);
    let latents = RawLatents::new(noise(&[vae.z_dim(), 3, 4, 4])?)?;
    let mut frames = Vec::new();
    for tiling in [Tiling::Whole, Tiling::Bands(2)] {
        let options = DecodeOptions::default().with_tiling(tiling);
        frames.clear();
        seen.check("decode_clip", policies, || {
            vae.decode_clip(&latents, &options, &seen.observer(), &mut |piece| {
                seen.note();
                frames.push(piece);
                Ok(())
            })
        })??;
        let mut fetch = |range: std::ops::Range<usize>| {
            seen.note();
            latents.frames(range.start, range.len())
        };
        seen.check("decode_stream", policies, || {
            vae.decode_stream(extents, &mut fetch, &options, &seen.observer(), &mut |_| {
                seen.note();
                Ok(())
            })
        })??;
        let mut sink = |_| {
            seen.note();
            Ok(())
        };
        seen.check("decode_clip_rgb8", policies, || {
            vae.decode_clip_rgb8(&latents, &options, &seen.observer(), &mut sink)
        })??;
        seen.check("decode_stream_rgb8", policies, || {
            vae.decode_stream_rgb8(extents, &mut fetch, &options, &seen.observer(), &mut sink)
        })??;
        let options = EncodeOptions::default().with_tiling(tiling);
        let mut pieces = frames.iter().map(|piece| {
            seen.note();
            Ok(piece.clone())
        });
        seen.check("encode_clip", policies, || {
            vae.encode_clip(&mut pieces, &options, &seen.observer(), &mut |_| {
                seen.note();
                Ok(())
            })
        })??;
    }
    Ok(Tensor::cat(&frames, 1)?.flatten_all()?.to_vec1()?)
}

/// The entries of the LTX networks; gives the frames of both decoders.
fn ltx(policies: Policies) -> Result<Vec<f32>> {
    let options = ltx::LoadOptions::default().with_backends(policies.0, policies.1);
    let golden = Golden::open("ltx-conv-23")?;
    let vae = ConvVae::load(golden.weights()?, Some(&golden.config()?), &options)?;
    let seen = Seen::default();
    let latents = noise(&[1, vae.architecture().latent_channels, 2, 2, 2])?;
    let decode = ConvDecodeOptions::default();
    let mut frames = Vec::new();
    seen.check("ConvVae::decode_clip", policies, || {
        vae.decode_clip(&latents, &decode, &seen.observer(), &mut |piece| {
            seen.note();
            frames.push(piece);
            Ok(())
        })
    })??;
    let mut sink = |_| {
        seen.note();
        Ok(())
    };
    seen.check("ConvVae::decode_rgb8", policies, || vae.decode_rgb8(&latents, &decode, &seen.observer(), &mut sink))??;
    let frames = Tensor::cat(&frames, 2)?;
    seen.check("ConvVae::encode", policies, || vae.encode(&frames, &ConvEncodeOptions::default(), &seen.observer()))??;

    let golden = Golden::open("ltx-diffusion")?;
    let config = DiffusionDecoderConfig::from_json(&golden.config()?)?;
    let decoder = DiffusionDecoder::load(&config, golden.weights()?, &options)?;
    let latents = noise(&[1, config.in_channels, 1, 3, 3])?;
    let decode = diffusion_decoder::DecodeOptions::default();
    let pixels =
        seen.check("DiffusionDecoder::decode", policies, || decoder.decode(&latents, &decode, &seen.observer()))??;
    seen.check("DiffusionDecoder::decode_rgb8", policies, || {
        decoder.decode_rgb8(&latents, &decode, &seen.observer(), &mut sink)
    })??;
    Ok([frames.flatten_all()?.to_vec1()?, pixels.flatten_all()?.to_vec1()?].concat())
}

#[test]
fn models_run_under_their_own_policies_by_default() {
    let flux2 = flux2::LoadOptions::default();
    assert_eq!((flux2.conv, flux2.attention), REPRODUCIBLE);
    let wan = wan_vae::LoadOptions::default();
    assert_eq!((wan.conv, wan.attention), FAST);
    let ltx = ltx::LoadOptions::default();
    assert_eq!((ltx.conv, ltx.attention), FAST);
    assert_ne!(expected(FAST), expected(REPRODUCIBLE));
}

#[test]
fn entries_run_under_the_policies_of_their_model_whatever_the_thread_has() -> Result<()> {
    let (conv, attention) = (ConvPolicy::CudnnRequired, AttentionPolicy::FusedAuto);
    for policies in [FAST, REPRODUCIBLE] {
        flux2(policies)?;
        wan(policies)?;
        ltx(policies)?;
        conv.scope(|| attention.scope(|| flux2(policies).and(wan(policies)).and(ltx(policies))))?;
    }
    Ok(())
}

#[test]
fn threads_with_opposite_policies_do_not_perturb_each_other() -> Result<()> {
    let barrier = Barrier::new(3);
    let run = |policies| -> Result<(Vec<f32>, Vec<f32>)> {
        barrier.wait();
        let picture = flux2(policies)?;
        let frames = wan(policies)?;
        ensure!(in_force() == (Backend::Im2col, Attention::Math));
        Ok((picture, frames))
    };
    let (fast, reproducible) = thread::scope(|scope| {
        let threads = [FAST, REPRODUCIBLE].map(|policies| {
            scope.spawn({
                let run = &run;
                move || run(policies)
            })
        });
        barrier.wait();
        assert_eq!(in_force(), (Backend::Im2col, Attention::Math));
        let [fast, reproducible] = threads.map(|thread| thread.join().expect("no panic"));
        (fast, reproducible)
    });
    // On the CPU there is one backend, so the bytes are the same.
    let (fast, reproducible) = (fast?, reproducible?);
    assert!(fast == reproducible);
    Ok(())
}
