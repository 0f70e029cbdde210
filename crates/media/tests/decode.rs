//! Pictures of every kind that users pass in (`tests/reference/pictures.py` makes them) and files that are none.

use std::fs;
use std::path::{Path, PathBuf};

use media::{Error, ImageFormat, Rgb8, decode, decode_file, encode};

const W: usize = 17;
const H: usize = 33;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn read(name: &str) -> Rgb8 {
    decode_file(data(name)).unwrap_or_else(|error| panic!("{error}"))
}

/// The picture that `pixel(x, y)` describes.
fn picture(pixel: impl Fn(usize, usize) -> [u8; 3]) -> Rgb8 {
    let pixel = &pixel;
    Rgb8::new((0..H).flat_map(|y| (0..W).flat_map(move |x| pixel(x, y))).collect(), W, H).unwrap()
}

fn colour(x: usize, y: usize) -> [u8; 3] {
    [(x * 15) as u8, (y * 7) as u8, (255 - 5 * (x + y)) as u8]
}

fn grey(y: usize) -> u8 {
    (y * 7) as u8
}

fn over_white(value: u8, x: usize, y: usize) -> u8 {
    let alpha = ((x * 16 + y * 11) % 256) as f64 / 255.0;
    (f64::from(value) * alpha + 255.0 * (1.0 - alpha)).round() as u8
}

fn largest_difference(a: &Rgb8, b: &Rgb8) -> u8 {
    assert_eq!((a.width(), a.height()), (b.width(), b.height()));
    a.pixels().iter().zip(b.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn rgb_is_taken_as_it_is() {
    assert_eq!(read("rgb.png"), picture(colour));
}

#[test]
fn transparent_pixels_show_white() {
    let expected = picture(|x, y| colour(x, y).map(|value| over_white(value, x, y)));
    assert_eq!(read("rgba.png"), expected);
    assert_eq!(read("rgba.webp"), expected);
    assert_eq!(read("grey_alpha.png"), picture(|x, y| [over_white(grey(y), x, y); 3]));
}

#[test]
fn grey_and_palettes_become_colours() {
    assert_eq!(read("grey.png"), picture(|_, y| [grey(y); 3]));
    assert_eq!(read("bilevel.png"), picture(|_, y| [if grey(y) > 100 { 255 } else { 0 }; 3]));
    assert_eq!(read("palette.png"), read("palette.expected.png"));
}

#[test]
fn sixteen_bits_are_rounded_to_eight() {
    // The file holds 257 * value +- 100, which rounds back; a cut would lose one wherever 100 is subtracted.
    assert_eq!(read("rgb16.png"), picture(colour));
}

#[test]
fn the_turn_in_exif_is_carried_out() {
    // Orientation 6 is shown turned by a quarter to the right: the left column, read upwards, is the top row.
    let turned = read("orientation6.png");
    assert_eq!((turned.width(), turned.height()), (H, W));
    let expected: Vec<u8> = (0..W).flat_map(|x| (0..H).rev().flat_map(move |y| colour(x, y))).collect();
    assert_eq!(turned.pixels(), expected);
    let (ours, reference) = (read("orientation6.jpg"), read("orientation6.expected.png"));
    assert_eq!((ours.width(), ours.height()), (2 * H, 2 * W));
    assert!(largest_difference(&ours, &reference) <= 4, "{}", largest_difference(&ours, &reference));
}

#[test]
fn varieties_of_jpeg_and_webp_agree_with_another_decoder() {
    // Decoders round the transforms, and interpolate the chroma planes, in their own ways.
    for (name, tolerance) in [("progressive.jpg", 4), ("cmyk.jpg", 4), ("grey.jpg", 2), ("lossy.webp", 4)] {
        let reference = read(&format!("{}.expected.png", name.split('.').next().unwrap()));
        let difference = largest_difference(&read(name), &reference);
        assert!(difference <= tolerance, "{name}: {difference}");
    }
}

#[test]
fn an_animation_gives_its_first_frame() {
    assert_eq!(read("animated.webp"), picture(colour));
}

#[test]
fn the_content_counts_and_not_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("really-a.jpg");
    fs::copy(data("rgb.png"), &path).unwrap();
    assert_eq!(decode_file(&path).unwrap(), picture(colour));
}

#[test]
fn files_that_are_no_pictures_are_one_line_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.png");
    let message = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        decode_file(&path).unwrap_err().to_string()
    };
    let shown = path.display().to_string();
    assert_eq!(message(b""), format!("{shown}: the file is empty, expected a PNG, JPEG or WebP picture"));
    for bytes in [&b"hello, I am a text file"[..], b"\x89PN", b"\xff\xd8", b"RIFF\0\0\0\0WAVE", b"GIF89a\x01\0", b"\0"]
    {
        assert_eq!(message(bytes), format!("{shown}: not a PNG, JPEG or WebP picture"));
    }
    for bytes in [&b"\x89PNG\r\n\x1a\n"[..], b"\xff\xd8\xff", b"RIFF\xff\xff\xff\xffWEBP"] {
        let message = message(bytes);
        assert!(message.starts_with(&format!("{shown}: broken ")) && !message.contains('\n'), "{message}");
    }
    let missing = decode_file(folder.path().join("missing.png")).unwrap_err();
    assert!(matches!(missing, Error::Read { .. }) && !missing.to_string().contains('\n'), "{missing}");
    assert!(matches!(decode_file(folder.path()), Err(Error::Read { .. })));
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_an_error() {
    for name in ["rgb.png", "orientation6.jpg", "progressive.jpg", "rgba.webp", "animated.webp"] {
        let bytes = fs::read(data(name)).unwrap();
        // Of a PNG the pixels may be complete without the empty last chunk; of a WebP animation, without later frames.
        let end = match name {
            "rgb.png" => bytes.len() - 20,
            "animated.webp" => bytes.len() / 4,
            _ => bytes.len() - 2,
        };
        for len in (0..end).step_by(7).chain([end]) {
            assert!(decode(&bytes[..len]).is_err(), "{name} cut to {len} of {} bytes", bytes.len());
        }
    }
}

