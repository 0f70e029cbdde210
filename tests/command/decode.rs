//! `tallow decode` on good input.

use std::{fs, path::PathBuf};

use image::RgbImage;

use crate::{
    checkpoint::Checkpoint,
    latents,
    support::{Place, data, text},
};

/// A clip of 13 frames of 80 x 48 pixels, as another program encoded and decoded it.
const GOLDEN: &str = "goldens/wan-c.safetensors";

fn demo_vae() -> PathBuf {
    data("models/wan-vae-demo")
}

fn demo_clip() -> PathBuf {
    data("models/wan-demo.latent")
}

/// `[1, 3, T, H, W]` in -1..=1 as pictures, rounded here.
fn pictures(shape: &[usize], values: &[f32]) -> Vec<RgbImage> {
    let &[1, 3, count, height, width] = shape else { panic!("{shape:?}") };
    let level = |frame: usize, channel: usize, x: u32, y: u32| {
        let value = values[((channel * count + frame) * height + y as usize) * width + x as usize];
        (127.5 * (value.clamp(-1.0, 1.0) + 1.0)).round() as u8
    };
    let picture = |frame| {
        let pixel = |x, y| image::Rgb([0, 1, 2].map(|channel| level(frame, channel, x, y)));
        RgbImage::from_fn(width as u32, height as u32, pixel)
    };
    (0..count).map(picture).collect()
}

/// Largest and mean difference of two clips.
fn difference(a: &[RgbImage], b: &[RgbImage]) -> (u8, f64) {
    assert_eq!(a.len(), b.len(), "numbers of frames");
    let mut values = Vec::new();
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.dimensions(), b.dimensions());
        values.extend(a.as_raw().iter().zip(b.as_raw()).map(|(a, b)| a.abs_diff(*b)));
    }
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64;
    (values.into_iter().max().expect("pixels"), mean)
}

#[test]
fn without_arguments_the_built_in_clip_becomes_a_video() {
    let place = Place::new();
    let ended = place.succeeds(&["decode"]);
    let name = if cfg!(feature = "mp4") { "clip.mp4" } else { "clip.gif" };
    assert_eq!(ended.stdout, format!("{name}\n"));
    assert_eq!(place.files().len(), 1);
    assert!(place.read(name).len() > 1000);
}

#[test]
fn without_latents_the_built_in_clip_is_decoded() {
    let place = Place::new();
    let ended = place.succeeds(&["decode", "-o", "%05d.png"]);
    assert_eq!(ended.stdout, "%05d.png\n");
    assert!(ended.stderr.contains("wan-demo.latent: 9 frames of 64x64 at 16 a second"), "{}", ended.stderr);
    assert!(ended.stderr.contains("wan-vae-demo") && !ended.stderr.contains("warning"), "{}", ended.stderr);
    // Progress is for terminals only.
    assert!(!ended.stderr.contains(['\r', '\x1b']), "{:?}", ended.stderr);
    assert_eq!(place.files().len(), 9);
    let built_in = place.series(9);
    assert!(difference(&built_in[..8], &built_in[1..]).1 > 0.05, "nothing moves");

    let files = Place::new();
    files.succeeds(&["decode", text(&demo_clip()), "--vae", text(&demo_vae()), "-o", "%05d.png", "-q"]);
    assert_eq!(difference(&files.series(9), &built_in), (0, 0.0));
}

