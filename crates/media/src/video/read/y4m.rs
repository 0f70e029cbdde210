//! Y4M in.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use super::{FrameSource, about, unreadable};
use crate::video::ycbcr::{Matrix, Planes, Range, Sampling, to_rgb};
use crate::video::{FrameRate, VideoFormat};
use crate::{Error, MAX_PIXELS, Result, Rgb8};

pub(super) const MAGIC: &[u8] = b"YUV4MPEG2";

/// A header line is some 60 bytes long; comments may make it longer.
const MAX_LINE_BYTES: u64 = 4096;

struct Y4mReader<R> {
    path: PathBuf,
    input: R,
    header: Header,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Header {
    width: usize,
    height: usize,
    fps: Option<FrameRate>,
    sampling: Sampling,
    matrix: Matrix,
    range: Range,
}

pub(super) fn open<R: BufRead + Send + 'static>(path: &Path, mut input: R) -> Result<Box<dyn FrameSource>> {
    let line = line(&mut input).map_err(|source| unreadable(path, source))?;
    let header = line
        .ok_or(Error::Y4m { found: "no line at the start".to_owned(), expected: "a line that begins with YUV4MPEG2" })
        .and_then(|line| Header::parse(&line))
        .map_err(|reason| about(path, reason))?;
    Ok(Box::new(Y4mReader { path: path.to_owned(), input, header }))
}

impl<R: BufRead + Send> FrameSource for Y4mReader<R> {
    fn next(&mut self, number: u64) -> Result<Option<Rgb8>> {
        let failed = |source| unreadable(&self.path, source);
        let broken = |reason| about(&self.path, reason);
        let Header { width, height, sampling, matrix, range, .. } = self.header;
        if self.input.fill_buf().map_err(failed)?.is_empty() {
            return Ok(None);
        }
        let line = line(&mut self.input).map_err(failed)?.unwrap_or_default();
        // Parameters may follow; there are none that matter to progressive video.
        if !line.starts_with("FRAME") || !matches!(line.as_bytes().get(5), None | Some(b' ')) {
            let start: String = line.chars().take(20).collect();
            let found = format!("`{}` before frame {number}", start.escape_debug());
            return Err(broken(Error::Y4m { found, expected: "a line that begins with FRAME" }));
        }
        let (chroma_width, chroma_height) = sampling.size(width, height);
        let mut plane = |len: usize| -> Result<Vec<u8>> {
            let mut bytes = Vec::new();
            // Grows with what there is, so that a short file takes little memory whatever it claims.
            self.input.by_ref().take(len as u64).read_to_end(&mut bytes).map_err(failed)?;
            if bytes.len() < len {
                return Err(broken(Error::FrameCutOff { format: VideoFormat::Y4m, frame: number }));
            }
            Ok(bytes)
        };
        let y = plane(width * height)?;
        let cb = plane(chroma_width * chroma_height)?;
        let cr = plane(chroma_width * chroma_height)?;
        to_rgb(&Planes { width, height, y, cb, cr }, sampling, matrix, range).map(Some)
    }

    fn fps(&self) -> Option<FrameRate> {
        self.header.fps
    }
}

/// The next line without its end, if it is complete and not too long.
fn line(input: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    input.take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes)?;
    Ok(bytes.strip_suffix(b"\n").map(|line| String::from_utf8_lossy(line).into_owned()))
}

