//! Where the networks lie: in published files, in files of a whole model, in folders of diffusers.

use std::{path::Path, sync::Arc};

use candle_core::{DType, Device};
use candle_fork::What;
use serde_json::Value;
use weights::{ModelFolder, TensorSource};

use crate::error::{Error, Result};

/// Prefixes of the tensors in published files: none in files of a VAE, `vae.` in those of a whole model.
pub(crate) const PREFIXES: [&str; 2] = ["", "vae."];

/// Key of the configuration in a published file's metadata.
pub(crate) const CONFIG: &str = "config";

/// Tensors, and what describes their network where the tensors' file does not.
#[derive(Clone)]
pub struct Component {
    /// Tensors under the names of any layout.
    pub source: Arc<dyn TensorSource>,
    /// The `config.json` beside them.
    pub config: Option<Value>,
}

impl Component {
    /// Mean and standard deviation of each channel of raw latents, as the file has them.
    ///
    /// # Errors
    /// [`Error::Missing`] if it has none; [`Error::Weights`] if they cannot be read.
    pub fn statistics(&self) -> Result<[Vec<f32>; 2]> {
        let read = |published: &str, diffusers: &str| -> Result<Vec<f32>> {
            let name = match prefix_of(&*self.source, published) {
                Some(prefix) => format!("{prefix}{published}"),
                None => diffusers.to_owned(),
            };
            if self.source.info(&name).is_none() {
                return Err(Error::Missing { part: "statistics of the latents of an ltx vae" });
            }
            let values = self.source.host(&name)?.to_tensor(DType::F32, &Device::Cpu)?;
            Ok(values.to_vec1().what("statistics of the latents")?)
        };
        Ok([
            read("per_channel_statistics.mean-of-means", "latents_mean")?,
            read("per_channel_statistics.std-of-means", "latents_std")?,
        ])
    }
}

/// The networks between latents and pixels that a path leads to.
///
/// A published file of LTX-2.5 holds an encoder beside the diffusion decoder, so both parts may be one file.
#[derive(Clone, Default)]
pub struct LtxFiles {
    /// The convolutional VAE: encoder, decoder, or both.
    pub vae: Option<Component>,
    /// The diffusion decoder.
    pub diffusion_decoder: Option<Component>,
}

impl LtxFiles {
    /// Looks at a path:
    ///
    /// - a file with any of the layouts' names, published or of diffusers, the latter with its `config.json` beside it;
    /// - the folder of one component, weights and `config.json`;
    /// - a model folder with components `vae` and `diffusion_decoder`, or one of them.
    ///
    /// Headers are read, no tensor is. Parts that are not there are `None`, both for files of something else.
    ///
    /// # Errors
    /// [`Error::Weights`] if there is nothing, or nothing that can be read.
    pub fn find(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::in_folder(&ModelFolder::Disk(path.to_path_buf()));
        }
        let source = weights::open(path)?;
        let beside = ModelFolder::Disk(path.parent().unwrap_or(Path::new("")).to_path_buf());
        let config = if source.metadata().contains_key(CONFIG) { None } else { json(&beside, "config.json")? };
        Ok(Self::of(Component { source, config }))
    }

    /// Like [`LtxFiles::find`], for a folder on disk or built into the program.
    ///
    /// # Errors
    /// As [`LtxFiles::find`].
    pub fn in_folder(folder: &ModelFolder) -> Result<Self> {
        let component = |name: &str| -> Result<Option<Component>> {
            let config = json(folder, &format!("{name}/config.json"))?;
            // Weights without their description are the component none the less: to open it says what is missing.
            let source = if config.is_some() { Some(folder.tensors(name)?) } else { folder.tensors(name).ok() };
            Ok(source.map(|source| Component { source, config }))
        };
        let (vae, decoder) = (component("vae")?, component("diffusion_decoder")?);
        if vae.is_none() && decoder.is_none() {
            let config = json(folder, "config.json")?;
            return Ok(Self::of(Component { source: folder.tensors("")?, config }));
        }
        // A folder of another family has a `vae` as well.
        Ok(Self {
            vae: vae.and_then(|component| Self::of(component).vae),
            diffusion_decoder: decoder.and_then(|component| Self::of(component).diffusion_decoder),
        })
    }

    fn of(component: Component) -> Self {
        let has_vae = has_vae(&*component.source);
        let has_diffusion = prefix_of(&*component.source, "decoder.conv_in_x_t.weight").is_some();
        Self { vae: has_vae.then(|| component.clone()), diffusion_decoder: has_diffusion.then_some(component) }
    }

    /// Whether there is none of them.
    pub fn is_empty(&self) -> bool {
        self.vae.is_none() && self.diffusion_decoder.is_none()
    }
}

/// The prefix under which a file has a tensor.
pub(crate) fn prefix_of(source: &dyn TensorSource, name: &str) -> Option<&'static str> {
    PREFIXES.into_iter().find(|prefix| source.info(&format!("{prefix}{name}")).is_some())
}

/// Encoder or decoder of the convolutional VAE, with the statistics of its latents.
fn has_vae(source: &dyn TensorSource) -> bool {
    let has = |name: &str| prefix_of(source, name).is_some();
    let networks = ["encoder.conv_in.conv.weight", "decoder.conv_in.conv.weight"];
    let statistics = ["latents_mean", "per_channel_statistics.mean-of-means"];
    networks.into_iter().any(has) && statistics.into_iter().any(has)
}

fn json(folder: &ModelFolder, path: &str) -> Result<Option<Value>> {
    Ok(if folder.contains(path) { Some(folder.json(path)?) } else { None })
}

/// The configuration in a file's metadata.
///
/// # Errors
/// [`Error::Config`] if it is no JSON.
pub(crate) fn embedded(source: &dyn TensorSource) -> Result<Option<Value>> {
    let Some(text) = source.metadata().get(CONFIG) else { return Ok(None) };
    let refuse = |e: serde_json::Error| Error::Config {
        field: format!("{}: metadata", source.describe()),
        problem: format!("is no JSON: {e}"),
    };
    serde_json::from_str(text).map(Some).map_err(refuse)
}

/// [`Error::NoConfig`] of a file.
pub(crate) fn no_config(source: &dyn TensorSource) -> Error {
    Error::NoConfig { file: source.describe().to_owned() }
}