#[cfg(feature = "mp4")]
#[test]
fn the_mp4_file_has_every_frame_with_its_colours() {
    let place = Place::new();
    let ended = place.succeeds(&["decode", "-o", "clip.mp4"]);
    assert_eq!(ended.stdout, "clip.mp4\n");
    assert_eq!(place.files().len(), 1);
    place.succeeds(&["decode", "-o", "%05d.png"]);
    let clip = crate::mp4::read(&place.path("clip.mp4"));
    assert_eq!((clip.size, clip.frames.len()), ((64, 64), 9));
    assert!((clip.seconds - 9.0 / 16.0).abs() < 1e-3, "{}", clip.seconds);
    let about: serde_json::Value = serde_json::from_str(&clip.description).expect("JSON");
    assert_eq!((&about["vae"], &about["execution"]["dtype"]), (&"wan-vae-demo".into(), &"f32".into()));
    let (_, mean) = difference(&clip.frames, &place.series(9));
    // Colours at half resolution blur the edges of the shapes, and only these.
    assert!(mean < 2.0, "{mean}");
    let flat = |x, y| (clip.frames[4].get_pixel(x, y).0, place.series(9)[4].get_pixel(x, y).0);
    for (x, y) in [(2, 2), (61, 2), (2, 61), (61, 61)] {
        let (found, expected) = flat(x, y);
        let worst = (0..3).map(|channel| found[channel].abs_diff(expected[channel])).max().expect("channels");
        assert!(worst <= 6, "at {x}, {y}: {found:?} instead of {expected:?}");
    }

    place.succeeds(&["decode", "-o", "slow.MP4", "--fps", "24000/1001", "-q"]);
    let seconds = crate::mp4::read(&place.path("slow.MP4")).seconds;
    assert!((seconds - 9.0 * 1001.0 / 24000.0).abs() < 1e-3, "{seconds}");
}

#[test]
fn frames_are_those_of_the_reference() {
    let place = Place::new();
    let (shape, mean) = latents::read(&data(GOLDEN), "latent_mean");
    latents::write(&place.path("raw.latent"), &shape, &mean);
    let (shape, decoded) = latents::read(&data(GOLDEN), "decoded");
    let expected = pictures(&shape, &decoded);
    let vae = demo_vae();
    let line = ["decode", "raw.latent", "--vae", text(&vae), "-o", "%05d.png", "-q"];
    place.succeeds(&line);
    let (largest, mean) = difference(&place.series(13), &expected);
    assert!(largest <= 1 && mean < 0.01, "{largest}, {mean}");
}

#[test]
fn normalized_latents_give_the_same_frames_and_a_mistake_is_noticed() {
    let place = Place::new();
    let (shape, raw) = latents::read(&demo_clip(), "latent_tensor");
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(demo_vae().join("config.json")).expect("a file")).expect("JSON");
    let statistic = |name: &str, channel: usize| config[name][channel].as_f64().expect("a number");
    let channel_of = |index: usize| index / (raw.len() / 16);
    let normalized: Vec<f32> = raw
        .iter()
        .enumerate()
        .map(|(index, &value)| {
            let channel = channel_of(index);
            ((f64::from(value) - statistic("latents_mean", channel)) / statistic("latents_std", channel)) as f32
        })
        .collect();
    latents::write(&place.path("normalized.latent"), &shape, &normalized);
    let vae = demo_vae();
    let decode = |file: &str, more: &[&str]| {
        place.succeeds(&[&["decode", file, "--vae", text(&vae), "-o", "clip.y4m"], more].concat())
    };
    let clip = demo_clip();
    decode(text(&clip), &[]);
    let expected = place.read("clip.y4m");
    let ended = decode("normalized.latent", &["--latents", "normalized"]);
    assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
    let found = place.read("clip.y4m");
    let differing = found.iter().zip(&expected).filter(|(a, b)| a.abs_diff(**b) > 1).count();
    assert_eq!((found.len(), differing), (expected.len(), 0));

    let ended = decode(text(&clip), &["--latents", "normalized"]);
    assert!(ended.stderr.contains("warning: ") && ended.stderr.contains("--latents raw"), "{}", ended.stderr);
    assert!(place.read("clip.y4m") != expected);
    // What a transformer sees over many clips: mean 0 and deviation 1 in every channel.
    let exact: Vec<f32> = (0..raw.len()).map(|index| if index % 2 == 0 { 1.0 } else { -1.0 }).collect();
    latents::write(&place.path("exact.latent"), &shape, &exact);
    let ended = decode("exact.latent", &[]);
    assert!(ended.stderr.contains("warning: ") && ended.stderr.contains("--latents normalized"), "{}", ended.stderr);
    assert!(!decode("exact.latent", &["--latents", "normalized"]).stderr.contains("warning"));
    assert_eq!(decode("exact.latent", &["-q"]).stderr, "");
}

