use std::{cell::RefCell, ops::ControlFlow};

use super::*;
use crate::testing::{Golden, demo, demo_with, max_abs, relative_l2, values};

fn pipeline(folder: &ModelFolder) -> Flux2Pipeline {
    Flux2Pipeline::load(folder, &LoadOptions::default()).expect("a pipeline")
}

/// The demonstration model as if it were not distilled.
fn base() -> Flux2Pipeline {
    pipeline(&demo_with(&[("model_index.json", br#"{"_class_name": "Flux2KleinPipeline", "is_distilled": false}"#)]))
}

/// A small and short run.
fn options() -> GenerateOptions {
    GenerateOptions {
        prompt: "a red circle".to_owned(),
        height: Some(64),
        width: Some(80),
        num_inference_steps: Some(2),
        seed: 5,
        ..GenerateOptions::default()
    }
}

fn load_error(changes: &[(&str, &[u8])]) -> Error {
    Flux2Pipeline::load(&demo_with(changes), &LoadOptions::default()).expect_err("a damaged model")
}

#[test]
fn a_pipeline_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Flux2Pipeline>();
}

#[test]
fn the_reference_run_is_reproduced() {
    let golden = Golden::open("flux2-c.safetensors");
    let pipeline = pipeline(&demo());
    let prompt = pipeline.encode_prompt(golden.meta("prompt")).expect("embeddings");
    let noise = golden.tensor("noise");
    let input = DenoiseInput {
        prompt_embeds: &prompt.embeds,
        negative_prompt_embeds: None,
        latents: &noise,
        num_inference_steps: 6,
        guidance_scale: 1.0,
    };
    let mut errors = Vec::new();
    let mut on_step = |step: DenoiseStep<'_>| {
        let want = golden.tensor(&format!("latents_step_{}", step.index));
        errors.push(relative_l2(step.latents, &want));
    };
    let latents = pipeline.denoise(&input, &Silent, &mut on_step).expect("latents");
    println!("latents after each step, relative L2: {errors:?}");
    assert_eq!(errors.len(), 6);
    assert!(errors.iter().all(|&error| error <= 1e-4), "{errors:?}");
    let image = pipeline.decode(&latents, &Silent).expect("a picture");
    let error = max_abs(&image.unsqueeze(0).expect("a batch"), &golden.tensor("image"));
    println!("picture, largest difference: {error:.2e}");
    assert!(error <= 1e-3, "{error}");
}

#[test]
fn generate_is_encode_denoise_decode() {
    let pipeline = pipeline(&demo());
    let generated = pipeline.generate(&options(), &Silent).expect("a picture");
    assert_eq!(generated.image.dims(), [3, 64, 80]);
    assert_eq!((generated.height, generated.width, generated.num_inference_steps), (64, 80, 2));
    assert_eq!((generated.guidance_scale, generated.seed), (1.0, 5));
    assert_eq!(generated.notices, []);
    assert!(values(&generated.image).iter().all(|v| (0.0..=1.0).contains(v)));

    let prompt = pipeline.encode_prompt("a red circle").expect("embeddings");
    let noise = Tensor::from_vec(sampling::NoiseGenerator::Philox.normal(5, 128 * 4 * 5), (1, 128, 4, 5), &Device::Cpu);
    let input = DenoiseInput {
        prompt_embeds: &prompt.embeds,
        negative_prompt_embeds: None,
        latents: &noise.expect("noise"),
        num_inference_steps: 2,
        guidance_scale: 1.0,
    };
    let latents = pipeline.denoise(&input, &Silent, &mut |_| ()).expect("latents");
    assert_eq!(latents.dims(), [1, 128, 4, 5]);
    let image = pipeline.decode(&latents, &Silent).expect("a picture");
    assert_eq!(values(&image), values(&generated.image));
}

#[test]
fn bytes_are_the_rounded_picture() {
    let pipeline = pipeline(&demo());
    let picture = pipeline.generate(&options(), &Silent).expect("a picture");
    let bytes = pipeline.generate_rgb8(&options(), &Silent).expect("a picture");
    assert_eq!((bytes.height, bytes.width, bytes.num_inference_steps, bytes.seed), (64, 80, 2, 5));
    let planes = values(&picture.image);
    for (index, &byte) in bytes.pixels.iter().enumerate() {
        let value = planes[index % 3 * 64 * 80 + index / 3];
        assert_eq!(byte, (255.0 * value).round_ties_even() as u8, "{index}");
    }
    assert_eq!(bytes.pixels.len(), 3 * 64 * 80);
    let nan = Tensor::full(f32::NAN, (1, 128, 4, 5), &Device::Cpu).expect("latents");
    assert!(matches!(pipeline.decode_rgb8(&nan, &Silent), Err(Error::NonFinite { .. })));
}

#[test]
fn a_pipeline_loads_from_any_source() {
    let folder = demo();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (tensors, log) = (folder.clone(), asked.clone());
    let sources: TensorSources = Arc::new(move |component| {
        log.lock().expect("a lock").push(component.to_owned());
        tensors.tensors(component)
    });
    let own = Flux2Pipeline::load_from(&folder, sources, &LoadOptions::default()).expect("a pipeline");
    let image = |pipeline: &Flux2Pipeline| values(&pipeline.generate(&options(), &Silent).expect("a picture").image);
    assert_eq!(image(&own), image(&pipeline(&folder)));
    for component in ["text_encoder", "transformer", "vae"] {
        assert!(asked.lock().expect("a lock").iter().any(|name| name == component), "{component}");
    }
}

#[test]
fn components_are_there_from_the_start_on_the_cpu_and_stay() {
    let pipeline = pipeline(&demo());
    let loaded = || (pipeline.text_encoder.is_loaded(), pipeline.transformer.is_loaded(), pipeline.vae.is_loaded());
    assert_eq!(loaded(), (true, true, true));
    pipeline.generate(&options(), &Silent).expect("a picture");
    assert_eq!(loaded(), (true, true, true));
}

#[test]
fn a_component_that_was_dropped_comes_back_as_it_was() {
    let pipeline = pipeline(&demo());
    let image = || values(&pipeline.generate(&options(), &Silent).expect("a picture").image);
    let want = image();
    pipeline.text_encoder.release();
    pipeline.transformer.release();
    pipeline.vae.release();
    pipeline.kept_prompts.lock().expect("a lock").clear();
    assert_eq!(image(), want);
}

#[test]
fn components_make_room_for_one_another_and_give_the_same_picture() {
    let want = values(&pipeline(&demo()).generate(&options(), &Silent).expect("a picture").image);
    let mut staged = pipeline(&demo());
    staged.all_stay = false;
    let image = |pipeline: &Flux2Pipeline| values(&pipeline.generate(&options(), &Silent).expect("a picture").image);
    let loaded = |pipeline: &Flux2Pipeline| (pipeline.text_encoder.is_loaded(), pipeline.transformer.is_loaded());
    assert_eq!(image(&staged), want);
    assert_eq!(loaded(&staged), (false, true));
    staged.encode_prompt("another").expect("embeddings");
    assert_eq!(loaded(&staged), (true, false));

    // A megabyte too little for the whole transformer.
    let plan = staged.memory_plan(64, 80).expect("a plan");
    let whole = plan.transformer.weights + plan.transformer.activations + plan.vae.weights + crate::memory::OVERHEAD;
    staged.options.max_vram = Some(whole - (1 << 20));
    let plan = staged.memory_plan(64, 80).expect("a plan");
    assert!(plan.streamed_blocks.single > 0 && !plan.keeps_transformer, "{plan}");
    assert_eq!(image(&staged), want);
    assert_eq!(loaded(&staged), (false, false));
    let transformer = staged.load_transformer(Some(&plan)).expect("a transformer");
    assert_eq!(transformer.streamed(), plan.streamed_blocks);

    staged.options.max_vram = Some(1 << 20);
    let error = staged.check(&options()).expect_err("too little");
    assert!(matches!(error, Error::Memory { .. }), "{error}");
}

#[test]
fn same_seed_same_bytes_and_other_seed_other_bytes() {
    let (first, second) = (pipeline(&demo()), pipeline(&demo()));
    let image = |pipeline: &Flux2Pipeline, seed| {
        values(&pipeline.generate(&GenerateOptions { seed, ..options() }, &Silent).expect("a picture").image)
    };
    let once = image(&first, 5);
    // After another run, with a prompt that is kept, and in another pipeline.
    assert_ne!(image(&first, 6), once);
    assert_eq!(image(&first, 5), once);
    assert_eq!(image(&second, 5), once);
}

#[test]
fn kept_prompts_are_exact_and_few() {
    let pipeline = pipeline(&demo());
    let fresh = |prompt: &str| values(&pipeline.encode_prompt(prompt).expect("embeddings").embeds);
    let (a, b) = (fresh("a red circle"), fresh("a blue star"));
    assert_ne!(a, b);
    assert_eq!(fresh("a red circle"), a);
    fresh("");
    assert_eq!(pipeline.kept_prompts.lock().expect("a lock").len(), KEPT_PROMPTS);
    assert_eq!(fresh("a red circle"), a);
}

#[test]
fn guidance_starts_from_the_empty_prompt() {
    let pipeline = base();
    let run = |guidance_scale| {
        let options =
            GenerateOptions { guidance_scale: Some(guidance_scale), num_inference_steps: Some(1), ..options() };
        pipeline.generate(&options, &Silent).expect("a picture")
    };
    // At most 1 means one pass per step, as in the reference.
    assert_eq!(values(&run(1.0).image), values(&run(0.5).image));
    assert_eq!(run(3.0).guidance_scale, 3.0);

    let noise = sampling::NoiseGenerator::Philox.normal(5, 128 * 4 * 5);
    let noise = Tensor::from_vec(noise, (1, 128, 4, 5), &Device::Cpu).expect("noise");
    let prompt = pipeline.encode_prompt("a red circle").expect("embeddings").embeds;
    let empty = pipeline.encode_prompt("").expect("embeddings").embeds;
    let step = |positive, negative, guidance_scale| {
        let input = DenoiseInput {
            prompt_embeds: positive,
            negative_prompt_embeds: negative,
            latents: &noise,
            num_inference_steps: 1,
            guidance_scale,
        };
        pipeline.denoise(&input, &Silent, &mut |_| ())
    };
    // One step is linear in the velocity, so the latents combine as the velocities do.
    let c = step(&prompt, None, 1.0).expect("latents");
    let u = step(&empty, None, 1.0).expect("latents");
    let want = (&u + ((c - &u).expect("same shape") * 3.0).expect("scaled")).expect("same shape");
    let got = step(&prompt, Some(&empty), 3.0).expect("latents");
    assert!(relative_l2(&got, &want) <= 1e-6);
    let image = pipeline.decode(&got, &Silent).expect("a picture");
    assert_eq!(values(&image), values(&run(3.0).image));
    assert!(matches!(step(&prompt, None, 3.0), Err(Error::NoNegativePrompt { .. })));
}

#[test]
fn a_distilled_model_ignores_guidance_and_says_so() {
    let pipeline = pipeline(&demo());
    let plain = pipeline.generate(&options(), &Silent).expect("a picture");
    let guided = GenerateOptions { guidance_scale: Some(4.0), ..options() };
    let guided = pipeline.generate(&guided, &Silent).expect("a picture");
    assert_eq!(guided.notices, [Notice::GuidanceIgnored { requested: 4.0 }]);
    assert_eq!(values(&plain.image), values(&guided.image));
}

#[test]
fn empty_and_overlong_prompts() {
    let pipeline = pipeline(&demo());
    let empty = pipeline.generate(&GenerateOptions { prompt: String::new(), ..options() }, &Silent).expect("a picture");
    assert_eq!(empty.notices, []);
    let prompt = "a ".repeat(1000);
    let long = pipeline.generate(&GenerateOptions { prompt, ..options() }, &Silent).expect("a picture");
    let [Notice::PromptTruncated { dropped }] = long.notices[..] else { panic!("{:?}", long.notices) };
    assert!(dropped > 900, "{dropped}");
}

#[test]
fn options_are_checked_before_any_work() {
    let pipeline = pipeline(&demo());
    let silent_failure = |options: GenerateOptions| {
        let observer = |event: &Event<'_>| -> ControlFlow<()> { panic!("work began: {event:?}") };
        let checked = pipeline.check(&options).expect_err("illegal").to_string();
        let error = pipeline.generate(&options, &observer).expect_err("illegal");
        assert_eq!(error.to_string(), checked);
        error
    };
    for side in [0, 16, 63, 72, 1000, 4112] {
        let error = silent_failure(GenerateOptions { height: Some(side), ..options() });
        assert!(matches!(error, Error::Size { axis: "height", .. }), "{side}: {error}");
        let error = silent_failure(GenerateOptions { width: Some(side), ..options() });
        assert!(matches!(error, Error::Size { axis: "width", .. }), "{side}: {error}");
    }
    let error = silent_failure(GenerateOptions { num_inference_steps: Some(0), ..options() });
    assert!(matches!(error, Error::Steps { got: 0 }), "{error}");
    let error = silent_failure(GenerateOptions { guidance_scale: Some(f64::INFINITY), ..options() });
    assert!(matches!(error, Error::Guidance { .. }), "{error}");
}

#[test]
fn stages_and_steps_are_reported_in_order() {
    let seen = RefCell::new(Vec::new());
    let observer = |event: &Event<'_>| {
        let line = match event {
            Event::Stage { name } => (*name).to_owned(),
            Event::Progress { done, total } => format!("{done}/{total}"),
            _ => String::new(),
        };
        let mut seen = seen.borrow_mut();
        if seen.last() != Some(&line) {
            seen.push(line);
        }
        ControlFlow::Continue(())
    };
    pipeline(&demo()).generate(&options(), &observer).expect("a picture");
    let seen = seen.into_inner().join(" ");
    let start = "text encoder 1/6 2/6 3/6 4/6 5/6 6/6 denoise ";
    assert!(seen.starts_with(start), "{seen}");
    // 0/2 stands for the layers of the first step.
    assert!(seen[start.len()..].trim_start_matches("0/2 ").starts_with("1/2 2/2 vae decode"), "{seen}");
}

#[test]
fn an_observer_stops_every_stage_and_layer() {
    let pipeline = pipeline(&demo());
    for stage in ["text encoder", "denoise", "vae decode"] {
        let stop = |event: &Event<'_>| match event {
            Event::Stage { name } if *name == stage => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        assert!(matches!(pipeline.generate(&options(), &stop), Err(Error::Cancelled(_))), "{stage}");
    }
    // Between layers of the second step: one step is done, the next has begun.
    let events = RefCell::new(0);
    let stop = |event: &Event<'_>| match event {
        Event::Progress { done: 1, total: 2 } => {
            *events.borrow_mut() += 1;
            if *events.borrow() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
        Event::Progress { done: 2, total: 2 } => panic!("the step went on"),
        _ => ControlFlow::Continue(()),
    };
    assert!(matches!(pipeline.generate(&options(), &stop), Err(Error::Cancelled(_))));
    assert_eq!(*events.borrow(), 3);
}

#[test]
fn non_finite_latents_name_their_step() {
    let pipeline = pipeline(&demo());
    let prompt = pipeline.encode_prompt("a red circle").expect("embeddings");
    let mut noise = vec![0.5; 128 * 16];
    noise[77] = f32::NAN;
    let noise = Tensor::from_vec(noise, (1, 128, 4, 4), &Device::Cpu).expect("noise");
    let input = DenoiseInput {
        prompt_embeds: &prompt.embeds,
        negative_prompt_embeds: None,
        latents: &noise,
        num_inference_steps: 3,
        guidance_scale: 1.0,
    };
    let error = pipeline.denoise(&input, &Silent, &mut |_| ()).expect_err("NaN");
    assert!(matches!(error, Error::NonFiniteLatents { step: 1, num_inference_steps: 3 }), "{error}");
    let infinite = Tensor::full(f32::INFINITY, (1, 128, 4, 4), &Device::Cpu).expect("latents");
    let error = pipeline.decode(&infinite, &Silent).expect_err("infinity");
    assert!(matches!(error, Error::NonFinite { .. }), "{error}");
}

#[test]
fn latents_of_another_shape_are_refused() {
    let pipeline = pipeline(&demo());
    let prompt = pipeline.encode_prompt("").expect("embeddings");
    for shape in [vec![1, 64, 4, 4], vec![2, 128, 4, 4], vec![1, 128, 16], vec![1, 128, 0, 4]] {
        let latents = Tensor::zeros(shape.clone(), DType::F32, &Device::Cpu).expect("latents");
        let input = DenoiseInput {
            prompt_embeds: &prompt.embeds,
            negative_prompt_embeds: None,
            latents: &latents,
            num_inference_steps: 1,
            guidance_scale: 1.0,
        };
        let error = pipeline.denoise(&input, &Silent, &mut |_| ()).expect_err("another shape");
        assert!(matches!(error, Error::Shape { what: "latents", .. }), "{shape:?}: {error}");
    }
}

#[test]
fn is_finite_sees_every_kind() {
    let check = |values: &[f32]| is_finite(&Tensor::new(values, &Device::Cpu).expect("a tensor")).expect("a check");
    assert!(check(&[0.0, -1.0, f32::MAX, f32::MAX, f32::MIN_POSITIVE]));
    assert!(!check(&[0.0, f32::NAN]));
    assert!(!check(&[f32::INFINITY, f32::NEG_INFINITY]));
}

#[test]
fn parts_that_do_not_fit_each_other_are_refused_by_their_configs() {
    let json = |path: &str| demo().json::<serde_json::Value>(path).expect("json");
    let mut transformer = json("transformer/config.json");
    transformer["joint_attention_dim"] = 12288.into();
    // The weights are gone: the check must not get as far as opening them.
    let error = load_error(&[
        ("transformer/config.json", transformer.to_string().as_bytes()),
        ("transformer/diffusion_pytorch_model.safetensors", b""),
        ("text_encoder/model.safetensors", b""),
    ]);
    assert_eq!(
        error.to_string(),
        "text encoder with hidden size 96 and 3 taps gives 288 channels, the transformer wants joint_attention_dim 12288: \
         use the text encoder with hidden size 4096 (Qwen3-8B)"
    );
    let mut vae = json("vae/config.json");
    vae["latent_channels"] = 16.into();
    let error = load_error(&[("vae/config.json", vae.to_string().as_bytes())]);
    assert!(matches!(error, Error::VaeMismatch { latent_channels: 16, in_channels: 128 }), "{error}");
    // Four taps of a narrower encoder are as wrong as three of a wider one.
    let error = load_error(&[("generation.json", br#"{"text_encoder_out_layers": [1, 2, 4, 6]}"#)]);
    assert!(matches!(error, Error::EncoderMismatch { taps: 4, .. }), "{error}");
    let error = load_error(&[("generation.json", b"")]);
    assert!(matches!(error, Error::Config { field: "text_encoder_out_layers", .. }), "{error}");
    let error = load_error(&[("generation.json", br#"{"text_encoder_out_layers": [2, 4, 6], "height": 100}"#)]);
    assert!(matches!(error, Error::Size { axis: "height", got: 100, .. }), "{error}");
}

#[test]
fn other_folders_are_named() {
    let error = load_error(&[("model_index.json", b"")]);
    assert!(matches!(error, Error::Weights(_)), "{error}");
    assert!(error.to_string().contains("model_index.json"), "{error}");
    let error = load_error(&[("model_index.json", br#"{"_class_name": "FluxPipeline"}"#)]);
    assert!(matches!(error, Error::NotThisModel { .. }) && error.to_string().contains("FluxPipeline"), "{error}");
    let error = load_error(&[("model_index.json", br#"{"_class_name": "Flux2Pipeline"}"#)]);
    assert!(matches!(error, Error::UnsupportedModel { .. }), "{error}");
    for part in ["text_encoder/config.json", "transformer/config.json", "vae/config.json", "tokenizer/tokenizer.json"] {
        let error = load_error(&[(part, b"")]).to_string();
        let (folder, file) = part.split_once('/').expect("a path");
        assert!(error.contains(folder) && error.contains(file), "{part}: {error}");
    }
    let nowhere = ModelFolder::Disk("no/such/folder".into());
    let error = Flux2Pipeline::load(&nowhere, &LoadOptions::default()).expect_err("nothing there").to_string();
    assert!(error.contains("no/such/folder"), "{error}");
}

#[test]
fn a_wrong_component_is_found_before_another_is_read() {
    // The VAE is checked last by name and shape, yet before the damaged values of the text encoder are seen.
    let read = |path: &str| std::fs::read(crate::testing::path("models/flux2-demo").join(path)).expect("a file");
    let mut encoder = read("text_encoder/model.safetensors");
    let half = encoder.len() / 2;
    encoder[half..].fill(0xff);
    let mut vae = demo().json::<serde_json::Value>("vae/config.json").expect("json");
    vae["layers_per_block"] = 2.into();
    let wrong_vae = ("vae/config.json", vae.to_string().into_bytes());
    let error = load_error(&[("text_encoder/model.safetensors", &encoder), (wrong_vae.0, &wrong_vae.1)]).to_string();
    assert!(error.contains("vae"), "{error}");
    let error = load_error(&[("text_encoder/model.safetensors", &encoder)]).to_string();
    assert!(error.contains("text_encoder"), "{error}");
    let cut = &encoder[..half];
    let error = load_error(&[("text_encoder/model.safetensors", cut)]).to_string();
    assert!(error.contains("text_encoder"), "{error}");
}
