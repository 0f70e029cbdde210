//! What the VAEs and diffusion decoders of LTX-2, 2.3 and 2.5 are, beyond names and sizes of tensors.

use std::path::Path;

use ltx::{Component, DiffusionDecoderConfig, LtxFiles, conv_vae::Checkpoint};
use serde::Serialize;
use weights::inspect::{Part, Report};

use crate::video::count;

/// What `weights` calls the models of this family begins so.
const FAMILY: &str = "LTX";

/// The networks that a path leads to.
#[derive(Debug, Default, Serialize)]
pub(super) struct Facts {
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vae: Option<VaeFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    diffusion_decoder: Option<DecoderFacts>,
    /// Why what looks like one of them cannot be loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// A convolutional VAE.
#[derive(Debug, Serialize)]
struct VaeFacts {
    latent_channels: usize,
    encoder: bool,
    decoder: bool,
    /// Frames, rows and columns of pixels for a latent.
    pixels_per_latent: [usize; 3],
}

/// A diffusion decoder.
#[derive(Debug, Serialize)]
struct DecoderFacts {
    latent_channels: usize,
    pixels_per_latent: [usize; 3],
    /// Steps that it is made for.
    steps: usize,
}

impl Facts {
    /// Of what a report describes, if networks of this family are there.
    pub(super) fn of(path: &Path, report: &Report) -> Option<Self> {
        let family = |part: &Part| part.model.as_ref().is_some_and(|m| m.model.starts_with(FAMILY));
        if !report.parts.iter().any(family) {
            return None;
        }
        let files = LtxFiles::find(path).ok().filter(|files| !files.is_empty())?;
        let mut facts = Self::default();
        let sources = [&files.vae, &files.diffusion_decoder].into_iter().flatten();
        facts.version = sources.into_iter().find_map(|part| part.source.metadata().get("model_version").cloned());
        facts.vae = files.vae.and_then(|component| facts.keep(VaeFacts::of(component)));
        facts.diffusion_decoder =
            files.diffusion_decoder.and_then(|component| facts.keep(DecoderFacts::of(&component)));
        Some(facts)
    }

    /// What was found, or nothing and its problem.
    fn keep<T>(&mut self, found: ltx::Result<T>) -> Option<T> {
        found.map_err(|problem| self.problems.push(problem.to_string())).ok()
    }

    /// Names and values for people.
    pub(super) fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = Vec::new();
        rows.extend(self.version.as_ref().map(|version| ("version", format!("LTX-{version}"))));
        let latents = |channels: usize, [t, h, w]: [usize; 3]| {
            ("latents", format!("{channels} channels, {t}x{h}x{w} (frames x height x width)"))
        };
        if let Some(vae) = &self.vae {
            let parts = match (vae.encoder, vae.decoder) {
                (true, true) => "encoder and decoder",
                (true, false) => "encoder only",
                _ => "decoder only",
            };
            rows.push(("vae", format!("LTX conv VAE, {parts}")));
            rows.push(latents(vae.latent_channels, vae.pixels_per_latent));
        }
        if let Some(decoder) = &self.diffusion_decoder {
            let steps = count(decoder.steps, "step");
            rows.push(("decoder", format!("LTX diffusion decoder, {steps}")));
            if self.vae.is_none() {
                rows.push(latents(decoder.latent_channels, decoder.pixels_per_latent));
            }
        }
        rows.extend(self.problems.iter().map(|problem| ("problem", problem.clone())));
        rows
    }
}

impl VaeFacts {
    fn of(component: Component) -> ltx::Result<Self> {
        let architecture = Checkpoint::new(component)?.architecture;
        let network = architecture.decoder.as_ref().or(architecture.encoder.as_ref());
        let [t, h, w] = network.map_or([1; 3], |network| network.factors());
        let side = architecture.patch_size;
        Ok(Self {
            latent_channels: architecture.latent_channels,
            encoder: architecture.encoder.is_some(),
            decoder: architecture.decoder.is_some(),
            pixels_per_latent: [t, h * side, w * side],
        })
    }
}

impl DecoderFacts {
    fn of(component: &Component) -> ltx::Result<Self> {
        let config = DiffusionDecoderConfig::of(&*component.source, component.config.as_ref())?;
        Ok(Self {
            latent_channels: config.in_channels,
            pixels_per_latent: config.compression(),
            steps: config.num_inference_steps,
        })
    }
}
