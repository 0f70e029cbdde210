//! Configurations: the one that published files carry, and that of diffusers.

use serde_json::Value;

use super::architecture::{Architecture, Block, Causality, Network, SpatialPadding};
use crate::error::{Error, Result};

/// From the section `vae` of the configuration in a published file's metadata. A file with the diffusion decoder gives its
/// encoder alone.
///
/// # Errors
/// [`Error::Config`] for what is missing, unknown or not of this family.
pub fn from_original(vae: &Value) -> Result<Architecture> {
    let class = Fields::new("vae", vae)?.text("_class_name", "CausalVideoAutoencoder")?;
    let architecture = match class.as_str() {
        "CausalVideoAutoencoder" => {
            let fields = Fields::new("vae", vae)?;
            let encoder = fields.value("encoder_blocks").map(|blocks| original_encoder(&fields, "encoder_", blocks));
            let decoder = fields.value("decoder_blocks").map(|blocks| original_decoder(&fields, blocks));
            Architecture {
                latent_channels: fields.required("latent_channels")?,
                channels: fields.number("in_channels", 3)?,
                patch_size: fields.number("patch_size", 4)?,
                encoder: encoder.transpose()?,
                decoder: decoder.transpose()?,
            }
        }
        "CausalDiffusionVAE" => {
            let whole = Fields::new("vae", vae)?;
            let encoder = whole.value("encoder").ok_or_else(|| refuse("vae.encoder", "is missing"))?;
            let fields = Fields::new("vae.encoder", encoder)?;
            let blocks = fields.value("blocks").ok_or_else(|| refuse("vae.encoder.blocks", "is missing"))?;
            Architecture {
                latent_channels: match (fields.value("out_channels"), whole.value("decoder")) {
                    (Some(_), _) => fields.required("out_channels")?,
                    (None, Some(decoder)) => Fields::new("vae.decoder", decoder)?.required("in_channels")?,
                    (None, None) => whole.required("latent_channels")?,
                },
                channels: fields.number("in_channels", 3)?,
                patch_size: fields.number("patch_size", whole.number("patch_size", 4)?)?,
                encoder: Some(original_encoder(&fields, "", blocks)?),
                decoder: None,
            }
        }
        other => return Err(refuse("vae._class_name", &format!("is {other:?}, expected \"CausalVideoAutoencoder\""))),
    };
    architecture.validate()?;
    Ok(architecture)
}

/// `prefix` stands before the keys that are the encoder's own.
fn original_encoder(fields: &Fields<'_>, prefix: &str, blocks: &Value) -> Result<Network> {
    only_pixel_norm(fields)?;
    let base = fields.number(&format!("{prefix}base_channels"), 128)?;
    let mut width = base;
    let mut list = Vec::new();
    for (index, entry) in entries(fields, blocks)?.iter().enumerate() {
        let (kind, params) = entry_of(fields, index, entry)?;
        list.push(match kind {
            "res_x" => Block::Residual { layers: params.layers()?, inject_noise: false },
            "compress_time_res" | "compress_space_res" | "compress_all_res" => {
                let multiplier = params.number("multiplier", 2)?;
                width = width.saturating_mul(multiplier);
                Block::Down { factor: factor(kind), width }
            }
            other => return Err(params.unsupported(other)),
        });
    }
    Ok(Network {
        width: base,
        blocks: list,
        causality: Causality::Causal,
        padding: padding(fields, &[&format!("{prefix}spatial_padding_mode")], SpatialPadding::Zeros)?,
        timestep_conditioning: false,
    })
}

/// Blocks are listed in the order of an encoder.
fn original_decoder(fields: &Fields<'_>, blocks: &Value) -> Result<Network> {
    only_pixel_norm(fields)?;
    let mut width: usize = fields.number("decoder_base_channels", 128)?;
    let mut list = Vec::new();
    for (index, entry) in entries(fields, blocks)?.iter().enumerate() {
        let (kind, params) = entry_of(fields, index, entry)?;
        list.push(match kind {
            "res_x" => Block::Residual { layers: params.layers()?, inject_noise: params.flag("inject_noise", false)? },
            "compress_time" | "compress_space" | "compress_all" => {
                let reduction = params.number("multiplier", 1)?;
                width = width.saturating_mul(reduction);
                Block::Up { factor: factor(kind), reduction, residual: params.flag("residual", false)? }
            }
            other => return Err(params.unsupported(other)),
        });
    }
    list.reverse();
    let keys = ["decoder_spatial_padding_mode", "spatial_padding_mode"];
    Ok(Network {
        width,
        blocks: list,
        causality: causality(fields.flag("causal_decoder", false)?),
        padding: padding(fields, &keys, SpatialPadding::Reflect)?,
        timestep_conditioning: fields.flag("timestep_conditioning", true)?,
    })
}

