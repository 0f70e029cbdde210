//! `tallow inspect` and `tallow doctor`.

use std::{fs, process::Stdio};

use serde_json::Value;

use crate::{
    checkpoint::Checkpoint,
    support::{Place, data, demo_folder, text},
};

const COMPONENTS: [(&str, &str); 3] = [
    ("text_encoder", "text_encoder/model.safetensors"),
    ("transformer", "transformer/diffusion_pytorch_model.safetensors"),
    ("vae", "vae/diffusion_pytorch_model.safetensors"),
];

/// Tensors, elements and bytes of a file, counted here.
fn count(file: &str) -> (u64, u64, u64) {
    let tensors = Checkpoint::open(demo_folder().join(file)).tensors();
    let elements = tensors.iter().map(|(_, _, shape, _)| shape.iter().product::<u64>()).sum();
    (tensors.len() as u64, elements, tensors.iter().map(|(.., bytes)| bytes).sum())
}

fn numbers(json: &Value) -> (u64, u64, u64) {
    let number = |key: &str| json[key].as_u64().or_else(|| json[key].as_array().map(|list| list.len() as u64));
    (number("tensors").expect("tensors"), number("elements").expect("elements"), number("bytes").expect("bytes"))
}

#[test]
fn inspect_counts_the_demonstration_model() {
    let place = Place::new();
    let folder = demo_folder();
    let path = folder.to_str().expect("a UTF-8 path");
    let json = place.succeeds(&["inspect", path, "--json"]);
    let json: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(json["kind"], "diffusers_folder");
    assert_eq!(json["pipeline"], "Flux2KleinPipeline");
    let people = place.succeeds(&["inspect", path]).stdout;

    let mut total = (0, 0, 0);
    let parts = json["parts"].as_array().expect("parts");
    assert_eq!(parts.len(), COMPONENTS.len());
    for (part, (component, file)) in parts.iter().zip(COMPONENTS) {
        let counted = count(file);
        assert_eq!(part["component"], component);
        assert_eq!(numbers(part), counted, "{component}");
        let (tensors, elements, bytes) = counted;
        let words = format!("{tensors} tensors, {elements} elements, {bytes} bytes");
        assert!(people.contains(&words), "no {words:?} in\n{people}");
        total = (total.0 + tensors, total.1 + elements, total.2 + bytes);
    }
    assert_eq!(numbers(&json), total);
    let words = format!("{} tensors, {} elements, {} bytes", total.0, total.1, total.2);
    assert!(people.lines().any(|line| line.starts_with("total ") && line.contains(&words)), "{people}");
}

#[test]
fn inspect_recognises_a_lone_file_and_names_other_things() {
    let place = Place::new();
    let file = demo_folder().join(COMPONENTS[1].1);
    let people = place.succeeds(&["inspect", file.to_str().expect("a UTF-8 path")]).stdout;
    assert!(people.contains("safetensors file, looks like FLUX.2 transformer"), "{people}");
    assert!(people.contains("BF16: ") && people.contains("metadata format"), "{people}");

    let kind = |file: &str| {
        let json = place.succeeds(&["inspect", file, "--json"]).stdout;
        serde_json::from_str::<Value>(&json).expect("JSON")["kind"].clone()
    };
    fs::write(place.path("a.npy"), b"\x89HDF\r\n\x1a\n").expect("a file");
    let people = place.succeeds(&["inspect", "a.npy"]).stdout;
    assert!(people.contains("HDF5"), "{people}");
    assert_eq!(kind("a.npy"), "other");
    // Version 3, no tensors, no metadata.
    fs::write(place.path("a.gguf"), [&b"GGUF\x03\0\0\0"[..], &[0; 16]].concat()).expect("a file");
    assert_eq!(kind("a.gguf"), "gguf");
    fs::write(place.path("a.gguf"), b"GGUF\x03\0\0\0").expect("a file");
    place.fails(&["inspect", "a.gguf"], 1, &["a.gguf"]);
}

