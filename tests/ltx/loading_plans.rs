//! What the LTX networks want to load, against what the published models hold.
//!
//! Sparse files carry exactly the published names and shapes, in every layout; the networks must take all tensors that are
//! theirs and miss none. Names of published files are translated here from the tables of diffusers' names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use ltx::{Component, DiffusionDecoder, DiffusionDecoderConfig, Error, LtxFiles, conv_vae::Checkpoint};
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::{NameTable, published_config};
use weights::{Loader, LoaderOptions, StoredDType, ValueCheck, write::header_only};

type Tensors = BTreeMap<String, Vec<usize>>;

const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

fn table(name: &str) -> Result<Tensors> {
    Ok(NameTable::open(name)?.tensors.into_iter().collect())
}

fn config(name: &str) -> Result<Value> {
    published_config(&format!("{name}.json"))
}

/// A file of holes under these names; `section` becomes the configuration in its metadata.
fn write(path: &Path, tensors: &Tensors, section: Option<&Value>) -> Result<()> {
    let metadata = section.map(|vae| ("config".to_owned(), json!({ "vae": vae, "transformer": {} }).to_string()));
    let list = tensors.iter().map(|(name, shape)| (name.as_str(), StoredDType::BF16, shape.as_slice()));
    Ok(header_only(path, list, &metadata.into_iter().collect())?)
}

/// The folder of a component as diffusers saves it.
fn component(folder: PathBuf, tensors: &Tensors, config: &Value) -> Result<()> {
    fs::create_dir_all(&folder)?;
    write(&folder.join(WEIGHTS), tensors, None)?;
    Ok(fs::write(folder.join("config.json"), config.to_string())?)
}

/// What the published files call a tensor of the convolutional VAE.
fn published_conv(name: &str, last_encoder_block: usize) -> String {
    match name {
        "latents_mean" => return "per_channel_statistics.mean-of-means".to_owned(),
        "latents_std" => return "per_channel_statistics.std-of-means".to_owned(),
        _ => {}
    }
    let name = name.replace("resnets", "res_blocks");
    for (part, blocks) in [("encoder", "down_blocks"), ("decoder", "up_blocks")] {
        if let Some(rest) = name.strip_prefix(&format!("{part}.mid_block.")) {
            let index = if part == "encoder" { last_encoder_block } else { 0 };
            return format!("{part}.{blocks}.{index}.{rest}");
        }
        let Some((index, rest)) = name.strip_prefix(&format!("{part}.{blocks}.")).and_then(|n| n.split_once('.'))
        else {
            continue;
        };
        let index: usize = index.parse().expect("an index");
        return match (part, rest.split_once("samplers.0.")) {
            ("encoder", Some((_, rest))) => format!("{part}.{blocks}.{}.{rest}", 2 * index + 1),
            ("encoder", None) => format!("{part}.{blocks}.{}.{rest}", 2 * index),
            (_, Some((_, rest))) => format!("{part}.{blocks}.{}.{rest}", 2 * index + 1),
            (_, None) => format!("{part}.{blocks}.{}.{rest}", 2 * index + 2),
        };
    }
    name
}

/// The tensors of the published diffusion decoder: query, key and value are one map there.
fn published_diffusion(diffusers: &Tensors) -> Tensors {
    let mut tensors = Tensors::new();
    for (name, shape) in diffusers {
        let name = match name.as_str() {
            "latents_mean" => "per_channel_statistics.mean-of-means".to_owned(),
            "latents_std" => "per_channel_statistics.std-of-means".to_owned(),
            name if name.contains(".to_k.") || name.contains(".to_v.") => continue,
            name => name
                .replace("attn.to_q.", "attn.qkv.")
                .replace("attn.to_out.0.", "attn.proj.")
                .replace("attn.norm_q.", "attn.q_norm.")
                .replace("attn.norm_k.", "attn.k_norm.")
                .replace("t_embedder.timestep_embedder.linear_1.", "t_embedder.mlp.0.")
                .replace("t_embedder.timestep_embedder.linear_2.", "t_embedder.mlp.2."),
        };
        let mut shape = shape.clone();
        if name.contains(".qkv.") {
            shape[0] *= 3;
        }
        tensors.insert(name, shape);
    }
    tensors.insert("decoder.type_emb".to_owned(), vec![128]);
    tensors
}

