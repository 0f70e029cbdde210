//! The metadata of a GGUF file: keys with typed values.

use std::collections::BTreeMap;

use super::{cursor::Cursor, problem::GgufError};
use crate::error::shown;

type Result<T> = std::result::Result<T, GgufError>;

/// Most entries of the metadata. Published files have a few dozen.
const MAX_KEYS: u64 = 1 << 16;

/// Longest list whose numbers are kept: shapes. Vocabularies are passed over.
const MAX_KEPT: u64 = 16;

/// Alignment of the data where the metadata does not say.
const DEFAULT_ALIGNMENT: usize = 32;

/// Largest alignment that is accepted.
const MAX_ALIGNMENT: u64 = 1 << 20;

const ALIGNMENT: &str = "general.alignment";

/// Key prefix under which writers keep the shape of a tensor that has more extents than GGUF allows.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";

// Numbers of the value types (`ggml-org/ggml`, docs/gguf.md).
const UINT32: u32 = 4;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// What the metadata says.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    /// Every entry as text; of long lists only what they hold.
    pub(super) texts: BTreeMap<String, String>,
    /// Alignment of the tensors in bytes, a power of two.
    pub(super) alignment: usize,
    /// Shapes that replace those of the tensors, by the tensor's name.
    pub(super) shapes: BTreeMap<String, Vec<usize>>,
}

/// A value as far as it is kept.
enum Value {
    Text(String),
    U32(u32),
    /// A short list of integers.
    Numbers(Vec<u64>),
}

impl Metadata {
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Self> {
        // Key length, one byte of a key, type and one byte of a value.
        let limit = MAX_KEYS.min(cursor.left() as u64 / 14);
        if count > limit {
            let what = "the number of metadata entries".to_owned();
            return Err(GgufError::TooMany { what, claimed: count, limit });
        }
        let mut this = Self { alignment: DEFAULT_ALIGNMENT, ..Self::default() };
        for _ in 0..count {
            let key = cursor.text(|| "a metadata key".to_owned())?;
            let kind = cursor.u32(|| about(key))?;
            let value = value(cursor, key, kind)?;
            let text = match value {
                Value::Text(text) => text,
                Value::U32(number) => {
                    if key == ALIGNMENT {
                        this.alignment = alignment(number)?;
                    }
                    number.to_string()
                }
                Value::Numbers(numbers) => {
                    if let Some(tensor) = key.strip_prefix(ORIGINAL_SHAPE) {
                        let extents = numbers.iter().map(|&n| usize::try_from(n).unwrap_or(usize::MAX));
                        this.shapes.insert(tensor.to_owned(), extents.collect());
                    }
                    format!("{numbers:?}")
                }
            };
            if key == ALIGNMENT && kind != UINT32 {
                return Err(refuse(key, format!("type number {kind}, an unsigned 32-bit number is needed")));
            }
            if this.texts.insert(key.to_owned(), text).is_some() {
                return Err(GgufError::Duplicate { kind: "metadata key", name: shown(key) });
            }
        }
        Ok(this)
    }
}

fn about(key: &str) -> String {
    format!("metadata `{}`", shown(key))
}

fn refuse(key: &str, problem: String) -> GgufError {
    GgufError::Metadata { key: shown(key), problem }
}

fn alignment(number: u32) -> Result<usize> {
    if number.is_power_of_two() && u64::from(number) <= MAX_ALIGNMENT {
        Ok(number as usize)
    } else {
        Err(refuse(ALIGNMENT, format!("the value {number}, a power of two up to {MAX_ALIGNMENT} is needed")))
    }
}

/// Bytes of a scalar; `None` for text and lists.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | BOOL => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn value(cursor: &mut Cursor<'_>, key: &str, kind: u32) -> Result<Value> {
    match kind {
        STRING => Ok(Value::Text(cursor.text(|| about(key))?.to_owned())),
        ARRAY => list(cursor, key),
        _ => {
            let len = scalar_bytes(kind).ok_or_else(|| refuse(key, format!("the unknown type number {kind}")))?;
            let bytes = cursor.take(len, || about(key))?;
            Ok(match (kind, number(kind, bytes)) {
                (UINT32, Some(n)) => Value::U32(n as u32),
                _ => Value::Text(scalar_text(kind, bytes)),
            })
        }
    }
}

/// A list: short ones of whole numbers are kept, of others only what they hold.
fn list(cursor: &mut Cursor<'_>, key: &str) -> Result<Value> {
    let kind = cursor.u32(|| about(key))?;
    let count = cursor.u64(|| about(key))?;
    let too_many = |limit| GgufError::TooMany { what: format!("the list of {}", about(key)), claimed: count, limit };
    if kind == STRING {
        let limit = cursor.left() as u64 / 8;
        if count > limit {
            return Err(too_many(limit));
        }
        for _ in 0..count {
            let len = cursor.u64(|| about(key))?;
            cursor.take(len, || about(key))?;
        }
        return Ok(Value::Text(format!("list of {count} texts")));
    }
    if kind == ARRAY {
        return Err(refuse(key, "a list of lists, which is not read".to_owned()));
    }
    let size = scalar_bytes(kind).ok_or_else(|| refuse(key, format!("a list of the unknown type number {kind}")))?;
    let limit = cursor.left() as u64 / size;
    if count > limit {
        return Err(too_many(limit));
    }
    let bytes = cursor.take(count * size, || about(key))?;
    if count <= MAX_KEPT {
        let numbers: Option<Vec<u64>> = bytes.chunks_exact(size as usize).map(|b| number(kind, b)).collect();
        if let Some(numbers) = numbers {
            return Ok(Value::Numbers(numbers));
        }
    }
    Ok(Value::Text(format!("list of {count} numbers")))
}

/// A whole number that is not negative.
fn number(kind: u32, bytes: &[u8]) -> Option<u64> {
    let mut wide = [0; 8];
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    let value = u64::from_le_bytes(wide);
    // Sign bit of the signed types.
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    match kind {
        0 | 2 | 4 | 10 => Some(value),
        1 | 3 | 5 | 11 if !negative => Some(value),
        _ => None,
    }
}

fn scalar_text(kind: u32, bytes: &[u8]) -> String {
    if let Some(n) = number(kind, bytes) {
        return n.to_string();
    }
    match (kind, bytes) {
        (1, &[b]) => b.cast_signed().to_string(),
        (BOOL, &[b]) => (b != 0).to_string(),
        (3, &[a, b]) => i16::from_le_bytes([a, b]).to_string(),
        (5, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).to_string(),
        (6, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).to_string(),
        (11, &[a, b, c, d, e, f, g, h]) => i64::from_le_bytes([a, b, c, d, e, f, g, h]).to_string(),
        (12, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]).to_string(),
        _ => String::new(),
    }
}
