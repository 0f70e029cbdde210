//! MP4, read by an independent parser and decoder, and by FFmpeg where there is one.

use std::fs;
use std::path::Path;
use std::process::Command;

use media::{Error, Rgb8, VideoFormat, VideoOptions, VideoWriter};
use mp4_atom::{Any, Avc1, Codec, Colr, FourCC, Moov, ReadFrom, StszSamples};
use openh264::decoder::Decoder;
use openh264::formats::YUVSource;

use super::{another_process, card, flat, in_another_process, noise, options, write};

/// What the parser finds in a file.
struct Parsed {
    moov: Moov,
    avc1: Avc1,
    /// The units of each frame, each after its length.
    samples: Vec<Vec<u8>>,
}

fn parse(path: &Path) -> Parsed {
    let bytes = fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let mut kinds = Vec::new();
    let mut moov = None;
    while !rest.is_empty() {
        let atom = Any::read_from(&mut rest).unwrap();
        kinds.push(atom.kind().to_string());
        if let Any::Moov(found) = atom {
            moov = Some(found);
        }
    }
    assert_eq!(kinds, ["ftyp", "moov", "mdat"], "the index goes first");
    let moov = moov.unwrap();
    assert_eq!(moov.trak.len(), 1);
    let stbl = &moov.trak[0].mdia.minf.stbl;
    let [Codec::Avc1(avc1)] = stbl.stsd.codecs.as_slice() else { panic!("{:?}", stbl.stsd) };
    let StszSamples::Different { sizes } = &stbl.stsz.samples else { panic!("{:?}", stbl.stsz) };
    let mut sizes = sizes.iter();
    let mut samples = Vec::new();
    for (chunk, &offset) in (1..).zip(&stbl.stco.as_ref().unwrap().entries) {
        let run = stbl.stsc.entries.iter().rfind(|run| run.first_chunk <= chunk).unwrap();
        let mut at = offset as usize;
        for &size in sizes.by_ref().take(run.samples_per_chunk as usize) {
            samples.push(bytes[at..at + size as usize].to_vec());
            at += size as usize;
        }
    }
    assert_eq!(sizes.next(), None, "frames outside of chunks");
    Parsed { avc1: avc1.clone(), samples, moov }
}

impl Parsed {
    /// The frames as OpenH264 decodes them: the whole stored pictures, converted by the formulas of BT.709 with the
    /// colour differences of the nearest sample.
    fn decode(&self) -> Vec<Rgb8> {
        let mut decoder = Decoder::new().unwrap();
        let sets = [&self.avc1.avcc.sequence_parameter_sets[0], &self.avc1.avcc.picture_parameter_sets[0]];
        let mut head: Vec<u8> = sets.into_iter().flat_map(|set| [&[0, 0, 0, 1][..], set].concat()).collect();
        let mut frames = Vec::new();
        for sample in &self.samples {
            let mut stream = std::mem::take(&mut head);
            let mut rest = sample.as_slice();
            while let Some((len, after)) = rest.split_first_chunk::<4>() {
                let (unit, after) = after.split_at(u32::from_be_bytes(*len) as usize);
                stream.extend([0, 0, 0, 1]);
                stream.extend(unit);
                rest = after;
            }
            assert!(rest.is_empty());
            let decoded = decoder.decode(&stream).unwrap().expect("a picture for each frame");
            frames.push(to_rgb(&decoded));
        }
        assert!(decoder.flush_remaining().unwrap().is_empty());
        frames
    }
}

fn to_rgb(planes: &impl YUVSource) -> Rgb8 {
    let ((width, height), strides) = (planes.dimensions(), planes.strides());
    let pixel = |x: usize, y: usize| {
        let luma = (f64::from(planes.y()[y * strides.0 + x]) - 16.0) / 219.0;
        let difference = |plane: &[u8]| (f64::from(plane[y / 2 * strides.1 + x / 2]) - 128.0) / 224.0;
        let (cb, cr) = (difference(planes.u()), difference(planes.v()));
        let (red, blue) = (luma + 1.5748 * cr, luma + 1.8556 * cb);
        let green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152;
        [red, green, blue].map(|value| (255.0 * value).round() as u8)
    };
    Rgb8::new((0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(x, y))).collect(), width, height).unwrap()
}

