//! `tallow quantize`, and what its files are good for.

use std::fs;

use crate::{
    checkpoint::Checkpoint,
    support::{Place, demo_folder, text},
};

const PROMPT: &str = "a red circle on a blue background";
const QUICK: [&str; 8] = ["--steps", "2", "-W", "64", "-H", "64", "-s", "5"];

fn transformer() -> String {
    text(&demo_folder().join("transformer/diffusion_pytorch_model.safetensors")).to_owned()
}

/// Mean difference of two pictures, of 255.
fn difference(place: &Place, a: &str, b: &str) -> f64 {
    let (a, b) = (place.picture(a).into_raw(), place.picture(b).into_raw());
    let sum: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a.abs_diff(*b))).sum();
    sum / a.len() as f64
}

#[test]
fn a_quantised_transformer_is_smaller_and_makes_nearly_the_same_picture() {
    let place = Place::new();
    place.succeeds(&[&["generate", PROMPT, "-o", "plain.png"][..], &QUICK].concat());
    for (file, options, format) in [
        ("int8.safetensors", &["--group-size", "16"][..], "int8_tensorwise"),
        ("fp8.safetensors", &["--format", "fp8-scaled"], "float8_e4m3fn"),
    ] {
        let ended = place.succeeds(&[&["quantize", &transformer(), file][..], options].concat());
        assert_eq!(ended.stdout, format!("{file}\n"));
        assert!(
            ended.stderr.contains("matrices became") && ended.stderr.contains("outside of the blocks"),
            "{ended:?}"
        );
        let size = |path: &str| fs::metadata(place.path(path)).expect("a file").len();
        assert!(4 * size(file) < 3 * size(&transformer()), "{} bytes", size(file));

        let report = place.succeeds(&["inspect", file]).stdout;
        for words in ["quantised", format, "computed", "used by       tallow generate --transformer"] {
            assert!(report.contains(words), "no {words:?} in\n{report}");
        }
        place.succeeds(&[&["generate", PROMPT, "-o", "small.png", "--transformer", file][..], &QUICK].concat());
        let difference = difference(&place, "plain.png", "small.png");
        assert!(difference > 0.0 && difference < 6.0, "{file}: {difference}");
        assert!(place.texts("small.png").iter().any(|(_, text)| text.contains(&format!("Model: {}", &file[..3]))));
    }
    used_as_asked_for(&place);
    // Twice the same bytes.
    let first = place.read("int8.safetensors");
    place.succeeds(&["quantize", &transformer(), "int8.safetensors", "--group-size", "16", "-q"]);
    assert!(place.read("int8.safetensors") == first);
}

/// Each use of quantised weights makes nearly the same picture, and says that it did.
fn used_as_asked_for(place: &Place) {
    let made = |options: &[&str]| {
        let line = [&["generate", PROMPT, "-o", "used.png"][..], &QUICK, options].concat();
        let said = place.succeeds(&line).stderr;
        let texts = place.texts("used.png");
        let recipe = &texts.iter().find(|(keyword, _)| keyword == "tallow").expect("a recipe").1;
        let recipe: serde_json::Value = serde_json::from_str(recipe).expect("JSON");
        (difference(place, "plain.png", "used.png"), recipe["execution"]["quant"].clone(), said)
    };
    let int8 = ["--transformer", "int8.safetensors", "--quant"];
    let (stored, ..) = made(&int8[..2]);
    for (name, noisier) in [("decoded", false), ("stored", false), ("int8", true)] {
        let (found, quant, said) = made(&[&int8[..], &[name]].concat());
        assert_eq!(quant, name);
        assert!(!said.contains("warning"), "{said}");
        assert!(found > 0.0 && found < 6.0, "{name}: {found}");
        assert!(
            (found - stored).abs() < 0.02 || noisier && found != stored,
            "{name}: {found}, {stored} as it is stored"
        );
    }
    let (nothing, quant, said) = made(&["--quant", "int8"]);
    assert!(nothing == 0.0 && quant.is_null() && said.contains("--quant int8 changes nothing"), "{quant} {said}");
}

#[test]
fn components_of_their_own_replace_those_of_the_model() {
    let place = Place::new();
    let folder = place.copy_demo("model");
    let line = [&["generate", PROMPT, "-o", "a.png", "-q"][..], &QUICK].concat();
    place.succeeds(&line);
    let moved = [
        ("--transformer", "transformer/diffusion_pytorch_model.safetensors", "t.safetensors"),
        ("--text-encoder", "text_encoder/model.safetensors", "e.safetensors"),
        ("--vae", "vae/diffusion_pytorch_model.safetensors", "v.safetensors"),
    ];
    let mut args = [&["generate", PROMPT, "-o", "b.png", "-q", "-m", "model"][..], &QUICK].concat();
    for (option, from, to) in moved {
        fs::rename(folder.join(from), place.path(to)).expect("a move");
        args.extend([option, to]);
    }
    place.succeeds(&args);
    assert!(place.picture("a.png") == place.picture("b.png"));

    place.fails(&["generate", "x", "-o", "c.png", "--transformer", "missing"], 1, &["missing"]);
    place.fails(
        &["generate", "x", "-o", "c.png", "-q", "--transformer", "v.safetensors"],
        1,
        &["v.safetensors", "FLUX.2 VAE"],
    );
    place.fails(&["generate", "x", "-o", "c.png", "-m", "t.safetensors"], 1, &["t.safetensors", "--transformer"]);
    // Without the other components the folder is no model any more.
    place.fails(&["generate", "x", "-o", "c.png", "-m", "model", "--vae", "v.safetensors"], 1, &["text_encoder"]);
}

#[test]
fn what_cannot_be_quantised_leaves_no_file() {
    let place = Place::new();
    let plain = transformer();
    place.fails(&["quantize", &plain, "a.safetensors"], 1, &["groups of 256", "smaller groups"]);
    place.fails(&["quantize", "missing", "a.safetensors"], 1, &["missing"]);
    place.fails(&["quantize", &plain, "a.gguf"], 2, &["a.gguf", ".safetensors"]);
    place.fails(&["quantize", &plain, "none/a.safetensors"], 1, &["none"]);
    place.fails(&["quantize", &plain, "a.safetensors", "--group-size", "8"], 2, &["--group-size", "16"]);
    place.fails(&["quantize", &plain, "a.safetensors", "--format", "q4"], 2, &["--format", "fp8-scaled"]);
    place.fails(&["quantize", text(&demo_folder()), "a.safetensors"], 1, &["safetensors"]);
    place.succeeds(&["quantize", &plain, "q.safetensors", "--format", "fp8-scaled", "-q"]);
    place.fails(&["quantize", "q.safetensors", "a.safetensors", "--group-size", "16"], 1, &["quantised", "already"]);

    let model = place.copy_demo("model");
    let mut checkpoint = Checkpoint::open(model.join("transformer/diffusion_pytorch_model.safetensors"));
    checkpoint.fill("transformer_blocks.0.attn.to_q.weight", f32::NAN, 1);
    checkpoint.save();
    for format in ["int8-convrot", "fp8-scaled"] {
        let line = ["quantize", "model/transformer", "a.safetensors", "--group-size", "16", "--format", format];
        place.fails(&line, 1, &["transformer_blocks.0.attn.to_q.weight", "NaN"]);
    }
}
