//! The boxes of an MP4 file (ISO/IEC 14496-12 and, for `avcC`, 14496-15).

use super::h264::ParameterSets;
use crate::video::{VideoFormat, VideoOptions};
use crate::{Error, Result};

/// Players seek by a clock of at least this many ticks a second.
const MIN_TIMESCALE: u32 = 10_000;

/// What the index says of a video with one track, and no edits.
#[derive(Debug)]
pub(super) struct Movie {
    width: usize,
    height: usize,
    /// Ticks a second.
    timescale: u32,
    /// Ticks a frame.
    duration: u32,
    frames_per_chunk: u32,
    /// Of each frame, in bytes.
    sizes: Vec<u32>,
    /// Numbers of the key frames, counted from 1.
    keys: Vec<u32>,
    total_bytes: u64,
    description: Option<String>,
}

impl Movie {
    pub(super) fn new(options: &VideoOptions) -> Self {
        let (mut timescale, mut duration) = (options.fps.numerator(), options.fps.denominator());
        // Exact whatever the rate: both by the same factor. At most 20,000 and, as a frame lasts at most 100 s,
        // 2,000,000 afterwards.
        while timescale < MIN_TIMESCALE {
            timescale *= 2;
            duration *= 2;
        }
        // About a second.
        let frames_per_chunk = (options.fps.as_f64().round() as u32).max(1);
        Self {
            width: options.width,
            height: options.height,
            timescale,
            duration,
            frames_per_chunk,
            sizes: Vec::new(),
            keys: Vec::new(),
            total_bytes: 0,
            description: None,
        }
    }

    pub(super) fn describe(&mut self, text: &str) {
        self.description = Some(text.to_owned());
    }

    pub(super) fn frames(&self) -> u64 {
        self.sizes.len() as u64
    }

    /// So that the duration fits 32 bits: more than 59 hours at 20,000 ticks a second.
    pub(super) fn max_frames(&self) -> u64 {
        u64::from(u32::MAX / self.duration)
    }

    pub(super) fn push(&mut self, bytes: &[u8], is_key: bool) -> Result<()> {
        let frame = self.frames() + 1;
        let too_many = |_| Error::TooManyFrames { format: VideoFormat::Mp4, max: self.max_frames() };
        let number = u32::try_from(frame).map_err(too_many)?;
        let too_large = |_| Error::EncodeH264 { frame, reason: "more than 4 GiB".to_owned() };
        self.sizes.push(u32::try_from(bytes.len()).map_err(too_large)?);
        if is_key {
            self.keys.push(number);
        }
        self.total_bytes += bytes.len() as u64;
        Ok(())
    }

    /// All that precedes the coded frames: `ftyp`, `moov`, and the header of `mdat`.
    pub(super) fn head(&self, sets: &ParameterSets) -> Vec<u8> {
        let mut head = Vec::new();
        put(&mut head, b"ftyp", |out| {
            out.extend(b"isom");
            u32s(out, [0x200]);
            out.extend(b"isomiso2avc1mp41");
        });
        // Where the frames begin depends on the length of the index, which does not depend on the place.
        let ftyp_len = head.len() as u64;
        let mdat_len = 8 + self.total_bytes;
        let is_large = mdat_len > u64::from(u32::MAX);
        let mdat_header = if is_large { 16 } else { 8 };
        let narrow_len = self.moov(sets, 0, OffsetWidth::Narrow).len() as u64;
        let end = ftyp_len + narrow_len + mdat_header + self.total_bytes;
        let (width, moov_len) = if end > u64::from(u32::MAX) {
            (OffsetWidth::Wide, self.moov(sets, 0, OffsetWidth::Wide).len() as u64)
        } else {
            (OffsetWidth::Narrow, narrow_len)
        };
        head.extend(self.moov(sets, ftyp_len + moov_len + mdat_header, width));
        if is_large {
            u32s(&mut head, [1]);
            head.extend(b"mdat");
            head.extend((8 + mdat_len).to_be_bytes());
        } else {
            u32s(&mut head, [mdat_len as u32]);
            head.extend(b"mdat");
        }
        head
    }

