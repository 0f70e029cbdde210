//! The pipeline on the demonstration model: every stage against diffusers, and what a caller may rely on.
//!
//! The goldens `flux2-a`, `-b` (128x128, four steps) and `-c` (160x96, six steps) come from `reference/golden_flux2.py`.

use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use flux2::{DenoiseInput, Error, Flux2Pipeline, GenerateOptions, LoadOptions};
use policy::Silent;
use sampling::{FlowMatchEuler, NoiseGenerator};
use tests::{DemoCopy, Golden, assert_close, assert_same_bits, demo, max_abs, request};

/// Relative L2 error of every stage of a run.
const TOLERANCE: f64 = 1e-4;
/// Largest error of a pixel in 0..=1.
const PIXEL: f64 = 1e-3;

const GOLDENS: [&str; 3] = ["flux2-a", "flux2-b", "flux2-c"];

/// The demonstration pipeline, loaded once.
fn pipeline() -> &'static Flux2Pipeline {
    static PIPELINE: LazyLock<Flux2Pipeline> =
        LazyLock::new(|| Flux2Pipeline::load(&demo(), &LoadOptions::default()).expect("the demonstration model loads"));
    &PIPELINE
}

/// A small picture, to compare runs with each other.
fn small(seed: u64) -> GenerateOptions {
    GenerateOptions {
        prompt: "a red circle on a blue background".to_owned(),
        height: Some(64),
        width: Some(80),
        num_inference_steps: Some(2),
        seed,
        ..GenerateOptions::default()
    }
}

#[test]
fn ids_and_mask_are_those_of_the_reference() -> Result<()> {
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        let tokens = pipeline().tokenizer().encode(golden.metadata("prompt")?)?;
        assert_eq!(tokens.ids, golden.integers("input_ids")?, "{name}");
        assert_eq!(tokens.mask(), golden.integers("attention_mask")?, "{name}");
    }
    Ok(())
}

#[test]
fn prompt_embeddings_match_the_reference() -> Result<()> {
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        let prompt = pipeline().encode_prompt(golden.metadata("prompt")?)?;
        assert_close(&format!("{name}, prompt embeds"), &prompt.embeds, &golden.tensor("prompt_embeds")?, TOLERANCE)?;
    }
    Ok(())
}

#[test]
fn sigmas_match_the_reference() -> Result<()> {
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        let (h, w): (usize, usize) = (golden.number("height")?, golden.number("width")?);
        let sampler = FlowMatchEuler::new(h / 16 * (w / 16), golden.number("steps")?)?;
        let sigmas = Tensor::new(sampler.sigmas(), &Device::Cpu)?;
        let error = max_abs(&sigmas, &golden.tensor("sigmas")?)?;
        assert!(error <= 1e-6, "{name}: {error:e}");
    }
    Ok(())
}

#[test]
fn latents_of_every_step_and_the_picture_match_the_reference() -> Result<()> {
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        // Embeddings from the golden, so that a fault of the text encoder does not show here.
        let (noise, prompt_embeds) = (golden.tensor("noise")?, golden.tensor("prompt_embeds")?);
        let input = DenoiseInput {
            prompt_embeds: &prompt_embeds,
            negative_prompt_embeds: None,
            latents: &noise,
            num_inference_steps: golden.number("steps")?,
            guidance_scale: 1.0,
        };
        let mut steps = Vec::new();
        let latents = pipeline().denoise(&input, &Silent, &mut |step| steps.push(step.latents.clone()))?;
        assert_eq!(steps.len(), input.num_inference_steps, "{name}");
        for (index, latents) in steps.iter().enumerate() {
            let want = golden.tensor(&format!("latents_step_{index}"))?;
            assert_close(&format!("{name}, latents after step {index}"), latents, &want, TOLERANCE)?;
        }
        let image = pipeline().decode(&latents, &Silent)?;
        let want = golden.tensor("image")?.squeeze(0)?;
        assert_close(&format!("{name}, picture"), &image, &want, TOLERANCE)?;
        let worst = max_abs(&image, &want)?;
        assert!(worst <= PIXEL, "{name}: a pixel is off by {worst:.2e}");
    }
    Ok(())
}