/// The largest difference of two pictures within the patches of [`card`], away from their edges: coding blurs those, and
/// a sample of colour belongs to both sides. The first may have a column or a row more.
fn difference_within_patches(found: &Rgb8, expected: &Rgb8) -> u8 {
    let (width, height) = (expected.width(), expected.height());
    // Eight pixels are coded together. Where no edge lies within them, the sample beside the edge is the mixed one.
    let margin = |patch: usize| if patch.is_multiple_of(8) { 3 } else { 8 };
    let inner = |at: usize, patch: usize| (margin(patch)..patch - margin(patch)).contains(&(at % patch));
    let mut largest = 0;
    for y in (0..height).filter(|&y| inner(y, height.div_ceil(2))) {
        for x in (0..width).filter(|&x| inner(x, width.div_ceil(4))) {
            largest = largest.max(difference_at(found, expected, x, y));
        }
    }
    largest
}

fn difference_at(a: &Rgb8, b: &Rgb8, x: usize, y: usize) -> u8 {
    let value = |picture: &Rgb8, channel| picture.pixels()[3 * (y * picture.width() + x) + channel];
    (0..3).map(|channel| value(a, channel).abs_diff(value(b, channel))).max().unwrap()
}

#[test]
fn a_description_is_kept_and_changes_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, described) = (folder.path().join("plain.mp4"), folder.path().join("described.mp4"));
    let frames = || (0..3).map(|shift| card(64, 48, shift));
    write(&plain, &options(64, 48), frames()).unwrap();
    let text = r#"{"vae":"日本語","steps":4}"#;
    let mut video = VideoWriter::create(&described, VideoFormat::Mp4, &options(64, 48)).unwrap();
    video.describe("an older one");
    frames().for_each(|frame| video.write(&frame).unwrap());
    video.describe(text);
    video.finish().unwrap();

    let (plain, parsed) = (parse(&plain), parse(&described));
    assert!(plain.moov.udta.is_none());
    let meta = parsed.moov.udta.as_ref().and_then(|udta| udta.meta.as_ref()).expect("metadata");
    assert_eq!(meta.hdlr.handler, FourCC::new(b"mdir"));
    let [Any::Ilst(list)] = meta.items.as_slice() else { panic!("{:?}", meta.items) };
    assert_eq!(list.desc.as_ref().map(|desc| desc.text.as_str()), Some(text));
    // Frames still begin where the index says.
    assert_eq!(parsed.samples, plain.samples);
}

#[test]
fn count_duration_and_tags_are_exact() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for (fps, count) in [("16", 1), ("16", 2), ("24000/1001", 9), ("16", 81), ("0.5", 3), ("120", 240)] {
        let options = VideoOptions::new(64, 64, fps.parse().unwrap());
        assert_eq!(write(&path, &options, (0..count).map(|shift| card(64, 64, shift))).unwrap(), count as u64);
        let Parsed { moov, avc1, samples } = parse(&path);
        assert_eq!(samples.len(), count);

        let mdia = &moov.trak[0].mdia;
        let stts = &mdia.minf.stbl.stts.entries;
        assert_eq!(stts.len(), 1, "a constant frame rate");
        assert_eq!(stts[0].sample_count as usize, count);
        // timescale / delta = numerator / denominator
        let (timescale, delta) = (u64::from(mdia.mdhd.timescale), u64::from(stts[0].sample_delta));
        assert_eq!(timescale * u64::from(options.fps.denominator()), delta * u64::from(options.fps.numerator()));
        assert!(timescale >= 10_000);
        let duration = delta * count as u64;
        assert_eq!(
            (mdia.mdhd.duration, moov.mvhd.duration, moov.trak[0].tkhd.duration),
            (duration, duration, duration)
        );
        assert_eq!(moov.mvhd.timescale, mdia.mdhd.timescale);
        assert!(moov.trak[0].edts.is_none() && mdia.minf.stbl.ctts.is_none());

        let keys = &mdia.minf.stbl.stss.as_ref().unwrap().entries;
        let period = (5.0 * options.fps.as_f64()).round() as u32;
        assert_eq!(*keys, (0..count as u32).step_by(period as usize).map(|index| index + 1).collect::<Vec<_>>());

        let bt709 = Colr::Nclx {
            colour_primaries: 1,
            transfer_characteristics: 1,
            matrix_coefficients: 1,
            full_range_flag: false,
        };
        assert_eq!(avc1.colr, Some(bt709));
        assert_eq!(avc1.avcc.avc_profile_indication, 66);
        assert_eq!((avc1.visual.width, avc1.visual.height, avc1.visual.data_reference_index), (64, 64, 1));
        assert_eq!((avc1.visual.horizresolution.integer(), avc1.visual.depth, avc1.visual.frame_count), (72, 24, 1));
    }
}

