//! The header of a safetensors file, read with suspicion.
//!
//! Format (`safetensors/safetensors`: README, "Format"): 8 bytes little-endian length N; N bytes of JSON, an object from
//! tensor name to `{dtype, shape, data_offsets}`, with an optional object of strings under `__metadata__`; then the data,
//! which the offsets must cover exactly, without holes and without overlaps.
//!
//! Nothing here allocates by a declared number: lengths are compared with the bytes that are there first, and a list of
//! extents is cut at [`MAX_RANK`].

use std::{collections::BTreeMap, ops::Range};

use super::{
    HeaderError,
    json::{RawTensor, parse_json},
    sniff::sniff,
};
use crate::{dtype::StoredDType, error::shown, source::TensorInfo};

/// Longest header that is read, in bytes; the limit of the `safetensors` crate.
pub const MAX_HEADER: u64 = 100_000_000;

/// Most extents of one tensor.
pub const MAX_RANK: usize = 64;

/// Key of the free-form metadata.
pub(crate) const METADATA: &str = "__metadata__";

/// A checked header: every range lies inside the file, and together they cover the data exactly once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// All tensors, sorted by name; ranges count from the start of the file, `file` is 0.
    pub tensors: Vec<TensorInfo>,
    /// The file's `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// Where the data starts.
    pub data_start: usize,
}

/// Reads and checks the header of a file given as a whole (mapped, or in memory).
///
/// Spaces and NULs after the JSON are accepted as padding: the format names spaces, some writers fill with NULs.
///
/// # Errors
/// The first thing that is wrong, as a [`HeaderError`].
pub fn parse(file: &[u8]) -> Result<Header, HeaderError> {
    let json = locate(file)?;
    let data_start = json.end;
    let raw = parse_json(&file[json])?;
    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for entry in raw.tensors {
        tensors.push(check_entry(entry, data_start, file.len())?);
    }
    check_cover(&tensors, data_start, file.len())?;
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(Header { tensors, metadata: raw.metadata, data_start })
}

/// Range of the JSON text.
fn locate(file: &[u8]) -> Result<Range<usize>, HeaderError> {
    let len = file.len();
    if len == 0 {
        return Err(HeaderError::Empty);
    }
    let start = file.first_chunk::<8>().map(|b| u64::from_le_bytes(*b));
    // A header length whose bytes happen to look like another format's magic is told apart by the brace that follows.
    let plausible = start.is_some_and(|n| n <= MAX_HEADER) && file.get(8) == Some(&b'{');
    if !plausible && let Some(found) = sniff(file) {
        return Err(HeaderError::OtherFormat { found });
    }
    let declared = start.ok_or(HeaderError::TooShort { len })?;
    if declared > MAX_HEADER {
        return Err(HeaderError::HeaderTooLarge { declared });
    }
    let end = usize::try_from(declared)
        .ok()
        .and_then(|n| n.checked_add(8))
        .filter(|&end| end <= len)
        .ok_or(HeaderError::HeaderTruncated { declared, len })?;
    if declared == 0 || file[8] != b'{' {
        return Err(HeaderError::NotAnObject);
    }
    Ok(8..end)
}

/// The checked description of one tensor, its range counted from the start of the file.
fn check_entry(raw: RawTensor, data_start: usize, len: usize) -> Result<TensorInfo, HeaderError> {
    let RawTensor { name, dtype, shape, begin, end } = raw;
    let tensor = || shown(&name);
    let Some(dtype) = StoredDType::from_name(&dtype) else {
        return Err(HeaderError::UnknownDType { tensor: tensor(), dtype: shown(&dtype) });
    };
    let extents: Option<Vec<usize>> = shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let bits = extents.as_ref().and_then(|s| s.iter().try_fold(dtype.bits(), |n, &d| n.checked_mul(d)));
    let (Some(extents), Some(bits)) = (extents, bits) else {
        return Err(HeaderError::BadSize {
            tensor: tensor(),
            dtype,
            shape: format!("{shape:?}"),
            problem: "beyond 64 bits",
        });
    };
    if !bits.is_multiple_of(8) {
        let problem = "not a whole number of bytes";
        return Err(HeaderError::BadSize { tensor: tensor(), dtype, shape: format!("{shape:?}"), problem });
    }
    let expected = bits / 8;
    if end.checked_sub(begin) != u64::try_from(expected).ok() {
        let shape = format!("{shape:?}");
        return Err(HeaderError::SizeMismatch { tensor: tensor(), dtype, shape, expected, begin, end });
    }
    let absolute = |offset: u64| usize::try_from(offset).ok().and_then(|o| o.checked_add(data_start));
    let (Some(from), Some(to)) = (absolute(begin), absolute(end)) else {
        return Err(HeaderError::Truncated { expected: end.saturating_add(data_start as u64), len });
    };
    Ok(TensorInfo { name, dtype, shape: extents, bytes: from..to, file: 0, quantisation: None })
}

/// Every byte of the data belongs to exactly one tensor.
fn check_cover(tensors: &[TensorInfo], data_start: usize, len: usize) -> Result<(), HeaderError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|t| (t.bytes.start, t.bytes.end));
    let mut at = data_start;
    let mut last: Option<&TensorInfo> = None;
    for t in order {
        if t.bytes.start < at {
            let first = last.map_or_else(String::new, |l| shown(&l.name));
            return Err(HeaderError::Overlap { first, second: shown(&t.name) });
        }
        if t.bytes.start > at {
            let bytes = (t.bytes.start - at) as u64;
            return Err(HeaderError::Hole { tensor: shown(&t.name), bytes });
        }
        at = t.bytes.end;
        last = Some(t);
    }
    if at > len {
        return Err(HeaderError::Truncated { expected: at as u64, len });
    }
    if at < len {
        return Err(HeaderError::Trailing { bytes: len - at, expected: at as u64, len });
    }
    Ok(())
}
