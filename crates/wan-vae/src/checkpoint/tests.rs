use std::{fs, path::PathBuf};

use candle_core::{DType, Device};
use tempfile::TempDir;
use weights::{
    Expected, Pth, Safetensors,
    write::{Metadata, TensorData, header_only, to_bytes},
};

use super::*;
use crate::{
    DecoderState, LoadOptions, RawLatents, WanVae,
    architecture::{Network, Unpack},
    names::NameMap,
    testing::{self, bits, path},
};

const FLAT: NameMap = NameMap { nested: false, encoder_blocks: 2, decoder_blocks: 3 };
const NESTED: NameMap = NameMap { nested: true, encoder_blocks: 2, decoder_blocks: 3 };

/// Names and shapes of a published VAE in the diffusers layout.
fn table(name: &str) -> Vec<Expected> {
    Expected::from_table(&fs::read_to_string(path(&format!("models/names/{name}.tsv"))).unwrap()).unwrap()
}

/// The same under their original names.
fn original(tensors: &[Expected], map: NameMap) -> Vec<Expected> {
    tensors.iter().map(|t| Expected::new(map.to_original(&t.name).unwrap(), t.shape.clone())).collect()
}

fn prefixed(tensors: &[Expected], prefix: &str) -> Vec<Expected> {
    tensors.iter().map(|t| Expected::new(format!("{prefix}{}", t.name), t.shape.clone())).collect()
}

/// A file of these names and shapes, without elements.
fn header(dir: &TempDir, tensors: &[Expected], dtype: StoredDType) -> Arc<dyn TensorSource> {
    let path = dir.path().join("header.safetensors");
    let entries = tensors.iter().map(|t| (t.name.as_str(), dtype, t.shape.as_slice()));
    header_only(&path, entries, &Metadata::new()).unwrap();
    Arc::new(Safetensors::open(&path).unwrap())
}

fn open_header(tensors: &[Expected]) -> Result<Checkpoint> {
    let dir = TempDir::new().unwrap();
    Checkpoint::new(header(&dir, tensors, StoredDType::BF16), None)
}

fn error(result: Result<Checkpoint>) -> String {
    let text = result.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("header.safetensors") && !text.contains('\n'), "{text}");
    text
}

#[test]
fn published_tables_open_in_every_layout() {
    let dir = TempDir::new().unwrap();
    for (name, map, count, variant) in [
        ("wan21-vae", FLAT, 194, Variant::Wan21),
        ("qwen-image-vae", FLAT, 194, Variant::Wan21),
        ("wan22-vae", NESTED, 196, Variant::Wan22),
    ] {
        let diffusers = table(name);
        assert_eq!(diffusers.len(), count);
        for (is_diffusers, tensors) in [(true, diffusers.clone()), (false, original(&diffusers, map))] {
            for prefix in ["", "vae.", "first_stage_model.", "model."] {
                for dtype in [StoredDType::F32, StoredDType::BF16, StoredDType::F16] {
                    let mut tensors = prefixed(&tensors, prefix);
                    if !prefix.is_empty() {
                        // The other models of an all-in-one checkpoint.
                        tensors.push(Expected::new("diffusion_model.patch_embedding.weight", [5, 7]));
                    }
                    let found = Checkpoint::new(header(&dir, &tensors, dtype), None).unwrap();
                    assert_eq!(found.layout, Layout { prefix, diffusers: is_diffusers, map });
                    assert_eq!(found.variant, variant);
                    assert_eq!(found.source.tensors().len(), count);
                    assert_eq!(found.unused, [""; 0]);
                    let mut known: Vec<_> = diffusers.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
                    known.sort_unstable();
                    let tensors = found.source.tensors().iter();
                    assert_eq!(tensors.map(|t| (t.name.as_str(), t.shape.as_slice())).collect::<Vec<_>>(), known);
                    let z = if map.nested { 48 } else { 16 };
                    assert_eq!(found.statistics.unwrap().mean().len(), z);
                }
            }
        }
    }
}

#[test]
fn published_architectures_are_those_of_their_configurations() {
    let found = |name| open_header(&table(name)).unwrap().architecture;
    assert_eq!(found("wan21-vae"), testing::wan21());
    assert_eq!(found("qwen-image-vae"), testing::wan21());
    assert_eq!(found("wan22-vae"), testing::wan22());
}