impl Header {
    fn parse(line: &str) -> Result<Self> {
        let wrong = |field: &str, expected| Error::Y4m {
            found: format!("`{}`", field.chars().take(40).collect::<String>().escape_debug()),
            expected,
        };
        let missing = |what: &str, expected| Error::Y4m { found: format!("no {what}"), expected };
        let mut fields = line.split(' ').filter(|field| !field.is_empty());
        if fields.next() != Some("YUV4MPEG2") {
            return Err(wrong(line, "a line that begins with YUV4MPEG2"));
        }
        let (mut width, mut height, mut fps, mut matrix) = (None, None, None, None);
        // What the format says where a field is missing.
        let mut sampling = Sampling::Both { between_columns: true, between_rows: true };
        let mut range = Range::Limited;
        for field in fields {
            let mut rest = field.chars();
            let kind = rest.next();
            let value = rest.as_str();
            match kind {
                Some('W') => width = Some(side(value).ok_or_else(|| wrong(field, "a width of at least 1 pixel"))?),
                Some('H') => height = Some(side(value).ok_or_else(|| wrong(field, "a height of at least 1 pixel"))?),
                Some('F') if value == "0:0" => fps = None,
                Some('F') => fps = Some(value.parse().map_err(|_| wrong(field, "a frame rate as in F16:1"))?),
                Some('I') if !matches!(value, "p" | "?") => return Err(wrong(field, "progressive frames (Ip)")),
                Some('C') => sampling = chroma(value).ok_or_else(|| wrong(field, LEGAL_CHROMA))?,
                Some('X') => match value {
                    "COLORRANGE=FULL" => range = Range::Full,
                    "COLORRANGE=LIMITED" => range = Range::Limited,
                    "COLORMATRIX=BT601" => matrix = Some(Matrix::Bt601),
                    "COLORMATRIX=BT709" => matrix = Some(Matrix::Bt709),
                    _ => {}
                },
                // The shape of the pixels, and fields that are not known.
                _ => {}
            }
        }
        let width = width.ok_or_else(|| missing("width", "a field as in W832"))?;
        let height = height.ok_or_else(|| missing("height", "a field as in H480"))?;
        if u64::from(width) * u64::from(height) > MAX_PIXELS {
            return Err(Error::TooManyPixels { width, height, max_pixels: MAX_PIXELS });
        }
        let (width, height) = (width as usize, height as usize);
        let matrix = matrix.unwrap_or(Matrix::of_untagged(width, height));
        Ok(Self { width, height, fps, sampling, matrix, range })
    }
}

const LEGAL_CHROMA: &str = "8 bits and one of: C420, C420jpeg, C420mpeg2, C420paldv, C422, C444, Cmono";

fn chroma(value: &str) -> Option<Sampling> {
    match value {
        "420" | "420jpeg" => Some(Sampling::Both { between_columns: true, between_rows: true }),
        "420mpeg2" => Some(Sampling::Both { between_columns: false, between_rows: true }),
        "420paldv" => Some(Sampling::Both { between_columns: false, between_rows: false }),
        "422" => Some(Sampling::Columns),
        "444" => Some(Sampling::Full),
        "mono" => Some(Sampling::None),
        _ => None,
    }
}

fn side(value: &str) -> Option<u32> {
    value.parse().ok().filter(|&side| side > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<Header> {
        Header::parse(&format!("YUV4MPEG2 {fields}"))
    }

    #[test]
    fn fields_come_in_any_order_and_have_defaults() {
        let header = parse("H480 W832").unwrap();
        let centre = Sampling::Both { between_columns: true, between_rows: true };
        let expected = Header {
            width: 832,
            height: 480,
            fps: None,
            sampling: centre,
            matrix: Matrix::Bt601,
            range: Range::Limited,
        };
        assert_eq!(header, expected);
        let header = parse("W1280 A1:1 F24000:1001 C444 XYSCSS=444 Ip H720 XCOLORRANGE=FULL Znew").unwrap();
        assert_eq!((header.fps, header.sampling), (Some(FrameRate::new(24_000, 1001).unwrap()), Sampling::Full));
        assert_eq!((header.matrix, header.range), (Matrix::Bt709, Range::Full));
        assert_eq!(parse("W2 H2 XCOLORMATRIX=BT709").unwrap().matrix, Matrix::Bt709);
        assert_eq!(parse("W2 H2 F0:0").unwrap().fps, None);
    }

    #[test]
    fn wrong_fields_are_named_with_what_is_legal() {
        for (fields, message) in [
            ("H2", "no width, expected a field as in W832"),
            ("W2", "no height, expected a field as in H480"),
            ("W0 H2", "`W0`, expected a width of at least 1 pixel"),
            ("W2 H-2", "`H-2`, expected a height of at least 1 pixel"),
            ("W2 H99999999999", "`H99999999999`, expected a height of at least 1 pixel"),
            ("W2 H2 F16", "`F0:1`, expected a frame rate as in F16:1"),
            ("W2 H2 It", "`It`, expected progressive frames (Ip)"),
            ("W2 H2 C420p10", &format!("`C420p10`, expected {LEGAL_CHROMA}")),
        ] {
            let fields = fields.replace("F16", "F0:1");
            assert_eq!(parse(&fields).unwrap_err().to_string(), format!("broken Y4M video: {message}"));
        }
        assert!(matches!(parse("W65535 H65535"), Err(Error::TooManyPixels { .. })));
        assert!(matches!(Header::parse("YUV4MPEG W2 H2"), Err(Error::Y4m { .. })));
        let long = format!("W{}\n", "\u{7}".repeat(1000));
        assert!(parse(&long).unwrap_err().to_string().len() < 400);
    }
}
