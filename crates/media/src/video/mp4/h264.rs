//! Frames to H.264.

use openh264::OpenH264API;
use openh264::encoder::{
    BitRate, Complexity, EncodedBitStream, Encoder, EncoderConfig, FrameRate, FrameType, IntraFramePeriod, Profile,
    QpRange, RateControlMode, SpsPpsStrategy, UsageType, VuiConfig,
};
use openh264::formats::YUVSlices;

use super::sequence::with_crop;
use crate::video::ycbcr::{Matrix, Planes, to_420};
use crate::video::{VideoFormat, VideoOptions};
use crate::{Error, Result, Rgb8};

/// Pictures are coded in squares of this side.
const MACROBLOCK: usize = 16;

/// The coarsest one that H.264 has.
const MAX_QUANTISER: u8 = 51;

/// How often a player can begin, in seconds.
const KEY_FRAME_SECONDS: f64 = 5.0;

/// OpenH264 with a constant quantiser: no rate control that could drop a frame.
pub(super) struct H264Encoder {
    options: VideoOptions,
    quantiser: u8,
    encoder: Encoder,
    sets: Option<ParameterSets>,
    /// Of the frame last coded.
    sample: Sample,
    last_is_key: bool,
    frames: u64,
    restarts: u32,
}

/// What a decoder needs before the first frame, each without a start code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParameterSets {
    pub(super) sequence: Vec<u8>,
    pub(super) picture: Vec<u8>,
}

/// A coded frame: units that are each preceded by their length in 4 bytes.
#[derive(Debug)]
pub(super) struct CodedFrame<'a> {
    pub(super) bytes: &'a [u8],
    /// Whether decoding can begin here.
    pub(super) is_key: bool,
}

impl H264Encoder {
    pub(super) fn new(options: &VideoOptions) -> Result<Self> {
        let quantiser = quantiser(options.quality);
        let encoder = encoder(options, quantiser).map_err(|error| failed(1, &error))?;
        Ok(Self {
            options: *options,
            quantiser,
            encoder,
            sets: None,
            sample: Sample::default(),
            last_is_key: false,
            frames: 0,
            restarts: 0,
        })
    }

    /// `picture` has the size of the options.
    ///
    /// The encoder gives up on a frame that would become larger than without coding, which noise with a fine quantiser
    /// does. It begins anew then, with steps twice as large, which stay for the rest of the video.
    pub(super) fn encode(&mut self, picture: &Rgb8) -> Result<CodedFrame<'_>> {
        let number = self.frames + 1;
        let wrong = |reason: &str| Error::EncodeH264 { frame: number, reason: reason.to_owned() };
        // Even sides in particular, without which the binding panics.
        let Planes { width, height, y, cb, cr } = to_420(picture, Matrix::Bt709, MACROBLOCK);
        let source = YUVSlices::new((&y, &cb, &cr), (width, height), (width, width / 2, width / 2));
        let (is_key, sets) = loop {
            match self.encoder.encode(&source) {
                Ok(coded) => break self.sample.take_units(&coded).map_err(wrong)?,
                Err(error) if self.quantiser >= MAX_QUANTISER => return Err(failed(number, &error)),
                Err(_) => self.restart(&source)?,
            }
        };
        if let Some(mut sets) = sets {
            let (shown_width, shown_height) = VideoFormat::Mp4.stored_size(picture.width(), picture.height());
            sets.sequence = with_crop(&sets.sequence, width - shown_width, height - shown_height)
                .ok_or_else(|| wrong("the encoder has other parameters than expected"))?;
            // The file has one set for all frames.
            if self.sets.get_or_insert_with(|| sets.clone()) != &sets {
                return Err(wrong("the encoder has changed its parameters"));
            }
        }
        if number == 1 && !(is_key && self.sets.is_some()) {
            return Err(wrong("the encoder does not begin with a key frame"));
        }
        self.frames = number;
        self.last_is_key = is_key;
        Ok(CodedFrame { bytes: &self.sample.0, is_key })
    }

    /// Begins anew with steps twice as large.
    fn restart(&mut self, source: &YUVSlices<'_>) -> Result<()> {
        self.quantiser = (self.quantiser + 6).min(MAX_QUANTISER);
        self.restarts += 1;
        self.encoder = encoder(&self.options, self.quantiser).map_err(|error| failed(self.frames + 1, &error))?;
        // A key frame right after another one must have another number (idr_pic_id); they count from the start.
        if self.last_is_key {
            for _ in 0..self.restarts {
                // The frame itself is coded after this, and a failed encoder refuses it again.
                let _ = self.encoder.encode(source);
                self.encoder.force_intra_frame();
            }
        }
        Ok(())
    }

    /// Known after the first frame.
    pub(super) fn parameter_sets(&self) -> Result<ParameterSets> {
        let missing = || Error::EncodeH264 { frame: 1, reason: "no parameters without a frame".to_owned() };
        self.sets.clone().ok_or_else(missing)
    }
}