/// From the `config.json` of diffusers' `AutoencoderKLLTX2Video`.
///
/// Lists of the decoder are in the order of the encoder there, but for `upsample_type`, which is in that of the run. The
/// width behind the encoder's first convolution is `latent_channels`.
///
/// # Errors
/// [`Error::Config`] for what is missing, unknown or not of this family.
pub fn from_diffusers(config: &Value) -> Result<Architecture> {
    let fields = Fields::new("", config)?;
    let class = fields.text("_class_name", "AutoencoderKLLTX2Video")?;
    if class != "AutoencoderKLLTX2Video" {
        return Err(refuse("_class_name", &format!("is {class:?}, expected \"AutoencoderKLLTX2Video\"")));
    }
    if fields.number("patch_size_t", 1)? != 1 {
        return Err(refuse("patch_size_t", "is not 1, which is not supported"));
    }
    let latent_channels = fields.required("latent_channels")?;
    let architecture = Architecture {
        latent_channels,
        channels: fields.number("in_channels", 3)?,
        patch_size: fields.number("patch_size", 4)?,
        encoder: Some(diffusers_encoder(&fields, latent_channels)?),
        decoder: Some(diffusers_decoder(&fields)?),
    };
    architecture.validate()?;
    Ok(architecture)
}

fn diffusers_encoder(fields: &Fields<'_>, width: usize) -> Result<Network> {
    let widths = fields.numbers("block_out_channels")?;
    let layers = fields.numbers("layers_per_block")?;
    let scaled = fields.flags("spatio_temporal_scaling", widths.len(), true)?;
    let kinds = fields.texts("downsample_type", &["spatial", "temporal", "spatiotemporal", "spatiotemporal"])?;
    fields.same_length("layers_per_block", layers.len(), widths.len() + 1)?;
    fields.same_length("downsample_type", kinds.len(), widths.len())?;
    all_scaled("spatio_temporal_scaling", &scaled)?;
    let mut blocks = Vec::new();
    for ((&layers, &width), kind) in layers.iter().zip(&widths).zip(&kinds) {
        blocks.push(Block::Residual { layers, inject_noise: false });
        blocks.push(Block::Down { factor: named_factor("downsample_type", kind)?, width });
    }
    blocks.push(Block::Residual { layers: layers.last().copied().unwrap_or(0), inject_noise: false });
    Ok(Network {
        width,
        blocks,
        causality: causality(fields.flag("encoder_causal", true)?),
        padding: padding(fields, &["encoder_spatial_padding_mode"], SpatialPadding::Zeros)?,
        timestep_conditioning: false,
    })
}

fn diffusers_decoder(fields: &Fields<'_>) -> Result<Network> {
    let widths = fields.numbers("decoder_block_out_channels")?;
    let count = widths.len();
    let mut layers = fields.numbers("decoder_layers_per_block")?;
    let mut noise = fields.flags("decoder_inject_noise", count + 1, false)?;
    let mut residual = fields.flags("upsample_residual", count, true)?;
    let mut reductions = match fields.value("upsample_factor") {
        Some(_) => fields.numbers("upsample_factor")?,
        None => vec![2; count],
    };
    let kinds = fields.texts("upsample_type", &vec!["spatiotemporal"; count])?;
    let scaled = fields.flags("decoder_spatio_temporal_scaling", count, true)?;
    all_scaled("decoder_spatio_temporal_scaling", &scaled)?;
    for (field, got, wanted) in [
        ("decoder_layers_per_block", layers.len(), count + 1),
        ("decoder_inject_noise", noise.len(), count + 1),
        ("upsample_residual", residual.len(), count),
        ("upsample_factor", reductions.len(), count),
        ("upsample_type", kinds.len(), count),
    ] {
        fields.same_length(field, got, wanted)?;
    }
    layers.reverse();
    noise.reverse();
    residual.reverse();
    reductions.reverse();
    let mut groups =
        layers.into_iter().zip(noise).map(|(layers, inject_noise)| Block::Residual { layers, inject_noise });
    let mut blocks: Vec<Block> = groups.next().into_iter().collect();
    for (((kind, reduction), residual), group) in kinds.iter().zip(reductions).zip(residual).zip(groups) {
        blocks.push(Block::Up { factor: named_factor("upsample_type", kind)?, reduction, residual });
        blocks.push(group);
    }
    Ok(Network {
        width: widths.last().copied().unwrap_or(0),
        blocks,
        causality: causality(fields.flag("decoder_causal", true)?),
        padding: padding(fields, &["decoder_spatial_padding_mode"], SpatialPadding::Reflect)?,
        timestep_conditioning: fields.flag("timestep_conditioning", false)?,
    })
}

fn causality(causal: bool) -> Causality {
    if causal { Causality::Causal } else { Causality::Centred }
}

/// Factors of a block of a published file.
fn factor(kind: &str) -> [usize; 3] {
    match kind.trim_start_matches("compress_").trim_end_matches("_res") {
        "time" => [2, 1, 1],
        "space" => [1, 2, 2],
        _ => [2, 2, 2],
    }
}

/// Factors of a block of diffusers.
fn named_factor(field: &str, kind: &str) -> Result<[usize; 3]> {
    match kind {
        "temporal" => Ok([2, 1, 1]),
        "spatial" => Ok([1, 2, 2]),
        "spatiotemporal" => Ok([2, 2, 2]),
        other => Err(refuse(field, &format!("has {other:?}, which is not supported"))),
    }
}