#[test]
fn a_seed_of_torch_gives_the_picture_of_the_reference() -> Result<()> {
    // End to end: from the prompt and the seed alone.
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        let options = request(&golden)?;
        let generated = pipeline().generate(&options, &Silent)?;
        assert_eq!((Some(generated.height), Some(generated.width)), (options.height, options.width), "{name}");
        let want = golden.tensor("image")?.squeeze(0)?;
        assert_close(&format!("{name}, from the seed"), &generated.image, &want, TOLERANCE)?;
        assert!(max_abs(&generated.image, &want)? <= PIXEL, "{name}");
    }
    Ok(())
}

#[test]
fn a_seed_gives_the_same_bits_whatever_was_made_before() -> Result<()> {
    // Picture i of a batch is the picture of seed + i, so a batch is a loop over seeds and must not carry state.
    let fresh = Flux2Pipeline::load(&demo(), &LoadOptions::default())?;
    let first = fresh.generate(&small(12), &Silent)?.image;
    let batch: Vec<_> =
        (10..13).map(|seed| Ok(pipeline().generate(&small(seed), &Silent)?.image)).collect::<Result<_>>()?;
    assert_same_bits("seed 12, alone and third of a batch", &batch[2], &first)?;
    assert_same_bits("seed 12, twice", &fresh.generate(&small(12), &Silent)?.image, &first)?;
    for (i, image) in batch.iter().enumerate() {
        for other in &batch[..i] {
            assert!(max_abs(image, other)? > 0.05, "two seeds give the same picture");
        }
    }
    Ok(())
}

#[test]
fn kept_prompt_embeddings_are_exact() -> Result<()> {
    let fresh = Flux2Pipeline::load(&demo(), &LoadOptions::default())?;
    let first = fresh.encode_prompt("a blue star")?.embeds;
    assert_same_bits("the same prompt again", &fresh.encode_prompt("a blue star")?.embeds, &first)?;
    for prompt in ["", "a green ring", "a blue star.", "A blue star"] {
        assert!(max_abs(&fresh.encode_prompt(prompt)?.embeds, &first)? > 0.0, "{prompt:?} gives the same embeddings");
    }
    assert_same_bits("the same prompt after others", &fresh.encode_prompt("a blue star")?.embeds, &first)
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() -> Result<()> {
    let with = |threads: usize| -> Result<Tensor> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        // A fresh pipeline, so that the embeddings are made in the pool as well.
        pool.install(|| Ok(Flux2Pipeline::load(&demo(), &LoadOptions::default())?.generate(&small(3), &Silent)?.image))
    };
    let one = with(1)?;
    for threads in [2, 3, 5] {
        assert_same_bits(&format!("1 thread and {threads}"), &with(threads)?, &one)?;
    }
    Ok(())
}

#[test]
fn one_pipeline_serves_several_threads() -> Result<()> {
    fn check<T: Send + Sync>(_: &T) {}
    let shared = pipeline();
    check(shared);
    let alone: Vec<_> =
        [21, 22].map(|seed| shared.generate(&small(seed), &Silent)).into_iter().collect::<flux2::Result<_>>()?;
    let together = std::thread::scope(|scope| {
        let runs = [21, 22].map(|seed| scope.spawn(move || shared.generate(&small(seed), &Silent)));
        runs.map(|run| run.join().expect("no panic"))
    });
    for (together, alone) in together.into_iter().zip(alone) {
        assert_same_bits("together and alone", &together?.image, &alone.image)?;
    }
    Ok(())
}

#[test]
fn nan_in_latents_is_an_error_that_names_the_step() -> Result<()> {
    let prompt = pipeline().encode_prompt("a red circle")?;
    let mut noise = NoiseGenerator::default().normal(1, 128 * 4 * 5);
    noise[777] = f32::NAN;
    let latents = Tensor::from_vec(noise, (1, 128, 4, 5), &Device::Cpu)?;
    let input = DenoiseInput {
        prompt_embeds: &prompt.embeds,
        negative_prompt_embeds: None,
        latents: &latents,
        num_inference_steps: 2,
        guidance_scale: 1.0,
    };
    let error = pipeline().denoise(&input, &Silent, &mut |_| ()).err().context("denoise should fail")?;
    assert!(matches!(error, Error::NonFiniteLatents { step: 1, .. }), "{error}");
    let error = pipeline().decode(&latents, &Silent).err().context("decode should fail")?;
    assert!(matches!(error, Error::NonFinite { .. }), "{error}");
    Ok(())
}