    fn moov(&self, sets: &ParameterSets, first_offset: u64, width: OffsetWidth) -> Vec<u8> {
        let mut out = Vec::new();
        let total = self.total_duration();
        put(&mut out, b"moov", |out| {
            put(out, b"mvhd", |out| {
                // Version and flags, times of creation and change (unknown, and the same bytes each time).
                u32s(out, [0, 0, 0, self.timescale, total, NORMAL_SPEED]);
                // Full volume, nothing reserved.
                u32s(out, [0x0100_0000, 0, 0]);
                u32s(out, UPRIGHT);
                u32s(out, [0; 6]);
                // The number of the next track.
                u32s(out, [2]);
            });
            put(out, b"trak", |out| {
                put(out, b"tkhd", |out| {
                    // Enabled and part of the movie; track 1; layer, group and volume 0.
                    u32s(out, [3, 0, 0, 1, 0, total, 0, 0, 0, 0]);
                    u32s(out, UPRIGHT);
                    // The picture, in 1/65536 of a pixel.
                    u32s(out, [self.width, self.height].map(|side| (side as u32) << 16));
                });
                put(out, b"mdia", |out| self.mdia(out, sets, first_offset, width));
            });
            if let Some(text) = &self.description {
                put(out, b"udta", |out| description(out, text));
            }
        });
        out
    }

    fn mdia(&self, out: &mut Vec<u8>, sets: &ParameterSets, first_offset: u64, width: OffsetWidth) {
        put(out, b"mdhd", |out| {
            u32s(out, [0, 0, 0, self.timescale, self.total_duration()]);
            // No language ("und" in three times five bits).
            u32s(out, [0x55c4_0000]);
        });
        put(out, b"hdlr", |out| {
            u32s(out, [0, 0]);
            out.extend(b"vide");
            u32s(out, [0, 0, 0]);
            out.extend(b"video\0");
        });
        put(out, b"minf", |out| {
            put(out, b"vmhd", |out| u32s(out, [1, 0, 0]));
            put(out, b"dinf", |out| {
                put(out, b"dref", |out| {
                    u32s(out, [0, 1]);
                    // The frames are in this file.
                    put(out, b"url ", |out| u32s(out, [1]));
                });
            });
            put(out, b"stbl", |out| self.stbl(out, sets, first_offset, width));
        });
    }

    fn stbl(&self, out: &mut Vec<u8>, sets: &ParameterSets, first_offset: u64, width: OffsetWidth) {
        let frames = self.sizes.len() as u32;
        put(out, b"stsd", |out| {
            u32s(out, [0, 1]);
            put(out, b"avc1", |out| self.avc1(out, sets));
        });
        put(out, b"stts", |out| u32s(out, [0, 1, frames, self.duration]));
        put(out, b"stss", |out| {
            u32s(out, [0, self.keys.len() as u32]);
            u32s(out, self.keys.iter().copied());
        });
        put(out, b"stsc", |out| {
            let (whole, rest) = (frames / self.frames_per_chunk, frames % self.frames_per_chunk);
            // First chunk, frames in each, description 1.
            let runs: &[[u32; 3]] = match (whole, rest) {
                (0, rest) => &[[1, rest, 1]],
                (_, 0) => &[[1, self.frames_per_chunk, 1]],
                (whole, rest) => &[[1, self.frames_per_chunk, 1], [whole + 1, rest, 1]],
            };
            u32s(out, [0, runs.len() as u32]);
            u32s(out, runs.iter().flatten().copied());
        });
        put(out, b"stsz", |out| {
            u32s(out, [0, 0, frames]);
            u32s(out, self.sizes.iter().copied());
        });
        let chunks = self.sizes.chunks(self.frames_per_chunk as usize);
        let offsets = chunks.clone().scan(first_offset, |offset, chunk| {
            let here = *offset;
            *offset += chunk.iter().copied().map(u64::from).sum::<u64>();
            Some(here)
        });
        match width {
            OffsetWidth::Narrow => put(out, b"stco", |out| {
                u32s(out, [0, chunks.len() as u32]);
                // Checked by the caller.
                u32s(out, offsets.map(|offset| offset as u32));
            }),
            OffsetWidth::Wide => put(out, b"co64", |out| {
                u32s(out, [0, chunks.len() as u32]);
                out.extend(offsets.flat_map(u64::to_be_bytes));
            }),
        }
    }

