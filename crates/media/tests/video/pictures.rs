//! Series of pictures, and single ones, as videos.

use std::fs;
use std::path::Path;

use media::{Error, ImageFormat, encode, open_video};

use super::{card, noise, read, reason};

fn put(folder: &Path, name: &str, seed: u64) {
    let format = ImageFormat::from_path(name).unwrap();
    fs::write(folder.join(name), encode(&noise(12, 8, seed), format, &[]).unwrap()).unwrap();
}

#[test]
fn numbers_give_the_order_and_not_the_alphabet() {
    let folder = tempfile::tempdir().unwrap();
    for seed in [10, 9, 8, 11, 7] {
        put(folder.path(), &format!("a{seed}.png"), seed);
    }
    fs::write(folder.path().join("notes.txt"), b"x").unwrap();
    fs::write(folder.path().join(".hidden.png"), b"x").unwrap();
    let expected: Vec<_> = (7..12).map(|seed| noise(12, 8, seed)).collect();
    let video = open_video(folder.path()).unwrap();
    assert_eq!((video.width(), video.height(), video.fps(), video.frame_count()), (12, 8, None, Some(5)));
    assert!(video.map(Result::unwrap).eq(expected.iter().cloned()));
    assert!(read(&folder.path().join("a%d.png")).unwrap() == expected);
    // Only the numbers that are written like this.
    put(folder.path(), "a012.png", 12);
    assert!(read(&folder.path().join("a%d.png")).unwrap() == expected);
    assert_eq!(read(&folder.path().join("a%03d.png")).unwrap().len(), 1);
}

#[test]
fn webp_series_and_single_pictures_are_read() {
    let folder = tempfile::tempdir().unwrap();
    (0..3).for_each(|seed| put(folder.path(), &format!("{seed:04}.webp"), seed));
    assert_eq!(read(folder.path()).unwrap().len(), 3);
    for (name, exact) in [("0001.webp", true), ("x.png", true), ("y.jpg", false)] {
        if !exact || name.ends_with("png") {
            put(folder.path(), name, 1);
        }
        let frames = read(&folder.path().join(name)).unwrap();
        assert_eq!(frames.len(), 1, "{name}");
        assert!(!exact || frames[0] == noise(12, 8, 1), "{name}");
    }
}

#[test]
fn a_missing_or_double_frame_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    [1, 2, 4].into_iter().for_each(|seed| put(folder.path(), &format!("f{seed}.png"), seed));
    let expected = "frame 4 follows frame 2, expected every number once";
    for path in [folder.path().to_owned(), folder.path().join("f%d.png")] {
        let error = open_video(&path).unwrap_err();
        assert_eq!(error.to_string(), format!("{}: {expected}", path.display()));
    }
    put(folder.path(), "f3.png", 3);
    assert_eq!(read(folder.path()).unwrap().len(), 4);
    put(folder.path(), "f03.png", 3);
    assert!(matches!(open_video(folder.path()), Err(Error::Numbering { before: 3, after: 3, .. })));
}

#[test]
fn a_folder_of_other_pictures_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(open_video(folder.path()), Err(Error::NoPictures { .. })));
    assert!(matches!(open_video(folder.path().join("%d.png")), Err(Error::NoPictures { .. })));
    put(folder.path(), "frame-1.png", 1);
    put(folder.path(), "cover.png", 1);
    let error = open_video(folder.path()).unwrap_err();
    let shown = folder.path().display();
    let expected =
        "cover.png and frame-1.png are not of one numbered series, expected a folder with the frames of one video";
    assert_eq!(error.to_string(), format!("{shown}: {expected}"));
    fs::rename(folder.path().join("cover.png"), folder.path().join("frame-2.jpg")).unwrap();
    assert!(matches!(open_video(folder.path()), Err(Error::MixedSeries { .. })));
}

#[test]
fn frames_of_different_sizes_are_an_error_that_names_one() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "1.png", 1);
    put(folder.path(), "2.png", 2);
    let bytes = encode(&card(8, 12, 0), ImageFormat::Png, &[]).unwrap();
    fs::write(folder.path().join("3.png"), bytes).unwrap();
    let mut video = open_video(folder.path()).unwrap();
    assert!(video.next().unwrap().is_ok() && video.next().unwrap().is_ok());
    let error = reason(video.next().unwrap().unwrap_err());
    assert_eq!(error.to_string(), "frame 3 has 8 x 12 pixels, expected 12 x 8 as before");
    assert!(video.next().is_none());

    fs::write(folder.path().join("3.png"), b"\x89PNG\r\n\x1a\n").unwrap();
    let error = read(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::Picture { path, .. } if path.ends_with("3.png")), "{error}");
}

#[test]
fn an_animated_png_is_not_taken_for_a_still_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png");
    let file = fs::File::create(&path).unwrap();
    let mut encoder = png::Encoder::new(file, 2, 2);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_animated(2, 0).unwrap();
    let mut writer = encoder.write_header().unwrap();
    (0..2).for_each(|level| writer.write_image_data(&[level; 12]).unwrap());
    writer.finish().unwrap();
    assert!(matches!(reason(open_video(&path).unwrap_err()), Error::AnimatedPng));
}

#[test]
fn a_name_that_looks_like_a_pattern_can_be_a_file() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), "a%d.png", 5);
    assert!(read(&folder.path().join("a%d.png")).unwrap() == [noise(12, 8, 5)]);
}
