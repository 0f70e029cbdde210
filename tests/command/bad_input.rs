//! Bad input: one line, the right exit code, and nothing left behind.

use std::fs;

use crate::{checkpoint::Checkpoint, support::Place};

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";
const VAE: &str = "vae/diffusion_pytorch_model.safetensors";
const TEXT_ENCODER: &str = "text_encoder/model.safetensors";

fn refused(place: &Place, args: &[&str], code: i32, words: &[&str]) {
    place.fails(&[&["generate", "x", "--seed", "1"], args].concat(), code, words);
}

#[test]
fn sizes() {
    let place = Place::new();
    let bad = |args: &[&str], words: &[&str]| refused(&place, &[args, &["-o", "a.png"]].concat(), 2, words);
    bad(&["-W", "1000"], &["width", "1000", "multiple of 16", "992", "1008"]);
    bad(&["-H", "250"], &["height", "240", "256"]);
    bad(&["-H", "0"], &["height", "64"]);
    bad(&["-W", "16"], &["64"]);
    bad(&["-W", "100000"], &["4096"]);
    bad(&["-W", "-64"], &["-64", "--width"]);
    bad(&["-W", "99999999999999999999999"], &["--width"]);
    bad(&["-W", "x"], &["--width"]);
    bad(&["-W", ""], &["--width"]);
}

#[test]
fn other_values() {
    let place = Place::new();
    let bad = |args: &[&str], words: &[&str]| refused(&place, &[args, &["-o", "a.png"]].concat(), 2, words);
    bad(&["--steps", "0"], &["steps", "0"]);
    bad(&["--steps", "1000000"], &["steps"]);
    bad(&["--rng", "mersenne"], &["mersenne", "philox", "torch-cpu"]);
    bad(&["--guidance", "nan"], &["guidance"]);
    bad(&["--guidance", "-1"], &["guidance"]);
    bad(&["--batch", "0"], &["--batch"]);
    bad(&["--threads", "0"], &["--threads"]);
    bad(&["--stepz", "4"], &["--stepz", "--steps"]);
    bad(&["--device", "gpu"], &["gpu", "cuda:N"]);
    bad(&["--max-vram", "8X"], &["--max-vram", "8G"]);
    bad(&["--max-vram", "8G"], &["--max-vram", "--device cuda"]);
    // A device that was asked for is never replaced by another.
    #[cfg(not(feature = "cuda"))]
    bad(&["--device", "cuda:1"], &["--device cuda:1", "feature `cuda`"]);
    for seed in ["abc", "", "-2", "18446744073709551616"] {
        place.fails(&["generate", "x", "-o", "a.png", "--seed", seed], 2, &["--seed", "18446744073709551615"]);
    }
    place.fails(&["generate", "-o", "a.png"], 2, &["PROMPT"]);
    place.fails(&["generate", "x"], 2, &["--output"]);
    place.fails(&["draw"], 2, &["draw"]);
}

#[test]
fn outputs() {
    let place = Place::new();
    refused(&place, &["-o", "a.bmp"], 2, &["bmp", "png"]);
    refused(&place, &["-o", "a"], 2, &["png"]);
    refused(&place, &["-o", "/dev/full"], 2, &["png"]);
    refused(&place, &["-o", "missing/a.png"], 1, &["missing"]);
    fs::create_dir(place.path("folder.png")).expect("a folder");
    refused(&place, &["-o", "folder.png"], 1, &["folder.png"]);
    fs::write(place.path("file"), "text").expect("a file");
    refused(&place, &["-o", "file/a.png"], 1, &["file/a.png"]);
    // The last of a batch is looked at before the first is made.
    fs::create_dir(place.path("b-3.png")).expect("a folder");
    refused(&place, &["-o", "b.png", "--batch", "3"], 1, &["b-3.png"]);
}

