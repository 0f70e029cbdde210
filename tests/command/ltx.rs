//! `tallow decode`, `encode` and `inspect` with VAEs of LTX.

use std::{fs, path::PathBuf};

use image::RgbImage;
use serde_json::Value;
use weights::{Safetensors, TensorSource};

use crate::{
    latents,
    support::{Place, data, text},
};

/// Latents, what both decoders of the reference make of them, and what its encoder makes of the result.
const GOLDEN: &str = "goldens/ltx-demo.safetensors";
/// Seed of the golden's noise, which torch drew on a CPU.
const SEED: [&str; 4] = ["--seed", "7", "--rng", "torch-cpu"];
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

fn model() -> PathBuf {
    data("models/ltx-demo")
}

/// Pictures of the golden.
fn golden(name: &str) -> Vec<RgbImage> {
    let file = Safetensors::open(data(GOLDEN)).expect("the golden");
    let &[_, height, width, 3] = file.info(name).expect(name).shape.as_slice() else { panic!("{name}") };
    let frames = file.bytes(name).expect(name).chunks_exact(height * width * 3);
    frames.map(|frame| RgbImage::from_raw(width as u32, height as u32, frame.to_vec()).expect(name)).collect()
}

/// The golden's latents as a file.
fn write_latents(place: &Place, name: &str) {
    let (shape, values) = latents::read(&data(GOLDEN), "latents");
    latents::write(&place.path(name), &shape, &values);
}

/// Largest difference, and the share of values that differ.
fn difference(found: &[RgbImage], expected: &[RgbImage]) -> (u8, f64) {
    assert_eq!(found.len(), expected.len(), "numbers of frames");
    let mut values = Vec::new();
    for (a, b) in found.iter().zip(expected) {
        assert_eq!(a.dimensions(), b.dimensions());
        values.extend(a.as_raw().iter().zip(b.as_raw()).map(|(a, b)| a.abs_diff(*b)));
    }
    let differing = values.iter().filter(|&&value| value > 0).count() as f64 / values.len() as f64;
    (values.into_iter().max().expect("pixels"), differing)
}

#[test]
fn frames_of_both_decoders_are_those_of_the_reference() {
    let model = model();
    for decoder in ["conv", "diffusion"] {
        let place = Place::new();
        write_latents(&place, "a.latent");
        let line = ["decode", "a.latent", "--vae", text(&model), "--decoder", decoder, "-o", "%05d.png"];
        let noise = if decoder == "conv" { &[][..] } else { &SEED };
        let ended = place.succeeds(&[&line[..], noise].concat());
        assert!(ended.stderr.contains("a.latent: 9 frames of 96x96 at 24 a second"), "{}", ended.stderr);
        assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
        let expected = golden(decoder);
        // Values at the middle between two levels may fall to either side.
        let (largest, differing) = difference(&place.series(expected.len()), &expected);
        assert!(largest <= 1 && differing < 0.01, "{decoder}: {largest} levels, {differing}");
    }
}

#[test]
fn tiles_are_those_that_were_asked_for() {
    let place = Place::new();
    write_latents(&place, "a.latent");
    let model = model();
    for decoder in ["conv", "diffusion"] {
        let decode = |output: &str, tiling: &str| {
            let line = ["decode", "a.latent", "--vae", text(&model), "--decoder", decoder, "-o", output, "-q"];
            place.succeeds(&[&line[..], &["--tiling", tiling]].concat());
            place.read(output)
        };
        let whole = decode("a.y4m", "whole");
        assert!(whole == decode("b.y4m", "auto"), "{decoder}");
        assert!(whole == decode("b.y4m", "blended:96:96"), "{decoder}: one tile is the clip");
        assert!(whole != decode("b.y4m", "blended:64:32"), "{decoder}: tiles leave seams");
    }
}

