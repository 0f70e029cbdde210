//! The demonstration model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use flux2::GenerateOptions;
use sampling::NoiseGenerator;
use tempfile::TempDir;
use weights::ModelFolder;

use crate::{container::Container, data, golden::Golden};

/// The trained miniature in `models/flux2-demo`.
pub fn demo() -> ModelFolder {
    ModelFolder::Disk(data("models/flux2-demo"))
}

/// The request that the picture of a golden is the answer to.
///
/// # Errors
/// If the golden does not say.
pub fn request(golden: &Golden) -> Result<GenerateOptions> {
    Ok(GenerateOptions {
        prompt: golden.metadata("prompt")?.to_owned(),
        height: Some(golden.number("height")?),
        width: Some(golden.number("width")?),
        num_inference_steps: Some(golden.number("steps")?),
        seed: golden.number("seed")?,
        noise: NoiseGenerator::TorchCpu,
        ..GenerateOptions::default()
    })
}

/// A copy of the demonstration model that a test may damage; it goes away with the value.
#[derive(Debug)]
pub struct DemoCopy {
    dir: TempDir,
}

impl DemoCopy {
    /// Copies the model.
    ///
    /// # Errors
    /// If that fails.
    pub fn new() -> Result<Self> {
        let dir = TempDir::new()?;
        copy(&data("models/flux2-demo"), dir.path())?;
        Ok(Self { dir })
    }

    /// The copy.
    pub fn folder(&self) -> ModelFolder {
        ModelFolder::Disk(self.dir.path().to_owned())
    }

    /// A file of the copy.
    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// Changes the weights of `component`.
    ///
    /// # Errors
    /// If that fails.
    pub fn edit(&self, component: &str, change: impl FnOnce(&mut Container) -> Result<()>) -> Result<()> {
        let names = ["model.safetensors", "diffusion_pytorch_model.safetensors"];
        let path = names.map(|name| self.path(component).join(name)).into_iter().find(|path| path.is_file());
        let path = path.with_context(|| format!("weights of {component}"))?;
        let mut container = Container::read(&path)?;
        change(&mut container)?;
        container.write(&path)
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            // Contents, not permissions: a read-only model gives a copy that can be changed.
            fs::write(&target, fs::read(entry.path())?)?;
        }
    }
    Ok(())
}
