//! `tallow encode`: on good input, and on videos that cannot be encoded.

use std::{fs, io::Write, path::Path, process::Stdio};

use image::RgbImage;

use crate::{
    latents,
    support::{Place, data, text},
};

/// 9 frames of 64 x 64 pixels, and what the reference makes of them.
const GOLDEN: &str = "goldens/wan-a.safetensors";

/// The frames of the golden as pictures, the last ones repeated.
fn frames(count: usize) -> Vec<RgbImage> {
    let (shape, values) = latents::read(&data(GOLDEN), "video");
    let &[1, 3, frames, height, width] = shape.as_slice() else { panic!("{shape:?}") };
    let picture = |frame: usize| {
        let frame = frame.min(frames - 1);
        RgbImage::from_fn(width as u32, height as u32, |x, y| {
            image::Rgb([0, 1, 2].map(|channel| {
                let value = values[((channel * frames + frame) * height + y as usize) * width + x as usize];
                (127.5 * (value + 1.0)).round() as u8
            }))
        })
    };
    (0..count).map(picture).collect()
}

fn write_series(place: &Place, folder: &str, count: usize) {
    fs::create_dir(place.path(folder)).expect("a folder");
    for (number, frame) in (1..).zip(frames(count)) {
        frame.save(place.path(&format!("{folder}/{number:05}.png"))).expect("a picture");
    }
}

/// Grey frames as Y4M.
pub(crate) fn y4m(count: usize, side: usize) -> Vec<u8> {
    let mut bytes = format!("YUV4MPEG2 W{side} H{side} F16:1 Ip A1:1 C444\n").into_bytes();
    for frame in 0..count {
        bytes.extend(b"FRAME\n");
        bytes.extend(vec![40 + 5 * (frame % 32) as u8; side * side]);
        bytes.extend(vec![128; 2 * side * side]);
    }
    bytes
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut expected.iter().map(|&b| f64::from(b)))
}

fn tensor(place: &Place, file: &str) -> (Vec<usize>, Vec<f32>) {
    latents::read(&place.path(file), "latent_tensor")
}