/// The bits of a unit from its fifth byte on.
struct Bits(std::vec::IntoIter<u32>);

impl Bits {
    fn of(unit: &[u8]) -> Self {
        let mut unit = unit.to_vec();
        // A 3 after two zeros is no content.
        while let Some(at) = unit.windows(3).position(|window| window == [0, 0, 3]) {
            unit.remove(at + 2);
        }
        let bits = unit[4..].iter().flat_map(|byte| (0..8).rev().map(move |shift| u32::from(byte >> shift & 1)));
        Self(bits.collect::<Vec<_>>().into_iter())
    }

    fn fixed(&mut self, count: usize) -> u32 {
        self.0.by_ref().take(count).fold(0, |value, bit| 2 * value + bit)
    }

    fn exp_golomb(&mut self) -> u32 {
        let zeros = self.0.by_ref().take_while(|&bit| bit == 0).count();
        (1 << zeros) - 1 + self.fixed(zeros)
    }
}

/// Some players read the tags of the stream and not those of the file.
#[test]
fn the_stream_itself_is_tagged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for (width, height) in [(64, 64), (33, 17), (100, 48)] {
        write(&path, &options(width, height), [card(width, height, 0)]).unwrap();
        let parsed = parse(&path);
        let mut bits = Bits::of(&parsed.avc1.avcc.sequence_parameter_sets[0]);
        // ITU-T H.264, 7.3.2.1.1: set, frame numbers of 15 bits, order 2, one reference, no gaps.
        assert_eq!([0; 4].map(|_| bits.exp_golomb()), [0, 11, 2, 1]);
        assert_eq!(bits.fixed(1), 0);
        let macroblocks = (width.div_ceil(16), height.div_ceil(16));
        assert_eq!((bits.exp_golomb() as usize + 1, bits.exp_golomb() as usize + 1), macroblocks);
        // Frames only, and one flag for B-frames.
        assert_eq!(bits.fixed(2) >> 1, 1);
        let stored = media::VideoFormat::Mp4.stored_size(width, height);
        let cut = [(16 * macroblocks.0 - stored.0) / 2, (16 * macroblocks.1 - stored.1) / 2];
        let is_cut = cut != [0, 0];
        assert_eq!(bits.fixed(1), u32::from(is_cut));
        if is_cut {
            assert_eq!([0; 4].map(|_| bits.exp_golomb() as usize), [0, cut[0], 0, cut[1]]);
        }
        // Annex E: there are hints, without a shape of the pixels and an overscan, but with the kind of signal, which is
        // limited and says its colours: primaries, transfer and matrix of BT.709.
        assert_eq!((bits.fixed(1), bits.fixed(2), bits.fixed(1)), (1, 0, 1));
        let _format = bits.fixed(3);
        assert_eq!((bits.fixed(1), bits.fixed(1)), (0, 1));
        assert_eq!([0; 3].map(|_| bits.fixed(8)), [1, 1, 1]);
    }
}

#[test]
fn colours_come_back_within_three_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for count in [1, 2, 9, 81] {
        let frames: Vec<_> = (0..count).map(|shift| card(64, 64, shift)).collect();
        write(&path, &options(64, 64), frames.clone()).unwrap();
        let decoded = parse(&path).decode();
        assert_eq!(decoded.len(), frames.len());
        for (number, (found, expected)) in decoded.iter().zip(&frames).enumerate() {
            assert_eq!((found.width(), found.height()), (64, 64));
            let difference = difference_within_patches(found, expected);
            assert!(difference <= 3, "frame {number} of {count}: {difference}");
        }
    }
}

