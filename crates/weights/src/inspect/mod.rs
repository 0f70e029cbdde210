//! What a file or folder is: kind, tensors, types, sizes, and the model that it looks like.

mod recognise;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fs, path::Path};

use serde::Serialize;

pub use self::recognise::{Guess, recognise};

use crate::{
    dtype::StoredDType,
    error::{Error, Result, shown},
    folder::{MODEL_INDEX, ModelFolder},
    gguf::{self, Gguf},
    open::first_bytes,
    pth::{self, Pth, PthError},
    quant,
    safetensors::{Safetensors, sniff},
    source::{SourceFile, TensorInfo, TensorSource},
};

/// What a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// One safetensors file.
    Safetensors,
    /// Several safetensors files with an index.
    ShardedSafetensors,
    /// A PyTorch checkpoint.
    PyTorch,
    /// A GGUF file.
    Gguf,
    /// A folder in the diffusers layout.
    DiffusersFolder,
    /// A file or folder that is something else; [`Report::description`] says what.
    Other,
}

/// Tensors of one element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct DTypeCount {
    /// Number of tensors.
    pub tensors: usize,
    /// Number of elements.
    pub elements: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Tensors that are quantised in one way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Quantised {
    /// Name of the format as files spell it, for example `int8_tensorwise` or `Q4_K`.
    pub format: String,
    /// Group of the rotation (ConvRot), if the matrices are rotated.
    pub convrot: Option<usize>,
    /// The same with its scales, for people.
    pub description: String,
    /// Whether it can be computed with here.
    pub supported: bool,
    /// Number of tensors.
    pub tensors: usize,
    /// Size of their codes in bytes, without side tensors.
    pub bytes: u64,
}

/// One set of tensors: a file, or a component of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Part {
    /// Name of the component (`transformer`, `vae`…); empty for a lone file.
    pub component: String,
    /// Class that the folder's configuration names, for example `AutoencoderKLFlux2`.
    pub class: Option<String>,
    /// What names and shapes look like.
    pub model: Option<Guess>,
    /// The files, with their sizes.
    pub files: Vec<SourceFile>,
    /// Number of elements of all tensors.
    pub elements: u64,
    /// Size of all tensors in bytes, without headers.
    pub bytes: u64,
    /// Tensors by element type.
    pub dtypes: BTreeMap<StoredDType, DTypeCount>,
    /// How its tensors are quantised, most bytes first; empty if none is.
    pub quantised: Vec<Quantised>,
    /// Free-form metadata of the file.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, sorted by name.
    pub tensors: Vec<TensorInfo>,
}

/// What a file or folder is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The path, or the name of a built-in model.
    pub path: String,
    /// What it is.
    pub kind: Kind,
    /// The same in a few words, for people.
    pub description: String,
    /// Pipeline class of a diffusers folder, for example `Flux2KleinPipeline`.
    pub pipeline: Option<String>,
    /// The sets of tensors, in the order of their names.
    pub parts: Vec<Part>,
}

impl Report {
    /// Number of tensors of all parts.
    pub fn tensors(&self) -> usize {
        self.parts.iter().map(|p| p.tensors.len()).sum()
    }

    /// Number of elements of all parts.
    pub fn elements(&self) -> u64 {
        self.parts.iter().map(|p| p.elements).sum()
    }

