//! Files that this crate writes, read back by itself and taken apart by hand.

use std::fs;
use std::path::Path;

use media::{Error, ImageFormat, Rgb8, decode, encode, read_png_text};

fn smooth(width: usize, height: usize) -> Rgb8 {
    let pixel = |x: usize, y: usize| [(x * 5) as u8, (y * 5) as u8, (x + y) as u8];
    Rgb8::new((0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(x, y))).collect(), width, height).unwrap()
}

fn texts(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|&(keyword, text)| (keyword.to_owned(), text.to_owned())).collect()
}

#[test]
fn lossless_formats_give_the_picture_back() {
    for (width, height) in [(1, 1), (1, 7), (33, 17), (50, 50)] {
        for format in [ImageFormat::Png, ImageFormat::WebP] {
            let bytes = encode(&smooth(width, height), format, &[]).unwrap();
            assert_eq!(decode(&bytes).unwrap(), smooth(width, height), "{format} {width}x{height}");
        }
    }
}

#[test]
fn jpeg_is_close_and_keeps_the_colours_of_single_pixels() {
    let picture = smooth(33, 17);
    let bytes = encode(&picture, ImageFormat::Jpeg, &[]).unwrap();
    let back = decode(&bytes).unwrap();
    let difference = |a: &Rgb8, b: &Rgb8| a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b)).max();
    assert!(difference(&picture, &back) <= Some(8), "{:?}", difference(&picture, &back));

    // The frame header: components 1 to 3, each sampled at every pixel (factors 1 x 1), so 4:4:4.
    let frame = bytes.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    let components = &bytes[frame + 10..frame + 19];
    assert_eq!(components.chunks(3).map(|component| component[1]).collect::<Vec<_>>(), [0x11; 3]);

    // Quality 95 divides by a tenth of the standard tables, which begin with 16 (brightness) and 17 (colour).
    let tables: Vec<u8> =
        bytes.windows(6).filter(|head| head[..4] == [0xff, 0xdb, 0, 67]).map(|head| head[5]).collect();
    assert_eq!(tables, [2, 2]);
}

#[test]
fn png_texts_come_back() {
    let long = "猫🐈 ".repeat(12_000);
    let texts = texts(&[
        ("parameters", "ねこ が すわって いる 🐈\nSteps: 4, Seed: 42"),
        ("tallow", r#"{"seed":42}"#),
        ("Long", &long),
        ("Empty", ""),
        ("Überschrift", "a\tb\r\n\u{7f}\u{200f}"),
        // The same keyword twice is allowed.
        ("tallow", "second"),
    ]);
    assert!(long.len() > 90_000);
    let bytes = encode(&smooth(20, 10), ImageFormat::Png, &texts).unwrap();
    assert_eq!(read_png_text(&bytes).unwrap(), texts);
    assert_eq!(decode(&bytes).unwrap(), smooth(20, 10));
}

#[test]
fn texts_are_plain_utf8_in_itxt_chunks() {
    let bytes = encode(&smooth(2, 2), ImageFormat::Png, &texts(&[("parameters", "猫")])).unwrap();
    let chunk = "iTXtparameters\0\0\0\0\0猫".as_bytes();
    assert!(bytes.windows(chunk.len()).any(|window| window == chunk));
}

#[test]
fn a_nul_does_not_cost_the_picture() {
    let bytes = encode(&smooth(2, 2), ImageFormat::Png, &texts(&[("parameters", "a\0b")])).unwrap();
    assert_eq!(read_png_text(&bytes).unwrap(), texts(&[("parameters", "a\u{2400}b")]));
    assert_eq!(decode(&bytes).unwrap(), smooth(2, 2));
}

#[test]
fn a_keyword_that_png_forbids_is_an_error() {
    for keyword in ["", "prompt\n", "プロンプト"] {
        let result = encode(&smooth(2, 2), ImageFormat::Png, &texts(&[("ok", "1"), (keyword, "text")]));
        assert!(matches!(result, Err(Error::Keyword { .. })), "{keyword:?}");
    }
}

#[test]
fn formats_without_texts_say_so_and_still_write_the_picture() {
    assert!(ImageFormat::Png.stores_text());
    for format in [ImageFormat::Jpeg, ImageFormat::WebP] {
        assert!(!format.stores_text());
        let without = encode(&smooth(8, 8), format, &[]).unwrap();
        assert_eq!(encode(&smooth(8, 8), format, &texts(&[("parameters", "x")])).unwrap(), without);
    }
}

#[test]
fn texts_of_other_programs_are_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/texts.png");
    let packed = "猫".repeat(300);
    let expected = texts(&[
        ("Comment", "café"),
        ("Packed", &"z".repeat(300)),
        ("parameters", "猫と🐈\nSeed: 1"),
        ("Packed UTF-8", &packed),
    ]);
    assert_eq!(read_png_text(&fs::read(path).unwrap()).unwrap(), expected);
}

#[test]
fn texts_behind_the_pixels_are_read() {
    let bytes = encode(&smooth(2, 2), ImageFormat::Png, &texts(&[("late", "text")])).unwrap();
    let find = |kind: &[u8]| bytes.windows(4).position(|window| window == kind).unwrap() - 4;
    let (text, pixels, end) = (find(b"iTXt"), find(b"IDAT"), find(b"IEND"));
    assert!(text < pixels);
    let moved = [&bytes[..text], &bytes[pixels..end], &bytes[text..pixels], &bytes[end..]].concat();
    assert_eq!(read_png_text(&moved).unwrap(), texts(&[("late", "text")]));
}

#[test]
fn only_png_has_texts_to_read() {
    assert!(matches!(read_png_text(b""), Err(Error::EmptyFile)));
    let jpeg = encode(&smooth(2, 2), ImageFormat::Jpeg, &[]).unwrap();
    assert!(matches!(read_png_text(&jpeg), Err(Error::UnknownFormat)));
    let png = encode(&smooth(2, 2), ImageFormat::Png, &[]).unwrap();
    assert!(matches!(read_png_text(&png[..40]), Err(Error::DecodePng { .. })));
}