/// Every architecture that the tensors of another tell, through both layouts.
fn detects(wanted: &Architecture) -> Variant {
    let tensors = expected(wanted);
    let network = wanted.decoder.as_ref().or(wanted.encoder.as_ref()).unwrap();
    let count = |n: &Option<Network>, default| n.as_ref().map_or(default, |n| n.stages[0].blocks.len());
    let (encoder_blocks, decoder_blocks) = (count(&wanted.encoder, 2), count(&wanted.decoder, 3));
    let map = NameMap { nested: wanted.residual, encoder_blocks, decoder_blocks };
    for tensors in [tensors.clone(), original(&tensors, map)] {
        let found = open_header(&tensors).unwrap();
        assert_eq!(&found.architecture, wanted);
        assert_eq!(found.architecture.decoder.or(found.architecture.encoder).as_ref(), Some(network));
        assert!(found.unused.is_empty());
    }
    Variant::of(wanted)
}

#[test]
fn relatives_are_told_by_their_tensors() {
    let wan21 = testing::wan21();
    let mut upscale = wan21.clone();
    upscale.unpack = Unpack::PixelShuffle(2);
    upscale.decoder.as_mut().unwrap().out_channels = 12;
    assert_eq!(detects(&upscale), Variant::Wan21Upscale2x);
    assert_eq!(upscale.spatial_factor(), 16);

    let mut layered = wan21.clone();
    layered.decoder.as_mut().unwrap().out_channels = 4;
    layered.encoder.as_mut().unwrap().in_channels = 4;
    assert_eq!(detects(&layered), Variant::QwenImageLayered);

    let light = Architecture::from_config(&testing::config([24, 24], &[1, 2, 4, 4], 16, 2, false)).unwrap();
    assert_eq!(detects(&light), Variant::LightVae);

    // The demonstration model: the widths of LightVAE, but other stages.
    let demo = Architecture::from_config(&testing::config([24, 24], &[1, 2, 2, 2], 16, 1, false)).unwrap();
    assert_eq!(detects(&demo), Variant::Other);

    let wan22 = testing::wan22();
    assert_eq!(detects(&wan22), Variant::Wan22);
    let mut pruned = Architecture::from_config(&testing::config([160, 128], &[1, 2, 4, 4], 48, 2, true)).unwrap();
    pruned.encoder = wan22.encoder.clone();
    assert_eq!(detects(&pruned), Variant::Wan22Pruned);

    let mut config = testing::config([96, 128], &[1, 2, 4, 8, 8], 64, 2, true);
    config.temperal_downsample = vec![false; 4];
    (config.in_channels, config.out_channels, config.patch_size) = (4, 4, None);
    let mut qwen = Architecture::from_config(&config).unwrap();
    qwen.temporal_kernel = 1;
    assert_eq!(detects(&qwen), Variant::QwenImage21);
    assert_eq!((qwen.spatial_factor(), qwen.temporal_factor()), (16, 1));

    for (tiny, residual) in testing::tiny_configs().iter().zip([false, true]) {
        let tiny = Architecture::from_config(tiny).unwrap();
        assert_eq!(tiny.residual, residual);
        assert_eq!(detects(&tiny), Variant::Other);
    }
}

#[test]
fn either_half_may_be_absent() {
    for whole in [testing::wan21(), testing::wan22()] {
        let decoder = Architecture { encoder: None, ..whole.clone() };
        let encoder = Architecture { decoder: None, ..whole.clone() };
        let unpack = decoder.unpack;
        assert_eq!(detects(&decoder), Variant::of(&whole));
        // Without a decoder nothing says how its pixels are unpacked, so it is as they are packed.
        assert_eq!(detects(&Architecture { unpack, ..encoder }), Variant::of(&whole));
        // Files keep both maps even then.
        let mut tensors = expected(&decoder);
        tensors.push(Expected::new("quant_conv.weight", [2 * whole.z_dim, 2 * whole.z_dim, 1, 1, 1]));
        tensors.push(Expected::new("quant_conv.bias", [2 * whole.z_dim]));
        assert_eq!(open_header(&tensors).unwrap().unused, [""; 0]);
    }
}

