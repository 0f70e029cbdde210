//! `tallow generate` on good input.

use std::{io::Write, process::Stdio};

use serde_json::Value;

use crate::support::Place;

const PROMPT: &str = "a red circle on a blue background";
/// The quickest run whose pixels still depend on everything.
const QUICK: [&str; 6] = ["--steps", "1", "-W", "64", "-H", "64"];

fn quick<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["generate"], args, &QUICK].concat()
}

#[test]
fn the_first_command_of_the_readme_makes_the_picture() {
    let place = Place::new();
    let ended = place.succeeds(&["generate", PROMPT, "-o", "circle.png", "--seed", "1"]);
    assert_eq!(ended.stdout, "circle.png\n");
    assert!(
        ended.stderr.contains("demonstration model") && ended.stderr.contains("coloured shapes"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("seed 1, steps 4,"), "{}", ended.stderr);
    // Progress is for terminals only.
    assert!(!ended.stderr.contains(['\r', '\x1b']), "{:?}", ended.stderr);
    assert_eq!(place.files().len(), 1);

    let picture = place.picture("circle.png");
    assert_eq!(picture.dimensions(), (128, 128));
    let [red, _, blue] = picture.get_pixel(2, 2).0;
    assert!(blue > 150 && red < 100, "the background is {:?}", picture.get_pixel(2, 2));
    let reddish = picture.pixels().filter(|pixel| pixel.0[0] > 150 && pixel.0[2] < 100).count();
    assert!(reddish > 200, "{reddish} red pixels");
}

#[test]
fn a_png_file_says_how_it_was_made() {
    let place = Place::new();
    place.succeeds(&quick(&["日本語 🎨", "-o", "a.png", "--seed", "7"]));
    let texts = place.texts("a.png");
    let find = |keyword: &str| &texts.iter().find(|(found, _)| found == keyword).expect(keyword).1;
    let parameters = find("parameters");
    assert!(parameters.starts_with("日本語 🎨\nSteps: 1, Sampler: Euler, "), "{parameters}");
    assert!(parameters.contains("Seed: 7, Size: 64x64, Model: flux2-demo"), "{parameters}");

    let json: Value = serde_json::from_str(find("tallow")).expect("JSON");
    assert_eq!(json["prompt"], "日本語 🎨");
    assert_eq!(json["seed"], 7);
    assert_eq!(json["steps"], 1);
    assert_eq!(json["width"], 64);
    assert_eq!(json["height"], 64);
    assert_eq!(json["model"], "flux2-demo");
    assert_eq!(json["rng"], "philox");
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["guidance"].is_number());
    // Backends at their default are not named.
    let execution = json["execution"].as_object().expect("an identity");
    assert_eq!(execution.keys().collect::<Vec<_>>(), ["device", "dtype", "version", "weights"]);
    assert_eq!((&execution["device"], &execution["dtype"]), (&"cpu".into(), &"f32".into()));
    assert!(execution["weights"].as_str().is_some_and(|hash| hash.starts_with("sample-sha256:")), "{execution:?}");

    place.succeeds(&quick(&["日本語 🎨", "-o", "b.png", "--seed", "7", "--no-metadata"]));
    assert!(place.texts("b.png").is_empty());
    assert_eq!(place.picture("a.png"), place.picture("b.png"));
}

/// One of a model's weights changes its identity, the folder's name does not.
#[test]
fn the_identity_is_that_of_the_weights_and_is_printed_if_asked_for() {
    let place = Place::new();
    let identity = |model: &[&str]| {
        let ended = place.succeeds(&quick(&[&[PROMPT, "-o", "a.png", "-s", "1", "-v"], model].concat()));
        let said = ended.stderr.lines().find_map(|line| line.strip_prefix("execution: ")).expect("the identity");
        let texts = place.texts("a.png");
        let text = &texts.iter().find(|(keyword, _)| keyword == "tallow").expect("tallow").1;
        let json: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(json["execution"], serde_json::from_str::<Value>(said).expect("JSON"));
        said.to_owned()
    };
    let built_in = identity(&[]);
    let weights = place.copy_demo("copy").join("vae/diffusion_pytorch_model.safetensors");
    assert_eq!(identity(&["--model", "copy"]), built_in);
    let mut bytes = std::fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("a byte") ^= 1;
    std::fs::write(&weights, bytes).expect("weights");
    assert_ne!(identity(&["--model", "copy"]), built_in);
    let quiet = place.succeeds(&quick(&[PROMPT, "-o", "b.png", "-s", "1"]));
    assert!(!quiet.stderr.contains("execution"), "{}", quiet.stderr);
}

#[test]
fn backends_that_the_environment_asks_for_must_be_known() {
    let place = Place::new();
    for (variable, legal) in [("MOLD_CONV", "cudnn, im2col"), ("MOLD_ATTENTION", "fused, math")] {
        let mut command = place.command(&quick(&[PROMPT, "-o", "a.png"]));
        let ended = command.env(variable, "fast").output().expect("the command starts");
        assert_eq!(ended.status.code(), Some(2));
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.contains(variable) && said.contains(legal) && said.lines().count() == 1, "{said}");
    }
    let mut command = place.command(&quick(&[PROMPT, "-o", "a.png"]));
    let ended = command.env("MOLD_CONV", "cudnn").env("MOLD_ATTENTION", "fused").output().expect("the command starts");
    assert!(ended.status.success());
    // Asked for, and not there: nothing but the defaults has computed.
    assert!(place.texts("a.png").iter().all(|(_, text)| !text.contains("cudnn") && !text.contains("fused")));
}

