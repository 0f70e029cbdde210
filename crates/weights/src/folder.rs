//! A model folder on disk or built into the program.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::de::DeserializeOwned;

use crate::{
    error::{Error, Result, list, shown},
    gguf::Gguf,
    quant,
    safetensors::{Safetensors, is_plain_path, read_small, shown_message},
    source::TensorSource,
};

/// Largest file that [`ModelFolder::read`] takes into memory: 64 MiB. The tokenizer of Qwen3 has 11.
pub const MAX_TEXT: u64 = 64 << 20;

/// File that makes a folder a model in the diffusers layout.
pub const MODEL_INDEX: &str = "model_index.json";

/// Where the parts of a model come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFolder {
    /// A folder on disk.
    Disk(PathBuf),
    /// Files built into the program: its name, then relative path with `/` and contents of each file.
    Memory(&'static str, &'static [(&'static str, &'static [u8])]),
}

impl ModelFolder {
    /// A model in the diffusers layout on disk: a folder with a `model_index.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if there is nothing; [`Error::NotAModelFolder`] says what is there instead.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let meta = fs::metadata(&path).map_err(|e| Error::io("open", &path, e))?;
        if !meta.is_dir() {
            let found = "it is a file; give the folder that holds model_index.json".to_owned();
            return Err(Error::NotAModelFolder { path: path.display().to_string(), found });
        }
        let folder = Self::Disk(path);
        folder.check()?;
        Ok(folder)
    }

    /// Whether this is a model in the diffusers layout.
    ///
    /// # Errors
    /// [`Error::NotAModelFolder`] says what it is instead.
    pub fn check(&self) -> Result<()> {
        if self.contains(MODEL_INDEX) {
            return Ok(());
        }
        Err(Error::NotAModelFolder { path: self.describe(), found: self.looks_like()? })
    }

    /// For messages: the path, or the name of the built-in model.
    pub fn describe(&self) -> String {
        match self {
            Self::Disk(path) => path.display().to_string(),
            Self::Memory(name, _) => (*name).to_owned(),
        }
    }

    /// Path of a part, for messages.
    fn describe_part(&self, path: &str) -> String {
        match self {
            Self::Disk(dir) => dir.join(path).display().to_string(),
            Self::Memory(name, _) if path.is_empty() => (*name).to_owned(),
            Self::Memory(name, _) => format!("{name}/{path}"),
        }
    }

    /// Whether the file `path` (relative, with `/`) is there.
    pub fn contains(&self, path: &str) -> bool {
        match self {
            Self::Disk(dir) => is_plain_path(path) && dir.join(path).is_file(),
            Self::Memory(..) => self.built_in(path).is_some(),
        }
    }

    /// Names in the folder `path` (empty for the top), sorted; folders end with `/`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::PathEscapes`].
    pub fn entries(&self, path: &str) -> Result<Vec<String>> {
        self.guard(path)?;
        let mut names = Vec::new();
        match self {
            Self::Disk(dir) => {
                let dir = dir.join(path);
                let io = |e| Error::io("read", &dir, e);
                for entry in fs::read_dir(&dir).map_err(io)? {
                    let entry = entry.map_err(io)?;
                    // Follows links: the hub's cache consists of them.
                    let slash = if entry.path().is_dir() { "/" } else { "" };
                    names.push(format!("{}{slash}", entry.file_name().to_string_lossy()));
                }
            }
            Self::Memory(_, files) => {
                let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
                for rest in files.iter().filter_map(|(p, _)| p.strip_prefix(&prefix)) {
                    names.push(rest.find('/').map_or(rest, |i| &rest[..=i]).to_owned());
                }
            }
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Contents of a small file, at most [`MAX_TEXT`] bytes.
    ///
    /// # Errors
    /// [`Error::MissingFile`] lists what is there; [`Error::TooLarge`]; [`Error::Io`]; [`Error::PathEscapes`].
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.guard(path)?;
        let bytes = match self {
            Self::Disk(dir) if self.contains(path) => Some(read_small(&dir.join(path), MAX_TEXT)?),
            Self::Disk(_) => None,
            Self::Memory(..) => self.built_in(path).map(<[u8]>::to_vec),
        };
        bytes.ok_or_else(|| {
            let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
            Error::MissingFile { folder: self.describe_part(dir), file: shown(file), found: self.found(dir) }
        })
    }

    /// A JSON file.
    ///
    /// # Errors
    /// Those of [`ModelFolder::read`]; [`Error::Json`] names file, line and column.
    pub fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let text = self.read(path)?;
        serde_json::from_slice(&text)
            .map_err(|e| Error::Json { file: self.describe_part(path), message: shown_message(&e.to_string()) })
    }

    /// The tensors of component `name` (`transformer`, `vae`, `text_encoder`; empty for the folder itself): one safetensors
    /// file, shards with an index, or a GGUF file. Quantised matrices are joined with their side tensors.
    ///
    /// A file with a standard name (`diffusion_pytorch_model.safetensors`, `model.safetensors`) comes first, then an index
    /// with such a name, then the only safetensors file or index in the folder, then the only GGUF file.
    ///
    /// # Errors
    /// [`Error::NoWeights`] lists what is there; otherwise those of [`Safetensors::open`], [`Gguf::open`] and
    /// [`quant::fold`].
    pub fn tensors(&self, component: &str) -> Result<Arc<dyn TensorSource>> {
        quant::fold(self.open_weights(component)?)
    }

    /// The tensors of a component as they are stored.
    pub(crate) fn open_weights(&self, component: &str) -> Result<Arc<dyn TensorSource>> {
        self.guard(component)?;
        let there = match self {
            Self::Disk(dir) => dir.join(component).is_dir(),
            Self::Memory(..) => !self.entries(component)?.is_empty(),
        };
        if !there {
            let (folder, file) = (self.describe(), format!("folder {}", shown(component)));
            return Err(Error::MissingFile { folder, file, found: self.found("") });
        }
        let file = choose(&self.entries(component)?).map_err(|problem| Error::NoWeights {
            folder: self.describe_part(component),
            problem,
            found: self.found(component),
        })?;
        let path = if component.is_empty() { file } else { format!("{component}/{file}") };
        match self {
            Self::Disk(dir) if path.ends_with(GGUF) => Ok(Arc::new(Gguf::open(dir.join(path))?)),
            Self::Disk(dir) => Ok(Arc::new(Safetensors::open(dir.join(path))?)),
            Self::Memory(..) => {
                let missing = || Error::MissingFile {
                    folder: self.describe_part(component),
                    file: shown(&path),
                    found: self.found(component),
                };
                let bytes = self.built_in(&path).ok_or_else(missing)?;
                let name = self.describe_part(&path);
                if path.ends_with(GGUF) {
                    return Ok(Arc::new(Gguf::from_bytes(Arc::new(bytes), name)?));
                }
                if !path.ends_with(".json") {
                    return Ok(Arc::new(Safetensors::from_static(bytes, name)?));
                }
                Ok(Arc::new(Safetensors::from_index(bytes, &name, |shard| {
                    let shard = if component.is_empty() { shard.to_owned() } else { format!("{component}/{shard}") };
                    Ok(self.built_in(&shard).map(|b| (Arc::new(b) as _, self.describe_part(&shard))))
                })?))
            }
        }
    }

    fn built_in(&self, path: &str) -> Option<&'static [u8]> {
        match self {
            Self::Disk(_) => None,
            Self::Memory(_, files) => files.iter().find(|(p, _)| *p == path).map(|(_, bytes)| *bytes),
        }
    }

    /// What a folder holds, for messages.
    fn found(&self, path: &str) -> String {
        match self.entries(path) {
            Ok(names) if names.is_empty() => "nothing".to_owned(),
            Ok(names) => list(names),
            Err(_) => "nothing that can be read".to_owned(),
        }
    }

    /// What a folder without `model_index.json` is instead.
    fn looks_like(&self) -> Result<String> {
        let names = self.entries("")?;
        if names.is_empty() {
            return Ok("it is empty".to_owned());
        }
        let found = format!("it holds {}", list(&names));
        let config = self.json::<serde_json::Value>("config.json").unwrap_or_default();
        if let Some(class) = config.get("_class_name").and_then(|c| c.as_str()) {
            return Ok(format!(
                "it looks like one component ({}) of a model, whose folder would be above; {found}",
                shown(class)
            ));
        }
        if let Some(class) = config.get("architectures").and_then(|a| a.get(0)).and_then(|c| c.as_str()) {
            return Ok(format!("it looks like a transformers model ({}); {found}", shown(class)));
        }
        let inner = names.iter().find(|n| n.ends_with('/') && self.contains(&format!("{n}{MODEL_INDEX}")));
        if let Some(inner) = inner {
            return Ok(format!("the model is in its folder {}; {found}", shown(inner.trim_end_matches('/'))));
        }
        if names.iter().any(|n| n.ends_with(".safetensors")) {
            return Ok(format!("it holds weights without the configuration files of the diffusers layout; {found}"));
        }
        if names.iter().any(|n| n.ends_with(GGUF)) {
            return Ok(format!("it holds GGUF files, a diffusers folder is needed; {found}"));
        }
        Ok(found)
    }

    fn guard(&self, path: &str) -> Result<()> {
        if path.is_empty() || is_plain_path(path) {
            return Ok(());
        }
        Err(Error::PathEscapes { file: self.describe(), path: shown(path) })
    }
}