#[test]
fn noise_is_that_of_the_seed_and_recorded() {
    let place = Place::new();
    write_latents(&place, "a.latent");
    let decoder = model().join("diffusion_decoder");
    let decode = |output: &str, more: &[&str]| {
        place.succeeds(&[&["decode", "a.latent", "--vae", text(&decoder), "-o", output], more].concat())
    };
    decode("a.y4m", &SEED);
    decode("b.y4m", &[&SEED[..], &["--threads", "1", "--decoder", "diffusion"]].concat());
    decode("c.y4m", &["--seed", "8", "--rng", "torch-cpu"]);
    decode("d.y4m", &["--seed", "7"]);
    decode("e.y4m", &[]);
    decode("f.y4m", &["--seed", "0", "--rng", "philox"]);
    let [a, b, c, d, e, f] = ["a", "b", "c", "d", "e", "f"].map(|name| place.read(&format!("{name}.y4m")));
    assert!(a == b && e == f, "the same request");
    assert!(a != c && a != d && d != e, "other noise");

    let (shape, values) = latents::read(&place.path("a.latent"), "latent_tensor");
    let &[1, channels, count, h, w] = shape.as_slice() else { panic!("{shape:?}") };
    let first = values.chunks_exact(count * h * w).flat_map(|channel| channel[..h * w].to_vec()).collect::<Vec<_>>();
    latents::write(&place.path("one.latent"), &[1, channels, 1, h, w], &first);
    place.succeeds(&["decode", "one.latent", "--vae", text(&decoder), "-o", "one.png", "--seed", "3"]);
    let texts = place.texts("one.png");
    let recorded = texts.iter().find(|(key, _)| key == "tallow").expect("a text");
    let recorded: Value = serde_json::from_str(&recorded.1).expect("JSON");
    assert_eq!((&recorded["seed"], &recorded["rng"]), (&3.into(), &"philox".into()));
    assert_eq!(recorded["vae"], "LTX diffusion decoder");
    assert_eq!(recorded["execution"]["device"], "cpu");
}

#[test]
fn the_decoder_that_is_there_is_taken() {
    let place = Place::new();
    write_latents(&place, "a.latent");
    let said = |vae: &str, more: &[&str]| {
        place.succeeds(&[&["decode", "a.latent", "--vae", vae, "-o", "a.y4m"], more].concat()).stderr
    };
    let model = model();
    let (vae, decoder) = (model.join("vae"), model.join("diffusion_decoder"));
    assert!(said(text(&model), &[]).contains("LTX diffusion decoder, f32"));
    assert!(said(text(&decoder), &[]).contains("LTX diffusion decoder"));
    assert!(said(text(&vae), &[]).contains("LTX conv VAE, f32"));
    let file = vae.join(WEIGHTS);
    assert!(said(text(&file), &["--decoder", "conv"]).contains("LTX conv VAE"));
    let ended = said(text(&vae), &["--seed", "1"]);
    assert!(ended.contains("warning: --seed and --rng have no effect"), "{ended}");
    let bad = |vae: &str, decoder: &str, words: &[&str]| {
        place.fails(&["decode", "a.latent", "--vae", vae, "--decoder", decoder, "-o", "b.y4m"], 1, words);
    };
    bad(text(&vae), "diffusion", &["--decoder diffusion", "no diffusion decoder"]);
    bad(text(&decoder), "conv", &["--decoder conv", "no convolutional decoder"]);
    let wan = data("models/wan-vae-demo");
    let clip = data("models/wan-demo.latent");
    let line = ["decode", text(&clip), "--vae", text(&wan), "--decoder", "diffusion", "-o", "b.y4m"];
    place.fails(&line, 2, &["--decoder diffusion", "only LTX VAEs"]);
}

#[test]
fn latents_are_those_of_the_reference_and_decode_again() {
    let place = Place::new();
    fs::create_dir(place.path("in")).expect("a folder");
    for (number, frame) in (1..).zip(golden("conv")) {
        frame.save(place.path(&format!("in/{number:05}.png"))).expect("a picture");
    }
    let model = model();
    let ended = place.succeeds(&["encode", "in", "--vae", text(&model), "-o", "a.latent"]);
    assert!(ended.stderr.contains("in: 9 frames of 96x96 with the LTX conv VAE"), "{}", ended.stderr);
    assert!(ended.stderr.contains("2 latent frames of 9 frames"), "{}", ended.stderr);
    let (shape, found) = latents::read(&place.path("a.latent"), "latent_tensor");
    let (expected_shape, expected) = latents::read(&data(GOLDEN), "encoded");
    assert_eq!(shape, expected_shape);
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied());
    assert!(error < 1e-4, "{error:e}");
    let metadata = latents::metadata(&place.path("a.latent"));
    assert_eq!((&metadata["vae"], &metadata["latents"]), (&"LTX conv VAE".into(), &"normalized".into()));

    place.succeeds(&["decode", "a.latent", "--vae", text(&model), "--decoder", "conv", "-o", "a.y4m"]);
    // The kind in the file counts unless another one is asked for.
    let line = ["decode", "a.latent", "--vae", text(&model), "--decoder", "conv", "-o", "b.y4m"];
    place.succeeds(&[&line[..], &["--latents", "normalized"]].concat());
    assert!(place.read("a.y4m") == place.read("b.y4m"));
    place.succeeds(&[&line[..], &["--latents", "raw"]].concat());
    assert!(place.read("a.y4m") != place.read("b.y4m"));
}