#[test]
fn an_end_marker_inside_a_preview_does_not_count() {
    let bytes = encode(&picture(colour), ImageFormat::Jpeg, &[]).unwrap();
    // A segment with a small complete picture in it, right after the start marker.
    let preview = [&b"Exif\0\0"[..], b"\xff\xd8\xff\xd9"].concat();
    let segment = [&[0xff, 0xe1, 0, preview.len() as u8 + 2][..], &preview].concat();
    let whole = [&bytes[..2], &segment, &bytes[2..]].concat();
    assert!(decode(&whole).is_ok());
    assert!(matches!(decode(&whole[..whole.len() - 40]), Err(Error::CutOff { format: ImageFormat::Jpeg })));
}

#[test]
fn a_huge_size_in_a_small_file_is_refused() {
    let mut bytes = fs::read(data("rgb.png")).unwrap();
    bytes[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    let crc = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    let error = decode(&bytes).unwrap_err();
    assert!(matches!(error, Error::TooManyPixels { width: 65_535, height: 65_535, .. }), "{error}");
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 })
    })
}

/// Damaged files are errors or other pictures, never panics.
#[test]
fn damaged_files_do_not_panic() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let mut refused = 0;
    for entry in fs::read_dir(data("")).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for _ in 0..100 {
            let mut damaged = bytes.clone();
            for _ in 0..=random() % 4 {
                let at = random() % damaged.len();
                damaged[at] = random() as u8;
            }
            if random() % 4 == 0 {
                damaged.truncate(random() % damaged.len());
            }
            let _ = media::read_png_text(&damaged);
            refused += usize::from(decode(&damaged).is_err());
        }
    }
    assert!(refused > 500, "{refused}");
}
