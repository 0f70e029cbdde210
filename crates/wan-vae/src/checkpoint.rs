//! Checkpoints of every layout, seen as one.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    path::Path,
    sync::Arc,
};

use candle_core::DType;
use candle_fork::{HostBytes, quant::QuantWeight};
use weights::{
    Error as WeightsError, ModelFolder, SourceFile, StoredDType, TensorInfo, TensorSource,
    folder::MODEL_INDEX,
    loader::{Misshapen, PlanReport},
};

use crate::{
    architecture::Architecture,
    config::{CLASSES, VaeConfig},
    detect::{Layout, detect},
    error::{Error, Result},
    latents::Statistics,
    load::stored_float,
    plan::expected,
    variant::Variant,
};

/// Tensors that come with some checkpoints and serve training only.
const IGNORED: &[&str] = &["dynamic_feature_projection_heads."];

/// A checkpoint whose tensors are all there with the right shapes.
pub struct Checkpoint {
    /// The network.
    pub architecture: Architecture,
    /// Which published one it is.
    pub variant: Variant,
    /// How the file names its tensors.
    pub layout: Layout,
    /// Mean and standard deviation of the latents, if they are known: those of the configuration, else the published
    /// ones of VAEs with 16 and 48 channels.
    pub statistics: Option<Statistics>,
    /// Names in the file of tensors that the network does not have, sorted. The map of an encoder or decoder that is not in
    /// the file, names without the prefix of the others, and names that serve training only do not count.
    pub unused: Vec<String>,
    /// Exactly the tensors of [`expected`], under those names.
    pub source: Arc<dyn TensorSource>,
}

impl Checkpoint {
    /// Recognises what `source` holds and checks it as a whole; no tensor is read. The tensors decide what the network
    /// is; a configuration that says otherwise is passed over with a `tracing` warning, except for the statistics, which
    /// are in no tensor. Tensors that the network does not have are listed in a warning.
    ///
    /// # Errors
    /// [`Error::NotAVae`], [`Error::Architecture`]; [`Error::Weights`] with the first names that are missing or have
    /// other shapes; [`Error::Statistics`] for a configuration whose statistics are those of another VAE.
    pub fn new(source: Arc<dyn TensorSource>, config: Option<&VaeConfig>) -> Result<Self> {
        let (layout, architecture) = detect(&*source)?;
        let renamed = Renamed::new(source, &layout, &architecture)?;
        let refuse = |e: Error| Error::NotAVae { file: renamed.describe().to_owned(), found: e.to_string() };
        architecture.validate().map_err(refuse)?;
        let variant = Variant::of(&architecture);
        if let Some(config) = config {
            compare(config, &architecture, renamed.describe());
        }
        if variant.pictures_only() {
            tracing::warn!(file = renamed.describe(), %variant, "the network knows no motion: every latent frame is a picture");
        }
        let statistics = statistics(config, architecture.z_dim)?;
        let unused = unused(&renamed, &layout, &architecture);
        if !unused.is_empty() {
            let first = unused.iter().take(10).map(String::as_str).collect::<Vec<_>>().join(", ");
            tracing::warn!(
                file = renamed.describe(),
                tensors = unused.len(),
                first,
                "tensors that the vae does not have"
            );
        }
        Ok(Self { architecture, variant, layout, statistics, unused, source: Arc::new(renamed) })
    }

    /// The narrowest float type that holds every weight as it is stored; weights are kept in it unless
    /// [`LoadOptions::dtype`](crate::LoadOptions::dtype) says otherwise.
    pub fn dtype(&self) -> DType {
        stored_float(&*self.source)
    }

    /// Refuses the maps beside the latents if they are zero throughout, as in one published revision, which decodes to a
    /// flat field.
    ///
    /// # Errors
    /// [`Error::Zeroed`]; [`Error::Weights`] if they cannot be read.
    pub fn check_values(&self) -> Result<()> {
        for name in ["quant_conv.weight", "post_quant_conv.weight"] {
            if let Some(tensor) = self.source.info(name)
                && is_zero(self.source.bytes(name)?, tensor.dtype)
            {
                let file = self.source.describe().to_owned();
                return Err(Error::Zeroed { file, tensor: self.layout.name_in_file(name) });
            }
        }
        Ok(())
    }
}

