//! One set of weights in every layout in which people have it: the demonstration VAE as diffusers folders, safetensors
//! files and `torch.save` files under both kinds of names, with every prefix, wrapped and in other element types.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use tempfile::TempDir;
use tests::{Container, Golden, PthSkeleton, Stored, assert_close, assert_same_bits, data, rel_l2};
use wan_vae::{DecoderState, EncoderState, LoadOptions, RawLatents, WanVae, checkpoint};

/// f32 against f32 over whole networks.
const TOLERANCE: f64 = 1e-5;

const PREFIXES: [&str; 4] = ["", "vae.", "first_stage_model.", "model."];

/// The demonstration model: its tensors under diffusers names.
static DEMO: LazyLock<Container> = LazyLock::new(|| {
    Container::read(&data("models/wan-vae-demo/diffusion_pytorch_model.safetensors")).expect("the demonstration vae")
});

fn open(path: &Path) -> Result<WanVae> {
    Ok(WanVae::open(path, &LoadOptions::default())?)
}

/// Original names of the demonstration model's tensors by their diffusers names.
fn original_names() -> Result<BTreeMap<String, String>> {
    let golden = Golden::open("wan-demo-pth")?;
    Ok(serde_json::from_str(golden.metadata("original_names")?)?)
}

/// The demonstration model under other names.
fn renamed(name: impl Fn(&str) -> String) -> Container {
    let tensors = DEMO.tensors.iter().map(|(old, tensor)| (name(old), tensor.clone())).collect();
    Container { metadata: BTreeMap::new(), tensors }
}

/// What a model makes of some goldens.
struct Results {
    encoded: Vec<Tensor>,
    decoded: Vec<Tensor>,
}

impl Results {
    fn of(vae: &WanVae, goldens: &[&str]) -> Result<Self> {
        let mut results = Self { encoded: Vec::new(), decoded: Vec::new() };
        for name in goldens {
            let golden = Golden::open(name)?;
            let video = golden.tensor("video")?.squeeze(0)?;
            let latents = vae.encode(&mut EncoderState::new(vae), &video)?.context("no latents")?;
            results.encoded.push(latents.into_tensor());
            let latents = RawLatents::new(golden.tensor("latent_mean")?)?;
            results.decoded.push(vae.decode(&mut DecoderState::new(vae), &latents)?);
        }
        Ok(results)
    }

    fn check(&self, what: &str, goldens: &[&str], tolerance: f64) -> Result<()> {
        for ((name, encoded), decoded) in goldens.iter().zip(&self.encoded).zip(&self.decoded) {
            let golden = Golden::open(name)?;
            let want = |key: &str| -> Result<Tensor> { Ok(golden.tensor(key)?.squeeze(0)?) };
            assert_close(&format!("{what}: {name}, encode"), encoded, &want("latent_mean")?, tolerance)?;
            assert_close(&format!("{what}: {name}, decode"), decoded, &want("decoded")?, tolerance)?;
        }
        Ok(())
    }
}

/// All goldens from the folder, the shortest from every other layout, with the same bits.
#[test]
fn every_layout_gives_the_golden_results() -> Result<()> {
    let all = ["wan-a", "wan-b", "wan-c"];
    let folder = Results::of(&open(&data("models/wan-vae-demo"))?, &all)?;
    folder.check("diffusers folder", &all, TOLERANCE)?;

    let dir = TempDir::new()?;
    let names = original_names()?;
    assert_eq!(names.len(), DEMO.tensors.len());
    let mut layouts: Vec<(String, PathBuf)> = Vec::new();

    let pipeline = dir.path().join("pipeline");
    fs::create_dir_all(pipeline.join("vae"))?;
    fs::write(
        pipeline.join("model_index.json"),
        r#"{"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}"#,
    )?;
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(data("models/wan-vae-demo").join(file), pipeline.join("vae").join(file))?;
    }
    layouts.push(("pipeline folder".to_owned(), pipeline));

    for prefix in PREFIXES {
        let diffusers = renamed(|name| format!("{prefix}{name}"));
        let original = renamed(|name| format!("{prefix}{}", names[name]));
        for (kind, mut container) in [("diffusers", diffusers), ("original", original)] {
            if !prefix.is_empty() {
                // Other models of one file.
                let other = Stored { dtype: "F32".to_owned(), shape: vec![1], bytes: vec![0; 4] };
                container.tensors.insert("blocks.0.attn.weight".to_owned(), other);
            }
            let path = dir.path().join(format!("{kind}-{prefix}safetensors"));
            container.write(&path)?;
            layouts.push((format!("{kind} names, prefix {prefix:?}"), path));
        }
    }
    for (what, skeleton) in [("torch.save", "wan-demo-pth"), ("torch.save, wrapped", "wan-demo-pth-wrapped")] {
        let path = dir.path().join(format!("{skeleton}.pth"));
        let by_original: BTreeMap<&str, &Stored> =
            names.iter().map(|(name, original)| (original.as_str(), &DEMO.tensors[name])).collect();
        let skeleton = PthSkeleton::open(skeleton)?;
        skeleton.write(&path, |name| by_original.get(name).map(|stored| stored.bytes.as_slice()))?;
        layouts.push((what.to_owned(), path));
    }
    assert_eq!(layouts.len(), 1 + 2 * PREFIXES.len() + 2);

    let wanted = elements(&data("models/wan-vae-demo"))?;
    for (what, path) in &layouts {
        ensure!(elements(path)? == wanted, "{what}: other tensors");
        let results = Results::of(&open(path)?, &["wan-b"])?;
        results.check(what, &["wan-b"], TOLERANCE)?;
        assert_same_bits(what, &results.encoded[0], &folder.encoded[1])?;
        assert_same_bits(what, &results.decoded[0], &folder.decoded[1])?;
    }
    Ok(())
}

