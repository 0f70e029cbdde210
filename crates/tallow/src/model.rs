//! Which model a run uses: the built-in one, a folder, or a repository of the hub; some of its components may come from
//! files of their own.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use flux2::{Components, TensorSources};
use hub::{RepoId, Settings, Want};
use policy::Observer;
use weights::{ModelFolder, TensorSource, sample_hash};

use crate::{cli::ModelArgs, demo, failure::Failure};

/// The components that have weights.
const PARTS: [&str; 3] = ["text_encoder", "transformer", "vae"];

/// A model and the name that metadata give it.
pub(crate) struct Model {
    pub(crate) folder: ModelFolder,
    /// Its components, each opened once.
    pub(crate) sources: TensorSources,
    pub(crate) name: String,
    /// What the user should know about where it comes from.
    pub(crate) notices: Vec<String>,
}

impl Model {
    /// A hash of the weights of all components.
    ///
    /// # Errors
    /// If a component cannot be read.
    pub(crate) fn hash(&self) -> anyhow::Result<String> {
        let parts = PARTS.map(|part| Ok((part, (self.sources)(part)?)));
        let sources = parts.into_iter().collect::<weights::Result<Vec<_>>>()?;
        let named: Vec<(&str, &dyn TensorSource)> = sources.iter().map(|(part, source)| (*part, &**source)).collect();
        Ok(sample_hash(&named)?)
    }

    /// Whether any of its weights are quantised.
    ///
    /// # Errors
    /// If a component cannot be read.
    pub(crate) fn is_quantised(&self) -> anyhow::Result<bool> {
        for part in PARTS {
            if (self.sources)(part)?.tensors().iter().any(|tensor| tensor.quantisation.is_some()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Opens the model that was asked for; what the hub's cache lacks is downloaded, if this program can.
    ///
    /// # Errors
    /// If it cannot be found or is no model; an interruption.
    pub(crate) fn open(args: &ModelArgs, observer: &dyn Observer) -> Result<Self, Failure> {
        let mut notices = Vec::new();
        let mut find = |path: &Path, wanted: Wanted<'_>| -> Result<PathBuf, Failure> {
            let (path, notice) = find(path, wanted, observer)?;
            notices.extend(notice);
            Ok(path)
        };
        let given =
            [("transformer", &args.transformer), ("text_encoder", &args.text_encoder), ("vae", &args.component_vae)];
        let mut components = Components::default();
        for (component, path) in given {
            let Some(path) = path else { continue };
            let source = weights::open(find(path, Wanted::File)?).map_err(anyhow::Error::from)?;
            components = match component {
                "transformer" => components.with_transformer(source),
                "text_encoder" => components.with_text_encoder(source),
                _ => components.with_vae(source),
            };
        }
        let without: Vec<&str> =
            given.into_iter().filter(|(_, path)| path.is_some()).map(|(component, _)| component).collect();
        let (folder, mut name) = match &args.model {
            None => (demo::model(), demo::NAME.to_owned()),
            Some(path) => {
                let found = find(path, Wanted::Model { without: &without })?;
                if found.is_file() {
                    let text = path.display();
                    return Err(anyhow!(
                        "{text} is a file: give it as --transformer, and the folder of the other components as --model"
                    )
                    .into());
                }
                let name = if found == *path { file_name(path, false)? } else { path.display().to_string() };
                (ModelFolder::open(found).map_err(anyhow::Error::from)?, name)
            }
        };
        if let Some(transformer) = &args.transformer {
            name = file_name(transformer, true)?;
        }
        let sources = components.sources(&folder);
        Ok(Self { folder, sources, name, notices })
    }
}

/// The last part of a path, which exists or is a name of the hub.
fn file_name(path: &Path, without_ending: bool) -> anyhow::Result<String> {
    // Canonical, so that `.` has a name as well.
    let canonical = if path.exists() {
        path.canonicalize().with_context(|| format!("cannot open {}", path.display()))?
    } else {
        path.to_owned()
    };
    let name = if without_ending && !path.is_dir() { canonical.file_stem() } else { canonical.file_name() };
    Ok(name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned()))
}

/// What a path, or a name of the hub, should lead to.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// A folder in the diffusers layout, named `owner/name` in the hub.
    Model {
        /// Components that come from elsewhere.
        without: &'a [&'a str],
    },
    /// A file, named `owner/name/path` in the hub.
    File,
}

/// Where `path` is: itself if it exists, else in the hub's cache.
fn find(path: &Path, wanted: Wanted<'_>, observer: &dyn Observer) -> Result<(PathBuf, Option<String>), Failure> {
    if path.exists() {
        return Ok((path.to_owned(), None));
    }
    let text = path.to_str().unwrap_or_default();
    let named = match wanted {
        Wanted::Model { .. } => RepoId::parse(text).map(|repo| (repo, String::new())),
        Wanted::File => RepoId::parse_with_file(text),
    };
    // What cannot be a name of the hub is a path that does not exist: whoever opens it says so.
    let Ok((repo, file)) = named else { return Ok((path.to_owned(), None)) };
    let want = match wanted {
        Wanted::Model { without } => Want::Model { without },
        Wanted::File => Want::File(&file),
    };
    match hub::fetch(&repo, want, &hub_settings()?, observer) {
        Ok(found) => {
            let notice = found.notice.map(|reason| format!("using {repo} as it is in the cache: {reason}"));
            Ok((found.path, notice))
        }
        Err(hub::Error::Cancelled(_)) => Err(Failure::Interrupted),
        // Many repositories hold single files of a model.
        Err(error @ hub::Error::NoSuchFile { .. }) if matches!(wanted, Wanted::Model { .. }) => {
            let advice = format!("{text} is no model folder; a file of it can be given as --transformer {text}/FILE");
            Err(anyhow::Error::from(error).context(advice).into())
        }
        Err(error) => Err(anyhow::Error::from(error).context(format!("{text} is no path here")).into()),
    }
}

/// The hub and its cache, as the environment describes them.
///
/// # Errors
/// If no variable leads to a place for the cache.
pub(crate) fn hub_settings() -> anyhow::Result<Settings> {
    let settings = Settings::from_variables(|name| std::env::var_os(name))?;
    ensure!(
        settings.endpoint.starts_with("http://") || settings.endpoint.starts_with("https://"),
        "HF_ENDPOINT is {:?}, expected an address that begins with https://",
        settings.endpoint
    );
    Ok(settings)
}