#[test]
fn odd_sizes_are_stored_even_and_shown_odd() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for (width, height) in [(33, 17), (17, 33), (16, 17), (101, 64), (128, 98)] {
        // Patches where there is room for them.
        let picture = if width * height < 1000 { flat } else { card };
        let frames: Vec<_> = (0..9).map(|shift| picture(width, height, shift)).collect();
        write(&path, &options(width, height), frames.clone()).unwrap();
        let parsed = parse(&path);
        let stored = media::VideoFormat::Mp4.stored_size(width, height);
        assert_eq!(stored, (width + width % 2, height + height % 2));
        let tkhd = &parsed.moov.trak[0].tkhd;
        assert_eq!((usize::from(tkhd.width.integer()), usize::from(tkhd.height.integer())), (width, height));
        let visual = &parsed.avc1.visual;
        assert_eq!((usize::from(visual.width), usize::from(visual.height)), stored);
        // The parser passes over the clean aperture.
        let bytes = fs::read(&path).unwrap();
        let clap = bytes.windows(4).position(|window| window == b"clap");
        if stored == (width, height) {
            assert_eq!(clap, None);
        } else {
            let half_pixels = |side: usize, stored: usize| (side as i32 - stored as i32) as u32;
            let expected = [
                [width as u32, 1],
                [height as u32, 1],
                [half_pixels(width, stored.0), 2],
                [half_pixels(height, stored.1), 2],
            ];
            let expected: Vec<u8> = expected.into_iter().flatten().flat_map(u32::to_be_bytes).collect();
            assert_eq!(bytes[clap.unwrap() + 4..][..32], expected);
        }
        let decoded = parsed.decode();
        assert_eq!(decoded.len(), 9);
        for (found, expected) in decoded.iter().zip(&frames) {
            assert_eq!((found.width(), found.height()), stored);
            let difference = match width * height < 1000 {
                // To the last column and row, and the doubled ones.
                true => {
                    let full =
                        Rgb8::new(expected.pixels()[..3].repeat(stored.0 * stored.1), stored.0, stored.1).unwrap();
                    found.pixels().iter().zip(full.pixels()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
                }
                false => difference_within_patches(found, expected),
            };
            assert!(difference <= 3, "{width} x {height}: {difference}");
        }
    }
}

/// Every pixel in its place: a picture of which each pixel differs from its neighbours.
#[test]
fn pixels_keep_their_places_at_odd_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    let (width, height) = (33, 17);
    let pixels = (0..height).flat_map(|y| (0..width).flat_map(move |x| [(7 * x + y) as u8; 3])).collect();
    let ramp = Rgb8::new(pixels, width, height).unwrap();
    write(&path, &options(width, height), [ramp.clone()]).unwrap();
    let decoded = parse(&path).decode();
    for y in 0..height {
        for x in 0..width {
            assert!(difference_at(&decoded[0], &ramp, x, y) <= 3, "{x}, {y}");
        }
        // The doubled column.
        let (last, doubled) = (3 * (y * 34 + 32), 3 * (y * 34 + 33));
        assert!(decoded[0].pixels()[last].abs_diff(decoded[0].pixels()[doubled]) <= 3);
    }
}

#[test]
fn no_frame_is_dropped_however_hard_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for quality in [0, 85, 100] {
        let options = options(128, 96).with_quality(quality);
        write(&path, &options, (0..40).map(|seed| noise(128, 96, seed / 2))).unwrap();
        assert_eq!(parse(&path).decode().len(), 40, "{quality}");
    }
}

#[test]
fn quality_trades_size_for_closeness() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    // Grain on grey.
    let pixels = noise(64, 64, 1).into_pixels().into_iter().map(|value| 110 + value % 32).collect();
    let picture = Rgb8::new(pixels, 64, 64).unwrap();
    let outcome = |quality: u8| {
        write(&path, &options(64, 64).with_quality(quality), [picture.clone()]).unwrap();
        let decoded = parse(&path).decode().remove(0);
        let squares = decoded.pixels().iter().zip(picture.pixels()).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2));
        (fs::metadata(&path).unwrap().len(), squares.sum::<u64>())
    };
    let outcomes = [0, 50, 85, 100].map(outcome);
    assert!(outcomes.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1), "{outcomes:?}");
}

#[test]
fn sizes_that_h264_cannot_have_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (width, height) in [(15, 16), (16, 15), (3841, 16), (2162, 2162)] {
        let error = write(&folder.path().join("clip.mp4"), &options(width, height), []).unwrap_err();
        assert!(matches!(error, Error::VideoSize { .. }), "{error}");
    }
    // The largest ones, as they are.
    for (width, height) in [(3840, 16), (16, 3840), (2160, 16)] {
        let path = folder.path().join("clip.mp4");
        write(&path, &options(width, height), [card(width, height, 0)]).unwrap();
        let decoded = parse(&path).decode();
        assert_eq!((decoded[0].width(), decoded[0].height()), (width, height));
    }
}

