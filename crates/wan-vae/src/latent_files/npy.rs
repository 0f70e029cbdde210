//! NumPy's file format for one array, read with suspicion.
//!
//! Format (`numpy/numpy`: `numpy/lib/_format_impl.py`): `\x93NUMPY`, major and minor version, the length of the header
//! (16 bits in version 1, 32 bits after), the header, which is a Python dictionary of `descr`, `fortran_order` and
//! `shape` as text, then the elements.

use std::ops::Range;

use candle_core::DType;

use super::LatentFileError;

/// Longest header that is read, in bytes; NumPy's own limit is 10,000.
const MAX_HEADER: usize = 10_000;

/// Most axes that are read.
const MAX_RANK: usize = 32;

/// A checked array: the range lies inside the file and is as long as type and shape say.
#[derive(Debug, PartialEq)]
pub(super) struct Npy {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

/// Reads the header of a file given as a whole.
pub(super) fn parse(file: &[u8]) -> Result<Npy, LatentFileError> {
    let cut = || bad("the file ends inside the header: truncated download?");
    let &[major, _] = file.get(6..8).and_then(|v| v.first_chunk()).ok_or_else(cut)?;
    let (len, start) = match major {
        1 => (usize::from(u16::from_le_bytes(*file.get(8..).and_then(|v| v.first_chunk()).ok_or_else(cut)?)), 10),
        2 | 3 => {
            let len = u32::from_le_bytes(*file.get(8..).and_then(|v| v.first_chunk()).ok_or_else(cut)?);
            (usize::try_from(len).unwrap_or(usize::MAX), 12)
        }
        _ => return Err(bad(format!("version {major} of the format, 1 to 3 are read"))),
    };
    if len > MAX_HEADER {
        return Err(bad(format!("a header of {len} bytes, more than the {MAX_HEADER} that are read")));
    }
    // No overflow: the length is bounded.
    let text = file.get(start..start + len).ok_or_else(cut)?;
    let text = std::str::from_utf8(text).map_err(|_| bad("the header is not text"))?;
    let header =
        Header::parse(text).ok_or_else(|| bad("the header is not a dictionary of descr, fortran_order and shape"))?;
    if header.fortran_order {
        return Err(bad("elements in column-major order; save numpy.ascontiguousarray(x) instead"));
    }
    let dtype = match header.descr {
        "<f2" => DType::F16,
        "<f4" => DType::F32,
        "<f8" => DType::F64,
        other => {
            let dtype = other.escape_debug().take(40).collect();
            return Err(LatentFileError::ElementType { dtype });
        }
    };
    let wanted = header.shape.iter().try_fold(dtype.size_in_bytes(), |n, &d| n.checked_mul(d));
    let data = start + len..file.len();
    match wanted {
        Some(wanted) if wanted == data.len() => Ok(Npy { dtype, shape: header.shape, bytes: data }),
        Some(wanted) => {
            let advice = if data.len() < wanted { ": truncated download?" } else { "" };
            Err(bad(format!("shape {:?} needs {wanted} bytes, the file has {}{advice}", header.shape, data.len())))
        }
        None => Err(bad("a shape beyond 64 bits")),
    }
}

struct Header<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl<'a> Header<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut rest = text.trim_ascii().strip_prefix('{')?.strip_suffix('}')?;
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        loop {
            rest = rest.trim_ascii_start();
            if rest.is_empty() {
                return Some(Self { descr: descr?, fortran_order: fortran_order?, shape: shape? });
            }
            let (key, after) = quoted(rest)?;
            rest = after.trim_ascii_start().strip_prefix(':')?.trim_ascii_start();
            match key {
                "descr" if descr.is_none() => {
                    let (value, after) = quoted(rest)?;
                    (descr, rest) = (Some(value), after);
                }
                "fortran_order" if fortran_order.is_none() => {
                    let (value, after) = match rest.strip_prefix("False") {
                        Some(after) => (false, after),
                        None => (true, rest.strip_prefix("True")?),
                    };
                    (fortran_order, rest) = (Some(value), after);
                }
                "shape" if shape.is_none() => {
                    let (inner, after) = rest.strip_prefix('(')?.split_once(')')?;
                    (shape, rest) = (Some(extents(inner)?), after);
                }
                _ => return None,
            }
            rest = rest.trim_ascii_start();
            rest = match rest.strip_prefix(',') {
                Some(after) => after,
                None if rest.is_empty() => rest,
                None => return None,
            };
        }
    }
}

/// A text in quotes without escapes, and what follows.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

/// Numbers with commas between them, and perhaps one behind them.
fn extents(text: &str) -> Option<Vec<usize>> {
    let text = text.trim_ascii();
    let text = text.strip_suffix(',').unwrap_or(text);
    if text.is_empty() {
        return Some(Vec::new());
    }
    if text.split(',').count() > MAX_RANK {
        return None;
    }
    // Python 2 wrote long numbers with an L.
    let number = |part: &str| {
        let part = part.trim_ascii();
        let digits = part.strip_suffix('L').unwrap_or(part);
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    text.split(',').map(number).collect()
}

fn bad(problem: impl Into<String>) -> LatentFileError {
    LatentFileError::Npy { problem: problem.into() }
}