    fn avc1(&self, out: &mut Vec<u8>, sets: &ParameterSets) {
        let (stored_width, stored_height) = VideoFormat::Mp4.stored_size(self.width, self.height);
        // Reserved; data reference 1; reserved.
        u32s(out, [0, 1, 0, 0, 0, 0]);
        // Sides are at most 3840.
        out.extend((stored_width as u16).to_be_bytes());
        out.extend((stored_height as u16).to_be_bytes());
        // 72 dots an inch both ways, reserved, one frame a sample, no name of the encoder, 24 bits of colour.
        u32s(out, [0x0048_0000, 0x0048_0000, 0]);
        out.extend(1_u16.to_be_bytes());
        out.extend([0; 32]);
        out.extend([0x00, 0x18, 0xff, 0xff]);
        put(out, b"avcC", |out| {
            let ParameterSets { sequence, picture } = sets;
            // Profile, its constraints and level are the second to fourth byte of the sequence parameters.
            out.push(1);
            out.extend(sequence.get(1..4).unwrap_or(&[0; 3]));
            // Lengths of 4 bytes, one set of each kind; the upper bits are ones.
            out.extend([0xff, 0xe1]);
            out.extend((sequence.len() as u16).to_be_bytes());
            out.extend(sequence);
            out.push(1);
            out.extend((picture.len() as u16).to_be_bytes());
            out.extend(picture);
        });
        put(out, b"colr", |out| {
            out.extend(b"nclx");
            // Primaries, transfer and matrix of BT.709; limited range.
            out.extend([0, 1, 0, 1, 0, 1, 0]);
        });
        put(out, b"pasp", |out| u32s(out, [1, 1]));
        if (stored_width, stored_height) != (self.width, self.height) {
            put(out, b"clap", |out| {
                // The centre of the picture, from that of the stored frame, in half pixels.
                let offset = |side: usize, stored: usize| (side as i32 - stored as i32) as u32;
                u32s(out, [self.width as u32, 1, self.height as u32, 1]);
                u32s(out, [offset(self.width, stored_width), 2, offset(self.height, stored_height), 2]);
            });
        }
    }

    /// Fits by [`Self::max_frames`].
    fn total_duration(&self) -> u32 {
        self.duration.saturating_mul(self.sizes.len() as u32)
    }
}

/// In 1/65536.
const NORMAL_SPEED: u32 = 0x0001_0000;

/// A matrix that neither turns nor scales.
const UPRIGHT: [u32; 9] = [0x0001_0000, 0, 0, 0, 0x0001_0000, 0, 0, 0, 0x4000_0000];

/// Whether places in the file are written in 4 or in 8 bytes.
#[derive(Debug, Clone, Copy)]
enum OffsetWidth {
    Narrow,
    Wide,
}

fn u32s(out: &mut Vec<u8>, values: impl IntoIterator<Item = u32>) {
    out.extend(values.into_iter().flat_map(u32::to_be_bytes));
}

/// A description as iTunes writes it, and as other programs read it.
fn description(out: &mut Vec<u8>, text: &str) {
    put(out, b"meta", |out| {
        u32s(out, [0]);
        put(out, b"hdlr", |out| {
            u32s(out, [0, 0]);
            out.extend(b"mdirappl");
            // Nothing reserved, no name.
            u32s(out, [0, 0]);
            out.push(0);
        });
        put(out, b"ilst", |out| {
            put(out, b"desc", |out| {
                put(out, b"data", |out| {
                    // UTF-8 text in no language of its own.
                    u32s(out, [1, 0]);
                    out.extend(text.as_bytes());
                });
            });
        });
    });
}