/// Name, shape and bytes of every tensor as the loader sees them.
type Elements = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn elements(path: &Path) -> Result<Elements> {
    let (source, config) = checkpoint::open(path)?;
    let found = checkpoint::Checkpoint::new(source, config.as_ref())?;
    ensure!(found.unused.is_empty(), "unused: {:?}", found.unused);
    let tensors = found.source.tensors().iter();
    tensors.map(|t| Ok((t.name.clone(), (t.shape.clone(), found.source.bytes(&t.name)?.to_vec())))).collect()
}

/// The published file is bf16; wider copies hold the same numbers, and f16 ones all but the tiniest.
#[test]
fn other_element_types_give_the_golden_results() -> Result<()> {
    let dir = TempDir::new()?;
    let reference = Results::of(&open(&data("models/wan-vae-demo"))?, &["wan-b"])?;
    for dtype in [DType::F32, DType::F16] {
        let mut container = DEMO.clone();
        let mut changed = 0;
        for stored in container.tensors.values_mut() {
            let wide = Tensor::from_raw_buffer(&stored.bytes, DType::BF16, &stored.shape, &Device::Cpu)?;
            let wide = wide.to_dtype(DType::F32)?.flatten_all()?;
            let (name, bytes): (_, Vec<u8>) = match dtype {
                DType::F16 => {
                    let narrow = wide.to_dtype(DType::F16)?.to_vec1::<half::f16>()?;
                    changed += narrow.iter().zip(wide.to_vec1::<f32>()?).filter(|(n, w)| n.to_f32() != *w).count();
                    ("F16", narrow.iter().flat_map(|v| v.to_le_bytes()).collect())
                }
                _ => ("F32", wide.to_vec1::<f32>()?.iter().flat_map(|v| v.to_le_bytes()).collect()),
            };
            *stored = Stored { dtype: name.to_owned(), shape: stored.shape.clone(), bytes };
        }
        let path = dir.path().join("vae.safetensors");
        container.write(&path)?;
        let results = Results::of(&open(&path)?, &["wan-b"])?;
        results.check(&format!("{dtype:?}"), &["wan-b"], TOLERANCE)?;
        if dtype == DType::F32 {
            assert_same_bits("f32", &results.encoded[0], &reference.encoded[0])?;
            assert_same_bits("f32", &results.decoded[0], &reference.decoded[0])?;
        } else {
            let error = rel_l2(&results.decoded[0], &reference.decoded[0])?;
            println!("{dtype:?}: {changed} weights differ, the frames by {error:.1e}");
            assert!(changed > 0, "nothing was rounded");
        }
    }
    Ok(())
}

/// Both networks of the goldens, one with nested names and one with flat ones, under their original names.
#[test]
fn tiny_networks_give_the_same_bits_under_their_original_names() -> Result<()> {
    let dir = TempDir::new()?;
    for golden in ["wan-22", "wan-qwen"] {
        let golden = Golden::open(golden)?;
        let names: BTreeMap<String, String> = serde_json::from_str(golden.metadata("original_names")?)?;
        let latents = RawLatents::new(golden.tensor("in.latents.2")?)?;
        let decoded = |container: &Container, config: bool| -> Result<Tensor> {
            let path = dir.path().join("vae.safetensors");
            container.write(&path)?;
            let beside = dir.path().join("config.json");
            if config {
                fs::write(&beside, golden.metadata("config")?)?;
            } else if beside.exists() {
                fs::remove_file(&beside)?;
            }
            let vae = open(&path)?;
            assert_eq!(vae.statistics().is_some(), config);
            Ok(vae.decode(&mut DecoderState::new(&vae), &latents)?)
        };
        let diffusers = golden.container();
        let mut original = Container::default();
        for (name, tensor) in &diffusers.tensors {
            original.tensors.insert(names[name].clone(), tensor.clone());
        }
        let want = decoded(&diffusers, true)?;
        assert_close("diffusers names", &want, &golden.tensor("out.video.2")?.squeeze(0)?, TOLERANCE)?;
        // Nothing but the tensors.
        assert_same_bits("original names", &decoded(&original, false)?, &want)?;
        assert_same_bits("diffusers names", &decoded(&diffusers, false)?, &want)?;
    }
    Ok(())
}
