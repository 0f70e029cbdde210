//! MP4 files, taken apart by another parser and another decoder than those that made them.

use std::{fs, path::Path};

use image::RgbImage;
use mp4_atom::{Any, Codec, Moov, ReadFrom, StszSamples};
use openh264::{decoder::Decoder, formats::YUVSource};

/// What a file says, and its pictures.
pub(crate) struct Clip {
    /// Width and height in the track header.
    pub(crate) size: (u16, u16),
    /// Duration in seconds.
    pub(crate) seconds: f64,
    /// What it says about itself.
    pub(crate) description: String,
    /// The decoded pictures.
    pub(crate) frames: Vec<RgbImage>,
}

pub(crate) fn read(path: &Path) -> Clip {
    let bytes = fs::read(path).expect("an MP4 file");
    let moov = index(&bytes);
    assert_eq!(moov.trak.len(), 1, "one track");
    let trak = &moov.trak[0];
    let stbl = &trak.mdia.minf.stbl;
    let [Codec::Avc1(avc1)] = stbl.stsd.codecs.as_slice() else { panic!("{:?}", stbl.stsd) };
    let sets = [&avc1.avcc.sequence_parameter_sets[0], &avc1.avcc.picture_parameter_sets[0]];
    let mut decoder = Decoder::new().expect("a decoder");
    let mut stream = Vec::new();
    sets.iter().for_each(|set| unit(&mut stream, set));
    let mut frames = Vec::new();
    for mut sample in samples(&moov, &bytes) {
        while let Some((len, rest)) = sample.split_first_chunk::<4>() {
            let (content, rest) = rest.split_at(u32::from_be_bytes(*len) as usize);
            unit(&mut stream, content);
            sample = rest;
        }
        let decoded = decoder.decode(&stream).expect("a sound stream").expect("a picture for each sample");
        frames.push(rgb(&decoded));
        stream.clear();
    }
    let seconds = moov.mvhd.duration as f64 / f64::from(moov.mvhd.timescale);
    let meta = moov.udta.as_ref().and_then(|udta| udta.meta.as_ref()).expect("metadata");
    let [Any::Ilst(list)] = meta.items.as_slice() else { panic!("{:?}", meta.items) };
    let description = list.desc.as_ref().expect("a description").text.clone();
    Clip { size: (trak.tkhd.width.integer(), trak.tkhd.height.integer()), seconds, description, frames }
}

fn index(bytes: &[u8]) -> Moov {
    let mut rest = bytes;
    let mut found = None;
    while !rest.is_empty() {
        if let Any::Moov(moov) = Any::read_from(&mut rest).expect("an atom") {
            found = Some(moov);
        }
    }
    found.expect("an index")
}

/// The bytes of each sample: chunk offsets, samples of a chunk and their sizes are in three tables.
fn samples<'a>(moov: &Moov, bytes: &'a [u8]) -> Vec<&'a [u8]> {
    let stbl = &moov.trak[0].mdia.minf.stbl;
    let StszSamples::Different { sizes } = &stbl.stsz.samples else { panic!("{:?}", stbl.stsz) };
    let mut sizes = sizes.iter();
    let mut samples = Vec::new();
    for (chunk, &offset) in (1..).zip(&stbl.stco.as_ref().expect("chunk offsets").entries) {
        let run = stbl.stsc.entries.iter().rfind(|run| run.first_chunk <= chunk).expect("a run of chunks");
        let mut at = offset as usize;
        for &size in sizes.by_ref().take(run.samples_per_chunk as usize) {
            samples.push(&bytes[at..at + size as usize]);
            at += size as usize;
        }
    }
    assert_eq!(sizes.next(), None, "samples outside of chunks");
    samples
}

/// A unit behind a start code.
fn unit(stream: &mut Vec<u8>, content: &[u8]) {
    stream.extend([0, 0, 0, 1]);
    stream.extend(content);
}

/// By the formulas of BT.709, limited range.
fn rgb(planes: &impl YUVSource) -> RgbImage {
    let ((width, height), strides) = (planes.dimensions(), planes.strides());
    RgbImage::from_fn(width as u32, height as u32, |x, y| {
        let (x, y) = (x as usize, y as usize);
        let luma = (f64::from(planes.y()[y * strides.0 + x]) - 16.0) / 219.0;
        let difference = |plane: &[u8]| (f64::from(plane[y / 2 * strides.1 + x / 2]) - 128.0) / 224.0;
        let (cb, cr) = (difference(planes.u()), difference(planes.v()));
        let (red, blue) = (luma + 1.5748 * cr, luma + 1.8556 * cb);
        let green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152;
        image::Rgb([red, green, blue].map(|value| (255.0 * value).round() as u8))
    })
}