/// A box: its length, its kind, and what `body` writes. Those here are far below 4 GiB.
fn put(out: &mut Vec<u8>, kind: &[u8; 4], body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    u32s(out, [0]);
    out.extend(kind);
    body(out);
    let len = (out.len() - start) as u32;
    out[start..start + 4].copy_from_slice(&len.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FrameRate;

    fn movie(fps: (u32, u32), sizes: &[u32]) -> Movie {
        let mut movie = Movie::new(&VideoOptions::new(64, 48, FrameRate::new(fps.0, fps.1).unwrap()));
        movie.keys = vec![1];
        movie.sizes = sizes.to_vec();
        movie.total_bytes = sizes.iter().copied().map(u64::from).sum();
        movie
    }

    fn sets() -> ParameterSets {
        ParameterSets { sequence: vec![0x67, 66, 0xc0, 30, 1], picture: vec![0x68, 2] }
    }

    /// The values of the box of this kind, from byte `skip` of its body.
    fn find(file: &[u8], kind: &[u8; 4], skip: usize) -> Vec<u32> {
        let at = file.windows(4).position(|window| window == kind).unwrap();
        let len = u32::from_be_bytes(file[at - 4..at].try_into().unwrap()) as usize;
        file[at + 4 + skip..at - 4 + len]
            .chunks_exact(4)
            .map(|word| u32::from_be_bytes(word.try_into().unwrap()))
            .collect()
    }

    #[test]
    fn clocks_are_exact() {
        for (fps, timescale, duration) in [
            ((16, 1), 16_384, 1024),
            ((30_000, 1001), 30_000, 1001),
            ((1, 100), 16_384, 1_638_400),
            ((25, 2), 12_800, 1024),
        ] {
            let movie = movie(fps, &[]);
            assert_eq!((movie.timescale, movie.duration), (timescale, duration), "{fps:?}");
            assert_eq!(u64::from(timescale) * u64::from(fps.1), u64::from(duration) * u64::from(fps.0));
            assert!(movie.max_frames() * u64::from(duration) <= u64::from(u32::MAX));
        }
    }

    #[test]
    fn chunks_cover_every_frame_once() {
        for frames in [1, 2, 3, 4, 5, 6, 7, 9] {
            let sizes: Vec<u32> = (1..=frames).map(|size| size * 10).collect();
            let head = movie((3, 1), &sizes).head(&sets());
            let runs = find(&head, b"stsc", 8);
            let offsets = find(&head, b"stco", 8);
            let per_chunk = |chunk: u32| runs.chunks(3).rfind(|run| run[0] <= chunk).unwrap()[1];
            let mut frame = 0;
            let mut expected = head.len() as u32;
            for (chunk, &offset) in (1..).zip(&offsets) {
                assert_eq!(offset, expected, "{frames}");
                let next = frame + per_chunk(chunk) as usize;
                expected += sizes[frame..next].iter().sum::<u32>();
                frame = next;
            }
            assert_eq!(frame, sizes.len());
        }
    }

    #[test]
    fn files_above_4_gib_have_wide_numbers() {
        const MDAT: usize = 4;
        let fill = |rest: u32| [vec![1_u32 << 30; 3], vec![(1 << 30) - rest]].concat();
        // The frames end exactly where 32 bits end, then one byte behind.
        let head_len = movie((1, 1), &fill(1000)).head(&sets()).len() as u32;
        let narrow = movie((1, 1), &fill(head_len + 1)).head(&sets());
        assert_eq!(narrow.len() as u32, head_len);
        assert_eq!(find(&narrow, b"stco", 8).len(), 4);
        assert_eq!(&narrow[narrow.len() - MDAT..], b"mdat");

        let wide = movie((1, 1), &fill(head_len)).head(&sets());
        let offsets = find(&wide, b"co64", 8);
        assert_eq!(offsets.len(), 8);
        assert_eq!((offsets[0], offsets[1] as usize), (0, wide.len()));
        assert_eq!(&wide[wide.len() - MDAT..], b"mdat");

        let large = movie((1, 1), &[1 << 30; 5]).head(&sets());
        let (header, len) = large[large.len() - 16..].split_at(8);
        assert_eq!(header, [&[0, 0, 0, 1][..], b"mdat"].concat());
        assert_eq!(u64::from_be_bytes(len.try_into().unwrap()), 16 + (5 << 30));
        let offsets = find(&large, b"co64", 8);
        assert_eq!((offsets[0], offsets[1] as usize), (0, large.len()));
        assert_eq!((offsets[8], offsets[9] as usize), (1, large.len()));
    }
}