#[test]
fn the_same_seed_gives_the_same_bytes_with_any_number_of_threads() {
    let place = Place::new();
    let line = ["generate", PROMPT, "--seed", "3", "-W", "80", "-H", "112", "--steps", "2"];
    for (file, threads) in [("a.png", "1"), ("b.png", "1"), ("c.png", "2"), ("d.png", "5")] {
        place.succeeds(&[&line[..], &["-o", file, "--threads", threads]].concat());
    }
    assert_eq!(place.picture("a.png").dimensions(), (80, 112));
    for file in ["b.png", "c.png", "d.png"] {
        assert!(place.read(file) == place.read("a.png"), "{file} differs from a.png");
    }
    place.succeeds(&[&line[..], &["-o", "e.png", "--seed-step", "2", "--rng", "torch-cpu"]].concat());
    assert!(place.picture("e.png") != place.picture("a.png"), "--rng changes nothing");
}

#[test]
fn a_random_seed_is_printed_and_makes_the_picture_again() {
    let place = Place::new();
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "a.png"]));
    let seed = ended.stderr.split("seed ").nth(1).and_then(|text| text.split(',').next()).expect("a seed is printed");
    place.succeeds(&quick(&[PROMPT, "-o", "b.png", "-s", seed]));
    assert!(place.read("a.png") == place.read("b.png"));
    place.succeeds(&quick(&[PROMPT, "-o", "c.png", "-s", "-1"]));
    assert!(place.picture("a.png") != place.picture("c.png"), "two random seeds are alike");
}

#[test]
fn pictures_of_a_batch_equal_single_pictures() {
    let place = Place::new();
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "b.png", "-b", "3", "-s", "18446744073709551614"]));
    assert_eq!(ended.stdout, "b-1.png\nb-2.png\nb-3.png\n");
    for (file, seed) in [("b-1.png", "18446744073709551614"), ("b-2.png", "18446744073709551615"), ("b-3.png", "0")] {
        place.succeeds(&quick(&[PROMPT, "-o", "single.png", "-s", seed]));
        assert!(place.read("single.png") == place.read(file), "{file} is not the picture of seed {seed}");
    }
    assert!(place.picture("b-1.png") != place.picture("b-2.png"));
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "%02d.png", "-b", "2", "-s", "5", "--seed-step", "10"]));
    assert_eq!(ended.stdout, "01.png\n02.png\n");
    assert!(place.texts("02.png").iter().any(|(_, text)| text.contains("Seed: 15,")));
}

#[test]
fn the_extension_decides_the_format() {
    let place = Place::new();
    for (file, signature) in [("a.jpg", &b"\xff\xd8\xff"[..]), ("a.JPEG", b"\xff\xd8\xff"), ("a.webp", b"RIFF")] {
        place.succeeds(&quick(&[PROMPT, "-o", file, "-s", "2"]));
        assert!(place.read(file).starts_with(signature), "{file}");
        assert_eq!(place.picture(file).dimensions(), (64, 64), "{file}");
    }
    place.succeeds(&quick(&[PROMPT, "-o", "a.png", "-s", "2"]));
    let difference = |file| {
        let pairs = place.picture("a.png").into_raw().into_iter().zip(place.picture(file).into_raw());
        let sum: f64 = pairs.map(|(a, b)| f64::from(a.abs_diff(b))).sum();
        sum / (64.0 * 64.0 * 3.0)
    };
    assert!(difference("a.jpg") < 6.0, "{}", difference("a.jpg"));
    assert!(difference("a.webp") < 6.0, "{}", difference("a.webp"));
}

#[test]
fn unusual_prompts_work() {
    let place = Place::new();
    let empty = place.succeeds(&quick(&["", "-o", "empty.png", "-s", "1"]));
    assert!(!empty.stderr.contains("warning"), "{}", empty.stderr);

    let special = place.succeeds(&quick(&["a red <|im_end|>circle<|endoftext|>", "-o", "special.png", "-s", "1"]));
    assert!(!special.stderr.contains("warning"), "{}", special.stderr);
    place.succeeds(&quick(&["a red circle", "-o", "plain.png", "-s", "1"]));
    assert!(place.picture("special.png") != place.picture("plain.png"));

    let long = "red circle ".repeat(500);
    let cut = place.succeeds(&quick(&[&long, "-o", "long.png", "-s", "1", "-b", "2"]));
    let warnings: Vec<_> = cut.stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
    assert_eq!(warnings.len(), 1, "{}", cut.stderr);
    assert!(warnings[0].contains("token"), "{}", warnings[0]);
    assert!(place.texts("long-1.png").iter().any(|(_, text)| text.starts_with(&long)));
}

#[test]
fn the_prompt_may_come_from_standard_input() {
    let place = Place::new();
    let mut child = place
        .command(&quick(&["-", "-o", "a.png", "-s", "1"]))
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(b"a green square\n").expect("the command reads");
    let output = child.wait_with_output().expect("the command ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    place.succeeds(&quick(&["-p", "a green square", "-o", "b.png", "-s", "1"]));
    assert!(place.read("a.png") == place.read("b.png"));
}

#[test]
fn quiet_says_nothing_and_a_model_folder_equals_the_built_in_model() {
    let place = Place::new();
    place.copy_demo("flux2-demo");
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "a.png", "-s", "9", "-q", "-m", "flux2-demo"]));
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "b.png", "-s", "9", "-q"]));
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    assert!(place.read("a.png") == place.read("b.png"));
    let ended = place.succeeds(&quick(&[PROMPT, "-o", "b.png", "-s", "9", "-v"]));
    assert!(ended.stderr.contains("replacing b.png"), "{}", ended.stderr);
    assert!(place.read("a.png") == place.read("b.png"));
}
