//! From the objects of a pickle to named tensors.

use std::{collections::HashSet, ops::Range};

use super::{
    pickle::{Id, Object, Pickle},
    problem::PthError,
    zip::Archive,
};
use crate::{
    dtype::StoredDType,
    error::{list, shown},
    safetensors::MAX_RANK,
};

type Result<T, E = PthError> = std::result::Result<T, E>;

/// Most tensors of one checkpoint.
const MAX_TENSORS: usize = 1 << 16;

/// Where checkpoints of whole training states keep the tensors, in the order in which they are tried.
const NESTED: &[&str] = &["state_dict", "model_state", "gen_model", "generator"];

/// How deep those may nest.
const MAX_DEPTH: usize = 4;

/// Name of the tensor of a file that holds one tensor and no dictionary.
const LONE: &str = "tensor";

/// A tensor whose elements are known to lie inside its storage.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) name: String,
    pub(super) dtype: StoredDType,
    pub(super) shape: Vec<usize>,
    /// The elements in the file, if they lie there one after another; otherwise the whole storage.
    pub(super) bytes: Range<usize>,
    /// Strides in elements and the first element's offset in the storage, if the elements have to be gathered.
    pub(super) strided: Option<(Vec<usize>, usize)>,
}

/// All tensors of the checkpoint, in the order of the file.
pub(super) fn tensors(pickle: &Pickle<'_>, archive: &Archive<'_>, root: &str) -> Result<Vec<Placed>> {
    let named = named_tensors(pickle)?;
    if named.len() > MAX_TENSORS {
        return Err(PthError::TooManyTensors { found: named.len(), limit: MAX_TENSORS });
    }
    let mut seen = HashSet::with_capacity(named.len());
    let mut placed = Vec::with_capacity(named.len());
    for (name, args, version) in named {
        if !seen.insert(name) {
            return Err(PthError::DuplicateName { name: shown(name) });
        }
        placed.push(place(pickle, archive, root, name, args, version)?);
    }
    Ok(placed)
}

/// Name, arguments and version of each tensor of the dictionary that holds them; its other entries are passed over.
fn named_tensors<'a>(pickle: &Pickle<'a>) -> Result<Vec<(&'a str, Id, u8)>> {
    let mut at = pickle.root();
    for _ in 0..=MAX_DEPTH {
        let dict = match pickle.get(at) {
            Object::Dict(dict) => dict,
            &Object::Tensor { args, version } => return Ok(vec![(LONE, args, version)]),
            Object::List(items) | Object::Tuple(items) => {
                return Err(PthError::NoTensors { found: format!("a list of {} objects", items.len()) });
            }
            _ => return Err(PthError::NoTensors { found: "a single value".to_owned() }),
        };
        let text = |id: Id| match pickle.get(id) {
            &Object::Text(text) => Some(text),
            _ => None,
        };
        let tensors: Vec<_> = dict
            .iter()
            .filter_map(|&(key, value)| match (text(key), pickle.get(value)) {
                (Some(name), &Object::Tensor { args, version }) => Some((name, args, version)),
                _ => None,
            })
            .collect();
        if !tensors.is_empty() {
            return Ok(tensors);
        }
        let inner = |key: &&str| {
            let found = dict.iter().find(|(k, _)| text(*k) == Some(*key)).map(|(_, value)| *value);
            found.filter(|&value| matches!(pickle.get(value), Object::Dict(_)))
        };
        match NESTED.iter().find_map(inner) {
            Some(value) => at = value,
            None if dict.is_empty() => {
                return Err(PthError::NoTensors { found: "an empty dictionary".to_owned() });
            }
            None => {
                let keys = dict.iter().filter_map(|(key, _)| text(*key));
                return Err(PthError::NoTensors { found: format!("a dictionary of {}", list(keys)) });
            }
        }
    }
    Err(PthError::NoTensors { found: "dictionaries inside dictionaries".to_owned() })
}

