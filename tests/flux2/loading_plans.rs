//! What a model wants to load, against what the published models hold.
//!
//! Sparse files carry exactly the published names and shapes; the plan that a published config leads to must take all of
//! them and miss none, and `inspect` must see the published figures.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use flux2::{
    Qwen3Config, TransformerConfig, VaeConfig, text_encoder, transformer::Flux2Transformer, vae, vae::Flux2Vae,
};
use tempfile::TempDir;
use tests::{NameTable, published_config};
use weights::{Error, Expected, Loader, Safetensors, StoredDType, TensorSource, inspect};

/// Taps of the published klein pipelines.
const OUT_LAYERS: [usize; 3] = [9, 18, 27];

/// One published component.
struct Component {
    table: &'static str,
    /// Path below `models/configs`.
    config: &'static str,
    /// Tensors, elements and bf16 bytes, from the published files and tables.
    figures: (usize, u64, u64),
    /// What `inspect` says.
    model: (&'static str, Option<&'static str>, &'static str),
}

const TRANSFORMERS: [Component; 3] = [
    Component {
        table: "flux2-klein-4b",
        config: "klein-4b/transformer/config.json",
        figures: (169, 3_875_544_576, 7_751_089_152),
        model: ("FLUX.2 transformer", Some("klein 4B"), "diffusers"),
    },
    Component {
        table: "flux2-klein-9b",
        config: "klein-9b/transformer/config.json",
        figures: (233, 9_078_581_248, 18_157_162_496),
        model: ("FLUX.2 transformer", Some("klein 9B"), "diffusers"),
    },
    Component {
        table: "flux2-dev",
        config: "dev/transformer/config.json",
        figures: (331, 32_223_281_152, 64_446_562_304),
        model: ("FLUX.2 transformer", Some("dev"), "diffusers"),
    },
];

const VAE: Component = Component {
    table: "flux2-vae",
    config: "klein-4b/vae/config.json",
    // 248 tensors of the network, mean and variance of 128 channels, one counter of 8 bytes.
    figures: (251, 84_046_115 + 2 * 128 + 1, 2 * (84_046_115 + 2 * 128) + 8),
    model: ("FLUX.2 VAE", None, "diffusers"),
};

const TEXT_ENCODERS: [Component; 2] = [
    Component {
        table: "qwen3-4b",
        config: "klein-4b/text_encoder/config.json",
        // The table holds the head of the tied embedding a second time.
        figures: (399, 4_022_468_096 + 151_936 * 2560, 2 * (4_022_468_096 + 151_936 * 2560)),
        model: ("Qwen3 language model", Some("4B"), "transformers"),
    },
    Component {
        table: "qwen3-8b",
        config: "klein-9b/text_encoder/config.json",
        figures: (399, 8_190_735_360, 16_381_470_720),
        model: ("Qwen3 language model", Some("8B"), "transformers"),
    },
];

fn components() -> impl Iterator<Item = &'static Component> {
    TRANSFORMERS.iter().chain([&VAE]).chain(&TEXT_ENCODERS)
}

/// The plan for a component, and whether it may pass over a tensor of the file.
struct Plan {
    expected: Vec<Expected>,
    ignored: Box<dyn Fn(&str) -> bool>,
}

impl Component {
    fn plan(&self) -> Result<Plan> {
        let config = published_config(self.config)?;
        Ok(if self.table.starts_with("qwen3") {
            let config: Qwen3Config = serde_json::from_value(config)?;
            config.validate()?;
            let expected = text_encoder::expected(&config, &OUT_LAYERS, "model.");
            Plan { expected, ignored: Box::new(text_encoder::ignored(&config, &OUT_LAYERS, "model.")) }
        } else if self.table == "flux2-vae" {
            let config: VaeConfig = serde_json::from_value(config)?;
            config.validate()?;
            Plan { expected: Flux2Vae::expected(&config), ignored: Box::new(vae::ignored) }
        } else {
            let config: TransformerConfig = serde_json::from_value(config)?;
            config.validate()?;
            Plan { expected: Flux2Transformer::expected(&config), ignored: Box::new(|_| false) }
        })
    }
}

impl Plan {
    /// Compares with a file that holds `table`.
    fn check(&self, table: &NameTable, dir: &TempDir) -> Result<weights::Result<Loader>> {
        let path = dir.path().join("model.safetensors");
        table.write_header_only(&path)?;
        let source: Arc<dyn TensorSource> = Arc::new(Safetensors::open(&path)?);
        Ok(Loader::new(source, &self.expected, &self.ignored, DType::F32, &Device::Cpu))
    }
}