fn encoder(options: &VideoOptions, quantiser: u8) -> std::result::Result<Encoder, openh264::Error> {
    // The level limits frame rates to 60 in any case; more is shown by the file's own clock.
    let fps = options.fps.as_f64().min(60.0);
    let pixels = (options.width * options.height) as f64;
    // An estimate that the level follows; at a constant quantiser the rate is what it is.
    let bitrate = (pixels * fps / 2.0).max(64_000.0) as u32;
    let config = EncoderConfig::new()
        // Of the modes, the one that obeys the range of quantisers alone, without warnings about skipped frames.
        .rate_control_mode(RateControlMode::Bufferbased)
        .qp(QpRange::new(quantiser, quantiser))
        .skip_frames(false)
        .bitrate(BitRate::from_bps(bitrate))
        .max_frame_rate(FrameRate::from_hz(fps as f32))
        .intra_frame_period(IntraFramePeriod::from_num_frames(key_frame_period(options)))
        // Cuts would raise the quantiser.
        .scene_change_detect(false)
        // Would blur what moves slowly.
        .background_detection(false)
        .adaptive_quantization(false)
        .usage_type(UsageType::CameraVideoRealTime)
        .complexity(Complexity::High)
        .profile(Profile::Baseline)
        .sps_pps_strategy(SpsPpsStrategy::ConstantId)
        // The same bytes on every machine.
        .num_threads(1)
        .vui(VuiConfig::bt709());
    Encoder::with_api_config(OpenH264API::from_source(), config)
}

/// The units of a frame, each after its length in 4 bytes.
#[derive(Debug, Default)]
struct Sample(Vec<u8>);

impl Sample {
    /// Takes the pictures out of `coded`. Returns whether this is a key frame, and its parameters.
    fn take_units(
        &mut self,
        coded: &EncodedBitStream<'_>,
    ) -> std::result::Result<(bool, Option<ParameterSets>), &'static str> {
        const DROPPED: &str = "the encoder has dropped it";
        let is_key = match coded.frame_type() {
            FrameType::IDR => true,
            FrameType::I | FrameType::P => false,
            _ => return Err(DROPPED),
        };
        self.0.clear();
        let (mut sequence, mut picture) = (None, None);
        for layer in (0..coded.num_layers()).filter_map(|index| coded.layer(index)) {
            for unit in (0..layer.nal_count()).filter_map(|index| layer.nal_unit(index)) {
                let unit = without_start_code(unit);
                match unit.first().map(|first| first & 0x1f) {
                    Some(SLICE | KEY_SLICE) => {
                        let len = u32::try_from(unit.len()).map_err(|_| "a unit of more than 4 GiB")?;
                        self.0.extend(len.to_be_bytes());
                        self.0.extend(unit);
                    }
                    Some(SEQUENCE_SET) => sequence = Some(unit.to_vec()),
                    Some(PICTURE_SET) => picture = Some(unit.to_vec()),
                    // Hints to decoders.
                    _ => {}
                }
            }
        }
        if self.0.is_empty() {
            return Err(DROPPED);
        }
        Ok((is_key, sequence.zip(picture).map(|(sequence, picture)| ParameterSets { sequence, picture })))
    }
}

/// The H.264 quantiser: 51 at quality 0, 12 at 100; each 6 halve the steps.
fn quantiser(quality: u8) -> u8 {
    MAX_QUANTISER - ((39 * u32::from(quality.min(100)) + 50) / 100) as u8
}

fn key_frame_period(options: &VideoOptions) -> u32 {
    (KEY_FRAME_SECONDS * options.fps.as_f64()).round().max(1.0) as u32
}

