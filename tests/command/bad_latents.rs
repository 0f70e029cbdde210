//! `tallow decode` on bad input: one line, the right exit code, and nothing left behind.

use std::{collections::BTreeMap, fs, path::PathBuf};

use weights::{StoredDType, write::header_only};

use crate::{
    checkpoint::Checkpoint,
    latents,
    support::{Place, data, text},
};

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

fn vae() -> PathBuf {
    data("models/wan-vae-demo")
}

/// `[1, z, n, h, w]` of one value.
fn flat(place: &Place, name: &str, shape: [usize; 5], value: f32) {
    latents::write(&place.path(name), &shape, &vec![value; shape.iter().product()]);
}

/// Names and shapes of a published VAE; the elements are holes in the file.
fn published(place: &Place, name: &str, table: &str) {
    let table = fs::read_to_string(data(&format!("models/names/{table}.tsv"))).expect("a table");
    let lines = table.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('\t'));
    let tensors: Vec<(&str, Vec<usize>)> = lines
        .map(|(name, shape)| (name, shape.split(',').map(|extent| extent.parse().expect("an extent")).collect()))
        .collect();
    let tensors = tensors.iter().map(|(name, shape)| (*name, StoredDType::BF16, shape.as_slice()));
    header_only(place.path(name), tensors, &BTreeMap::new()).expect("a writable folder");
}

fn refused(place: &Place, latents: &str, words: &[&str]) {
    place.fails(&["decode", latents, "--vae", text(&vae()), "-o", "a.y4m"], 1, words);
}

#[test]
fn latents_that_are_not_finite_are_blamed_before_the_vae() {
    let place = Place::new();
    let (shape, values) = latents::read(&data("models/wan-demo.latent"), "latent_tensor");
    let plane = 64;
    for (file, value, word) in [("a.latent", f32::NAN, "NaN"), ("b.latent", f32::INFINITY, "inf")] {
        let mut values = values.clone();
        // Channel 5, frame 2 of 3.
        values[(5 * 3 + 2) * plane + 7] = value;
        values[(15 * 3 + 1) * plane] = f32::NAN;
        latents::write(&place.path(file), &shape, &values);
        refused(&place, file, &["the latents hold", word, "channel 5, frame 2", "the sampler", "not the vae"]);
        // Not even the head of a video goes out.
        place.fails(&["decode", file, "--vae", text(&vae()), "-o", "-"], 1, &["the latents hold"]);
    }
}

#[test]
fn latents_of_another_vae_name_the_one_that_fits() {
    let place = Place::new();
    flat(&place, "wan22.latent", [1, 48, 1, 4, 4], 0.1);
    let words = ["48 channels", "takes 16", "48-channel latents need the Wan 2.2 VAE (TI2V-5B only)"];
    refused(&place, "wan22.latent", &words);
    published(&place, "wan22.safetensors", "wan22-vae");
    let clip = data("models/wan-demo.latent");
    let words = ["16 channels", "takes 48", "16-channel latents need the Wan 2.1 VAE (also for Wan 2.2 14B)"];
    place.fails(&["decode", text(&clip), "--vae", "wan22.safetensors", "-o", "a.y4m"], 1, &words);

    // Any other VAE has 16 channels as well; the built-in one would make a picture of noise without a word.
    place.fails(&["decode", text(&clip), "-o", "a.y4m"], 2, &["--vae is missing"]);
    place.fails(&["decode", "--vae", text(&vae()), "-o", "a.y4m"], 2, &["--vae needs LATENTS"]);
}

#[test]
fn files_that_hold_no_latents() {
    let place = Place::new();
    refused(&place, "missing.latent", &["missing.latent"]);
    fs::write(place.path("text"), "text").expect("a file");
    refused(&place, "text", &["text"]);
    fs::create_dir(place.path("folder")).expect("a folder");
    refused(&place, "folder", &["folder"]);
    for (name, shape) in [("zero", [1, 16, 0, 8, 8]), ("nothing", [1, 16, 1, 8, 0]), ("batch", [2, 16, 1, 2, 2])] {
        flat(&place, name, shape, 0.0);
        let word = if name == "batch" { "a batch of 2" } else { "0" };
        refused(&place, name, &[name, word]);
    }
    latents::write(&place.path("flat"), &[16, 64], &[0.0; 16 * 64]);
    refused(&place, "flat", &["flat", "[16, 64]", "[z, n, h, w]"]);
    latents::write_bytes(&place.path("integers"), &[1, 16, 1, 1, 1], "I32", &[0; 64]);
    refused(&place, "integers", &["integers", "I32", "float"]);
    let bytes = fs::read(data("models/wan-demo.latent")).expect("the clip");
    for length in [bytes.len() - 1, 1000, 100, 8, 0] {
        fs::write(place.path("cut"), &bytes[..length]).expect("a file");
        refused(&place, "cut", &["cut"]);
    }
    // A checkpoint has many tensors, and none is named like latents.
    let weights = vae().join(WEIGHTS);
    refused(&place, text(&weights), &["named like latents"]);
}

