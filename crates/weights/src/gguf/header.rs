//! The header of a GGUF file, read with suspicion.
//!
//! Format (`ggml-org/ggml`: docs/gguf.md), little-endian: `GGUF`, version, number of tensors, number of metadata entries;
//! the metadata; of each tensor its name, its extents (innermost first), its type and the offset of its data; padding;
//! the data, tensor after tensor, each at a multiple of the alignment.
//!
//! Nothing here allocates by a declared number: counts are compared with the bytes that are there first.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
};

use super::{
    cursor::Cursor,
    metadata::Metadata,
    problem::GgufError,
    types::{self, GgmlType},
};
use crate::{
    dtype::StoredDType,
    error::shown,
    quant::Quantisation,
    safetensors::{MAX_RANK, sniff},
    source::TensorInfo,
};

type Result<T> = std::result::Result<T, GgufError>;

/// First bytes of a GGUF file.
pub(crate) const MAGIC: &[u8] = b"GGUF";

/// Most tensors of one file.
const MAX_TENSORS: u64 = 1 << 16;

/// Most extents of one tensor.
const MAX_DIMS: u32 = 4;

/// A checked header: every range lies inside the file, and together they cover the data once, but for padding.
#[derive(Debug)]
pub(super) struct Header {
    /// All tensors, sorted by name; ranges count from the start of the file.
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// A tensor as the header describes it.
struct Entry {
    name: String,
    dtype: StoredDType,
    shape: Vec<usize>,
    offset: u64,
    len: usize,
}

/// Reads and checks the header of a file given as a whole (mapped, or in memory).
pub(super) fn parse(file: &[u8]) -> Result<Header> {
    if !file.starts_with(MAGIC) {
        let found =
            if file.is_empty() { "an empty file" } else { sniff(file).unwrap_or("a file of an unknown format") };
        return Err(GgufError::OtherFormat { found });
    }
    let mut cursor = Cursor::new(file, MAGIC.len());
    let head = || "the header".to_owned();
    let version = cursor.u32(head)?;
    if matches!(version.swap_bytes(), 1..=3) {
        return Err(GgufError::BigEndian);
    }
    if !matches!(version, 2 | 3) {
        return Err(GgufError::Version { version });
    }
    let tensor_count = cursor.u64(head)?;
    let metadata_count = cursor.u64(head)?;
    let metadata = Metadata::read(&mut cursor, metadata_count)?;
    let entries = entries(&mut cursor, tensor_count)?;
    let align = |at: usize| at.checked_next_multiple_of(metadata.alignment);
    let data_start = align(cursor.at()).unwrap_or(usize::MAX);
    let ranges = place(&entries, data_start, metadata.alignment, file.len())?;

    let mut tensors = Vec::with_capacity(entries.len());
    for (entry, bytes) in entries.into_iter().zip(ranges) {
        tensors.push(describe(entry, bytes, &metadata)?);
    }
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(Header { tensors, metadata: metadata.texts })
}

/// The descriptions of all tensors, in the order of the file.
fn entries(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Entry>> {
    // Length of a name, number of extents, type, offset.
    let limit = MAX_TENSORS.min(cursor.left() as u64 / 24);
    if count > limit {
        return Err(GgufError::TooMany { what: "the number of tensors".to_owned(), claimed: count, limit });
    }
    let mut seen = HashSet::new();
    let mut entries = Vec::new();
    for _ in 0..count {
        let entry = entry(cursor)?;
        if !seen.insert(entry.name.clone()) {
            return Err(GgufError::Duplicate { kind: "tensor", name: shown(&entry.name) });
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn entry(cursor: &mut Cursor<'_>) -> Result<Entry> {
    let name = cursor.text(|| "the name of a tensor".to_owned())?;
    let about = || format!("tensor `{}`", shown(name));
    let dims = cursor.u32(about)?;
    if dims > MAX_DIMS {
        let what = format!("the number of extents of {}", about());
        return Err(GgufError::TooMany { what, claimed: dims.into(), limit: MAX_DIMS.into() });
    }
    let mut extents = (0..dims).map(|_| cursor.u64(about)).collect::<Result<Vec<_>>>()?;
    extents.reverse();
    let id = cursor.u32(about)?;
    let offset = cursor.u64(about)?;
    let dtype = types::stored(id).map_err(|problem| GgufError::UnknownType { tensor: shown(name), id, problem })?;
    let bad = |problem| GgufError::BadShape { tensor: shown(name), dtype, shape: format!("{extents:?}"), problem };
    if extents.contains(&0) {
        return Err(bad("has an extent of zero"));
    }
    let beyond = "is larger than 64 bits can count";
    let shape: Option<Vec<usize>> = extents.iter().map(|&d| usize::try_from(d).ok()).collect();
    let shape = shape.ok_or_else(|| bad(beyond))?;
    // Eight times the size is counted in bits elsewhere, so it must not overflow either.
    shape.iter().try_fold(64usize, |n, &d| n.checked_mul(d)).ok_or_else(|| bad(beyond))?;
    if let StoredDType::Ggml(blocks) = dtype
        && !is_whole(blocks, &shape)
    {
        return Err(bad("has rows that are no whole number of blocks"));
    }
    let len = dtype.byte_len(&shape).ok_or_else(|| bad(beyond))?;
    Ok(Entry { name: name.to_owned(), dtype, shape, offset, len })
}

fn is_whole(blocks: GgmlType, shape: &[usize]) -> bool {
    shape.last().is_some_and(|row| row.is_multiple_of(blocks.block()))
}

/// The tensors' ranges in the file, by the same index: one after another in the order of their offsets, each at the next
/// multiple of the alignment.
fn place(entries: &[Entry], data_start: usize, alignment: usize, len: usize) -> Result<Vec<Range<usize>>> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| entries[i].offset);
    let mut ranges = vec![0..0; entries.len()];
    // End of the tensor before, from the start of the data.
    let mut at = 0usize;
    for &i in &order {
        let entry = &entries[i];
        let expected = at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        if entry.offset != expected as u64 {
            return Err(GgufError::Offset {
                tensor: shown(&entry.name),
                offset: entry.offset,
                expected: expected as u64,
            });
        }
        let start = data_start.checked_add(expected);
        let range = start.and_then(|start| Some(start..start.checked_add(entry.len)?)).filter(|r| r.end <= len);
        let Some(range) = range else {
            let expected = (data_start as u64).saturating_add(entry.offset).saturating_add(entry.len as u64);
            return Err(GgufError::Truncated { expected, len });
        };
        at = expected + entry.len;
        ranges[i] = range;
    }
    // Writers pad the last tensor too, or do not.
    let end = data_start.saturating_add(at);
    let padded = data_start.saturating_add(at.checked_next_multiple_of(alignment).unwrap_or(at));
    if !entries.is_empty() && len > padded {
        return Err(GgufError::Trailing { bytes: len - end, expected: end as u64, len });
    }
    Ok(ranges)
}

/// The checked description of one tensor, with the shape that it had before it was fitted into four extents.
fn describe(entry: Entry, bytes: Range<usize>, metadata: &Metadata) -> Result<TensorInfo> {
    let Entry { name, dtype, mut shape, .. } = entry;
    if let Some(original) = metadata.shapes.get(&name) {
        let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if elements(original) != elements(&shape) || original.len() > MAX_RANK {
            let shape = format!("{shape:?}");
            let problem = "has another number of elements than the original shape in the metadata";
            return Err(GgufError::BadShape { tensor: shown(&name), dtype, shape, problem });
        }
        shape.clone_from(original);
    }
    let quantisation = match dtype {
        StoredDType::Ggml(blocks) => Some(Quantisation::Ggml(blocks)),
        _ => None,
    };
    Ok(TensorInfo { name, dtype, shape, bytes, file: 0, quantisation })
}