#[test]
fn published_checkpoints_are_taken_whole() -> Result<()> {
    let dir = TempDir::new()?;
    for component in components() {
        let plan = component.plan()?;
        let table = NameTable::open(component.table)?;
        plan.check(&table, &dir)?.with_context(|| component.table)?;
        // What the plan leaves out is known: it is not in the plan, and nothing else is ignored.
        for (name, shape) in &table.tensors {
            let planned = plan.expected.iter().any(|e| e.name == *name && e.shape == *shape);
            assert!(planned != (plan.ignored)(name), "{}: {name}", component.table);
        }
        assert_eq!(plan.expected.iter().filter(|e| (plan.ignored)(&e.name)).count(), 0, "{}", component.table);
    }
    Ok(())
}

#[test]
fn only_what_the_pipeline_never_uses_is_ignored() -> Result<()> {
    for component in components() {
        let plan = component.plan()?;
        let table = NameTable::open(component.table)?;
        let ignored: Vec<_> =
            table.tensors.iter().map(|(name, _)| name.as_str()).filter(|name| (plan.ignored)(name)).collect();
        if component.table.starts_with("qwen3") {
            // Layers 27 to 35 with 11 tensors each, the final norm, the head.
            assert_eq!(ignored.len(), 9 * 11 + 2, "{}", component.table);
            let used = |name: &str| {
                name.strip_prefix("model.layers.")
                    .and_then(|rest| rest.split('.').next()?.parse().ok())
                    .is_some_and(|layer: usize| layer < 27)
            };
            assert!(!ignored.iter().any(|name| used(name)), "{}", component.table);
        } else if component.table == "flux2-vae" {
            assert_eq!(ignored, ["bn.num_batches_tracked"]);
        } else {
            assert!(ignored.is_empty(), "{}: {ignored:?}", component.table);
        }
    }
    Ok(())
}

#[test]
fn every_planned_tensor_is_published_and_every_other_is_ignored() -> Result<()> {
    for component in components() {
        let plan = component.plan()?;
        let table = NameTable::open(component.table)?;
        let held: std::collections::BTreeSet<_> = table.tensors.iter().map(|(name, _)| name.as_str()).collect();
        for expected in &plan.expected {
            assert!(held.contains(expected.name.as_str()), "{}: {} is not published", component.table, expected.name);
        }
        assert_eq!(
            plan.expected.len(),
            held.iter().filter(|name| !(plan.ignored)(name)).count(),
            "{}",
            component.table
        );
    }
    Ok(())
}

#[test]
fn a_missing_renamed_or_misshapen_tensor_is_named() -> Result<()> {
    let dir = TempDir::new()?;
    for component in components() {
        let plan = component.plan()?;
        let table = NameTable::open(component.table)?;
        let planned: Vec<usize> = (0..table.tensors.len()).filter(|&i| !(plan.ignored)(&table.tensors[i].0)).collect();
        for victim in [planned[0], planned[planned.len() / 2], planned[planned.len() - 1]] {
            let name = table.tensors[victim].0.clone();
            let message = |table: &NameTable| -> Result<String> {
                let error = plan.check(table, &dir)?.err().with_context(|| format!("{name} should be missed"))?;
                assert!(matches!(error, Error::Plan { .. }), "{error}");
                let message = error.to_string();
                assert!(message.contains(&name) && !message.contains('\n'), "{message}");
                Ok(message)
            };
            let mut without = table.clone();
            without.tensors.remove(victim);
            message(&without)?;

            let mut renamed = table.clone();
            renamed.tensors[victim].0 = format!("{name}_typo");
            assert!(message(&renamed)?.contains(&format!("{name}_typo")), "the new name is named as well");

            let mut misshapen = table.clone();
            misshapen.tensors[victim].1[0] += 1;
            let extents = |shape: &[usize]| format!("{shape:?}");
            let text = message(&misshapen)?;
            assert!(text.contains(&extents(&misshapen.tensors[victim].1)), "{text}");
            assert!(text.contains(&extents(&table.tensors[victim].1)), "{text}");

            let mut extra = table.clone();
            extra.tensors.push((format!("{name}.lora_A"), vec![4, 4]));
            let error = plan.check(&extra, &dir)?.err().context("an extra tensor should be noticed")?;
            assert!(error.to_string().contains(&format!("{name}.lora_A")), "{error}");
        }
    }
    Ok(())
}

