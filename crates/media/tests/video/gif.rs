//! Animated GIF out and in, and animated WebP in.

use std::fs;
use std::path::Path;

use media::{Error, FrameRate, Rgb8, VideoOptions, open_video};

use super::{card, noise, options, read, reason, write};

#[test]
fn a_frame_of_few_colours_is_exact() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.gif");
    for count in [1, 2, 9, 81] {
        let frames: Vec<_> = (0..count).map(|shift| card(33, 17, shift)).collect();
        write(&path, &options(33, 17), frames.clone()).unwrap();
        assert!(read(&path).unwrap() == frames, "{count}");
    }
    // Exactly as many colours as fit.
    let picture = Rgb8::new((0..=255).flat_map(|x| [x, 255 - x, x ^ 0x55]).collect(), 16, 16).unwrap();
    write(&path, &options(16, 16), [picture.clone()]).unwrap();
    assert!(read(&path).unwrap() == [picture]);
}

#[test]
fn a_frame_of_many_colours_is_near() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.gif");
    let pixels = (0..64).flat_map(|y| (0..64).flat_map(move |x| [x * 4, y * 4, 128])).collect();
    let picture = Rgb8::new(pixels, 64, 64).unwrap();
    write(&path, &options(64, 64), [picture.clone()]).unwrap();
    let back = read(&path).unwrap();
    let sum: u64 = back[0].pixels().iter().zip(picture.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    let mean = sum as f64 / picture.pixels().len() as f64;
    assert!(mean < 6.0, "{mean}");
}

/// By the decoder itself, which another crate wraps here.
#[test]
fn delays_add_up_and_the_animation_repeats() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.gif");
    for (fps, count, hundredths) in [("16", 81, 506), ("24000/1001", 48, 200), ("50", 10, 20)] {
        let options = VideoOptions::new(8, 8, fps.parse().unwrap());
        write(&path, &options, (0..count).map(|shift| card(8, 8, shift))).unwrap();
        let mut decoder = gif::DecodeOptions::new().read_info(fs::File::open(&path).unwrap()).unwrap();
        let (mut frames, mut total) = (0, 0);
        while let Some(frame) = decoder.read_next_frame().unwrap() {
            frames += 1;
            total += u32::from(frame.delay);
        }
        assert_eq!((frames, total), (count, hundredths), "{fps}");
        assert_eq!(decoder.repeat(), gif::Repeat::Infinite);
    }
    assert_eq!(open_video(&path).unwrap().fps(), Some(FrameRate::new(50, 1).unwrap()));
}

#[test]
fn frame_rates_that_browsers_slow_down_are_refused() {
    let options = VideoOptions::new(8, 8, FrameRate::new(60_000, 1001).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let error = write(&folder.path().join("clip.gif"), &options, []).unwrap_err();
    assert_eq!(error.to_string(), "GIF cannot show 60000/1001 frames a second, expected at most 50");
}

/// A GIF of 4 x 4 by hand: each frame is a rectangle of one colour.
fn by_hand(path: &Path, frames: &[(u16, u16, u16, u16, u8, gif::DisposalMethod)]) {
    let palette = [255, 0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0];
    let mut encoder = gif::Encoder::new(fs::File::create(path).unwrap(), 4, 4, &palette).unwrap();
    for &(left, top, width, height, colour, dispose) in frames {
        encoder
            .write_frame(&gif::Frame {
                left,
                top,
                width,
                height,
                dispose,
                delay: 4,
                // Black is nothing.
                transparent: Some(3),
                buffer: vec![colour; usize::from(width * height)].into(),
                ..Default::default()
            })
            .unwrap();
    }
}

#[test]
fn rectangles_are_laid_on_what_is_there() {
    use gif::DisposalMethod::{Background, Keep, Previous};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.gif");
    let frames = [(0, 0, 4, 2, 0, Keep), (1, 1, 2, 2, 1, Previous), (0, 0, 1, 4, 2, Background), (3, 3, 1, 1, 3, Keep)];
    by_hand(&path, &frames);
    let (r, g, b, w) = ([255, 0, 0], [0, 255, 0], [0, 0, 255], [255; 3]);
    let expected = [
        [[r, r, r, r], [r, r, r, r], [w, w, w, w], [w, w, w, w]],
        [[r, r, r, r], [r, g, g, r], [w, g, g, w], [w, w, w, w]],
        [[b, r, r, r], [b, r, r, r], [b, w, w, w], [b, w, w, w]],
        [[w, r, r, r], [w, r, r, r], [w, w, w, w], [w, w, w, w]],
    ];
    let video = open_video(&path).unwrap();
    assert_eq!(video.fps(), Some(FrameRate::new(25, 1).unwrap()));
    let frames: Vec<_> = video.map(|frame| frame.unwrap().into_pixels()).collect();
    assert_eq!(frames, expected.map(|frame| frame.concat().concat()));
}

#[test]
fn damaged_animations_are_errors_and_do_not_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.gif");
    write(&path, &options(16, 16), (0..3).map(|seed| noise(16, 16, seed))).unwrap();
    let clip = fs::read(&path).unwrap();
    for len in (0..clip.len() - 1).step_by(7) {
        fs::write(&path, &clip[..len]).unwrap();
        let error = reason(read(&path).unwrap_err());
        assert!(
            matches!(error, Error::DecodeGif { .. } | Error::UnknownVideo | Error::NoFrames { .. }),
            "{len}: {error}"
        );
    }
    let webp = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/animated.webp")).unwrap();
    let mut refused = 0;
    for seed in 0..600 {
        let mut bytes = if seed % 2 == 0 { clip.clone() } else { webp.clone() };
        let random = noise(4, 1, seed).into_pixels();
        for place in random.chunks(4) {
            let at = (usize::from(place[0]) << 8 | usize::from(place[1])) % bytes.len();
            bytes[at] = place[2];
        }
        fs::write(&path, &bytes).unwrap();
        refused += usize::from(read(&path).is_err());
    }
    assert!(refused > 50, "{refused}");
}

#[test]
fn an_animated_webp_gives_all_its_frames() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/animated.webp");
    let video = open_video(&path).unwrap();
    let (count, fps) = (video.frame_count(), video.fps());
    let frames: Vec<_> = video.map(Result::unwrap).collect();
    assert_eq!(count, Some(frames.len() as u64));
    assert!(frames.len() > 1 && fps.is_some(), "{} {fps:?}", frames.len());
    assert!(frames[0] == media::decode_file(&path).unwrap());
    assert!(frames[1] != frames[0]);
}