/// The VAE of LTX-2.3 and 2.5 under published names: the same kinds of tensors as that of 2.0, other widths and numbers.
fn ltx23() -> Result<Tensors> {
    let mut tensors = Tensors::new();
    let mut conv = |name: String, output: usize, input: usize| {
        tensors.insert(format!("{name}.conv.weight"), vec![output, input, 3, 3, 3]);
        tensors.insert(format!("{name}.conv.bias"), vec![output]);
    };
    // Residual layers and their width, or a change of resolution with outputs and inputs.
    let encoder = [
        (4, 128, 0),
        (0, 64, 128),
        (6, 256, 0),
        (0, 256, 256),
        (4, 512, 0),
        (0, 128, 512),
        (2, 1024, 0),
        (0, 128, 1024),
        (2, 1024, 0),
    ];
    let decoder = [
        (2, 1024, 0),
        (0, 4096, 1024),
        (2, 512, 0),
        (0, 4096, 512),
        (4, 512, 0),
        (0, 512, 512),
        (6, 256, 0),
        (0, 512, 256),
        (4, 128, 0),
    ];
    for (part, blocks, ends) in [
        ("encoder.down_blocks", encoder, [("encoder.conv_in", 128, 48), ("encoder.conv_out", 129, 1024)]),
        ("decoder.up_blocks", decoder, [("decoder.conv_in", 1024, 128), ("decoder.conv_out", 48, 128)]),
    ] {
        ends.into_iter().for_each(|(name, output, input)| conv(name.to_owned(), output, input));
        for (index, (layers, output, input)) in blocks.into_iter().enumerate() {
            if layers == 0 {
                conv(format!("{part}.{index}.conv"), output, input);
            }
            for layer in 0..layers {
                conv(format!("{part}.{index}.res_blocks.{layer}.conv1"), output, output);
                conv(format!("{part}.{index}.res_blocks.{layer}.conv2"), output, output);
            }
        }
    }
    for name in ["mean-of-means", "std-of-means"] {
        tensors.insert(format!("per_channel_statistics.{name}"), vec![128]);
    }
    Ok(tensors)
}

fn with_prefix(tensors: &Tensors, prefix: &str) -> Tensors {
    tensors.iter().map(|(name, shape)| (format!("{prefix}{name}"), shape.clone())).collect()
}

fn elements(tensors: &Tensors) -> usize {
    tensors.values().map(|shape| shape.iter().product::<usize>()).sum()
}

/// Plans a load that looks at no value; gives the names that it ignores.
fn plan_vae(component: Component) -> Result<BTreeSet<String>> {
    let checkpoint = Checkpoint::new(component)?;
    let plan = checkpoint.expected()?;
    let options = LoaderOptions::default().with_values(ValueCheck::Off);
    let source = checkpoint.source.clone();
    Loader::with_options(source, &plan, |name| checkpoint.ignores(name), DType::BF16, &Device::Cpu, options)?;
    let names = checkpoint.source.tensors().iter().map(|tensor| tensor.name.clone());
    Ok(names.filter(|name| plan.iter().all(|expected| expected.name != *name)).collect())
}

fn plan_decoder(component: &Component) -> Result<BTreeSet<String>> {
    let source = &component.source;
    let config = DiffusionDecoderConfig::of(&**source, component.config.as_ref())?;
    let plan = DiffusionDecoder::expected(&config, &**source);
    let options = LoaderOptions::default().with_values(ValueCheck::Off);
    let ignores = |name: &str| DiffusionDecoder::ignores(&**source, name);
    Loader::with_options(source.clone(), &plan, ignores, DType::BF16, &Device::Cpu, options)?;
    let names = source.tensors().iter().map(|tensor| tensor.name.clone());
    Ok(names.filter(|name| plan.iter().all(|expected| expected.name != *name)).collect())
}

fn only_vae(files: LtxFiles) -> Result<Component> {
    ensure!(files.diffusion_decoder.is_none(), "a diffusion decoder");
    files.vae.context("no vae")
}

#[test]
fn folders_of_diffusers_have_nothing_unused() -> Result<()> {
    let (vae, decoder) = (table("ltx2-conv-vae")?, table("ltx25-diffusion-decoder")?);
    ensure!((vae.len(), elements(&vae)) == (184, 1_222_479_857));
    ensure!((decoder.len(), elements(&decoder)) == (407, 417_133_872));
    let model = TempDir::new()?;
    component(model.path().join("vae"), &vae, &config("ltx20-conv-vae.diffusers")?)?;
    component(model.path().join("diffusion_decoder"), &decoder, &config("ltx25-diffusion-decoder.diffusers")?)?;
    for path in ["", "vae", "diffusion_decoder", &format!("vae/{WEIGHTS}"), &format!("diffusion_decoder/{WEIGHTS}")] {
        let files = LtxFiles::find(model.path().join(path))?;
        let found = (files.vae.is_some(), files.diffusion_decoder.is_some());
        let wanted = (path.is_empty() || path.starts_with("vae"), !path.starts_with("vae"));
        ensure!(found == wanted, "{path:?}: {found:?}");
        if let Some(component) = files.vae {
            ensure!(plan_vae(component)?.is_empty(), "{path:?}");
        }
        if let Some(component) = files.diffusion_decoder {
            ensure!(plan_decoder(&component)?.is_empty(), "{path:?}");
        }
    }
    Ok(())
}

#[test]
fn the_vae_of_ltx2_has_nothing_unused_under_published_names() -> Result<()> {
    let tensors: Tensors =
        table("ltx2-conv-vae")?.into_iter().map(|(name, shape)| (published_conv(&name, 8), shape)).collect();
    ensure!(tensors.len() == 184, "names that became one");
    let folder = TempDir::new()?;
    for prefix in ["", "vae."] {
        let path = folder.path().join("file.safetensors");
        write(&path, &with_prefix(&tensors, prefix), Some(&config("ltx20-conv-vae")?))?;
        ensure!(plan_vae(only_vae(LtxFiles::find(&path)?)?)?.is_empty(), "prefix {prefix:?}");
    }
    Ok(())
}