/// The tensors and the configuration, if there is one, of a VAE: a file of any layout, the folder of the component, or a
/// model folder in the diffusers layout with a component `vae`.
///
/// # Errors
/// [`Error::Weights`].
pub fn open(path: impl AsRef<Path>) -> Result<(Arc<dyn TensorSource>, Option<VaeConfig>)> {
    let path = path.as_ref();
    if path.is_dir() {
        return open_folder(&ModelFolder::Disk(path.to_path_buf()));
    }
    let source = weights::open(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok((source, config_in(&ModelFolder::Disk(folder.to_path_buf()), "config.json")?))
}

/// Like [`open()`], for a folder on disk or built into the program.
///
/// # Errors
/// As [`open()`].
pub fn open_folder(folder: &ModelFolder) -> Result<(Arc<dyn TensorSource>, Option<VaeConfig>)> {
    if folder.contains(MODEL_INDEX) {
        return Ok((folder.tensors("vae")?, config_in(folder, "vae/config.json")?));
    }
    Ok((folder.tensors("")?, config_in(folder, "config.json")?))
}

/// The configuration, if there is one and it is that of a VAE: original repositories have the transformer's there.
fn config_in(folder: &ModelFolder, path: &str) -> Result<Option<VaeConfig>> {
    if !folder.contains(path) {
        return Ok(None);
    }
    let value: serde_json::Value = folder.json(path)?;
    let class = value.get("_class_name").and_then(|class| class.as_str());
    if class.is_some_and(|class| CLASSES.contains(&class)) { Ok(Some(folder.json(path)?)) } else { Ok(None) }
}

/// Those of the configuration, else the published ones.
fn statistics(config: Option<&VaeConfig>, z_dim: usize) -> Result<Option<Statistics>> {
    let Some(config) = config else {
        return Ok(match z_dim {
            16 => Some(Statistics::wan21()),
            48 => Some(Statistics::wan22()),
            _ => None,
        });
    };
    if config.latents_mean.len() != z_dim {
        let got = format!("{} values", config.latents_mean.len());
        let expected = format!("{z_dim}, the channels of the weights: the configuration is that of another vae");
        return Err(Error::Statistics { field: "latents_mean", got, expected });
    }
    Statistics::new(&config.latents_mean, &config.latents_std).map(Some)
}

/// Warns where a configuration and the tensors disagree.
fn compare(config: &VaeConfig, architecture: &Architecture, file: &str) {
    for (field, said, found) in disagreements(config, architecture) {
        tracing::warn!(file, field, said, found, "the configuration disagrees with the tensors, which count");
    }
}

/// Field, its value in the configuration, and what the tensors say.
fn disagreements(config: &VaeConfig, architecture: &Architecture) -> Vec<(&'static str, String, String)> {
    let mut list = Vec::new();
    let mut compare = |field, said: usize, found: Option<usize>| {
        if let Some(found) = found
            && said != found
        {
            list.push((field, said.to_string(), found.to_string()));
        }
    };
    let (encoder, decoder) = (architecture.encoder.as_ref(), architecture.decoder.as_ref());
    let widths = |network: &crate::architecture::Network| -> Vec<usize> {
        network.stages.iter().filter_map(|s| s.blocks.last()).map(|b| b.output).collect()
    };
    compare("z_dim", config.z_dim, Some(architecture.z_dim));
    compare("is_residual", config.is_residual.into(), Some(architecture.residual.into()));
    compare("in_channels", config.in_channels, encoder.map(|e| e.in_channels));
    compare("out_channels", config.out_channels, decoder.map(|d| d.out_channels));
    compare("base_dim", config.base_dim, encoder.map(|e| e.base));
    let finest = decoder.and_then(|d| widths(d).last().copied());
    compare("decoder_base_dim", config.decoder_base_dim.unwrap_or(config.base_dim), finest);
    let blocks = encoder.and_then(|e| e.stages.first()).map(|s| s.blocks.len());
    let blocks = blocks.or_else(|| decoder.and_then(|d| d.stages.first()).map(|s| s.blocks.len().saturating_sub(1)));
    compare("num_res_blocks", config.num_res_blocks, blocks);
    compare("dim_mult", config.dim_mult.len(), encoder.or(decoder).map(|n| n.stages.len()));
    if let Some(encoder) = encoder {
        let found = widths(encoder);
        let said: Vec<usize> = config.dim_mult.iter().map(|m| m.saturating_mul(config.base_dim)).collect();
        if said.len() == found.len() && said != found {
            list.push(("dim_mult", format!("{said:?}"), format!("{found:?}")));
        }
    }
    list
}

/// A checkpoint with its tensors under diffusers names, and with the axes that this crate's kernels have.
struct Renamed {
    inner: Arc<dyn TensorSource>,
    /// Sorted by name.
    tensors: Vec<TensorInfo>,
    /// Names in the file, by the same index.
    names: Vec<String>,
}

impl Renamed {
    fn new(inner: Arc<dyn TensorSource>, layout: &Layout, architecture: &Architecture) -> Result<Self> {
        let mut report = PlanReport::default();
        let mut pairs = Vec::new();
        for wanted in expected(architecture) {
            let name = layout.name_in_file(&wanted.name);
            let Some(found) = inner.info(&name) else {
                report.missing.push(name);
                continue;
            };
            // Norms are stored with and without axes for the picture, kernels of networks for pictures without time.
            if same_but_for_ones(&found.shape, &wanted.shape) {
                pairs.push((TensorInfo { name: wanted.name, shape: wanted.shape, ..found.clone() }, name));
            } else {
                report.misshapen.push(Misshapen { name, found: found.shape.clone(), expected: wanted.shape });
            }
        }
        if !report.fits() {
            let file = inner.describe().to_owned();
            return Err(WeightsError::Plan { file, report: Box::new(report) }.into());
        }
        pairs.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        let (tensors, names) = pairs.into_iter().unzip();
        Ok(Self { inner, tensors, names })
    }

    fn find(&self, name: &str) -> weights::Result<usize> {
        let found = self.tensors.binary_search_by(|t| t.name.as_str().cmp(name));
        found.map_err(|_| WeightsError::NoSuchTensor { file: self.describe().to_owned(), tensor: name.to_owned() })
    }
}

/// Names that the network does not have and that belong to no other part of the file.
fn unused(source: &Renamed, layout: &Layout, architecture: &Architecture) -> Vec<String> {
    let used: HashSet<&str> = source.names.iter().map(String::as_str).collect();
    let absent = |name: &str| match name.split('.').next() {
        Some("quant_conv" | "conv1") => architecture.encoder.is_none(),
        Some("post_quant_conv" | "conv2") => architecture.decoder.is_none(),
        _ => false,
    };
    let is_unused = |name: &str| !absent(name) && !IGNORED.iter().any(|prefix| name.starts_with(prefix));
    let tensors = source.inner.tensors().iter().filter(|t| !used.contains(t.name.as_str()));
    let unused = tensors.filter(|t| t.name.strip_prefix(layout.prefix).is_some_and(is_unused));
    unused.map(|t| t.name.clone()).collect()
}

/// Whether two shapes differ only by extents of 1.
fn same_but_for_ones(a: &[usize], b: &[usize]) -> bool {
    let long = |&extent: &&usize| *extent != 1;
    a.iter().filter(long).eq(b.iter().filter(long))
}

impl TensorSource for Renamed {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn files(&self) -> &[SourceFile] {
        self.inner.files()
    }

    fn bytes(&self, name: &str) -> weights::Result<&[u8]> {
        self.inner.bytes(&self.names[self.find(name)?])
    }

    fn shared(&self, name: &str) -> weights::Result<(HostBytes, Range<usize>)> {
        self.inner.shared(&self.names[self.find(name)?])
    }

    fn quant(&self, name: &str) -> weights::Result<QuantWeight> {
        self.inner.quant(&self.names[self.find(name)?])
    }

    fn describe(&self) -> &str {
        self.inner.describe()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.inner.metadata()
    }
}

/// Whether every element is zero, of either sign; false for a tensor without elements.
fn is_zero(bytes: &[u8], dtype: StoredDType) -> bool {
    let size = (dtype.bits() / 8).max(1);
    let zero = |element: &[u8]| match element.split_last() {
        Some((last, rest)) => last & 0x7f == 0 && rest.iter().all(|&b| b == 0),
        None => true,
    };
    !bytes.is_empty() && bytes.chunks(size).all(zero)
}

#[cfg(test)]
mod tests;