/// Checks a tensor against its storage.
fn place(pickle: &Pickle<'_>, archive: &Archive<'_>, root: &str, name: &str, args: Id, version: u8) -> Result<Placed> {
    let bad = |problem: &str| PthError::Tensor { tensor: shown(name), problem: problem.to_owned() };
    let Object::Tuple(items) = pickle.get(args) else { return Err(bad("is made from nothing")) };
    let &[storage, offset, shape, strides, ..] = items.as_slice() else {
        return Err(bad("is made from too few arguments"));
    };
    let &Object::Storage { dtype: stored, key, len } = pickle.get(storage) else {
        return Err(bad("has no storage"));
    };
    let numbers = |id: Id| -> Option<Vec<usize>> {
        let Object::Tuple(items) = pickle.get(id) else { return None };
        if items.len() > MAX_RANK {
            return None;
        }
        items.iter().map(|&id| number(pickle, id)).collect()
    };
    let (Some(offset), Some(shape), Some(strides)) = (number(pickle, offset), numbers(shape), numbers(strides)) else {
        return Err(bad("has an offset, shape or strides that are no counts"));
    };
    if shape.len() != strides.len() {
        return Err(bad("has not as many strides as extents"));
    }
    // Version 3: storage, offset, shape, strides, requires_grad, hooks, element type.
    let dtype = match (version, items.get(6)) {
        (3, Some(&id)) => match pickle.get(id) {
            &Object::Global(super::pickle::Global::DType(dtype)) => dtype,
            _ => None,
        },
        _ => stored,
    };
    let Some(dtype) = dtype else { return Err(bad("has an element type that is not read")) };

    let beyond = || bad("is larger than 64 bits can count");
    let size = dtype.bits() / 8;
    let len = usize::try_from(len).map_err(|_| bad("has a storage of negative length"))?;
    let storage_bytes = if stored.is_some() { len.checked_mul(size) } else { Some(len) }.ok_or_else(beyond)?;
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(beyond)?;
    let wanted = dtype.byte_len(&shape).ok_or_else(beyond)?;
    let placed = |bytes, strided| Placed { name: name.to_owned(), dtype, shape: shape.clone(), bytes, strided };
    if elements == 0 {
        return Ok(placed(0..0, None));
    }

    let member = format!("{root}data/{key}");
    let Some(range) = archive.find(&member)? else {
        return Err(PthError::Member { member: shown(&member), problem: "is missing, though a tensor refers to it" });
    };
    if range.len() != storage_bytes {
        return Err(bad(&format!(
            "needs a storage of {storage_bytes} bytes, but `{}` has {}",
            shown(&member),
            range.len()
        )));
    }
    let last = shape.iter().zip(&strides).try_fold(offset, |at, (&d, &s)| at.checked_add((d - 1).checked_mul(s)?));
    let end = last.and_then(|last| last.checked_add(1)?.checked_mul(size)).ok_or_else(beyond)?;
    if end > range.len() {
        return Err(bad("reaches beyond its storage"));
    }
    if is_contiguous(&shape, &strides) {
        // Contiguous and inside the storage, as just checked.
        let start = range.start + offset * size;
        return Ok(placed(start..start + wanted, None));
    }
    if wanted > range.len() {
        return Err(bad("repeats elements of its storage (an expanded tensor)"));
    }
    Ok(placed(range, Some((strides, offset))))
}

fn number(pickle: &Pickle<'_>, id: Id) -> Option<usize> {
    match pickle.get(id) {
        &Object::Int(value) => usize::try_from(value).ok(),
        _ => None,
    }
}

/// Whether elements lie one after another in row-major order; the strides of extents of 1 do not count.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    for (&extent, &stride) in shape.iter().zip(strides).rev() {
        if extent != 1 && stride != expected {
            return false;
        }
        // The whole product has been computed before.
        expected *= extent;
    }
    true
}

/// The elements of a strided tensor in row-major order. `storage` holds them, as [`place`] has checked.
pub(super) fn gather(storage: &[u8], size: usize, shape: &[usize], strides: &[usize], offset: usize) -> Vec<u8> {
    let elements: usize = shape.iter().product();
    let mut out = Vec::with_capacity(elements * size);
    let mut index = vec![0usize; shape.len()];
    let mut at = offset;
    for _ in 0..elements {
        out.extend_from_slice(&storage[at * size..(at + 1) * size]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            at += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            at -= index[axis] * strides[axis];
            index[axis] = 0;
        }
    }
    out
}