#[test]
fn a_duration_that_does_not_fit_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    // 100 s a frame, at 16,384 ticks a second.
    let options = VideoOptions::new(16, 16, "0.01".parse().unwrap());
    let max = u64::from(u32::MAX) / 1_638_400;
    assert_eq!(write(&path, &options, (0..max).map(|_| card(16, 16, 0))).unwrap(), max);
    let moov = parse(&path).moov;
    assert_eq!(moov.mvhd.duration, max * 1_638_400);
    let error = write(&path, &options, (0..=max).map(|_| card(16, 16, 0))).unwrap_err();
    assert_eq!(error.to_string(), "too many frames for MP4 at this frame rate, expected at most 2621");
}

/// The encoder has warnings of its own, which nobody has asked for.
#[test]
fn nothing_is_printed() {
    if in_another_process() {
        let folder = tempfile::tempdir().unwrap();
        for (width, height, quality) in [(64, 64, 100), (33, 17, 0), (832, 480, 85), (3840, 16, 50)] {
            let frames = (0..3).map(|seed| noise(width, height, seed));
            write(&folder.path().join("clip.mp4"), &options(width, height).with_quality(quality), frames).unwrap();
        }
        return;
    }
    let output = another_process("mp4::nothing_is_printed").output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let lines: Vec<_> = output.stdout.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), 3, "the test's own: {}", String::from_utf8_lossy(&output.stdout));
}

/// A second, wholly independent reader. Says loudly that it is skipped where there is none.
#[test]
fn ffmpeg_agrees() {
    if Command::new("ffmpeg").arg("-version").output().is_err()
        || Command::new("ffprobe").arg("-version").output().is_err()
    {
        eprintln!("SKIPPED: no ffmpeg and ffprobe on PATH");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clip.mp4");
    for (width, height, fps, count, duration) in
        [(64, 64, "16/1", 81, 5.0625), (64, 64, "16/1", 1, 0.0625), (131, 97, "24000/1001", 9, 0.375_375)]
    {
        let frames: Vec<_> = (0..count).map(|shift| card(width, height, shift)).collect();
        write(&path, &VideoOptions::new(width, height, fps.parse().unwrap()), frames.clone()).unwrap();
        let (stored_width, stored_height) = media::VideoFormat::Mp4.stored_size(width, height);

        let shown = "stream=codec_name,width,height,has_b_frames,color_range,color_space,color_transfer,color_primaries,\
                     avg_frame_rate,nb_read_frames,sample_aspect_ratio:format=duration";
        let arguments = ["-v", "warning", "-count_frames", "-show_entries", shown, "-of", "default=nw=1"];
        let probe = Command::new("ffprobe").args(arguments).arg(&path).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&probe.stderr), "");
        let stdout = String::from_utf8_lossy(&probe.stdout);
        let value = |name: &str| {
            let line = stdout.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.unwrap_or_else(|| panic!("{name} in {stdout}")).to_owned()
        };
        for (name, expected) in [
            ("codec_name", "h264".to_owned()),
            ("has_b_frames", "0".to_owned()),
            ("color_range", "tv".to_owned()),
            ("color_space", "bt709".to_owned()),
            ("color_transfer", "bt709".to_owned()),
            ("color_primaries", "bt709".to_owned()),
            ("avg_frame_rate", fps.to_owned()),
            ("nb_read_frames", count.to_string()),
            ("sample_aspect_ratio", "1:1".to_owned()),
        ] {
            assert_eq!(value(name), expected, "{name}");
        }
        assert!((value("duration").parse::<f64>().unwrap() - duration).abs() < 1e-5, "{stdout}");
        // Newer versions apply the clean aperture themselves.
        let (shown_width, shown_height): (usize, usize) =
            (value("width").parse().unwrap(), value("height").parse().unwrap());
        assert!([(width, height), (stored_width, stored_height)].contains(&(shown_width, shown_height)), "{stdout}");

        let decode = Command::new("ffmpeg")
            .args(["-v", "warning", "-i"])
            .arg(&path)
            .args(["-sws_flags", "bilinear+accurate_rnd+full_chroma_int", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&decode.stderr), "");
        let frame_len = 3 * shown_width * shown_height;
        assert_eq!(decode.stdout.len(), count * frame_len);
        for (found, expected) in decode.stdout.chunks(frame_len).zip(&frames) {
            let found = Rgb8::new(found.to_vec(), shown_width, shown_height).unwrap();
            let difference = difference_within_patches(&found, expected);
            assert!(difference <= 3, "{difference}");
        }
    }
}