const GGUF: &str = ".gguf";

/// The file with the weights among the names of a folder: a safetensors file, an index, or else a GGUF file.
fn choose(names: &[String]) -> Result<String, &'static str> {
    const SUFFIX: &str = ".safetensors";
    const INDEX: &str = ".safetensors.index.json";
    for standard in ["diffusion_pytorch_model", "model"] {
        for suffix in [SUFFIX, INDEX] {
            let name = format!("{standard}{suffix}");
            if names.contains(&name) {
                return Ok(name);
            }
        }
    }
    let with = |suffix: &str| names.iter().filter(|n| n.ends_with(suffix)).collect::<Vec<_>>();
    match (with(SUFFIX).as_slice(), with(INDEX).as_slice()) {
        ([file], _) => Ok((*file).clone()),
        ([_, _, ..], [index]) => Ok((*index).clone()),
        ([], [_, ..]) => Err("an index, but no safetensors file"),
        ([], []) => match with(GGUF).as_slice() {
            [file] => Ok((*file).clone()),
            [] => Err("no safetensors or GGUF file"),
            _ => Err("several GGUF files"),
        },
        (_, []) => Err("several safetensors files without an index, and none with a standard name"),
        (_, _) => Err("several safetensors files and several indexes, and none with a standard name"),
    }
}

