//! Writing safetensors files.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use half::bf16;
use serde::Serialize;

mod placed;

pub use self::placed::PlacedFile;

use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
    safetensors::{MAX_HEADER, METADATA},
};

/// One tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorData<'a> {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: StoredDType,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Elements, row-major and little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> TensorData<'a> {
    /// A tensor from its bytes.
    pub fn new(name: impl Into<String>, dtype: StoredDType, shape: &[usize], bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), bytes: bytes.into() }
    }

    /// A tensor of 32-bit floats.
    pub fn f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> TensorData<'static> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        TensorData::new(name, StoredDType::F32, shape, bytes)
    }

    /// A tensor of brain floats, rounded from 32-bit floats.
    pub fn bf16(name: impl Into<String>, shape: &[usize], values: &[f32]) -> TensorData<'static> {
        let bytes: Vec<u8> = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        TensorData::new(name, StoredDType::BF16, shape, bytes)
    }
}

/// Text that is kept in the file's header under `__metadata__`.
pub type Metadata = BTreeMap<String, String>;

/// A whole safetensors file in memory. Wider elements come first, then names in order; the data starts at a multiple of
/// 8 bytes, so every tensor is aligned.
///
/// # Errors
/// [`Error::Unwritable`] if a tensor's bytes are not what its shape says, or a name is repeated or reserved, or the header
/// would be longer than readers accept.
pub fn to_bytes(tensors: &[TensorData<'_>], metadata: &Metadata) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    write(&mut out, tensors, metadata, "memory")?;
    Ok(out)
}

/// Writes a safetensors file: to a temporary file beside `path` first, then renamed, so that a mapped older file stays
/// whole and an interruption leaves nothing behind under the name.
///
/// # Errors
/// As [`to_bytes`], and [`Error::Io`].
pub fn to_file(path: impl AsRef<Path>, tensors: &[TensorData<'_>], metadata: &Metadata) -> Result<()> {
    let path = path.as_ref();
    replace(path, |file| {
        let mut out = BufWriter::new(file);
        write(&mut out, tensors, metadata, &path.display().to_string())?;
        let file = out.into_inner().map_err(|e| Error::io("write", path, e.into_error()))?;
        file.sync_all().map_err(|e| Error::io("write", path, e))
    })
}

/// Writes only the header and extends the file with zeros to its full size, which on most file systems takes no space:
/// for tests of names, shapes and sizes.
///
/// # Errors
/// As [`to_file`].
pub fn header_only<'a>(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (&'a str, StoredDType, &'a [usize])>,
    metadata: &Metadata,
) -> Result<()> {
    let path = path.as_ref();
    let name = path.display().to_string();
    let entries: Vec<Entry<'_>> =
        tensors.into_iter().map(|(name, dtype, shape)| Entry { name, dtype, shape }).collect();
    let (header, _, data) = plan(&entries, metadata, &name)?;
    replace(path, |mut file| {
        file.write_all(&header).map_err(|e| Error::io("write", path, e))?;
        file.set_len((header.len() + data) as u64).map_err(|e| Error::io("extend", path, e))
    })
}

/// What stands before the elements in a file with these tensors. The elements follow, row-major and little-endian, tensor
/// by tensor: wider ones first, then names in order. For files that are written as their elements come.
///
/// # Errors
/// [`Error::Unwritable`], as [`to_bytes`].
pub fn header<'a>(
    tensors: impl IntoIterator<Item = (&'a str, StoredDType, &'a [usize])>,
    metadata: &Metadata,
) -> Result<Vec<u8>> {
    let entries: Vec<Entry<'_>> =
        tensors.into_iter().map(|(name, dtype, shape)| Entry { name, dtype, shape }).collect();
    Ok(plan(&entries, metadata, "memory")?.0)
}

/// What the header says about one tensor.
struct Entry<'a> {
    name: &'a str,
    dtype: StoredDType,
    shape: &'a [usize],
}