#[test]
fn inspect_gives_the_published_figures() -> Result<()> {
    let dir = TempDir::new()?;
    for component in components() {
        let path = dir.path().join(format!("{}.safetensors", component.table));
        let table = NameTable::open(component.table)?;
        let length = table.write_header_only(&path)?;
        let report = inspect(&path)?;
        let (tensors, elements, bytes) = component.figures;
        assert_eq!((report.tensors(), report.elements(), report.bytes()), component.figures, "{}", component.table);
        assert_eq!(elements, table.elements() as u64, "{}", component.table);
        assert_eq!(report.parts.len(), 1, "{}", component.table);
        let part = &report.parts[0];
        assert_eq!(part.files.iter().map(|file| file.bytes as u64).sum::<u64>(), length, "{}", component.table);
        let model = part.model.as_ref().with_context(|| format!("{} is not recognised", component.table))?;
        assert_eq!((model.model, model.variant.as_deref(), model.layout), component.model, "{}", component.table);
        let counters = usize::from(component.table == "flux2-vae");
        let bf16 = &part.dtypes[&StoredDType::BF16];
        assert_eq!(
            (bf16.tensors, bf16.bytes),
            (tensors - counters, bytes - 8 * counters as u64),
            "{}",
            component.table
        );
        assert_eq!(bf16.bytes, 2 * bf16.elements, "{}", component.table);
        assert_eq!(part.dtypes.len(), 1 + counters, "{}", component.table);
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

#[test]
fn the_single_file_layout_is_recognised_and_not_mistaken_for_the_folder_layout() -> Result<()> {
    let dir = TempDir::new()?;
    let table = NameTable::open("flux2-dev.bfl")?;
    let path = dir.path().join("flux2-dev.safetensors");
    table.write_header_only(&path)?;
    let report = inspect(&path)?;
    let model = report.parts[0].model.as_ref().context("not recognised")?;
    assert_eq!((model.model, model.variant.as_deref(), model.layout), ("FLUX.2 transformer", Some("dev"), "BFL"));
    // Fused projections: fewer tensors, the same parameters.
    assert_eq!((report.tensors(), report.elements()), (299, TRANSFORMERS[2].figures.1));
    let error = TRANSFORMERS[2].plan()?.check(&table, &dir)?.err().context("other names should not load")?;
    assert!(matches!(error, Error::Plan { .. }) && !error.to_string().contains('\n'), "{error}");
    Ok(())
}

#[test]
fn published_configs_parse_unchanged() -> Result<()> {
    for (name, double, single, heads, joint, guidance) in [
        ("klein-4b", 5, 20, 24, 7680, false),
        ("klein-base-4b", 5, 20, 24, 7680, false),
        ("klein-9b", 8, 24, 32, 12288, false),
        ("klein-base-9b", 8, 24, 32, 12288, false),
        ("dev", 8, 48, 48, 15360, true),
    ] {
        let config: TransformerConfig =
            serde_json::from_value(published_config(&format!("{name}/transformer/config.json"))?)?;
        config.validate().context(name)?;
        assert_eq!(
            (config.num_layers, config.num_single_layers, config.num_attention_heads),
            (double, single, heads),
            "{name}"
        );
        assert_eq!((config.joint_attention_dim, config.guidance_embeds), (joint, guidance), "{name}");
        assert_eq!(
            (config.in_channels, config.out_channels(), config.timestep_guidance_channels),
            (128, 128, 256),
            "{name}"
        );
        assert_eq!(
            (config.attention_head_dim, config.rope_theta, config.mlp_ratio, config.eps),
            (128, 2000.0, 3.0, 1e-6),
            "{name}"
        );
        assert_eq!(config.axes_dims_rope, [32; 4], "{name}");

        let config: VaeConfig = serde_json::from_value(published_config(&format!("{name}/vae/config.json"))?)?;
        config.validate().context(name)?;
        assert_eq!(config.block_out_channels, [128, 256, 512, 512], "{name}");
        assert_eq!(config.decoder_block_out_channels(), [128, 256, 512, 512], "{name}");
        assert_eq!((config.latent_channels, config.layers_per_block, config.norm_num_groups), (32, 2, 32), "{name}");
        assert_eq!(
            (config.packed_channels(), config.packed_factor(), config.batch_norm_eps),
            (128, 16, 1e-4),
            "{name}"
        );
        if name == "dev" {
            continue;
        }
        let text: Qwen3Config = serde_json::from_value(published_config(&format!("{name}/text_encoder/config.json"))?)?;
        text.validate().context(name)?;
        assert_eq!(
            (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads, text.head_dim),
            (36, 32, 8, 128),
            "{name}"
        );
        assert_eq!(
            (text.hidden_size * OUT_LAYERS.len(), text.vocab_size, text.rope_theta()?),
            (joint, 151_936, 1e6),
            "{name}"
        );
    }
    Ok(())
}
