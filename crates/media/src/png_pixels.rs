//! The pixels of a PNG file, filtered and compressed by all threads.
//!
//! Rows are dealt out in parts of about 128 KiB. Each part is compressed without a look at the others and ends at a whole
//! byte (a "sync flush"), so that parts behind one another are one zlib stream: RFC 1950 and 1951. Parts depend on the size of
//! the picture alone, and so do the bytes.

use miniz_oxide::deflate::core::{
    CompressorOxide, TDEFLFlush, TDEFLStatus, compress_to_output, create_comp_flags_from_zip_params,
};
use rayon::prelude::*;

/// Bytes of a part, about.
const PART: usize = 128 << 10;

/// The number of the filter, before each row.
const PAETH: u8 = 4;

const CHANNELS: usize = 3;

/// A zlib header: a window of 32 KiB, the fastest compression.
const HEADER: [u8; 2] = [0x78, 0x01];

/// Fast: a picture may be computed in less time than the smallest file takes to find.
const LEVEL: i32 = 1;

/// The zlib stream of an 8-bit RGB picture, in pieces for as many IDAT chunks. `pixels` are rows of `width`, which is not 0.
pub(crate) fn compress(pixels: &[u8], width: usize) -> Vec<Vec<u8>> {
    let row = CHANNELS * width;
    let part = (PART / row).max(1) * row;
    let parts = pixels.len().div_ceil(part);
    // No zlib header in the parts: a window of 0.
    let flags = create_comp_flags_from_zip_params(LEVEL, 0, 0);
    let compressed: Vec<_> = (0..parts)
        .into_par_iter()
        .map_init(
            || CompressorOxide::new(flags),
            |compressor, index| {
                let start = index * part;
                let filtered = filter(pixels, row, start..pixels.len().min(start + part));
                let flush = if index + 1 == parts { TDEFLFlush::Finish } else { TDEFLFlush::Sync };
                (deflate(compressor, &filtered, flush), simd_adler32::adler32(&&filtered[..]), filtered.len())
            },
        )
        .collect();
    let mut sum = (1, 0);
    let mut pieces = Vec::with_capacity(parts);
    for (piece, part_sum, len) in compressed {
        sum = joined(sum, (part_sum & 0xffff, part_sum >> 16), len);
        pieces.push(piece);
    }
    if let Some(first) = pieces.first_mut() {
        first.splice(0..0, HEADER);
    }
    if let Some(last) = pieces.last_mut() {
        last.extend((sum.1 << 16 | sum.0).to_be_bytes());
    }
    pieces
}

/// Rows of the range, each behind the number of its filter: what remains of a value after the neighbour that comes nearest to
/// the plane through those to the left, above, and above to the left (PNG, section 9.4).
fn filter(pixels: &[u8], row: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut filtered = Vec::with_capacity(range.len() + range.len() / row);
    let zeros = vec![0; row];
    for start in range.step_by(row) {
        let current = &pixels[start..start + row];
        let above = if start == 0 { &zeros[..] } else { &pixels[start - row..start] };
        filtered.push(PAETH);
        // Left of the first pixel are zeros, of which the nearest to the plane is what is above.
        filtered.extend(current.iter().zip(above).take(CHANNELS).map(|(x, up)| x.wrapping_sub(*up)));
        let neighbours = current.iter().zip(&above[CHANNELS..]).zip(above);
        filtered.extend(current[CHANNELS..].iter().zip(neighbours).map(|(x, ((&left, &up), &corner))| {
            let (a, b, c) = (i16::from(left), i16::from(up), i16::from(corner));
            let (pa, pb, pc) = ((b - c).abs(), (a - c).abs(), (a + b - 2 * c).abs());
            let nearest = if pa <= pb && pa <= pc {
                left
            } else if pb <= pc {
                up
            } else {
                corner
            };
            x.wrapping_sub(nearest)
        }));
    }
    filtered
}

/// `data` as blocks of a deflate stream of its own.
fn deflate(compressor: &mut CompressorOxide, data: &[u8], flush: TDEFLFlush) -> Vec<u8> {
    compressor.reset();
    let mut out = Vec::with_capacity(data.len() + data.len() / 64 + 64);
    let (status, read) = compress_to_output(compressor, data, flush, |bytes| {
        out.extend_from_slice(bytes);
        true
    });
    debug_assert!(matches!(status, TDEFLStatus::Okay | TDEFLStatus::Done) && read == data.len());
    out
}

/// Adler-32 sums (RFC 1950, section 9) of two runs of bytes, the second of `len`, as those of both.
fn joined((a, b): (u32, u32), (next_a, next_b): (u32, u32), len: usize) -> (u32, u32) {
    const MODULUS: u64 = 65521;
    let [a, b, next_a, next_b] = [a, b, next_a, next_b].map(u64::from);
    // Each byte of the second run is added to b again with the a of the first; its own sums began at 1.
    let grown = (len as u64 % MODULUS) * (a + MODULUS - 1);
    (((a + next_a + MODULUS - 1) % MODULUS) as u32, ((b + next_b + grown) % MODULUS) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sums_of_parts_are_those_of_the_whole(data in prop::collection::vec(any::<u8>(), 0..3000), cut in 0usize..3000) {
            let (first, second) = data.split_at(cut.min(data.len()));
            let sum = |data: &[u8]| {
                let sum = simd_adler32::adler32(&data);
                (sum & 0xffff, sum >> 16)
            };
            prop_assert_eq!(joined(sum(first), sum(second), second.len()), sum(&data));
        }
    }

    /// Pictures of one part, of many, of noise and of a single colour, through the decoder of another crate.
    #[test]
    fn every_kind_of_picture_comes_back() {
        let noise =
            |i: usize| (i as u32).wrapping_mul(2_654_435_761) as u8 ^ ((i as u32).wrapping_mul(40_503) >> 9) as u8;
        for (width, height) in [(1, 1), (3, 200), (1000, 100), (50_000, 3), (700, 700)] {
            let len = CHANNELS * width * height;
            for pixels in [(0..len).map(noise).collect::<Vec<u8>>(), vec![7; len]] {
                let pieces = compress(&pixels, width);
                let rows = (PART / (CHANNELS * width)).max(1);
                assert_eq!(pieces.len(), height.div_ceil(rows), "{width}x{height}");
                let picture = crate::Rgb8::new(pixels, width, height).unwrap();
                let file = crate::encode(&picture, crate::ImageFormat::Png, &[]).unwrap();
                assert_eq!(crate::decode(&file).unwrap(), picture, "{width}x{height}");
                let allowed =
                    if picture.pixels().iter().all(|&x| x == 7) { len / 50 + 2000 } else { len + len / 100 + 2000 };
                assert!(file.len() <= allowed, "{width}x{height}: {} bytes", file.len());
            }
        }
    }
}
