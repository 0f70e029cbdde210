//! LTX VAEs: interruption, and videos that have no end.

use std::{
    io::Write,
    process::{ChildStdin, Stdio},
    thread,
    time::Duration,
};

use crate::{
    encode::y4m,
    latents,
    support::{Place, data, text},
    video_resources::{Run, interrupted},
};

const SIDE: usize = 32;

#[test]
fn ctrl_c_stops_both_decoders_and_leaves_no_file() {
    let place = Place::new();
    let model = data("models/ltx-demo");
    let shape = [1, 32, 24, 10, 10];
    latents::write(&place.path("long.latent"), &shape, &vec![0.5; shape.iter().product()]);
    for decoder in ["conv", "diffusion"] {
        interrupted(&place, &["decode", "long.latent", "--vae", text(&model), "--decoder", decoder, "-o", "a.y4m"]);
    }
}

/// Gives frames to a command as long as it takes any, at most `most`. Returns how many there were.
fn feed(mut stdin: ChildStdin, most: usize) -> usize {
    let video = y4m(1, SIDE);
    let head = video.iter().position(|&byte| byte == b'\n').expect("a line") + 1;
    let (head, frame) = video.split_at(head);
    if stdin.write_all(head).is_err() {
        return 0;
    }
    (0..most).take_while(|_| stdin.write_all(frame).is_ok()).count()
}

#[test]
fn ctrl_c_stops_an_encode_that_still_reads() {
    let place = Place::new();
    let model = data("models/ltx-demo");
    let mut command = place.command(&["encode", "-", "--vae", text(&model), "-o", "a.latent"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let stdin = child.stdin.take().expect("a pipe");
    let writer = thread::spawn(|| feed(stdin, usize::MAX));
    let mut run = Run::of(child);
    thread::sleep(Duration::from_millis(300));
    run.interrupt();
    assert!(writer.join().expect("a thread") > 0);
    assert!(place.files().is_empty());
}

#[test]
fn a_video_without_an_end_stops_at_the_limit_of_memory() {
    // As floats, once as they are and once for the encoder, 2700 frames.
    const LIMIT: &str = "64M";
    const MOST: usize = 40_000;
    let place = Place::new();
    let model = data("models/ltx-demo");
    let args = ["encode", "-", "--vae", text(&model), "-o", "a.latent", "-q", "--max-memory", LIMIT];
    let mut command = place.command(&args);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    let taken = feed(child.stdin.take().expect("a pipe"), MOST);
    let output = child.wait_with_output().expect("the command ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: encoding needs at least") && stderr.contains("the limit is 64 MiB"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(taken < MOST / 10, "{taken} frames");
    assert!(place.files().is_empty());
}