fn all_scaled(field: &str, scaled: &[bool]) -> Result<()> {
    let all = scaled.iter().all(|&scaled| scaled);
    if all { Ok(()) } else { Err(refuse(field, "has a block that does not scale, which is not supported")) }
}

fn only_pixel_norm(fields: &Fields<'_>) -> Result<()> {
    match fields.text("norm_layer", "pixel_norm")?.as_str() {
        "pixel_norm" => Ok(()),
        other => Err(refuse(&fields.name("norm_layer"), &format!("is {other:?}, expected \"pixel_norm\""))),
    }
}

/// The first of the keys that is there.
fn padding(fields: &Fields<'_>, keys: &[&str], default: SpatialPadding) -> Result<SpatialPadding> {
    let Some(key) = keys.iter().find(|key| fields.value(key).is_some()) else { return Ok(default) };
    match fields.text(key, "")?.as_str() {
        "zeros" => Ok(SpatialPadding::Zeros),
        "reflect" => Ok(SpatialPadding::Reflect),
        other => Err(refuse(&fields.name(key), &format!("is {other:?}, expected \"zeros\" or \"reflect\""))),
    }
}

fn entries<'a>(fields: &Fields<'_>, blocks: &'a Value) -> Result<&'a [Value]> {
    match blocks.as_array() {
        Some(list) if list.len() <= 64 => Ok(list),
        _ => Err(refuse(&fields.name("blocks"), "is no list of at most 64 blocks")),
    }
}

/// Kind and parameters of an entry `[kind, parameters]`; a number stands for that of layers.
fn entry_of<'a>(fields: &Fields<'_>, index: usize, entry: &'a Value) -> Result<(&'a str, Fields<'a>)> {
    let path = fields.name(&format!("blocks[{index}]"));
    match entry.as_array().map(Vec::as_slice) {
        Some([Value::String(kind), params]) => Ok((kind, Fields { path, value: params })),
        _ => Err(refuse(&path, "is not a name and its parameters")),
    }
}

fn refuse(field: &str, problem: &str) -> Error {
    Error::Config { field: field.to_owned(), problem: problem.to_owned() }
}

/// An object, and where it stands.
struct Fields<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Fields<'a> {
    fn new(path: &str, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(_) => Ok(Self { path: path.to_owned(), value }),
            _ => Err(refuse(path, "is no object")),
        }
    }

    fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn value(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn convert<T>(&self, key: &str, what: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| refuse(&self.name(key), &format!("is not {what}")))
    }

    fn number(&self, key: &str, default: usize) -> Result<usize> {
        let Some(value) = self.value(key) else { return Ok(default) };
        self.convert(key, "a whole number", value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn required(&self, key: &str) -> Result<usize> {
        if self.value(key).is_none() {
            return Err(refuse(&self.name(key), "is missing"));
        }
        self.number(key, 0)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.value(key) else { return Ok(default) };
        self.convert(key, "true or false", value.as_bool())
    }

    fn text(&self, key: &str, default: &str) -> Result<String> {
        let Some(value) = self.value(key) else { return Ok(default.to_owned()) };
        self.convert(key, "a string", value.as_str().map(str::to_owned))
    }

    fn list<T>(&self, key: &str, what: &str, convert: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
        let list = self.value(key).and_then(Value::as_array).filter(|list| list.len() <= 64);
        let list = list.and_then(|list| list.iter().map(convert).collect());
        self.convert(key, &format!("a list of at most 64 {what}"), list)
    }

    fn numbers(&self, key: &str) -> Result<Vec<usize>> {
        self.list(key, "whole numbers", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// One flag stands for all.
    fn flags(&self, key: &str, count: usize, default: bool) -> Result<Vec<bool>> {
        match self.value(key) {
            None => Ok(vec![default; count]),
            Some(Value::Bool(flag)) => Ok(vec![*flag; count]),
            Some(_) => self.list(key, "flags", Value::as_bool),
        }
    }

    fn texts(&self, key: &str, default: &[&str]) -> Result<Vec<String>> {
        match self.value(key) {
            None => Ok(default.iter().map(|&text| text.to_owned()).collect()),
            Some(_) => self.list(key, "strings", |value| value.as_str().map(str::to_owned)),
        }
    }

    fn same_length(&self, key: &str, got: usize, wanted: usize) -> Result<()> {
        let problem = || refuse(&self.name(key), &format!("has {got} entries, expected {wanted}"));
        if got == wanted { Ok(()) } else { Err(problem()) }
    }

    /// Parameters of residual blocks.
    fn layers(&self) -> Result<usize> {
        match self.value {
            Value::Number(_) => self.convert("", "a whole number", self.value.as_u64().map(|n| n as usize)),
            _ => self.required("num_layers"),
        }
    }

    fn unsupported(&self, kind: &str) -> Error {
        refuse(&self.path, &format!("is {kind:?}, which is not supported"))
    }
}

#[cfg(test)]
mod tests;