/// Path of the weights in a folder on disk.
pub(crate) fn weights_in(dir: &Path) -> Result<PathBuf> {
    let folder = ModelFolder::Disk(dir.to_path_buf());
    choose(&folder.entries("")?).map(|file| dir.join(file)).map_err(|problem| Error::NoWeights {
        folder: folder.describe(),
        problem,
        found: folder.found(""),
    })
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::write::{Metadata, TensorData, to_bytes, to_file};

    fn weights(path: impl AsRef<Path>) {
        to_file(path, &[TensorData::f32("w", &[1], &[1.0])], &Metadata::new()).unwrap();
    }

    fn names(names: &[&str]) -> Result<String, &'static str> {
        choose(&names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn weights_are_chosen_by_name() {
        let standard = "diffusion_pytorch_model.safetensors";
        assert_eq!(names(&["a.safetensors", standard, "model.safetensors"]).as_deref(), Ok(standard));
        assert_eq!(names(&["model.safetensors", "z.safetensors"]).as_deref(), Ok("model.safetensors"));
        let index = "model.safetensors.index.json";
        assert_eq!(names(&["model-1.safetensors", "model-2.safetensors", index]).as_deref(), Ok(index));
        let index = "x.safetensors.index.json";
        assert_eq!(names(&["x-1.safetensors", "x-2.safetensors", index]).as_deref(), Ok(index));
        assert_eq!(names(&["ae.safetensors", "config.json"]).as_deref(), Ok("ae.safetensors"));
        assert!(names(&["config.json"]).is_err());
        assert_eq!(names(&["x.gguf", "config.json"]).as_deref(), Ok("x.gguf"));
        assert_eq!(names(&["x.gguf", "y.safetensors"]).as_deref(), Ok("y.safetensors"));
        assert!(names(&["x.gguf", "y.gguf"]).is_err_and(|e| e.contains("several GGUF")));
        assert!(names(&["a.safetensors", "b.safetensors"]).is_err_and(|e| e.contains("without an index")));
        assert!(names(&["x.safetensors.index.json"]).is_err_and(|e| e.contains("no safetensors file")));
    }

    #[test]
    fn a_folder_on_disk_reads_files() {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("vae")).unwrap();
        fs::write(dir.path().join("vae/config.json"), "{\"a\": 1,\n \"b\": x}").unwrap();
        weights(dir.path().join("vae/diffusion_pytorch_model.safetensors"));
        let folder = ModelFolder::Disk(dir.path().to_path_buf());
        assert!(folder.contains("vae/config.json") && !folder.contains("vae") && !folder.contains("none"));
        assert!(!folder.contains("../x") && !folder.contains("/etc/passwd"));
        assert_eq!(folder.entries("").unwrap(), ["vae/"]);
        assert_eq!(folder.tensors("vae").unwrap().tensors().len(), 1);
        let text = folder.json::<serde_json::Value>("vae/config.json").unwrap_err().to_string();
        assert!(text.contains("config.json: ") && text.contains("line 2 column 7"), "{text}");
        let text = folder.read("vae/other.json").unwrap_err().to_string();
        assert!(text.contains("has no other.json") && text.contains("config.json, diffusion_pytorch"), "{text}");
        for path in ["../secret", "/etc/passwd", "a/../../b"] {
            assert!(matches!(folder.read(path), Err(Error::PathEscapes { .. })), "{path}");
            assert!(matches!(folder.tensors(path), Err(Error::PathEscapes { .. })), "{path}");
        }
        let text = folder.tensors("transformer").map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("no folder transformer") && text.contains("vae/"), "{text}");
    }

    #[test]
    fn large_files_are_not_read() {
        let dir = TempDir::new().unwrap();
        let file = fs::File::create(dir.path().join("big.json")).unwrap();
        file.set_len(MAX_TEXT + 1).unwrap();
        let folder = ModelFolder::Disk(dir.path().to_path_buf());
        assert!(matches!(folder.read("big.json"), Err(Error::TooLarge { .. })));
    }

    #[test]
    fn a_built_in_folder_reads_files() {
        let w = |name: &str| to_bytes(&[TensorData::f32(name, &[1], &[1.0])], &Metadata::new()).unwrap().leak();
        let files: &'static [(&'static str, &'static [u8])] = Box::leak(Box::new([
            ("model_index.json", b"{}" as &[u8]),
            ("vae/model.safetensors", w("a")),
            ("t/model.safetensors.index.json", br#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#),
            ("t/1.safetensors", w("a")),
            ("t/2.safetensors", w("b")),
        ]));
        let folder = ModelFolder::Memory("demo", files);
        folder.check().unwrap();
        assert_eq!(folder.describe(), "demo");
        assert!(folder.contains("model_index.json") && !folder.contains("vae"));
        assert_eq!(folder.entries("").unwrap(), ["model_index.json", "t/", "vae/"]);
        assert_eq!(folder.tensors("vae").unwrap().describe(), "demo/vae/model.safetensors");
        assert_eq!(folder.tensors("t").unwrap().tensors().len(), 2);
        let text = folder.read("vae/none").unwrap_err().to_string();
        assert!(text.contains("demo/vae has no none; the folder holds model.safetensors"), "{text}");
        assert!(matches!(folder.tensors("x"), Err(Error::MissingFile { .. })));
    }

    /// A folder that is something else is said to be that.
    #[test]
    fn other_folders_are_described() {
        let text = |dir: &TempDir| ModelFolder::open(dir.path()).map(|_| ()).unwrap_err().to_string();
        let dir = TempDir::new().unwrap();
        assert!(text(&dir).contains("it is empty"), "{}", text(&dir));
        fs::write(dir.path().join("notes.txt"), "").unwrap();
        assert!(text(&dir).contains("it holds notes.txt"), "{}", text(&dir));
        weights(dir.path().join("ae.safetensors"));
        assert!(text(&dir).contains("without the configuration files"), "{}", text(&dir));
        fs::create_dir(dir.path().join("inner")).unwrap();
        fs::write(dir.path().join("inner/model_index.json"), "{}").unwrap();
        assert!(text(&dir).contains("the model is in its folder inner"), "{}", text(&dir));
        fs::write(dir.path().join("config.json"), r#"{"architectures":["Qwen3ForCausalLM"]}"#).unwrap();
        assert!(text(&dir).contains("transformers model (Qwen3ForCausalLM)"), "{}", text(&dir));
        fs::write(dir.path().join("config.json"), r#"{"_class_name":"AutoencoderKLFlux2"}"#).unwrap();
        assert!(text(&dir).contains("one component (AutoencoderKLFlux2)"), "{}", text(&dir));
        assert!(text(&dir).starts_with(&dir.path().display().to_string()));
        fs::write(dir.path().join("model_index.json"), "{}").unwrap();
        ModelFolder::open(dir.path()).unwrap();
        let file = ModelFolder::open(dir.path().join("notes.txt")).unwrap_err().to_string();
        assert!(file.contains("it is a file"), "{file}");
        assert!(matches!(ModelFolder::open(dir.path().join("none")), Err(Error::Io { .. })));
    }
}