#[test]
fn latents_are_those_of_the_reference_and_decode_again() {
    let place = Place::new();
    write_series(&place, "in", 9);
    let ended = place.succeeds(&["encode", "in", "-o", "a.latent"]);
    assert_eq!(ended.stdout, "a.latent\n");
    assert!(
        ended.stderr.contains("in: 9 frames of 64x64") && ended.stderr.contains("wan-vae-demo"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("3 latent frames of 9 frames"), "{}", ended.stderr);
    let (shape, found) = tensor(&place, "a.latent");
    let (expected_shape, expected) = latents::read(&data(GOLDEN), "latent_mean");
    assert_eq!(shape, expected_shape);
    // The reference has seen the frames before they were rounded to 8 bits.
    let error = relative_error(&found, &expected);
    assert!(error < 0.01, "{error}");
    let metadata = latents::metadata(&place.path("a.latent"));
    assert_eq!((&metadata["vae"], &metadata["latents"]), (&"wan-vae-demo".into(), &"raw".into()));
    let execution = |file: &str| -> serde_json::Value {
        let metadata = latents::metadata(&place.path(file));
        serde_json::from_str(metadata["execution"].as_str().expect("an identity")).expect("JSON")
    };
    let identity = execution("a.latent");
    assert_eq!((&identity["device"], &identity["dtype"]), (&"cpu".into(), &"f32".into()));
    let weights = identity["weights"].as_str().expect("a hash");
    assert!(weights.starts_with("sample-sha256:") && identity.get("conv").is_none(), "{identity}");
    // Weights that were rounded are other weights.
    let ended = place.succeeds(&["encode", "in", "-o", "f16.latent", "--dtype", "f16", "-v"]);
    assert_eq!(execution("f16.latent")["weights"], format!("{weights} as f16"));
    assert!(ended.stderr.contains(&format!("{weights} as f16")), "{}", ended.stderr);

    // A file that says that the built-in VAE has made it needs no --vae.
    place.succeeds(&["decode", "a.latent", "-o", "a.y4m", "-q"]);
    let vae = data("models/wan-vae-demo");
    place.succeeds(&["decode", "a.latent", "-o", "b.y4m", "-q", "--vae", text(&vae)]);
    assert!(place.read("a.y4m") == place.read("b.y4m"));
    place.succeeds(&["decode", "a.latent", "-o", "%05d.png", "-q"]);
    let pairs = place.series(9).into_iter().zip(frames(9));
    let sum: f64 = pairs.map(|(a, b)| mean_difference(&a, &b)).sum();
    assert!(sum / 9.0 < 12.0, "{}", sum / 9.0);
}

fn mean_difference(a: &RgbImage, b: &RgbImage) -> f64 {
    let pairs = a.as_raw().iter().zip(b.as_raw());
    pairs.map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / a.as_raw().len() as f64
}

#[test]
fn every_way_in_gives_the_same_latents() {
    let place = Place::new();
    write_series(&place, "in", 5);
    place.succeeds(&["encode", "in", "-o", "folder.latent", "-q"]);
    place.succeeds(&["encode", "in/%05d.png", "-o", "pattern.safetensors", "-q"]);
    assert!(place.read("folder.latent") == place.read("pattern.safetensors"));
    for more in [&["--threads", "1"][..], &["--tiling", "whole"], &["--dtype", "f32"]] {
        place.succeeds(&[&["encode", "in", "-o", "b.latent", "-q"], more].concat());
        assert!(place.read("b.latent") == place.read("folder.latent"), "{more:?} changes the latents");
    }
    place.succeeds(&["encode", "in", "-o", "b.latent", "-q", "--tiling", "bands:2"]);
    let error = relative_error(&tensor(&place, "b.latent").1, &tensor(&place, "folder.latent").1);
    assert!(error < 1e-6, "{error}");

    place.succeeds(&["encode", "in/00001.png", "-o", "picture.latent", "-q"]);
    let (shape, first) = tensor(&place, "picture.latent");
    assert_eq!(shape, [1, 16, 1, 8, 8]);
    // The first latent frame is that of the first picture alone.
    let (_, all) = tensor(&place, "folder.latent");
    let first_of_all: Vec<f32> = all.chunks_exact(2 * 64).flat_map(|channel| channel[..64].to_vec()).collect();
    assert_eq!(first, first_of_all);

    fs::write(place.path("a.y4m"), y4m(5, 32)).expect("a file");
    place.succeeds(&["encode", "a.y4m", "-o", "y4m.latent", "-q"]);
    let mut child = place
        .command(&["encode", "-", "-o", "stdin.latent", "-q"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(&y4m(5, 32)).expect("the command reads");
    let output = child.wait_with_output().expect("the command ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(place.read("stdin.latent") == place.read("y4m.latent"));
}

#[test]
fn frames_that_fill_no_group_are_refused_trimmed_or_repeated() {
    let place = Place::new();
    for (folder, count) in [("nine", 9), ("ten", 10), ("thirteen", 13), ("two", 2)] {
        write_series(&place, folder, count);
    }
    let refused = ["10 frames are not possible", "nearest: 9 or 13"];
    place.fails(&["encode", "ten", "-o", "a.latent"], 1, &refused);
    place.fails(&["encode", "ten", "-o", "a.latent", "--frames", "error"], 1, &refused);
    place.fails(&["encode", "two", "-o", "a.latent"], 1, &["2 frames are not possible", "nearest: 1 or 5"]);
    place.fails(&["encode", "ten", "-o", "a.latent", "--frames", "drop"], 2, &["drop", "trim", "pad"]);
    let encode = |folder: &str, policy: &str, file: &str| {
        place.succeeds(&["encode", folder, "-o", file, "--frames", policy]).stderr
    };
    encode("nine", "error", "nine.latent");
    encode("thirteen", "error", "thirteen.latent");
    let said = encode("ten", "trim", "a.latent");
    assert!(said.contains("1 frame at the end left out"), "{said}");
    assert!(place.read("a.latent") == place.read("nine.latent"));
    let said = encode("ten", "pad", "a.latent");
    assert!(said.contains("the last frame is repeated 3 times"), "{said}");
    // The golden's last frame is what follows the ninth.
    assert!(place.read("a.latent") == place.read("thirteen.latent"));
    encode("two", "trim", "a.latent");
    assert_eq!(tensor(&place, "a.latent").0, [1, 16, 1, 8, 8]);
}

#[test]
fn a_stream_of_a_wrong_length_ends_without_a_file() {
    let place = Place::new();
    let mut child = place
        .command(&["encode", "-", "-o", "a.latent", "-q"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(&y4m(7, 32)).expect("the command reads");
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.starts_with("error: ") && stderr.contains("nearest: 5 or 9"), "{stderr}");
    assert!(place.files().is_empty());
}

#[test]
fn what_cannot_be_encoded_is_refused() {
    let place = Place::new();
    let bad = |input: &str, words: &[&str]| place.fails(&["encode", input, "-o", "a.latent"], 1, words);
    bad("missing", &["missing"]);
    fs::write(place.path("text"), "no picture").expect("a file");
    bad("text", &["text", "not a Y4M"]);
    fs::write(place.path("clip.mp4"), b"\0\0\0\x20ftypisom").expect("a file");
    bad("clip.mp4", &["clip.mp4", "ffmpeg"]);
    fs::write(place.path("empty"), "").expect("a file");
    bad("empty", &["empty"]);
    fs::create_dir(place.path("folder")).expect("a folder");
    bad("folder", &["folder", "no numbered"]);

    fs::write(place.path("small.y4m"), y4m(1, 4)).expect("a file");
    bad("small.y4m", &["width 4", "multiple of 8", "nearest: 8"]);
    fs::write(place.path("odd.y4m"), y4m(1, 60)).expect("a file");
    bad("odd.y4m", &["width 60", "multiple of 8", "nearest: 56 or 64"]);
    fs::write(place.path("none.y4m"), y4m(0, 64)).expect("a file");
    bad("none.y4m", &["without frames"]);
    // Found before anything is encoded, though it is the last frame.
    let clip = y4m(9, 64);
    fs::write(place.path("cut.y4m"), &clip[..clip.len() - 1]).expect("a file");
    bad("cut.y4m", &["cut.y4m", "frame 9 is cut off"]);

    write_series(&place, "gap", 5);
    fs::remove_file(place.path("gap/00003.png")).expect("a file");
    bad("gap", &["gap", "frame 4 follows frame 2"]);
    write_series(&place, "mixed", 5);
    RgbImage::new(32, 64).save(place.path("mixed/00004.png")).expect("a picture");
    bad("mixed", &["frame 4", "32 x 64", "64 x 64"]);
}

#[test]
fn outputs_and_vaes_that_cannot_work_are_refused() {
    let place = Place::new();
    write_series(&place, "in", 1);
    for output in ["a.png", "a", "-", "a.npy"] {
        place.fails(&["encode", "in", "-o", output], 2, &[".latent", ".safetensors"]);
    }
    place.fails(&["encode", "in", "-o", "none/a.latent"], 1, &["none"]);
    fs::create_dir(place.path("b.latent")).expect("a folder");
    place.fails(&["encode", "in", "-o", "b.latent"], 1, &["b.latent", "folder"]);
    place.fails(&["encode", "-o", "a.latent"], 2, &["VIDEO|IMAGE"]);
    place.fails(&["encode", "in"], 2, &["--output"]);
    place.fails(&["encode", "in", "-o", "a.latent", "--vae", "none.pth"], 1, &["none.pth"]);
    place.fails(
        &["encode", "in", "-o", "a.latent", "--max-memory", "1M"],
        1,
        &["needs at least", "the limit is 1 MiB"],
    );

    // A VAE that can only decode.
    let file = place.copy_vae("decoder").join("diffusion_pytorch_model.safetensors");
    let mut checkpoint = crate::checkpoint::Checkpoint::open(&file);
    checkpoint.remove(|name| name.starts_with("encoder.") || name.starts_with("quant_conv."));
    checkpoint.save();
    place.fails(&["encode", "in", "-o", "a.latent", "--vae", "decoder"], 1, &["no encoder"]);
    place.succeeds(&["decode", text(&data("models/wan-demo.latent")), "--vae", "decoder", "-o", "a.y4m"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_without_a_file() {
    let place = Place::new();
    write_series(&place, "in", 5);
    std::os::unix::fs::symlink("/dev/full", place.path("full.latent")).expect("a link");
    let before = place.files();
    let ended = place.run(&["encode", "in", "-o", "full.latent"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(1), ""), "{ended:?}");
    let last = ended.stderr.lines().last().expect("a line");
    assert!(last.starts_with("error: ") && last.contains("full.latent") && last.contains("space"), "{last}");
    assert_eq!(place.files(), before);
    assert_eq!(fs::read_link(place.path("full.latent")).expect("still a link"), Path::new("/dev/full"));
}