/// Kernels of two axes, and norms with any number of axes behind the channels.
#[test]
fn axes_of_one_may_be_left_out() {
    for (name, map) in [("wan21-vae", FLAT), ("wan22-vae", NESTED)] {
        let mut tensors = original(&table(name), map);
        for (i, t) in tensors.iter_mut().filter(|t| t.name.ends_with("gamma")).enumerate() {
            t.shape.truncate(1 + i % 4);
        }
        assert_eq!(open_header(&tensors).unwrap().source.tensors().len(), tensors.len());
    }
    let mut tensors = original(&table("wan21-vae"), FLAT);
    // Those that widen time may still be there; they have nothing to do.
    let unused = tensors.iter().filter(|t| t.name.contains("time_conv")).count();
    for t in tensors.iter_mut().filter(|t| t.shape.len() == 5) {
        t.shape.remove(2);
    }
    let found = open_header(&tensors).unwrap();
    assert_eq!(found.variant, Variant::Pictures);
    assert_eq!((found.unused.len(), unused), (8, 8));
    assert_eq!((found.architecture.temporal_kernel, found.architecture.temporal_factor()), (1, 1));
    assert_eq!(found.source.info("decoder.conv_in.weight").unwrap().shape, [384, 16, 1, 3, 3]);
    assert_eq!(found.source.host("decoder.conv_in.weight").unwrap().dims(), [384, 16, 1, 3, 3]);
}

#[test]
fn missing_tensors_are_named_as_in_the_file() {
    let all = prefixed(&original(&table("wan21-vae"), FLAT), "vae.");
    // Each alone, whatever it would have told about the network.
    for lost in &all {
        let tensors: Vec<_> = all.iter().filter(|t| t.name != lost.name).cloned().collect();
        let text = error(open_header(&tensors));
        assert!(text.contains("1 tensor missing") && text.contains(&lost.name), "{}: {text}", lost.name);
    }
    // All parts of a module, and of a stage.
    for lost in ["vae.decoder.upsamples.4.", "vae.decoder.upsamples.7.", "vae.encoder.downsamples.5.", "vae.conv2."] {
        let tensors: Vec<_> = all.iter().filter(|t| !t.name.starts_with(lost)).cloned().collect();
        let text = error(open_header(&tensors));
        assert!(text.contains("missing") && text.contains(lost), "{lost}: {text}");
        assert!(!text.contains("another shape"), "{lost}: {text}");
    }
    // The last stage: the resampler before it tells that there is one.
    let last = ["vae.encoder.downsamples.9.", "vae.encoder.downsamples.10."];
    let tensors: Vec<_> = all.iter().filter(|t| !last.iter().any(|lost| t.name.starts_with(lost))).cloned().collect();
    let text = error(open_header(&tensors));
    assert!(text.contains("12 tensors missing") && text.contains(last[0]), "{text}");
    let tensors: Vec<_> = all.iter().filter(|t| !t.name.contains("decoder.upsamples.1")).cloned().collect();
    let text = error(open_header(&tensors));
    assert!(text.contains("missing"), "{text}");
    let all = original(&table("wan22-vae"), NESTED);
    for lost in &all {
        let tensors: Vec<_> = all.iter().filter(|t| t.name != lost.name).cloned().collect();
        let text = error(open_header(&tensors));
        assert!(text.contains("1 tensor missing") && text.contains(&lost.name), "{}: {text}", lost.name);
    }
}

#[test]
fn other_shapes_and_names_are_told() {
    let all = original(&table("wan21-vae"), FLAT);
    let mut tensors = all.clone();
    let odd = tensors.iter_mut().find(|t| t.name == "decoder.upsamples.8.residual.6.weight").unwrap();
    odd.shape = vec![192, 100, 3, 3, 3];
    let text = error(open_header(&tensors));
    assert!(text.contains("upsamples.8.residual.6.weight is [192, 100, 3, 3, 3], needs [192, 192, 3, 3, 3]"), "{text}");

    let mut tensors = all.clone();
    tensors.push(Expected::new("decoder.upsamples.0.residual.7.weight", [3]));
    tensors.push(Expected::new("loss.discriminator", [3]));
    tensors.push(Expected::new("dynamic_feature_projection_heads.0.weight", [3]));
    let unused = open_header(&tensors).unwrap().unused;
    assert_eq!(unused, ["decoder.upsamples.0.residual.7.weight", "loss.discriminator"]);

    let mut tensors = all;
    tensors.iter_mut().find(|t| t.name == "encoder.conv1.weight").unwrap().shape[1] = 5;
    assert!(error(open_header(&tensors)).contains("5 channels of pixels"));
}

