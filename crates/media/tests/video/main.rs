//! Videos that this crate writes and reads, taken apart by hand and by other programs.

mod files;
mod gif;
#[cfg(feature = "mp4")]
mod mp4;
mod pictures;
mod y4m;

use std::fs;
use std::path::Path;
use std::process::Command;

use media::{Error, FrameRate, Result, Rgb8, VideoFormat, VideoOptions, VideoWriter};

/// Red, green, blue, white, black, grey, skin and a dark brown.
const CARD: [[u8; 3]; 8] =
    [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [128, 128, 128], [224, 172, 140], [60, 40, 30]];

/// Patches of these colours, four beside each other in two rows, each moved on by `shift` places.
fn card(width: usize, height: usize, shift: usize) -> Rgb8 {
    let (patch_width, patch_height) = (width.div_ceil(4), height.div_ceil(2));
    let pixel = |x: usize, y: usize| CARD[(4 * (y / patch_height) + x / patch_width + shift) % CARD.len()];
    Rgb8::new((0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(x, y))).collect(), width, height).unwrap()
}

#[cfg(feature = "mp4")]
fn flat(width: usize, height: usize, shift: usize) -> Rgb8 {
    Rgb8::new(CARD[shift % CARD.len()].repeat(width * height), width, height).unwrap()
}

fn noise(width: usize, height: usize, seed: u64) -> Rgb8 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let value = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    Rgb8::new(std::iter::repeat_with(value).take(3 * width * height).collect(), width, height).unwrap()
}

fn options(width: usize, height: usize) -> VideoOptions {
    VideoOptions::new(width, height, FrameRate::new(16, 1).unwrap())
}

fn write(path: &Path, options: &VideoOptions, frames: impl IntoIterator<Item = Rgb8>) -> Result<u64> {
    let mut video = VideoWriter::create(path, VideoFormat::from_path(path)?, options)?;
    for frame in frames {
        video.write(&frame)?;
    }
    video.finish()
}

fn read(path: &Path) -> Result<Vec<Rgb8>> {
    media::open_video(path)?.collect()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What is wrong with a file, without its path.
#[track_caller]
fn reason(error: Error) -> Error {
    assert!(!error.to_string().contains('\n'), "{error}");
    match error {
        Error::Picture { reason, .. } => *reason,
        other => other,
    }
}

/// The formats that this build can write, by a name that stands for each.
fn writable() -> Vec<&'static str> {
    let mut names = vec!["clip.y4m", "clip.gif", "frame-%05d.png"];
    if cfg!(feature = "mp4") {
        names.push("clip.mp4");
    }
    names
}

const PART: &str = "MEDIA_TEST_IN_ANOTHER_PROCESS";

/// A test of this file again, alone in a process of its own; there [`in_another_process`] holds.
fn another_process(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(PART, test).env_remove("RUST_BACKTRACE");
    command
}

fn in_another_process() -> bool {
    std::env::var_os(PART).is_some()
}