    /// Size of all tensors in bytes, without headers.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

impl Part {
    /// Describes the tensors of a source.
    ///
    /// # Errors
    /// Those of [`quant::fold`] for quantised matrices that contradict their side tensors.
    pub fn new(component: &str, source: &dyn TensorSource) -> Result<Self> {
        let mut part = Self {
            component: component.to_owned(),
            class: None,
            model: recognise(source.tensors()),
            files: source.files().to_vec(),
            elements: 0,
            bytes: 0,
            dtypes: BTreeMap::new(),
            quantised: quantised(source)?,
            metadata: source.metadata().clone(),
            tensors: source.tensors().to_vec(),
        };
        for t in source.tensors() {
            // A checked header keeps all sizes below 64 bits, and their sum below the files' sizes.
            let (elements, bytes) = (t.elements() as u64, t.bytes.len() as u64);
            let count = part.dtypes.entry(t.dtype).or_default();
            count.tensors += 1;
            count.elements += elements;
            count.bytes += bytes;
            part.elements += elements;
            part.bytes += bytes;
        }
        Ok(part)
    }
}

/// The tensors of a source by their quantisation.
fn quantised(source: &dyn TensorSource) -> Result<Vec<Quantised>> {
    let mut kinds: Vec<Quantised> = Vec::new();
    for (info, quantisation) in quant::quantised(source)? {
        let description = quantisation.to_string();
        let known = kinds.iter().position(|kind| kind.description == description);
        let kind = known.unwrap_or_else(|| {
            kinds.push(Quantised {
                format: quantisation.format().to_owned(),
                convrot: quantisation.convrot(),
                description,
                supported: quantisation.is_supported(),
                tensors: 0,
                bytes: 0,
            });
            kinds.len() - 1
        });
        kinds[kind].tensors += 1;
        kinds[kind].bytes += info.bytes.len() as u64;
    }
    kinds.sort_by(|a, b| (b.bytes, &a.description).cmp(&(a.bytes, &b.description)));
    Ok(kinds)
}

/// Says what `path` is: a safetensors file, an index, a folder with either, a folder in the diffusers layout, a PyTorch
/// checkpoint, or a GGUF file. Something else is described as far as its first bytes tell.
///
/// # Errors
/// [`Error::Io`] if it cannot be read; every error of [`Safetensors::open`] for a safetensors file that is damaged, also
/// when it is one component of several; those of [`Pth::open`] for a zip archive, of [`Gguf::open`] for a GGUF file, and
/// of [`quant::fold`].
pub fn inspect(path: impl AsRef<Path>) -> Result<Report> {
    let path = path.as_ref();
    let meta = fs::metadata(path).map_err(|e| Error::io("open", path, e))?;
    if meta.is_dir() {
        return inspect_folder(&ModelFolder::Disk(path.to_path_buf()));
    }
    let first = first_bytes(path)?;
    if first.starts_with(pth::MAGIC) {
        return match Pth::open(path) {
            Ok(source) => lone(path.display().to_string(), &source, Kind::PyTorch),
            Err(Error::Pth { file, problem }) if *problem == PthError::NoPickle => Ok(other(file, problem.to_string())),
            Err(e) => Err(e),
        };
    }
    if first.starts_with(gguf::MAGIC) {
        return lone(path.display().to_string(), &Gguf::open(path)?, Kind::Gguf);
    }
    match Safetensors::open(path) {
        Ok(source) => lone(path.display().to_string(), &source, Kind::Safetensors),
        Err(Error::OtherFormat { file, found }) => Ok(other(file, found.to_owned())),
        // A JSON file that is not an index.
        Err(e @ Error::Json { .. }) => match sniff(&first) {
            Some(found) if !is_index(path) => Ok(other(path.display().to_string(), found.to_owned())),
            _ => Err(e),
        },
        Err(e) => Err(e),
    }
}

/// Says what a model folder is, on disk or built in.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_folder(folder: &ModelFolder) -> Result<Report> {
    if !folder.contains(MODEL_INDEX) {
        return match folder.open_weights("") {
            Ok(source) => {
                let is_gguf = source.files().iter().any(|f| f.name.ends_with(".gguf"));
                let kind = if is_gguf { Kind::Gguf } else { Kind::Safetensors };
                let mut report = lone(folder.describe(), &*source, kind)?;
                if let Some(part) = report.parts.first_mut() {
                    part.class = class_of(folder, "config.json");
                }
                Ok(report)
            }
            Err(Error::NoWeights { problem, found, .. }) => Ok(other(
                folder.describe(),
                format!("a folder with neither a model index nor weights ({problem}): {found}"),
            )),
            Err(e) => Err(e),
        };
    }
    let index: serde_json::Map<String, serde_json::Value> = folder.json(MODEL_INDEX)?;
    let pipeline = index.get("_class_name").and_then(|c| c.as_str()).map(shown);
    let mut parts = Vec::new();
    for entry in folder.entries("")? {
        let Some(component) = entry.strip_suffix('/') else { continue };
        // Tokenizers and schedulers have no weights; a component that has some must open.
        let is_weights = |n: &String| (n.contains(".safetensors") || n.ends_with(".gguf")) && !n.ends_with('/');
        let has_weights = |names: Vec<String>| names.iter().any(is_weights);
        if !folder.entries(component).is_ok_and(has_weights) {
            continue;
        }
        let mut part = Part::new(component, &*folder.open_weights(component)?)?;
        part.class = class_of(folder, &format!("{component}/config.json"));
        parts.push(part);
    }
    let mut description = "diffusers folder".to_owned();
    if let Some(class) = &pipeline {
        description.push_str(&format!(", {class}"));
    }
    Ok(Report { path: folder.describe(), kind: Kind::DiffusersFolder, description, pipeline, parts })
}

/// One file of that kind, or the shards of one.
fn lone(path: String, source: &dyn TensorSource, kind: Kind) -> Result<Report> {
    let part = Part::new("", source)?;
    let (kind, form) = match (kind, part.files.len()) {
        (Kind::Safetensors, n) if n != 1 => (Kind::ShardedSafetensors, format!("safetensors in {n} shards")),
        (Kind::PyTorch, _) => (kind, "PyTorch checkpoint".to_owned()),
        (Kind::Gguf, _) => (kind, "GGUF file".to_owned()),
        _ => (kind, "safetensors file".to_owned()),
    };
    let description = match &part.model {
        Some(model) => format!("{form}, looks like {}", model.describe()),
        None => format!("{form}, model unknown"),
    };
    Ok(Report { path, kind, description, pipeline: None, parts: vec![part] })
}

fn other(path: String, description: String) -> Report {
    Report { path, kind: Kind::Other, description, pipeline: None, parts: Vec::new() }
}

/// Class that a configuration names, in either library's spelling.
fn class_of(folder: &ModelFolder, config: &str) -> Option<String> {
    let config: serde_json::Value = folder.json(config).ok()?;
    let class = config.get("_class_name").or_else(|| config.get("architectures")?.get(0))?;
    class.as_str().map(shown)
}

fn is_index(path: &Path) -> bool {
    path.to_string_lossy().ends_with(".safetensors.index.json")
}