#[cfg(target_os = "linux")]
#[test]
fn unwritable_places_of_linux() {
    let place = Place::new();
    // Not even the superuser may create a file here.
    refused(&place, &["-o", "/proc/a.png"], 1, &["/proc"]);

    // A full disk shows only when the picture is written; a link to a device is not replaced by a file.
    std::os::unix::fs::symlink("/dev/full", place.path("full.png")).expect("a link");
    let before = place.files();
    let ended = place.run(&["generate", "x", "-o", "full.png", "--steps", "1", "-W", "64", "-H", "64"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let errors: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(errors.len() == 1 && errors[0].contains("full.png") && errors[0].contains("space"), "{ended:?}");
    assert_eq!(ended.stdout, "");
    assert_eq!(place.files(), before);
    assert_eq!(fs::read_link(place.path("full.png")).expect("still a link").to_str(), Some("/dev/full"));

    let full = fs::File::options().write(true).open("/dev/full").expect("the device");
    let output = place.command(&["doctor"]).stdout(full).output().expect("the command starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: cannot write to standard output: ") && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn folders_that_are_no_model() {
    let place = Place::new();
    let bad = |model: &str, words: &[&str]| refused(&place, &["-o", "a.png", "-m", model], 1, words);
    bad("missing", &["missing"]);
    fs::write(place.path("file"), "text").expect("a file");
    bad("file", &["file"]);
    fs::create_dir(place.path("empty")).expect("a folder");
    bad("empty", &["empty", "model_index.json"]);
    fs::create_dir(place.path("other")).expect("a folder");
    let index = r#"{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}"#;
    fs::write(place.path("other/model_index.json"), index).expect("a file");
    bad("other", &["StableDiffusionPipeline"]);
    fs::write(place.path("other/model_index.json"), "{").expect("a file");
    bad("other", &["model_index.json"]);
    fs::write(place.path("other/model_index.json"), "[1]").expect("a file");
    bad("other", &["model_index.json"]);

    let part = place.copy_demo("part");
    fs::remove_file(part.join(VAE)).expect("a file");
    bad("part", &["vae"]);
    fs::remove_dir_all(part.join("vae")).expect("a folder");
    bad("part", &["vae"]);
    let swapped = place.copy_demo("swapped");
    fs::copy(swapped.join(VAE), swapped.join(TRANSFORMER)).expect("a copy");
    bad("swapped", &["transformer"]);
    let broken = place.copy_demo("broken");
    fs::write(broken.join("tokenizer/tokenizer.json"), "{}").expect("a file");
    bad("broken", &["tokenizer.json"]);
}

#[test]
fn truncated_weights() {
    let place = Place::new();
    for (model, component) in [("a", TRANSFORMER), ("b", VAE), ("c", TEXT_ENCODER)] {
        let file = place.copy_demo(model).join(component);
        let bytes = fs::read(&file).expect("a checkpoint");
        for length in [bytes.len() - 100, bytes.len() / 2, 1000, 8, 3, 0] {
            fs::write(&file, &bytes[..length]).expect("a writable file");
            refused(&place, &["-o", "a.png", "-m", model], 1, &["safetensors"]);
        }
    }
}

#[test]
fn weights_of_another_shape_or_name() {
    let place = Place::new();
    for (model, component, tensor) in
        [("a", TRANSFORMER, "x_embedder.weight"), ("b", TEXT_ENCODER, "layers.0.mlp.gate_proj.weight")]
    {
        let mut checkpoint = Checkpoint::open(place.copy_demo(model).join(component));
        checkpoint.transpose_shape(tensor);
        checkpoint.save();
        refused(&place, &["-o", "a.png", "-m", model], 1, &[tensor]);
    }
    for (model, component, tensor) in [("c", VAE, "decoder.conv_in.bias"), ("d", TRANSFORMER, "proj_out.weight")] {
        let mut checkpoint = Checkpoint::open(place.copy_demo(model).join(component));
        checkpoint.rename(tensor, "surprise");
        checkpoint.save();
        refused(&place, &["-o", "a.png", "-m", model], 1, &[tensor, "surprise"]);
    }
}

#[test]
fn weights_that_are_not_finite() {
    let place = Place::new();
    for (model, component, tensor, value) in [
        ("a", TRANSFORMER, "proj_out.weight", f32::NAN),
        ("b", VAE, "decoder.conv_in.weight", f32::INFINITY),
        ("c", TEXT_ENCODER, "layers.0.input_layernorm.weight", f32::NAN),
    ] {
        let mut checkpoint = Checkpoint::open(place.copy_demo(model).join(component));
        checkpoint.fill(tensor, value, 1);
        checkpoint.save();
        let ended = place.run(&["generate", "x", "-o", "a.png", "-m", model]);
        assert_eq!(ended.code, Some(1), "{tensor}: {ended:?}");
        let errors: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{tensor}: {}", ended.stderr);
        assert!(!place.path("a.png").exists());
    }
}

#[test]
fn latents_that_overflow() {
    let place = Place::new();
    let mut checkpoint = Checkpoint::open(place.copy_demo("a").join(TRANSFORMER));
    // Finite, but the sums are not.
    checkpoint.fill("proj_out.weight", 3e38, usize::MAX);
    checkpoint.save();
    let before = place.files();
    let ended = place.run(&["generate", "x", "-o", "a.png", "-m", "a"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.lines().any(|line| line.starts_with("error: ") && line.contains("latents")), "{ended:?}");
    assert_eq!(place.files(), before);
}
