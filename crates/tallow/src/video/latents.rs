//! Latents out, as they come.

use std::{
    fs::File,
    io::{BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use candle_core::{DType, Tensor};
use media::OutputFile;
use wan_vae::latent_files;
use weights::write::Metadata;

/// Large enough that a write is worth its call.
const BUFFER_BYTES: usize = 1 << 18;
/// Bytes of an element.
const FLOAT: usize = 4;

/// Checks that the name is that of a file of latents.
///
/// # Errors
/// If it has another extension.
pub(crate) fn check_name(path: &Path) -> anyhow::Result<()> {
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("latent" | "safetensors") => Ok(()),
        Some(other) => {
            bail!("{}: unknown extension .{other}, expected one of: .latent, .safetensors", path.display())
        }
        None => bail!("{}: no extension, expected one of: .latent, .safetensors", path.display()),
    }
}

/// A file of latents in ComfyUI's form. The file has the frames of one channel after those of the other, and latents come
/// frame by frame, so these wait in a nameless file: memory does not grow with the clip.
pub(crate) struct LatentWriter {
    path: PathBuf,
    output: OutputFile,
    waiting: BufWriter<File>,
    frames: usize,
    /// Channels, height and width.
    extents: (usize, usize, usize),
}

impl LatentWriter {
    /// Begins a file of latents of so many channels, rows and columns.
    ///
    /// # Errors
    /// Those of [`OutputFile::create`].
    pub(crate) fn create(path: &Path, extents: (usize, usize, usize)) -> anyhow::Result<Self> {
        let output = OutputFile::create(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let waiting = tempfile::tempfile_in(folder).with_context(|| format!("cannot write {}", path.display()))?;
        let waiting = BufWriter::with_capacity(BUFFER_BYTES, waiting);
        Ok(Self { path: path.to_owned(), output, waiting, frames: 0, extents })
    }

    /// Takes the next latent frames, `[z, n, h, w]`.
    ///
    /// # Errors
    /// If they are of other extents; if the disk is full or fails.
    pub(crate) fn write(&mut self, latents: &Tensor) -> anyhow::Result<()> {
        let (channels, frames, height, width) = latents.dims4()?;
        let found = (channels, height, width);
        ensure!(found == self.extents, "latents of {found:?} (channels, height, width), expected {:?}", self.extents);
        for frame in 0..frames {
            let values = latents.narrow(1, frame, 1).and_then(|x| x.to_dtype(DType::F32)?.flatten_all());
            let values: Vec<f32> = values.and_then(|x| x.to_vec1()).context("cannot read the latents")?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.waiting.write_all(&bytes).with_context(|| format!("cannot write {}", self.path.display()))?;
            self.frames += 1;
        }
        Ok(())
    }

    /// Completes the file and puts it in its place.
    ///
    /// # Errors
    /// If the disk is full or fails; then nothing of it remains.
    pub(crate) fn finish(self, metadata: &Metadata) -> anyhow::Result<()> {
        let Self { path, mut output, waiting, frames, extents } = self;
        let head = latent_files::head((extents.0, frames, extents.1, extents.2), metadata)?;
        let cannot_write = || format!("cannot write {}", path.display());
        let mut waiting = waiting.into_inner().map_err(|error| error.into_error()).with_context(cannot_write)?;
        let mut copy = || {
            let mut to = BufWriter::with_capacity(BUFFER_BYTES, &mut output);
            to.write_all(&head)?;
            let (channels, plane) = (extents.0, extents.1 * extents.2 * FLOAT);
            let mut buffer = vec![0; plane];
            for channel in 0..channels {
                for frame in 0..frames {
                    waiting.seek(SeekFrom::Start(((frame * channels + channel) * plane) as u64))?;
                    waiting.read_exact(&mut buffer)?;
                    to.write_all(&buffer)?;
                }
            }
            to.flush()
        };
        copy().with_context(cannot_write)?;
        output.commit()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use wan_vae::{RawLatents, latent_files::LatentFile};

    use super::*;

    #[test]
    fn what_comes_frame_by_frame_is_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.latent");
        let values: Vec<f32> = (0..3 * 4 * 2 * 5).map(|value| value as f32).collect();
        let all = Tensor::from_vec(values, (3, 4, 2, 5), &Device::Cpu).unwrap();
        let mut file = LatentWriter::create(&path, (3, 2, 5)).unwrap();
        for (first, count) in [(0, 1), (1, 2), (3, 1)] {
            file.write(&all.narrow(1, first, count).unwrap()).unwrap();
        }
        assert!(file.write(&all.narrow(2, 0, 1).unwrap()).is_err());
        let metadata = Metadata::from([("vae".to_owned(), "x".to_owned())]);
        file.finish(&metadata).unwrap();
        let read = LatentFile::open(&path).unwrap();
        assert_eq!(read.metadata(), &metadata);
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&read.all().unwrap()), values(&all));
        let whole = folder.path().join("b.latent");
        latent_files::write(&whole, &RawLatents::new(all).unwrap(), &metadata).unwrap();
        assert_eq!(std::fs::read(path).unwrap(), std::fs::read(whole).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["a.latent", "a.LATENT", "b.safetensors"] {
            assert!(check_name(Path::new(name)).is_ok(), "{name}");
        }
        for name in ["a", "a.png", "-", ".latent", "a.npy"] {
            assert!(check_name(Path::new(name)).is_err(), "{name}");
        }
    }
}