#[test]
fn inspect_describes_vaes_and_latents() {
    let place = Place::new();
    let says = |path: &str, words: &[&str]| {
        let people = place.succeeds(&["inspect", path]).stdout;
        for word in words {
            assert!(people.contains(word), "no {word:?} in\n{people}");
        }
    };
    let vae = data("models/wan-vae-demo");
    let words = ["AutoencoderKLWan", "16 channels, 4x8x8", "encoder and decoder", "statistics    known"];
    says(text(&vae), &words);
    let json: Value = serde_json::from_str(&place.succeeds(&["inspect", text(&vae), "--json"]).stdout).expect("JSON");
    assert_eq!(json["wan"]["vae"]["latent_channels"], 16);
    assert_eq!(json["wan"]["vae"]["temporal_factor"], 4);
    let original = data("../crates/wan-vae/tests/data/original.pth");
    says(text(&original), &["PyTorch checkpoint", "original names", "channels, 4x"]);

    let clip = data("models/wan-demo.latent");
    says(text(&clip), &["16 channels, 3 frames of 8x8", "F32"]);
    place.succeeds(&["decode", "-o", "%05d.png", "-q"]);
    place.succeeds(&["encode", "00001.png", "-o", "a.latent", "-q"]);
    says("a.latent", &["16 channels, 1 frame of 8x8", "wan-vae-demo"]);
    crate::latents::write(&place.path("b.latent"), &[1, 48, 1, 1, 1], &[f32::NAN; 48]);
    says("b.latent", &["Wan 2.2 VAE (TI2V-5B only)", "NaN"]);
    let json: Value = serde_json::from_str(&place.succeeds(&["inspect", "b.latent", "--json"]).stdout).expect("JSON");
    assert_eq!(json["wan"]["latents"]["channels"], 48);

    let file = place.copy_vae("part").join("diffusion_pytorch_model.safetensors");
    let mut checkpoint = Checkpoint::open(&file);
    checkpoint.rename("decoder.conv_in.bias", "surprise");
    checkpoint.save();
    says("part", &["problem", "decoder.conv_in.bias"]);
}

#[test]
fn inspect_refuses_what_is_damaged_or_missing() {
    let place = Place::new();
    place.fails(&["inspect", "missing"], 1, &["missing"]);
    place.fails(&["inspect"], 2, &["FILE|DIR"]);
    let file = place.copy_demo("demo").join(COMPONENTS[2].1);
    let bytes = fs::read(&file).expect("a checkpoint");
    fs::write(&file, &bytes[..bytes.len() - 1]).expect("a writable file");
    place.fails(&["inspect", "demo"], 1, &["safetensors"]);
    place.fails(&["inspect", "demo", "--json"], 1, &["safetensors"]);
}

#[test]
fn doctor_describes_the_build_and_the_machine() {
    let place = Place::new();
    let people = place.succeeds(&["doctor"]);
    assert_eq!(people.stderr, "");
    assert!(people.stdout.contains("flux2-demo") && people.stdout.contains("wan-vae-demo"), "{}", people.stdout);
    let hub = people.stdout.lines().find(|line| line.starts_with("hub ")).expect("a line about the hub");
    assert!(hub.contains("no downloads") && hub.contains(text(&place.path("hf"))), "{hub}");
    let json: Value = serde_json::from_str(&place.succeeds(&["doctor", "--json"]).stdout).expect("JSON");
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["target"].as_str().is_some_and(|target| target.contains(std::env::consts::ARCH)), "{json}");
    assert!(json["cores"].as_u64().is_some_and(|cores| cores > 0), "{json}");
    assert_eq!(json["cuda_compiled"], cfg!(feature = "cuda"));
    assert_eq!(json.get("cuda").is_some(), cfg!(feature = "cuda"));
}

#[test]
fn help_and_version_are_data() {
    let place = Place::new();
    for args in [&["--help"][..], &["--version"], &["generate", "--help"], &["decode", "--help"], &["encode", "-h"]] {
        let ended = place.succeeds(args);
        assert!(ended.stdout.contains("tallow") && ended.stderr.is_empty(), "{args:?}: {ended:?}");
    }
}

#[test]
fn the_bare_command_explains_itself() {
    let place = Place::new();
    let ended = place.run(&[]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert!(ended.stderr.contains("Usage: tallow") && ended.stderr.contains("generate"), "{}", ended.stderr);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let place = Place::new();
    let file = demo_folder();
    let mut child = place
        .command(&["inspect", file.to_str().expect("a UTF-8 path"), "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
