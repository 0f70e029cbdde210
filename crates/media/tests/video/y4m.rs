//! Y4M out byte for byte, and in from others.

use std::fs;
use std::path::Path;

use media::{Error, FrameRate, Rgb8, VideoOptions, open_video};

use super::{CARD, another_process, card, in_another_process, noise, options, read, reason, write};

/// Files made by hand.
fn read_bytes(bytes: &[u8]) -> media::Result<Vec<Rgb8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    fs::write(&path, bytes).unwrap();
    read(&path)
}

fn largest_difference(a: &[Rgb8], b: &[Rgb8]) -> u8 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(a, b)| a.pixels().iter().zip(b.pixels()));
    pairs.map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

#[test]
fn a_small_video_has_exactly_these_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    // Red and green above blue and white, then black.
    let bars = Rgb8::new([CARD[0], CARD[1], CARD[2], CARD[3]].concat(), 2, 2).unwrap();
    let black = Rgb8::new(vec![0; 12], 2, 2).unwrap();
    let options = VideoOptions::new(2, 2, FrameRate::new(24_000, 1001).unwrap());
    write(&path, &options, [bars, black]).unwrap();
    let expected = [
        &b"YUV4MPEG2 W2 H2 F24000:1001 Ip A1:1 C444 XCOLORRANGE=LIMITED XCOLORMATRIX=BT601\n"[..],
        b"FRAME\n",
        &[81, 145, 41, 235, 90, 54, 240, 128, 240, 34, 110, 128],
        b"FRAME\n",
        &[16, 16, 16, 16, 128, 128, 128, 128, 128, 128, 128, 128],
    ]
    .concat();
    assert_eq!(fs::read(&path).unwrap(), expected);
}

#[test]
fn large_videos_have_the_matrix_of_high_definition() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    for (width, height, matrix, red) in
        [(1279, 2, "601", 81), (1280, 2, "709", 63), (2, 576, "601", 81), (2, 577, "709", 63)]
    {
        let picture = Rgb8::new([255, 0, 0].repeat(width * height), width, height).unwrap();
        write(&path, &options(width, height), [picture.clone()]).unwrap();
        let bytes = fs::read(&path).unwrap();
        let line_len = bytes.iter().position(|&byte| byte == b'\n').unwrap();
        assert!(bytes[..line_len].ends_with(format!("XCOLORMATRIX=BT{matrix}").as_bytes()), "{width} x {height}");
        assert_eq!(bytes[line_len + 1 + "FRAME\n".len()], red);
        assert!(largest_difference(&read(&path).unwrap(), &[picture]) <= 1);
    }
}

#[test]
fn frames_come_back_within_two_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    for count in [1, 2, 9, 81] {
        let frames: Vec<_> = (0..count).map(|seed| noise(33, 17, seed)).collect();
        assert_eq!(write(&path, &options(33, 17), frames.clone()).unwrap(), count);
        let video = open_video(&path).unwrap();
        assert_eq!((video.width(), video.height(), video.frame_count()), (33, 17, None));
        assert_eq!(video.fps(), Some(FrameRate::new(16, 1).unwrap()));
        let back: Vec<_> = video.collect::<Result<_, _>>().unwrap();
        assert!(largest_difference(&back, &frames) <= 2);
    }
    let bars: Vec<_> = (0..8).map(|shift| card(64, 64, shift)).collect();
    write(&path, &options(64, 64), bars.clone()).unwrap();
    assert!(largest_difference(&read(&path).unwrap(), &bars) <= 1);
}

/// Odd sides: planes of 3 x 3 and, at 4:2:0, 2 x 2 samples.
#[test]
fn other_samplings_are_read() {
    let white = [235_u8; 9];
    let frame = |fields: &str, colours: &[u8]| {
        let bytes = [format!("YUV4MPEG2 W3 H3 F25:2 Ip {fields}\nFRAME Ixyz\n").as_bytes(), &white, colours].concat();
        let frames = read_bytes(&bytes).unwrap();
        assert_eq!(frames.len(), 1);
        frames[0].clone().into_pixels()
    };
    for (fields, samples) in [
        ("C420jpeg", 4),
        ("C420mpeg2", 4),
        ("C420paldv", 4),
        ("C420", 4),
        ("", 4),
        ("C422", 6),
        ("C444", 9),
        ("Cmono", 0),
    ] {
        assert_eq!(frame(fields, &vec![128; 2 * samples]), [255; 27], "{fields}");
    }
    // Red differences of 128 on the left and 64 on the right: in BT.601, 1.596 for each step.
    let across = |fields: &str| {
        let cr = [128, 64, 128, 64];
        let pixels = frame(fields, &[&[128; 4][..], &cr].concat());
        assert_eq!((pixels[..9].to_vec(), pixels[9..18].to_vec()), (pixels[18..].to_vec(), pixels[..9].to_vec()));
        [pixels[0], pixels[3], pixels[6]]
    };
    assert_eq!(across("C420mpeg2"), [255, 255 - 51, 255 - 102]);
    assert_eq!(across("C420jpeg"), [255, 255 - 26, 255 - 77]);
    // And down.
    let down = |fields: &str| {
        let cr = [128, 128, 64, 64];
        let pixels = frame(fields, &[&[128; 4][..], &cr].concat());
        [pixels[0], pixels[9], pixels[18]]
    };
    assert_eq!(down("C420paldv"), [255, 255 - 51, 255 - 102]);
    assert_eq!(down("C420mpeg2"), [255, 255 - 26, 255 - 77]);
}