#[test]
fn the_name_decides_the_format() {
    let place = Place::new();
    place.succeeds(&["decode", "-o", "a.y4m", "--fps", "29.97"]);
    let y4m = place.read("a.y4m");
    let line = y4m.iter().position(|&byte| byte == b'\n').expect("a header");
    let header = String::from_utf8_lossy(&y4m[..line]).into_owned();
    assert!(header.starts_with("YUV4MPEG2 W64 H64 F30000:1001 "), "{header}");
    assert_eq!(y4m.len(), line + 1 + 9 * ("FRAME\n".len() + 3 * 64 * 64));

    let to_stdout = place.command(&["decode", "-o", "-", "--fps", "29.97"]).output().expect("the command starts");
    assert!(to_stdout.status.success());
    assert!(to_stdout.stdout == y4m, "standard output and the file differ");

    place.succeeds(&["decode", "-o", "a.gif"]);
    let gif = place.read("a.gif");
    assert!(gif.starts_with(b"GIF89a") && gif.ends_with(&[0x3b]) && gif.len() > 5000);

    // The golden with one latent frame is one picture.
    let (shape, mean) = latents::read(&data("goldens/wan-b.safetensors"), "latent_mean");
    latents::write(&place.path("one.latent"), &shape, &mean);
    let vae = demo_vae();
    for name in ["one.png", "one.jpg", "one.webp", "one.y4m"] {
        let ended = place.succeeds(&["decode", "one.latent", "--vae", text(&vae), "-o", name]);
        assert!(ended.stderr.contains("1 frame of 64x64"), "{}", ended.stderr);
    }
    let (shape, decoded) = latents::read(&data("goldens/wan-b.safetensors"), "decoded");
    assert!(difference(&[place.picture("one.png")], &pictures(&shape, &decoded)).0 <= 1);
    assert_eq!(place.picture("one.webp"), place.picture("one.png"));
    assert!(place.read("one.jpg").starts_with(b"\xff\xd8\xff"));
    let texts = place.texts("one.png");
    assert_eq!((texts.len(), texts[0].0.as_str()), (1, "tallow"));
    let about: serde_json::Value = serde_json::from_str(&texts[0].1).expect("JSON");
    assert!(about["vae"].is_string() && about["execution"]["device"] == "cpu", "{about}");
}

#[test]
fn neither_threads_nor_exact_weights_change_a_bit_and_bands_only_the_last() {
    let place = Place::new();
    place.succeeds(&["decode", "-o", "a.y4m", "-q"]);
    let expected = place.read("a.y4m");
    for more in [
        &["--threads", "1"][..],
        &["--threads", "3"],
        &["--tiling", "whole"],
        &["--dtype", "bf16"],
        &["--dtype", "f32"],
        // Pictures that fit in one tile are not cut.
        &["--tiling", "blended"],
        &["--device", "cpu", "--max-memory", "1G"],
    ] {
        place.succeeds(&[&["decode", "-o", "b.y4m", "-q"], more].concat());
        assert!(place.read("b.y4m") == expected, "{more:?} changes the frames");
    }
    let differences = || {
        let found = place.read("b.y4m");
        assert_eq!(found.len(), expected.len());
        found
            .iter()
            .zip(&expected)
            .map(|(a, b)| a.abs_diff(*b))
            .filter(|&difference| difference > 0)
            .collect::<Vec<_>>()
    };
    for bands in ["bands:1", "bands:2", "bands:3", "bands:8"] {
        place.succeeds(&["decode", "-o", "b.y4m", "-q", "--tiling", bands]);
        let found = differences();
        // A value that lies between two levels may be rounded either way.
        assert!(found.len() < 10 && found.iter().all(|&difference| difference == 1), "{bands}: {found:?}");
    }
    let ended = place.succeeds(&["decode", "-o", "b.y4m", "--tiling", "blended:32:16"]);
    assert!(ended.stderr.contains("blended tiles, which differ"), "{}", ended.stderr);
    assert!(place.read("b.y4m") != expected);
}

