//! What the VAEs of the Wan family and latents are, beyond names and sizes of tensors.

use std::path::Path;

use candle_core::DType;
use serde::Serialize;
use wan_vae::{
    Architecture, Checkpoint, Statistics, checkpoint,
    latent_files::{Kind, LatentFile, likeness},
};
use weights::inspect::Report;

use crate::video::count;

/// What `weights` calls these VAEs.
const VAE_MODEL: &str = "Wan video VAE";

/// A VAE or latents.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Facts {
    Vae(VaeFacts),
    Latents(LatentFacts),
    /// Why what looks like a VAE cannot be loaded.
    Problem(String),
}

#[derive(Debug, Serialize)]
pub(super) struct VaeFacts {
    /// Which published one it is.
    variant: String,
    latent_channels: usize,
    /// Frames per latent frame behind the first.
    temporal_factor: usize,
    /// Pixels per latent in height and width: of the decoder if there is one.
    spatial_factor: usize,
    encoder: bool,
    decoder: bool,
    /// Whether mean and standard deviation of its latents are known.
    statistics: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct LatentFacts {
    channels: usize,
    frames: usize,
    height: usize,
    width: usize,
    dtype: &'static str,
    /// The VAE that made them, if the file says so.
    made_by: Option<String>,
    /// Why they cannot be decoded, if so.
    problem: Option<String>,
    /// What their statistics look like, if they are as many as those of a published VAE.
    looks: Option<&'static str>,
}

impl Facts {
    /// Of what a report describes, if that is a VAE or latents.
    pub(super) fn of(path: &Path, report: &Report) -> Option<Self> {
        if report.parts.iter().any(|part| part.model.as_ref().is_some_and(|model| model.model == VAE_MODEL)) {
            let opened = checkpoint::open(path).and_then(|(source, config)| Checkpoint::new(source, config.as_ref()));
            return Some(match opened {
                Ok(checkpoint) => Self::Vae(VaeFacts::of(&checkpoint)),
                Err(error) => Self::Problem(error.to_string()),
            });
        }
        let unknown = report.parts.iter().all(|part| part.model.is_none());
        // Not every file that could be meant by several names: a pipe would wait for ever.
        let file = (unknown && path.is_file()).then(|| LatentFile::open(path).ok()).flatten()?;
        Some(Self::Latents(LatentFacts::of(&file)))
    }

    /// Names and values for people.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Vae(vae) => vae.rows(),
            Self::Latents(latents) => latents.rows(),
            Self::Problem(problem) => vec![("problem", problem.clone())],
        }
    }
}

impl VaeFacts {
    fn of(checkpoint: &Checkpoint) -> Self {
        let architecture = &checkpoint.architecture;
        Self {
            variant: checkpoint.variant.to_string(),
            latent_channels: architecture.z_dim,
            temporal_factor: architecture.temporal_factor(),
            spatial_factor: spatial_factor(architecture),
            encoder: architecture.encoder.is_some(),
            decoder: architecture.decoder.is_some(),
            statistics: checkpoint.statistics.is_some(),
        }
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let parts = match (self.encoder, self.decoder) {
            (true, true) => "encoder and decoder",
            (true, false) => "encoder only",
            _ => "decoder only",
        };
        let factors = format!("{}x{f}x{f}", self.temporal_factor, f = self.spatial_factor);
        let statistics = if self.statistics { "known" } else { "unknown: raw latents only" };
        vec![
            ("vae", format!("{}, {parts}", self.variant)),
            ("latents", format!("{} channels, {factors} (frames x height x width)", self.latent_channels)),
            ("statistics", statistics.to_owned()),
        ]
    }
}

fn spatial_factor(architecture: &Architecture) -> usize {
    if architecture.decoder.is_some() { architecture.spatial_factor() } else { architecture.encoder_spatial_factor() }
}

impl LatentFacts {
    fn of(file: &LatentFile) -> Self {
        let (channels, frames, height, width) = file.extents();
        let dtype = match file.dtype() {
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::F64 => "F64",
            _ => "F32",
        };
        Self {
            channels,
            frames,
            height,
            width,
            dtype,
            made_by: file.metadata().get("vae").cloned(),
            problem: file.check_finite().err().map(|error| error.to_string()),
            looks: looks(file),
        }
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let Self { channels, frames, height, width, dtype, .. } = self;
        let mut rows = vec![(
            "latents",
            format!("{channels} channels, {} of {height}x{width} (rows x columns), {dtype}", count(*frames, "frame")),
        )];
        let vae = self.made_by.as_deref().or_else(|| published(*channels));
        rows.extend(vae.map(|vae| ("vae", vae.to_owned())));
        rows.extend(self.looks.map(|looks| ("looks", looks.to_owned())));
        rows.extend(self.problem.clone().map(|problem| ("problem", problem)));
        rows
    }
}

/// The published VAE with so many latent channels.
fn published(channels: usize) -> Option<&'static str> {
    match channels {
        16 => Some("Wan 2.1 VAE (also for Wan 2.2 14B) or Qwen-Image VAE, by the channels"),
        48 => Some("Wan 2.2 VAE (TI2V-5B only), by the channels"),
        128 => Some("VAE of LTX-2, 2.3 or 2.5, by the channels"),
        _ => None,
    }
}

/// Statistics of its raw latents; the files of LTX hold their own.
fn statistics(channels: usize) -> Option<Statistics> {
    match channels {
        16 => Some(Statistics::wan21()),
        48 => Some(Statistics::wan22()),
        _ => None,
    }
}

/// Only for latents of a published VAE: others have statistics of their own.
fn looks(file: &LatentFile) -> Option<&'static str> {
    let (channels, ..) = file.extents();
    if file.metadata().contains_key("vae") {
        return None;
    }
    let statistics = statistics(channels)?;
    Some(match likeness(&file.sample().ok()?, &statistics).ok()?.kind()? {
        Kind::Raw => "raw",
        Kind::Normalized => "normalized",
    })
}
