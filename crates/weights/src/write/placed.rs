//! A safetensors file that is written as its elements come, tensor by tensor in any order.

use std::{
    collections::HashMap,
    fs::File,
    io::{Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use super::{Entry, Metadata, Temporary, plan};
use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
};

/// A safetensors file under way: [`PlacedFile::append`] puts elements where the header says that they are. Names, types and
/// shapes are known beforehand, so nothing is held in memory. Until [`PlacedFile::finish`] there is no file under the name.
#[derive(Debug)]
pub struct PlacedFile {
    path: PathBuf,
    temporary: Temporary,
    file: File,
    /// What is left to be written of each tensor, as offsets in the file.
    left: HashMap<String, Range<u64>>,
}

impl PlacedFile {
    /// Begins the file.
    ///
    /// # Errors
    /// [`Error::Unwritable`] as [`super::to_bytes`]; [`Error::Io`].
    pub fn create<'a>(
        path: impl AsRef<Path>,
        tensors: impl IntoIterator<Item = (&'a str, StoredDType, &'a [usize])>,
        metadata: &Metadata,
    ) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let entries: Vec<Entry<'_>> =
            tensors.into_iter().map(|(name, dtype, shape)| Entry { name, dtype, shape }).collect();
        let (header, order, data) = plan(&entries, metadata, &path.display().to_string())?;
        let mut at = header.len() as u64;
        let mut left = HashMap::with_capacity(entries.len());
        for index in order {
            let Entry { name, dtype, shape } = &entries[index];
            // The plan has refused sizes that are no number of bytes.
            let end = at + dtype.byte_len(shape).unwrap_or(0) as u64;
            left.insert((*name).to_owned(), at..end);
            at = end;
        }
        let (temporary, mut file) = Temporary::beside(&path)?;
        file.write_all(&header).map_err(|e| Error::io("write", &path, e))?;
        file.set_len((header.len() + data) as u64).map_err(|e| Error::io("extend", &path, e))?;
        Ok(Self { path, temporary, file, left })
    }

    /// Writes the next bytes of a tensor.
    ///
    /// # Errors
    /// [`Error::Unwritable`] if there is no such tensor or less of it is left; [`Error::Io`].
    pub fn append(&mut self, tensor: &str, bytes: &[u8]) -> Result<()> {
        let Some(left) = self.left.get_mut(tensor).filter(|left| bytes.len() as u64 <= left.end - left.start) else {
            return Err(self.refuse(tensor, format!("{} bytes are more than are left of it", bytes.len())));
        };
        let at = left.start;
        left.start += bytes.len() as u64;
        let seek = self.file.seek(SeekFrom::Start(at));
        seek.and_then(|_| self.file.write_all(bytes)).map_err(|e| Error::io("write", &self.path, e))
    }

    /// Brings the file to the disk and to its place, replacing an older one in one step.
    ///
    /// # Errors
    /// [`Error::Unwritable`] if a tensor is not complete; [`Error::Io`].
    pub fn finish(self) -> Result<()> {
        if let Some((name, left)) = self.left.iter().find(|(_, left)| !left.is_empty()) {
            return Err(self.refuse(name, format!("{} bytes of it were never written", left.end - left.start)));
        }
        self.file.sync_all().map_err(|e| Error::io("write", &self.path, e))?;
        self.temporary.persist(&self.path)
    }

    fn refuse(&self, tensor: &str, problem: String) -> Error {
        Error::Unwritable { file: self.path.display().to_string(), tensor: shown(tensor), problem }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::write::{TensorData, to_bytes};

    #[test]
    fn the_order_of_writing_does_not_matter() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("x.safetensors");
        let tensors = [
            TensorData::bf16("a", &[2], &[1.0, 2.0]),
            TensorData::f32("b", &[2], &[3.0, 4.0]),
            TensorData::f32("c", &[0], &[]),
        ];
        let metadata = Metadata::from([("k".to_owned(), "v".to_owned())]);
        let entries = || tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice()));
        let mut file = PlacedFile::create(&path, entries(), &metadata).unwrap();
        for (tensor, bytes) in
            [("a", &tensors[0].bytes[..2]), ("b", &tensors[1].bytes[..]), ("a", &tensors[0].bytes[2..])]
        {
            file.append(tensor, bytes).unwrap();
        }
        assert!(!path.exists());
        file.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), to_bytes(&tensors, &metadata).unwrap());
    }

    #[test]
    fn an_unfinished_file_leaves_nothing() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("x.safetensors");
        let shape = [2];
        let mut file = PlacedFile::create(&path, [("a", StoredDType::BF16, &shape[..])], &Metadata::new()).unwrap();
        assert!(file.append("b", &[]).unwrap_err().to_string().contains("`b`"));
        file.append("a", &[0; 3]).unwrap();
        assert!(file.append("a", &[0; 2]).unwrap_err().to_string().contains("2 bytes are more"));
        assert!(file.finish().unwrap_err().to_string().contains("1 bytes of it were never written"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