#[test]
fn other_models_are_named() {
    let text = error(open_header(&table("flux2-vae")));
    assert!(text.contains("no vae of the Wan family") && text.contains("FLUX.2 VAE"), "{text}");
    let lora =
        [Expected::new("blocks.0.q.lora_down.weight", [4, 8]), Expected::new("blocks.0.q.lora_up.weight", [8, 4])];
    assert!(error(open_header(&lora)).contains("LoRA"));
    assert!(error(open_header(&[])).contains("no tensors"));
    assert!(error(open_header(&[Expected::new("x", [1])])).contains("none of its 1 tensors"));
    // Numbers out of all bounds cost nothing.
    let marker = Expected::new("decoder.middle.0.residual.0.gamma", [8, 1, 1, 1]);
    for name in ["decoder.upsamples.9999.residual.2.weight", "decoder.upsamples.9999.upsamples.9999.residual.2.weight"]
    {
        let tensors = [marker.clone(), Expected::new(name, [8, 8, 3, 3, 3])];
        error(open_header(&tensors));
    }
    let lora = Pth::open(path("../crates/weights/tests/data/lora.pth")).unwrap();
    let text = Checkpoint::new(Arc::new(lora), None).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("lora.pth holds no vae") && text.contains("LoRA"), "{text}");
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The tensors of a source under other names and in another type.
fn copied(source: &dyn TensorSource, name: impl Fn(&str) -> String, dtype: StoredDType) -> Vec<TensorData<'static>> {
    let tensor = |t: &TensorInfo| {
        let host = source.host(&t.name).unwrap();
        let wide = host.to_tensor(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        match dtype {
            StoredDType::F32 => TensorData::f32(name(&t.name), &t.shape, &wide),
            StoredDType::BF16 => TensorData::bf16(name(&t.name), &t.shape, &wide),
            other => panic!("{other}"),
        }
    };
    source.tensors().iter().map(tensor).collect()
}

fn decoded(source: Arc<dyn TensorSource>) -> Result<Vec<u32>> {
    let vae = WanVae::load(source, None, &LoadOptions::default())?;
    let latents = RawLatents::new(testing::noise(5, 1.0, &[16, 2, 3, 2]))?;
    Ok(bits(&vae.decode(&mut DecoderState::new(&vae), &latents)?))
}

/// One set of weights as PyTorch and the diffusers library saved it, then in every other guise: the same bits come out.
#[test]
fn every_layout_gives_the_same_frames() {
    let reference = weights::open(data("diffusers.safetensors")).unwrap();
    let wanted = decoded(reference.clone()).unwrap();
    assert_eq!(decoded(weights::open(data("original.pth")).unwrap()).unwrap(), wanted);
    for prefix in ["", "vae.", "first_stage_model.", "model."] {
        for dtype in [StoredDType::F32, StoredDType::BF16] {
            let named = |name: &str| format!("{prefix}{name}");
            let renamed = |name: &str| format!("{prefix}{}", FLAT.to_original(name).unwrap());
            for tensors in [copied(&*reference, named, dtype), copied(&*reference, renamed, dtype)] {
                assert_eq!(decoded(testing::file(&tensors)).unwrap(), wanted, "{prefix} {dtype}");
            }
        }
    }
}