#[test]
fn full_range_is_honoured() {
    let read = |range: &str| {
        let bytes = [format!("YUV4MPEG2 W1 H1 C444 {range}\nFRAME\n").as_bytes(), &[235, 128, 128]].concat();
        read_bytes(&bytes).unwrap()[0].pixels()[0]
    };
    assert_eq!((read(""), read("XCOLORRANGE=LIMITED"), read("XCOLORRANGE=FULL")), (255, 255, 235));
}

#[test]
fn a_file_that_is_cut_off_is_an_error_and_not_a_shorter_video() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    write(&path, &options(4, 4), (0..3).map(|seed| noise(4, 4, seed))).unwrap();
    let bytes = fs::read(&path).unwrap();
    let header_len = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    let frame_len = "FRAME\n".len() + 48;
    assert_eq!(bytes.len(), header_len + 3 * frame_len);
    for len in 0..bytes.len() {
        let result = read_bytes(&bytes[..len]);
        match len.checked_sub(header_len) {
            Some(0) => assert!(matches!(result, Err(Error::NoFrames { .. }))),
            Some(rest) if rest % frame_len == 0 => assert_eq!(result.unwrap().len(), rest / frame_len),
            _ => drop(reason(result.unwrap_err())),
        }
    }
    let error = reason(read_bytes(&bytes[..bytes.len() - 1]).unwrap_err());
    assert_eq!(error.to_string(), "broken Y4M video: frame 3 is cut off");
}

#[test]
fn frames_before_the_damage_are_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    write(&path, &options(4, 4), (0..3).map(|seed| noise(4, 4, seed))).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 48 - "FRAME\n".len();
    bytes[last..last + 6].copy_from_slice(b"FR\x07ME\n");
    fs::write(&path, &bytes).unwrap();
    let mut video = open_video(&path).unwrap();
    assert!(video.next().unwrap().is_ok() && video.next().unwrap().is_ok());
    let error = reason(video.next().unwrap().unwrap_err());
    assert_eq!(
        error.to_string(),
        r"broken Y4M video: `FR\u{7}ME` before frame 3, expected a line that begins with FRAME"
    );
    assert!(video.next().is_none() && video.next().is_none());
}

#[test]
fn claims_of_a_small_file_take_no_memory() {
    for (fields, len) in [("W65535 H65535", 0), ("W8192 H8192", 1000), ("W4294967295 H4294967295", 10)] {
        let bytes = [format!("YUV4MPEG2 {fields} C444\nFRAME\n").as_bytes(), &vec![0; len]].concat();
        let error = reason(read_bytes(&bytes).unwrap_err());
        assert!(matches!(error, Error::TooManyPixels { .. } | Error::FrameCutOff { .. }), "{error}");
    }
    for bytes in [[&b"YUV4MPEG2 W2 H2 X"[..], &[b'a'; 100_000]].concat(), b"YUV4MPEG2 W2 H2\nFRAME".to_vec()] {
        assert!(matches!(reason(read_bytes(&bytes).unwrap_err()), Error::Y4m { .. }));
    }
}

#[test]
fn damaged_files_do_not_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    write(&path, &options(5, 3), (0..2).map(|seed| noise(5, 3, seed))).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut refused = 0;
    for seed in 0..2000 {
        let random = noise(8, 1, seed).into_pixels();
        let mut damaged = bytes.clone();
        for pair in random[..2 * (1 + seed as usize % 4)].chunks(2) {
            // Mostly the header.
            damaged[usize::from(pair[0]) % bytes.len().min(120)] = pair[1];
        }
        refused += usize::from(read_bytes(&damaged).is_err());
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn other_files_are_told_apart() {
    for bytes in [&b""[..], b"hello", b"\0\0\0\x20ftypisom\0\0\x02\0", b"YUV4MPE"] {
        let error = reason(read_bytes(bytes).unwrap_err());
        assert!(matches!(error, Error::UnknownVideo), "{error}");
        assert!(error.to_string().contains("ffmpeg -i clip.mp4 frame-%05d.png"));
    }
    let missing = open_video(Path::new("no/such/clip.y4m")).unwrap_err();
    assert!(matches!(&missing, Error::Read { .. }), "{missing}");
}

#[test]
fn standard_output_gets_the_bytes_of_the_file() {
    let frames = || (0..3).map(|seed| noise(33, 17, seed));
    if in_another_process() {
        write(Path::new("-"), &options(33, 17), frames()).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    write(&path, &options(33, 17), frames()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let output = another_process("y4m::standard_output_gets_the_bytes_of_the_file").output().unwrap();
    assert!(output.status.success());
    // Between the lines of the test itself.
    assert_eq!(output.stdout.windows(bytes.len()).filter(|window| *window == bytes).count(), 1);
}

#[test]
fn standard_input_is_read() {
    if in_another_process() {
        let video = open_video("-").unwrap();
        assert_eq!((video.width(), video.height()), (33, 17));
        assert_eq!(video.map(Result::unwrap).count(), 3);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.y4m");
    write(&path, &options(33, 17), (0..3).map(|seed| noise(33, 17, seed))).unwrap();
    let run = |len: u64| {
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        file.set_len(len).unwrap();
        another_process("y4m::standard_input_is_read").stdin(file).output().unwrap().status.success()
    };
    let len = fs::metadata(&path).unwrap().len();
    assert!(run(len));
    assert!(!run(len - 1));
}