fn write(out: &mut impl Write, tensors: &[TensorData<'_>], metadata: &Metadata, file: &str) -> Result<()> {
    let entries: Vec<Entry<'_>> =
        tensors.iter().map(|t| Entry { name: &t.name, dtype: t.dtype, shape: &t.shape }).collect();
    let (header, order, _) = plan(&entries, metadata, file)?;
    for t in tensors {
        let (found, wanted) = (t.bytes.len(), t.dtype.byte_len(&t.shape));
        if wanted != Some(found) {
            let problem = format!("{found} bytes for type {} and shape {:?}", t.dtype, t.shape);
            return Err(Error::Unwritable { file: file.to_owned(), tensor: shown(&t.name), problem });
        }
    }
    let io = |e: io::Error| Error::io("write", file, e);
    out.write_all(&header).map_err(io)?;
    for i in order {
        out.write_all(&tensors[i].bytes).map_err(io)?;
    }
    Ok(())
}

/// Length and JSON of the header, the order of the data, and the data's size in bytes.
fn plan(tensors: &[Entry<'_>], metadata: &Metadata, file: &str) -> Result<(Vec<u8>, Vec<usize>, usize)> {
    #[derive(Serialize)]
    struct Field<'a> {
        dtype: StoredDType,
        shape: &'a [usize],
        data_offsets: [usize; 2],
    }

    let refuse = |tensor: &str, problem: &str| Error::Unwritable {
        file: file.to_owned(),
        tensor: shown(tensor),
        problem: problem.to_owned(),
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].dtype.bits()), tensors[i].name));

    let mut seen = HashSet::new();
    let mut fields = serde_json::Map::new();
    let mut at = 0usize;
    if !metadata.is_empty() {
        fields.insert(METADATA.to_owned(), serde_json::json!(metadata));
    }
    for &i in &order {
        let t = &tensors[i];
        if t.name == METADATA {
            return Err(refuse(t.name, "the format reserves this name"));
        }
        if !seen.insert(t.name) {
            return Err(refuse(t.name, "the name stands twice"));
        }
        if matches!(t.dtype, StoredDType::Ggml(_)) {
            return Err(refuse(t.name, "the format has no name for blocks of GGML"));
        }
        let len = t.dtype.byte_len(t.shape);
        let end =
            len.and_then(|n| at.checked_add(n)).ok_or_else(|| refuse(t.name, "its size is not a number of bytes"))?;
        let field = Field { dtype: t.dtype, shape: t.shape, data_offsets: [at, end] };
        fields.insert(t.name.to_owned(), serde_json::json!(field));
        at = end;
    }

    let mut json = serde_json::Value::Object(fields).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER {
        return Err(refuse("(header)", "the header would be longer than readers accept"));
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok((header, order, at))
}

/// Lets `fill` write a temporary file beside `path`, then renames it; on any error the temporary file is removed.
fn replace(path: &Path, fill: impl FnOnce(File) -> Result<()>) -> Result<()> {
    let (temporary, file) = Temporary::beside(path)?;
    fill(file)?;
    temporary.persist(path)
}

/// A file that is removed unless it is put in its place.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    fn beside(path: &Path) -> Result<(Self, File)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);

        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let temporary = Self(path.with_file_name(name));
        let file =
            File::options().write(true).create_new(true).open(&temporary.0).map_err(|e| Error::io("write", path, e))?;
        Ok((temporary, file))
    }

    fn persist(self, path: &Path) -> Result<()> {
        fs::rename(&self.0, path).map_err(|e| Error::io("write", path, e))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Already renamed: nothing to do then.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::{Safetensors, TensorSource};

    fn problem(tensors: &[TensorData<'_>]) -> String {
        to_bytes(tensors, &Metadata::new()).unwrap_err().to_string()
    }

    #[test]
    fn a_header_and_the_elements_are_a_file() {
        let metadata = Metadata::from([("a".to_owned(), "b".to_owned())]);
        let (narrow, wide) = (TensorData::bf16("a", &[2], &[1.0, 2.0]), TensorData::f32("b", &[1], &[3.0]));
        let mut file =
            header([("a", narrow.dtype, narrow.shape.as_slice()), ("b", wide.dtype, wide.shape.as_slice())], &metadata)
                .unwrap();
        file.extend(wide.bytes.iter().chain(narrow.bytes.iter()));
        assert_eq!(file, to_bytes(&[narrow, wide], &metadata).unwrap());
        assert!(header([("a", StoredDType::F32, &[usize::MAX, 2][..])], &metadata).is_err());
    }

    #[test]
    fn what_cannot_be_read_is_not_written() {
        let f = TensorData::f32("f", &[1], &[1.0]);
        assert!(problem(&[f.clone(), f]).contains("`f` to memory: the name stands twice"));
        assert!(problem(&[TensorData::f32("__metadata__", &[1], &[1.0])]).contains("reserves"));
        assert!(problem(&[TensorData::f32("f", &[2], &[1.0])]).contains("4 bytes for type F32 and shape [2]"));
        assert!(problem(&[TensorData::new("f", StoredDType::F4, &[3], vec![0; 2])]).contains("not a number of bytes"));
    }

    #[test]
    fn an_interrupted_write_leaves_nothing() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("x.safetensors");
        to_file(&path, &[TensorData::f32("f", &[1], &[1.0])], &Metadata::new()).unwrap();
        // A mapped file stays whole while it is replaced.
        let old = Safetensors::open(&path).unwrap();
        to_file(&path, &[TensorData::f32("f", &[2], &[3.0; 2])], &Metadata::new()).unwrap();
        assert_eq!(old.bytes("f").unwrap(), 1.0f32.to_le_bytes());
        to_file(&path, &[TensorData::f32("f", &[3], &[3.0; 2])], &Metadata::new()).unwrap_err();
        assert_eq!(Safetensors::open(&path).unwrap().info("f").unwrap().shape, [2]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(to_file(dir.path().join("none/x"), &[], &Metadata::new()).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn a_header_alone_has_the_full_size() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("x.safetensors");
        let shape = [1 << 10, 1 << 20];
        header_only(&path, [("w", StoredDType::F32, &shape[..])], &Metadata::new()).unwrap();
        let source = Safetensors::open(&path).unwrap();
        assert_eq!(source.info("w").unwrap().bytes.len(), 4 << 30);
    }
}