#[test]
fn damaged_values_are_refused() {
    let reference = weights::open(data("original.pth")).unwrap();
    for (name, map) in [("conv1.weight", "zero"), ("conv2.weight", "zero"), ("conv2.weight", "NaN")] {
        let mut tensors = copied(&*reference, str::to_owned, StoredDType::BF16);
        let tensor = tensors.iter_mut().find(|t| t.name == name).unwrap();
        let value: [u8; 2] = if map == "zero" { [0, 0x80] } else { [0xc0, 0x7f] };
        let len = tensor.bytes.len() / 2;
        tensor.bytes = value.repeat(len).into();
        let text = decoded(testing::file(&tensors)).unwrap_err().to_string();
        assert!(text.contains(map) && text.contains("random") && !text.contains('\n'), "{text}");
        assert_eq!(text.contains(&format!("`{name}`")), map == "zero", "{text}");
    }
    // A file that ends early.
    let bytes = to_bytes(&copied(&*reference, str::to_owned, StoredDType::BF16), &Metadata::new()).unwrap();
    let cut = Safetensors::from_bytes(Arc::new(bytes[..bytes.len() - 1].to_vec()), "cut.safetensors");
    assert!(cut.unwrap_err().to_string().contains("truncated"));
}

#[test]
fn configurations_count_for_statistics_only() {
    let architecture = testing::wan21();
    let mut config = testing::config([96, 96], &[1, 2, 4, 4], 16, 2, false);
    assert_eq!(disagreements(&config, &architecture), []);
    let dir = TempDir::new().unwrap();
    let source = header(&dir, &table("wan21-vae"), StoredDType::F16);
    let found = Checkpoint::new(source.clone(), Some(&config)).unwrap();
    assert_eq!(found.statistics, Some(Statistics::new(&config.latents_mean, &config.latents_std).unwrap()));
    assert_ne!(found.statistics, Some(Statistics::wan21()));

    (config.base_dim, config.decoder_base_dim, config.dim_mult[1], config.num_res_blocks) = (64, Some(32), 3, 4);
    (config.in_channels, config.out_channels, config.is_residual) = (4, 12, true);
    let fields: Vec<_> = disagreements(&config, &architecture).into_iter().map(|d| d.0).collect();
    assert_eq!(
        fields,
        ["is_residual", "in_channels", "out_channels", "base_dim", "decoder_base_dim", "num_res_blocks", "dim_mult"]
    );
    assert_eq!(Checkpoint::new(source.clone(), Some(&config)).unwrap().architecture, architecture);

    config.latents_mean.push(0.0);
    let text = Checkpoint::new(source.clone(), Some(&config)).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("17 values") && text.contains("another vae"), "{text}");
    config.latents_mean.pop();
    config.latents_std[3] = 0.0;
    assert!(matches!(Checkpoint::new(source, Some(&config)), Err(Error::Statistics { field: "latents_std", .. })));
}

#[test]
fn files_and_folders_open_with_their_configuration() {
    let demo = path("models/wan-vae-demo");
    let (source, config) = open(&demo).unwrap();
    assert_eq!(config.as_ref().unwrap().base_dim, 24);
    let found = Checkpoint::new(source, config.as_ref()).unwrap();
    assert_eq!((found.variant, found.unused.len()), (Variant::Other, 0));
    assert_eq!(found.architecture, Architecture::from_config(&config.unwrap()).unwrap());
    assert_eq!(open(demo.join("diffusion_pytorch_model.safetensors")).unwrap().1.unwrap().z_dim, 16);

    // A model folder; a lone file beside the configuration of something else; a broken configuration.
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("vae")).unwrap();
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(demo.join(file), dir.path().join("vae").join(file)).unwrap();
    }
    fs::write(dir.path().join("model_index.json"), "{}").unwrap();
    assert_eq!(open(dir.path()).unwrap().1.unwrap().base_dim, 24);
    fs::copy(data("original.pth"), dir.path().join("Wan2.1_VAE.pth")).unwrap();
    fs::write(dir.path().join("config.json"), r#"{"_class_name": "WanModel", "dim": 5120}"#).unwrap();
    let (source, config) = open(dir.path().join("Wan2.1_VAE.pth")).unwrap();
    assert_eq!((source.tensors().len(), config), (194, None));
    fs::write(dir.path().join("vae/config.json"), r#"{"_class_name": "AutoencoderKLWan"}"#).unwrap();
    let text = open(dir.path()).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("config.json") && text.contains("missing field") && !text.contains('\n'), "{text}");
    let text = open(dir.path().join("none.pth")).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("none.pth"), "{text}");
}
