//! Memory while a long video is written and read. Alone in its process, so that other tests do not disturb the figures.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;

use media::{FrameRate, Rgb8, VideoFormat, VideoOptions, VideoWriter, open_video};

const SIDE: usize = 32;
const FRAMES: u64 = 2000;

/// Of this process, in bytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    1024 * line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
}

fn frame(seed: u64) -> Rgb8 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let value = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    Rgb8::new(std::iter::repeat_with(value).take(3 * SIDE * SIDE).collect(), SIDE, SIDE).unwrap()
}

/// The pixels are 6 MB, and the files some 3 MB or more.
#[test]
fn memory_does_not_grow_with_the_number_of_frames() {
    const MAX_GROWTH: u64 = 1 << 20;
    const WARM_UP: u64 = 200;
    let folder = tempfile::tempdir().unwrap();
    let mut names = vec!["clip.y4m", "clip.gif", "%05d.png"];
    if cfg!(feature = "mp4") {
        names.push("clip.mp4");
    }
    for name in names {
        let path = folder.path().join(name);
        let options = VideoOptions::new(SIDE, SIDE, FrameRate::new(16, 1).unwrap());
        let mut video = VideoWriter::create(&path, VideoFormat::from_path(&path).unwrap(), &options).unwrap();
        let mut before = 0;
        for seed in 0..FRAMES {
            if seed == WARM_UP {
                before = resident();
            }
            video.write(&frame(seed)).unwrap();
        }
        let written = resident().saturating_sub(before);
        assert_eq!(video.finish().unwrap(), FRAMES);
        let finished = resident().saturating_sub(before);
        eprintln!("{name}: {written} bytes more after the frames, {finished} at the end");
        assert!(written < MAX_GROWTH && finished < MAX_GROWTH, "{name}: {written}, {finished}");
        if !name.contains('%') {
            assert!(fs::metadata(&path).unwrap().len() > 5 * MAX_GROWTH / 2, "{name}: the test shows nothing");
        }
        if name != "clip.mp4" {
            read(&path, MAX_GROWTH, WARM_UP);
        }
    }
}

fn read(path: &Path, max_growth: u64, warm_up: u64) {
    let mut before = 0;
    let mut count = 0;
    for frame in open_video(path).unwrap() {
        assert_eq!(frame.unwrap().width(), SIDE);
        count += 1;
        if count == warm_up {
            before = resident();
        }
    }
    let growth = resident().saturating_sub(before);
    assert_eq!(count, FRAMES);
    assert!(growth < max_growth, "{}: {growth}", path.display());
}