#[test]
fn lengths_and_sides_that_no_latents_stand_for() {
    let place = Place::new();
    let model = model();
    let video =
        |count: usize, side: usize| fs::write(place.path("in.y4m"), crate::encode::y4m(count, side)).expect("a file");
    let encode =
        |more: &[&'static str]| [&["encode", "in.y4m", "--vae", text(&model), "-o", "a.latent"], more].concat();
    video(10, 32);
    place.fails(&encode(&[]), 1, &["10 frames", "a multiple of 8", "9 or 17", "--frames error"]);
    for (policy, words) in [("trim", "1 frame at the end left out"), ("pad", "the last frame is repeated 7 times")] {
        let ended = place.succeeds(&encode(&["--frames", policy]));
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
        let (shape, _) = latents::read(&place.path("a.latent"), "latent_tensor");
        assert_eq!(shape[2..], [if policy == "trim" { 2 } else { 3 }, 1, 1]);
        fs::remove_file(place.path("a.latent")).expect("a file");
    }
    video(9, 48);
    place.fails(&encode(&[]), 1, &["48", "a multiple of 32", "32 or 64"]);
    video(9, 32);
    let decoder = model.join("diffusion_decoder");
    place.fails(&["encode", "in.y4m", "--vae", text(&decoder), "-o", "a.latent"], 1, &["no encoder"]);
    place.fails(&encode(&["--tiling", "bands:2"]), 2, &["--tiling", "auto, whole or blended"]);
    place.fails(
        &encode(&["--tiling", "blended:64:48"]),
        1,
        &["--tiling: tiles of 64 pixels every 48", "multiples of 32"],
    );
}

#[test]
fn latents_that_do_not_fit() {
    let place = Place::new();
    let model = model();
    let refused = |latents: &str, words: &[&str]| {
        for decoder in ["conv", "diffusion"] {
            let line = ["decode", latents, "--vae", text(&model), "--decoder", decoder, "-o", "a.y4m"];
            place.fails(&line, 1, words);
        }
    };
    let wan = data("models/wan-demo.latent");
    refused(text(&wan), &["16 channels", "takes 32", "need the Wan 2.1 VAE"]);
    let (shape, mut values) = latents::read(&data(GOLDEN), "latents");
    values[5] = f32::NAN;
    latents::write(&place.path("nan.latent"), &shape, &values);
    refused("nan.latent", &["the latents hold NaN", "channel 0, frame 0"]);
    latents::write(&place.path("empty.latent"), &[1, 32, 0, 2, 2], &[]);
    refused("empty.latent", &["empty.latent", "0"]);
    latents::write(&place.path("batch.latent"), &[2, 32, 1, 1, 1], &[0.0; 64]);
    refused("batch.latent", &["a batch of 2"]);
    write_latents(&place, "a.latent");
    let wan_vae = data("models/wan-vae-demo");
    place.fails(&["decode", "a.latent", "--vae", text(&wan_vae), "-o", "a.y4m"], 1, &["32 channels", "takes 16"]);
    let decode = |more: &[&'static str]| [&["decode", "a.latent", "--vae", text(&model), "-o", "a.y4m"], more].concat();
    place.fails(&decode(&["--tiling", "bands:2"]), 2, &["--tiling", "Wan"]);
    for (decoder, multiple) in [("conv", "multiples of 32"), ("diffusion", "multiples of 8")] {
        for tiling in ["blended:64:60", "blended:60:60", "blended:0:0", "blended:64:96"] {
            let line = ["--tiling", tiling, "--decoder", decoder];
            place.fails(&[&decode(&[])[..], &line].concat(), 1, &["--tiling: tiles of", multiple]);
        }
    }
    for decoder in ["conv", "diffusion"] {
        // One line, before the network is loaded.
        let limit = ["--max-memory", "1M", "--decoder", decoder];
        place.fails(&[&decode(&[])[..], &limit].concat(), 1, &["decoding needs at least", "the limit is 1 MiB"]);
    }
    place.fails(&decode(&["--decoder", "other"]), 2, &["other", "diffusion"]);
    place.fails(&decode(&["--seed", "-1"]), 2, &["--seed"]);
}

/// A part of the model whose files a test may damage.
fn copy(place: &Place, part: &str, name: &str) -> PathBuf {
    let to = place.path(name);
    fs::create_dir(&to).expect("a folder");
    for file in ["config.json", WEIGHTS] {
        fs::write(to.join(file), fs::read(model().join(part).join(file)).expect("a file")).expect("a file");
    }
    to
}

#[test]
fn configurations_that_cannot_be_used() {
    let place = Place::new();
    write_latents(&place, "a.latent");
    let folder = copy(&place, "diffusion_decoder", "decoder");
    let path = folder.join("config.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    let refused = |text: &str, words: &[&str]| {
        fs::write(&path, text).expect("a file");
        place.fails(&["decode", "a.latent", "--vae", "decoder", "-o", "a.y4m"], 1, words);
    };
    for (key, value, words) in [
        ("decoder_stage5_kernel", serde_json::json!([4, 7, 7]), ["stage_kernels", "odd"]),
        ("decoder_stage5_kernel", serde_json::json!([0, 7, 7]), ["stage_kernels", "odd"]),
        ("decoder_head_dim", serde_json::json!(12), ["head_dim", "multiple of 8"]),
        ("decoder_model_output_type", serde_json::json!("eps"), ["eps", "x0"]),
        ("decoder_timestep_scale_multiplier", Value::Null, ["config", "null"]),
        ("_class_name", serde_json::json!("AutoencoderKLLTX2Video"), ["_class_name", "LTX2VideoDiffusionDecoderModel"]),
        ("decoder_stage_depths", serde_json::json!([1, 1, 1, 1, 3]), ["missing", "diff_blocks.2"]),
    ] {
        let mut config = good.clone();
        config[key] = value;
        refused(&config.to_string(), &words);
    }
    refused("{", &["config.json"]);
    fs::remove_file(&path).expect("a file");
    let words = ["carries no `config`", "put its config.json beside it"];
    for vae in ["decoder", &format!("decoder/{WEIGHTS}")] {
        place.fails(&["decode", "a.latent", "--vae", vae, "-o", "a.y4m"], 1, &words);
    }
    fs::write(&path, good.to_string()).expect("a file");
    place.succeeds(&["decode", "a.latent", "--vae", &format!("decoder/{WEIGHTS}"), "-o", "a.y4m"]);
}

#[test]
fn inspect_names_the_networks() {
    let place = Place::new();
    let model = model();
    let people = place.succeeds(&["inspect", text(&model)]).stdout;
    for words in [
        "LTX2Pipeline",
        "LTX video VAE",
        "LTX conv VAE, encoder and decoder",
        "LTX diffusion decoder, 1 step",
        "32 channels, 8x32x32 (frames x height x width)",
    ] {
        assert!(people.contains(words), "no {words:?} in\n{people}");
    }
    let json = place.succeeds(&["inspect", text(&model.join("diffusion_decoder")), "--json"]).stdout;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["ltx"]["diffusion_decoder"]["pixels_per_latent"], serde_json::json!([8, 32, 32]));
    assert!(json["ltx"].get("vae").is_none() && json.get("wan").is_none(), "{json}");
    latents::write(&place.path("a.latent"), &[1, 128, 1, 1, 1], &[0.5; 128]);
    let people = place.succeeds(&["inspect", "a.latent"]).stdout;
    assert!(people.contains("VAE of LTX-2, 2.3 or 2.5, by the channels"), "{people}");
    let broken = copy(&place, "vae", "broken").join("config.json");
    fs::write(&broken, r#"{"_class_name": "AutoencoderKLLTX2Video"}"#).expect("a file");
    let people = place.succeeds(&["inspect", "broken"]).stdout;
    assert!(people.contains("problem") && people.contains("latent_channels"), "{people}");
}