// Kinds of units (ITU-T H.264, table 7-1).
const SLICE: u8 = 1;
const KEY_SLICE: u8 = 5;
const SEQUENCE_SET: u8 = 7;
const PICTURE_SET: u8 = 8;

/// A unit comes after two or three zeros and a one.
fn without_start_code(unit: &[u8]) -> &[u8] {
    unit.strip_prefix(&[0, 0, 0, 1]).or_else(|| unit.strip_prefix(&[0, 0, 1])).unwrap_or(unit)
}

fn failed(frame: u64, error: &openh264::Error) -> Error {
    Error::EncodeH264 { frame, reason: error.to_string().replace(char::is_control, " ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FrameRate;

    fn options(fps: u32) -> VideoOptions {
        VideoOptions::new(32, 16, FrameRate::new(fps, 1).unwrap())
    }

    #[test]
    fn quality_spans_the_quantisers_of_the_encoder() {
        assert_eq!([0, 50, 85, 100].map(quantiser), [51, 31, 18, 12]);
        assert_eq!(quantiser(VideoOptions::DEFAULT_QUALITY), 12);
    }

    #[test]
    fn every_frame_is_coded_and_key_frames_come_in_time() {
        let mut encoder = H264Encoder::new(&options(2)).unwrap();
        let keys: Vec<bool> = (0..41)
            .map(|level| {
                let frame = Rgb8::new(vec![level * 6; 3 * 32 * 16], 32, 16).unwrap();
                let coded = encoder.encode(&frame).unwrap();
                let len = u32::from_be_bytes(coded.bytes[..4].try_into().unwrap());
                assert_eq!(len as usize, coded.bytes.len() - 4, "one unit");
                coded.is_key
            })
            .collect();
        assert_eq!(keys, (0..41).map(|index| index % 10 == 0).collect::<Vec<_>>());
    }

    /// The binding would panic at odd sides.
    #[test]
    fn any_size_from_16_on_is_coded() {
        for (width, height) in [(16, 16), (17, 16), (16, 33), (47, 31), (3839, 17)] {
            let options = VideoOptions::new(width, height, FrameRate::new(16, 1).unwrap());
            let mut encoder = H264Encoder::new(&options).unwrap();
            let picture = Rgb8::new(vec![99; 3 * width * height], width, height).unwrap();
            assert!(encoder.encode(&picture).unwrap().is_key, "{width} x {height}");
        }
    }

    #[test]
    fn noise_is_coded_more_coarsely_and_not_dropped() {
        const SIDE: usize = 64;
        let options = VideoOptions::new(SIDE, SIDE, FrameRate::new(16, 1).unwrap());
        let mut state = 1_u32;
        let mut noise = || {
            let values = std::iter::repeat_with(|| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            });
            Rgb8::new(values.take(3 * SIDE * SIDE).collect(), SIDE, SIDE).unwrap()
        };
        let mut encoder = H264Encoder::new(&options).unwrap();
        let first = encoder.encode(&noise()).unwrap();
        assert!(first.is_key);
        let first = number_of_key_frame(first.bytes);
        assert!(encoder.restarts > 0 && encoder.quantiser > 12);
        // A restart right after a key frame.
        encoder.quantiser = 12;
        encoder.encoder = super::encoder(&options, 12).unwrap();
        let restarts = encoder.restarts;
        let second = encoder.encode(&noise()).unwrap();
        assert!(second.is_key);
        let second = number_of_key_frame(second.bytes);
        assert_ne!(first, second);
        assert!(encoder.restarts > restarts);
        assert!((0..9).all(|_| !encoder.encode(&noise()).unwrap().is_key));
    }

    /// Field `idr_pic_id` of the slice header (ITU-T H.264, 7.3.3), after `first_mb_in_slice`, `slice_type`,
    /// `pic_parameter_set_id` and 15 bits of `frame_num`.
    fn number_of_key_frame(sample: &[u8]) -> u32 {
        let mut bits =
            sample[5..20].iter().flat_map(|byte| (0..8).rev().map(move |shift| u32::from(byte >> shift & 1)));
        let mut ue = |skip: usize| {
            let mut bits = bits.by_ref().skip(skip);
            let zeros = bits.by_ref().take_while(|&bit| bit == 0).count();
            bits.take(zeros).fold(1, |value, bit| 2 * value + bit) - 1
        };
        assert_eq!(ue(0), 0);
        let (_, _) = (ue(0), ue(0));
        ue(15)
    }
}