#[test]
fn files_that_are_no_vae() {
    let place = Place::new();
    let clip = data("models/wan-demo.latent");
    let bad = |vae: &str, words: &[&str]| {
        place.fails(&["decode", text(&clip), "--vae", vae, "-o", "a.y4m"], 1, words);
    };
    bad("missing.pth", &["missing.pth"]);
    fs::create_dir(place.path("folder")).expect("a folder");
    bad("folder", &["folder"]);
    fs::write(place.path("text.pth"), "text").expect("a file");
    bad("text.pth", &["text.pth"]);
    bad(text(&clip), &["wan-demo.latent", "no vae of the Wan family"]);
    let other = data(&format!("models/flux2-demo/vae/{WEIGHTS}"));
    bad(text(&other), &["no vae of the Wan family", "FLUX.2 VAE"]);
    let foreign = |name: &str| data(&format!("../crates/weights/tests/data/{name}"));
    bad(text(&foreign("lora.pth")), &["lora.pth", "LoRA"]);
    bad(text(&foreign("command.pth")), &["command.pth", "system"]);
    bad(text(&foreign("legacy.pth")), &["legacy.pth"]);
    published(&place, "wan21.safetensors", "wan21-vae");
    // A file of zeros decodes to a flat field.
    bad("wan21.safetensors", &["wan21.safetensors", "zero throughout"]);
}

#[test]
fn damaged_vaes() {
    let place = Place::new();
    let clip = data("models/wan-demo.latent");
    let file = place.copy_vae("renamed").join(WEIGHTS);
    let mut checkpoint = Checkpoint::open(&file);
    checkpoint.rename("decoder.up_blocks.1.resnets.0.conv1.bias", "surprise");
    checkpoint.save();
    let words = ["decoder.up_blocks.1.resnets.0.conv1.bias"];
    place.fails(&["decode", text(&clip), "--vae", "renamed", "-o", "a.y4m"], 1, &words);
    let bytes = fs::read(&file).expect("a checkpoint");
    fs::write(&file, &bytes[..bytes.len() / 2]).expect("a writable file");
    place.fails(&["decode", text(&clip), "--vae", "renamed", "-o", "a.y4m"], 1, &["safetensors"]);

    let file = place.copy_vae("nan").join(WEIGHTS);
    let mut checkpoint = Checkpoint::open(&file);
    checkpoint.fill("decoder.conv_in.weight", f32::NAN, 1);
    checkpoint.save();
    // Finite, but the sums are not.
    let file = place.copy_vae("large").join(WEIGHTS);
    let mut checkpoint = Checkpoint::open(&file);
    checkpoint.fill("decoder.conv_out.weight", 3e38, usize::MAX);
    checkpoint.save();
    let before = place.files();
    for (vae, words) in [("nan", ["decoder.conv_in.weight", "NaN"]), ("large", ["frames", "non-finite"])] {
        let ended = place.run(&["decode", text(&clip), "--vae", vae, "-o", "a.y4m"]);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
        let errors: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{}", ended.stderr);
        assert!(words.iter().all(|word| errors[0].contains(word)), "{}", errors[0]);
        assert_eq!(place.files(), before);
    }
}

#[test]
fn outputs() {
    let place = Place::new();
    let usage = |output: &str, words: &[&str]| place.fails(&["decode", "-o", output], 2, words);
    usage("a.avi", &["avi", ".mp4", ".y4m", ".gif"]);
    usage("a", &[".mp4"]);
    usage("%d-%d.png", &["one place for the number"]);
    let failed = |output: &str, words: &[&str]| place.fails(&["decode", "-o", output], 1, words);
    failed("a.png", &["a.png", "9 frames", "frame-%05d.png"]);
    failed("none/a.y4m", &["none"]);
    failed("none/%d.png", &["none"]);
    fs::create_dir(place.path("folder.y4m")).expect("a folder");
    failed("folder.y4m", &["folder.y4m"]);
    fs::write(place.path("file"), "text").expect("a file");
    failed("file/a.y4m", &["file/a.y4m"]);
    place.fails(&["decode", "-o", "a.gif", "--fps", "60"], 1, &["GIF", "60", "50"]);
    #[cfg(not(feature = "mp4"))]
    failed("a.mp4", &["MP4", "feature `mp4`"]);
    #[cfg(feature = "mp4")]
    {
        flat(&place, "small.latent", [1, 16, 1, 1, 1], 0.1);
        let vae = vae();
        let line = ["decode", "small.latent", "--vae", text(&vae), "-o", "a.mp4"];
        place.fails(&line, 1, &["8 x 8", "MP4", "at least 16"]);
    }
}

#[test]
fn values() {
    let place = Place::new();
    let usage = |args: &[&str], words: &[&str]| {
        place.fails(&[&["decode", "-o", "a.y4m"], args].concat(), 2, words);
    };
    usage(&["--fps", "0"], &["--fps", "0.01 to 1000"]);
    usage(&["--fps", "-16"], &["--fps"]);
    usage(&["--fps", "fast"], &["fast"]);
    usage(&["--dtype", "f8"], &["f8", "bf16"]);
    usage(&["--max-memory", "much"], &["much", "8G"]);
    usage(&["--max-memory", "0"], &["--max-memory"]);
    usage(&["--latents", "cooked"], &["cooked", "normalized"]);
    usage(&["--tiling", "small"], &["small", "bands:N"]);
    usage(&["--device", "gpu"], &["gpu", "cuda:N"]);
    usage(&["--vea", "x"], &["--vea"]);
    #[cfg(not(feature = "cuda"))]
    usage(&["--device", "cuda:1"], &["--device cuda:1", "feature `cuda`"]);
    let failed = |args: &[&str], words: &[&str]| {
        place.fails(&[&["decode", "-o", "a.y4m"], args].concat(), 1, words);
    };
    failed(&["--tiling", "bands:0"], &["0 bands", "1 to 8"]);
    failed(&["--tiling", "bands:9"], &["9 bands", "1 to 8"]);
    failed(&["--tiling", "blended:64:0"], &["tiles of 64"]);
    failed(&["--tiling", "blended:60:30"], &["multiples of 8"]);
    failed(&["--max-memory", "1M"], &["needs at least", "MiB", "the limit is 1 MiB"]);
}