#[test]
fn weights_are_kept_as_stored_or_as_asked_for() {
    let place = Place::new();
    place.succeeds(&["decode", "-o", "expected.y4m", "-q"]);
    let file = place.copy_vae("wide").join("diffusion_pytorch_model.safetensors");
    let mut checkpoint = Checkpoint::open(&file);
    // A quarter of the distance to the next number of 16 bits: rounding takes it away again.
    checkpoint.widen(0x4000);
    checkpoint.save();
    let clip = demo_clip();
    let decode = |more: &[&str]| {
        let said = place.succeeds(&[&["decode", text(&clip), "--vae", "wide", "-o", "a.y4m"], more].concat()).stderr;
        (place.read("a.y4m"), said)
    };
    let expected = place.read("expected.y4m");
    let (as_stored, said) = decode(&[]);
    assert!(as_stored != expected && said.contains("weights f32"), "{said}");
    assert!(decode(&["--dtype", "f32"]).0 == as_stored);
    let (rounded, said) = decode(&["--dtype", "bf16"]);
    assert!(rounded == expected && said.contains("weights bf16"), "{said}");
    let (narrow, said) = decode(&["--dtype", "f16"]);
    let worst = narrow.iter().zip(&as_stored).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(worst <= Some(2) && said.contains("weights f16"), "{worst:?}, {said}");
}

#[test]
fn what_does_not_fit_is_cut_into_bands_or_refused_with_the_figure() {
    let place = Place::new();
    let values = vec![0.1; 16 * 24 * 24];
    latents::write(&place.path("a.latent"), &[1, 16, 1, 24, 24], &values);
    let vae = demo_vae();
    let line = ["decode", "a.latent", "--vae", text(&vae), "--tiling", "whole", "-o", "a.png"];
    let ended = place.run(&[&line[..], &["--max-memory", "1M"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let figure = |stderr: &str| {
        let figure = stderr.split("needs at least ").nth(1).and_then(|text| text.split(' ').next());
        figure.and_then(|figure| figure.parse::<u64>().ok()).expect("a figure in MiB")
    };
    let whole = figure(&ended.stderr);
    place.fails(
        &[&line[..], &["--max-memory", &format!("{}MiB", whole - 1)]].concat(),
        1,
        &["needs at least", "whole"],
    );
    place.succeeds(&[&line[..], &["--max-memory", &format!("{whole}MiB")]].concat());

    let auto = ["decode", "a.latent", "--vae", text(&vae), "-o", "b.png", "--max-memory"];
    let ended = place.succeeds(&[&auto[..], &[&format!("{}MiB", whole - 1)]].concat());
    assert!(ended.stderr.contains(" bands, about "), "{}", ended.stderr);
    assert!(place.read("a.png") == place.read("b.png"));
    place.fails(&[&auto[..], &["1M"]].concat(), 1, &["needs at least", "the limit is 1 MiB"]);
}

#[test]
fn an_older_file_is_replaced_and_an_older_series_is_not() {
    let place = Place::new();
    fs::write(place.path("a.y4m"), "older").expect("a file");
    assert!(!place.succeeds(&["decode", "-o", "a.y4m"]).stderr.contains("replacing"));
    assert!(place.succeeds(&["decode", "-o", "a.y4m", "-v"]).stderr.contains("replacing a.y4m"));
    assert!(place.read("a.y4m").starts_with(b"YUV4MPEG2"));
    let ended = place.succeeds(&["decode", "-o", "a.y4m", "-q"]);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));

    fs::write(place.path("00007.png"), "older").expect("a file");
    place.fails(&["decode", "-o", "%05d.png"], 1, &["%05d.png", "00007.png", "exists"]);
    assert_eq!(place.read("00007.png"), b"older");
}
