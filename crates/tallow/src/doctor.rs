//! What this build can do on this machine.

use std::{fmt::Write, num::NonZero, thread};

use anyhow::Context;
use serde::Serialize;

use self::cuda::Cuda;
use crate::{cli::DoctorArgs, demo, failure::Failure, machine, model::hub_settings, terminal};

mod cuda;

/// A model family and the layouts it loads from.
#[derive(Debug, Serialize)]
struct Model {
    name: &'static str,
    does: &'static str,
    loads_from: &'static str,
}

const MODELS: &[Model] = &[
    Model {
        name: "FLUX.2 klein 4B and 9B, distilled and base",
        does: "text to image",
        loads_from: "a folder in the diffusers layout or a name of the hub; components also from files with names of BFL, \
                     ComfyUI or llama.cpp: safetensors (f32, bf16, f16, int8, fp8) and GGUF",
    },
    Model {
        name: "VAEs of Wan 2.1, Wan 2.2 and Qwen-Image",
        does: "latents to video and picture, and back",
        loads_from: "a file with original, ComfyUI or diffusers names (.safetensors, .pth) or a folder, f32, bf16 or f16",
    },
];

/// Video formats that this build writes.
const VIDEO_FORMATS: &[&str] =
    if cfg!(feature = "mp4") { &["mp4", "y4m", "gif", "png series"] } else { &["y4m", "gif", "png series"] };

/// Where models named owner/name come from.
fn hub() -> String {
    let settings = match hub_settings() {
        Ok(settings) => settings,
        Err(error) => return format!("not usable: {error:#}"),
    };
    let downloads = match (cfg!(feature = "hub"), settings.offline) {
        (false, _) => "no downloads (feature `hub`)".to_owned(),
        (true, true) => "no downloads (HF_HUB_OFFLINE)".to_owned(),
        (true, false) => {
            let token = if settings.token.is_some() { ", with a token" } else { ", without a token" };
            format!("downloads from {}{token}", settings.endpoint)
        }
    };
    format!("{downloads}, cache {}", settings.cache.display())
}

/// Everything that `doctor` finds out.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    target: &'static str,
    features: Vec<&'static str>,
    cpu: Option<String>,
    simd: Vec<&'static str>,
    cores: usize,
    threads: usize,
    memory_total_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    cuda_compiled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cuda: Option<Cuda>,
    demonstration_model: &'static str,
    demonstration_model_bytes: usize,
    demonstration_vae: &'static str,
    demonstration_vae_bytes: usize,
    /// What becomes of models named owner/name.
    hub: String,
    models: &'static [Model],
    picture_formats: &'static [&'static str],
    video_formats: &'static [&'static str],
}

/// Prints the report.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let report = Report::new();
    let text = if args.json {
        serde_json::to_string_pretty(&report).context("cannot write the report")? + "\n"
    } else {
        report.table()
    };
    Ok(terminal::stdout(&text)?)
}

impl Report {
    fn new() -> Self {
        let (memory_total_bytes, memory_available_bytes) = machine::memory();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            target: env!("TALLOW_TARGET"),
            features: features(),
            cpu: machine::cpu_model(),
            simd: simd(),
            cores: thread::available_parallelism().map_or(1, NonZero::get),
            threads: rayon::current_num_threads(),
            memory_total_bytes,
            memory_available_bytes,
            cuda_compiled: cfg!(feature = "cuda"),
            cuda: Cuda::new(),
            demonstration_model: demo::NAME,
            demonstration_model_bytes: demo::size(),
            demonstration_vae: demo::VAE_NAME,
            demonstration_vae_bytes: demo::vae_size(),
            hub: hub(),
            models: MODELS,
            picture_formats: &["png", "jpeg", "webp"],
            video_formats: VIDEO_FORMATS,
        }
    }

    fn table(&self) -> String {
        let list = |items: &[&str]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        let bytes = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), terminal::bytes);
        let mut rows = vec![
            ("tallow", self.version.to_owned()),
            ("target", self.target.to_owned()),
            ("features", list(&self.features)),
            ("cpu", self.cpu.clone().unwrap_or_else(|| "unknown".to_owned())),
            ("simd", list(&self.simd)),
            ("cores", self.cores.to_string()),
            ("threads", format!("{} by default", self.threads)),
            ("memory", format!("{}, {} available", bytes(self.memory_total_bytes), bytes(self.memory_available_bytes))),
            ("cuda", if self.cuda_compiled { "compiled in" } else { "not compiled in (feature `cuda`)" }.to_owned()),
        ];
        rows.extend(self.cuda.iter().flat_map(Cuda::rows));
        rows.extend([
            (
                "built-in model",
                format!(
                    "{}, {}: {}",
                    self.demonstration_model,
                    bytes(Some(self.demonstration_model_bytes as u64)),
                    demo::KNOWS
                ),
            ),
            (
                "built-in vae",
                format!("{}, {}", self.demonstration_vae, bytes(Some(self.demonstration_vae_bytes as u64))),
            ),
            ("hub", self.hub.clone()),
            ("pictures", list(self.picture_formats)),
            ("videos", list(self.video_formats)),
        ]);
        rows.extend(
            self.models
                .iter()
                .map(|model| ("model", format!("{}: {}, from {}", model.name, model.does, model.loads_from))),
        );
        let mut table = String::new();
        for (name, value) in rows {
            let _ = writeln!(table, "{name:<15} {value}");
        }
        table
    }
}

fn features() -> Vec<&'static str> {
    let all = [
        ("hub", cfg!(feature = "hub")),
        ("mp4", cfg!(feature = "mp4")),
        ("cuda", cfg!(feature = "cuda")),
        ("mkl", cfg!(feature = "mkl")),
        ("accelerate", cfg!(feature = "accelerate")),
    ];
    all.into_iter().filter_map(|(name, on)| on.then_some(name)).collect()
}

/// Instruction sets that matter to the kernels, as the CPU and the operating system offer them.
fn simd() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(target_arch = "aarch64")]
    let all = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("dotprod", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let all: [(&str, bool); 0] = [];
    all.into_iter().filter_map(|(name, on)| on.then_some(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_row() {
        let table = Report::new().table();
        for name in [
            "tallow",
            "target",
            "cpu",
            "simd",
            "memory",
            "cuda",
            "built-in model",
            "built-in vae",
            "hub",
            "model",
            "pictures",
            "videos",
        ] {
            assert!(table.lines().any(|line| line.starts_with(name)), "{name} is missing in\n{table}");
        }
    }
}