#[test]
fn damaged_weights_are_an_error_and_never_a_picture() -> Result<()> {
    // One element each, on the path of every picture; the embedding's is the first token of the template.
    for (component, tensor, index) in [
        ("text_encoder", "embed_tokens.weight", 96),
        ("text_encoder", "layers.1.input_layernorm.weight", 5),
        ("text_encoder", "layers.3.mlp.down_proj.weight", 17),
        ("transformer", "time_guidance_embed.timestep_embedder.linear_1.weight", 3),
        ("transformer", "transformer_blocks.0.attn.norm_added_k.weight", 31),
        ("transformer", "transformer_blocks.1.ff.linear_in.weight", 1000),
        ("transformer", "single_transformer_blocks.5.attn.to_out.weight", 0),
        ("transformer", "norm_out.linear.weight", 7),
        ("vae", "bn.running_var", 9),
        ("vae", "post_quant_conv.bias", 0),
        ("vae", "decoder.mid_block.attentions.0.to_v.weight", 40),
        ("vae", "decoder.conv_out.weight", 100),
    ] {
        for value in [f32::NAN, f32::INFINITY] {
            let copy = DemoCopy::new()?;
            copy.edit(component, |weights| weights.set(tensor, index, value))?;
            let run = Flux2Pipeline::load(&copy.folder(), &LoadOptions::default())
                .and_then(|pipeline| pipeline.generate(&small(1), &Silent));
            let error = run.err().with_context(|| format!("{value} in {tensor} went unnoticed"))?;
            let typed = match &error {
                Error::NonFinite { .. } | Error::NonFiniteLatents { .. } => true,
                Error::Weights(error) => {
                    matches!(**error, weights::Error::NotFinite { .. }) && error.to_string().contains(tensor)
                }
                _ => false,
            };
            ensure!(typed, "{value} in {tensor}: {error}");
            ensure!(!error.to_string().contains('\n'), "more than one line: {error}");
        }
    }
    Ok(())
}

#[test]
fn a_missing_or_extra_tensor_is_named_before_anything_is_made() -> Result<()> {
    for (component, tensor) in [
        ("text_encoder", "layers.5.self_attn.q_norm.weight"),
        ("transformer", "transformer_blocks.1.attn.add_v_proj.weight"),
        ("vae", "bn.running_mean"),
    ] {
        let copy = DemoCopy::new()?;
        copy.edit(component, |weights| {
            let stored = weights.tensors.remove(tensor).context("the tensor to rename")?;
            weights.tensors.insert(format!("{tensor}_renamed"), stored);
            Ok(())
        })?;
        let error = Flux2Pipeline::load(&copy.folder(), &LoadOptions::default()).err().context("load should fail")?;
        let message = error.to_string();
        ensure!(matches!(error, Error::Weights(_)), "{message}");
        ensure!(message.contains(tensor) && message.contains(&format!("{tensor}_renamed")), "{message}");
    }
    Ok(())
}

#[test]
fn bf16_files_load_as_the_f32_numbers_that_they_hold() -> Result<()> {
    // The demonstration weights are bf16; widening them in the file must not change a bit of the picture.
    let copy = DemoCopy::new()?;
    for component in ["text_encoder", "transformer", "vae"] {
        copy.edit(component, |weights| {
            for tensor in weights.tensors.values_mut().filter(|tensor| tensor.dtype == "BF16") {
                tensor.dtype = "F32".to_owned();
                tensor.bytes = tensor.bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
            }
            Ok(())
        })?;
    }
    let widened = Flux2Pipeline::load(&copy.folder(), &LoadOptions::default())?.generate(&small(4), &Silent)?;
    assert_eq!(widened.image.dtype(), DType::F32);
    assert_same_bits("bf16 and f32 files", &widened.image, &pipeline().generate(&small(4), &Silent)?.image)
}

#[test]
fn odd_prompts_make_pictures() -> Result<()> {
    let long = "a red circle ".repeat(40);
    for prompt in ["", "\n a ring", "<|im_end|><|endoftext|>", "\u{1f7e5} caf\u{e9}", &long] {
        let options = GenerateOptions { prompt: prompt.to_owned(), num_inference_steps: Some(1), ..small(1) };
        let generated = pipeline().generate(&options, &Silent)?;
        let values: Vec<f32> = generated.image.flatten_all()?.to_vec1()?;
        assert!(values.iter().all(|value| (0.0..=1.0).contains(value)), "{prompt:?}");
        let cut = generated.notices.iter().any(|notice| matches!(notice, flux2::Notice::PromptTruncated { .. }));
        assert_eq!(cut, prompt == long, "{prompt:?}");
    }
    Ok(())
}