/// Sizes are those of the published files, headers included.
#[test]
fn the_files_of_ltx25_have_nothing_unused() -> Result<()> {
    let folder = TempDir::new()?;
    let conv = ltx23()?;
    let path = folder.path().join("ltx-2.5-video-vae-conv-bf16.safetensors");
    write(&path, &conv, Some(&config("ltx23-conv-vae")?))?;
    ensure!(conv.len() == 170, "{} tensors", conv.len());
    let header = 1_452_269_922 - 2 * elements(&conv);
    ensure!((10_000..100_000).contains(&header), "{header} bytes for the header");
    ensure!(plan_vae(only_vae(LtxFiles::find(&path)?)?)?.is_empty());

    let decoder = published_diffusion(&table("ltx25-diffusion-decoder")?);
    let mut both = decoder.clone();
    both.extend(conv.into_iter().filter(|(name, _)| name.starts_with("encoder.")));
    let path = folder.path().join("ltx-2.5-video-vae-bf16.safetensors");
    write(&path, &both, Some(&config("ltx25-diffusion-vae")?))?;
    ensure!(both.len() == 396, "{} tensors", both.len());
    let header = 1_472_223_346 - 2 * elements(&both);
    ensure!((10_000..100_000).contains(&header), "{header} bytes for the header");
    let LtxFiles { vae, diffusion_decoder } = LtxFiles::find(&path)?;
    let by_vae = plan_vae(vae.context("no vae")?)?;
    let by_decoder = plan_decoder(&diffusion_decoder.context("no diffusion decoder")?)?;
    ensure!(by_vae.iter().all(|name| name.starts_with("decoder.")) && by_vae.len() == 310, "{by_vae:?}");
    let unread: Vec<_> = by_vae.intersection(&by_decoder).collect();
    ensure!(unread == ["decoder.type_emb"], "{unread:?}");
    Ok(())
}

#[test]
fn other_parts_of_a_whole_model_are_left_alone() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("ltx-2.3.safetensors");
    let mut whole = with_prefix(&ltx23()?, "vae.");
    for other in ["model.diffusion_model.patchify_proj.weight", "audio_vae.encoder.conv_in.conv.weight", "vocoder.x"] {
        whole.insert(other.to_owned(), vec![4, 4]);
    }
    whole.insert("vae.per_channel_statistics.mean-of-stds".to_owned(), vec![128]);
    write(&path, &whole, Some(&config("ltx23-conv-vae")?))?;
    ensure!(plan_vae(only_vae(LtxFiles::find(&path)?)?)?.len() == 4);
    Ok(())
}

/// One line, with the name, before anything is read.
#[test]
fn what_is_missing_or_unknown_is_named() -> Result<()> {
    let folder = TempDir::new()?;
    let path = folder.path().join("file.safetensors");
    let refused = |tensors: &Tensors, section: Option<&Value>| -> Result<String> {
        write(&path, tensors, section)?;
        let error = plan_vae(only_vae(LtxFiles::find(&path)?)?).expect_err("a bad file").to_string();
        ensure!(!error.contains('\n'), "{error}");
        Ok(error)
    };
    let (conv, section) = (ltx23()?, config("ltx23-conv-vae")?);
    let mut short = conv.clone();
    short.remove("decoder.up_blocks.6.res_blocks.5.conv2.conv.bias");
    ensure!(refused(&short, Some(&section))?.contains("decoder.up_blocks.6.res_blocks.5.conv2.conv.bias"));
    let mut long = conv.clone();
    long.insert("decoder.up_blocks.9.conv.conv.bias".to_owned(), vec![4]);
    ensure!(refused(&long, Some(&section))?.contains("decoder.up_blocks.9.conv.conv.bias"));
    // The file of another version.
    ensure!(refused(&conv, Some(&config("ltx20-conv-vae")?))?.contains("up_blocks"));
    ensure!(refused(&conv, None)?.contains("carries no `config`"));

    let mut decoder = published_diffusion(&table("ltx25-diffusion-decoder")?);
    decoder.remove("decoder.diff_blocks.3.attn.qkv.bias");
    write(&path, &decoder, Some(&config("ltx25-diffusion-vae")?))?;
    let component = LtxFiles::find(&path)?.diffusion_decoder.context("no diffusion decoder")?;
    let error = plan_decoder(&component).expect_err("a bad file").to_string();
    ensure!(error.contains("decoder.diff_blocks.3.attn.qkv.bias"), "{error}");
    // Each loader refuses the file of the other kind.
    write(&path, &conv, Some(&section))?;
    let component = LtxFiles::find(&path)?.vae.context("no vae")?;
    let error = DiffusionDecoderConfig::of(&*component.source, None).expect_err("a conv vae");
    ensure!(matches!(error, Error::Config { .. }), "{error}");
    Ok(())
}
