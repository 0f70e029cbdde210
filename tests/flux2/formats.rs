//! The demonstration model as other programs would store it makes the picture of the golden.
//!
//! Other layouts hold the same numbers, so they are held to the tolerance of the plain model. Quantised ones are held to a
//! signal-to-noise ratio that the same file with a wrong scale does not reach.

use std::{fs, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use candle_core::{Tensor, quantized::GgmlDType};
use candle_fork::{QuantMode, convrot::take_counters};
use flux2::{Components, Flux2Pipeline, LoadOptions, ModelFolder, QuantPolicy};
use policy::Silent;
use tempfile::TempDir;
use tests::{
    Container, DemoCopy, Golden, Stored, assert_close, assert_same_bits, data, demo, gguf, prefixed, psnr, relayout,
    request,
};
use weights::{
    Safetensors, TensorSource,
    quantize::{Format, quantize},
};

const GOLDEN: &str = "flux2-a";
/// Relative L2 error of a picture of the same numbers.
const TOLERANCE: f64 = 1e-4;
/// Groups of the rotation: 256 divides no row of the miniature.
const CONVROT: Format = Format::Int8ConvRot { group_size: 16 };

/// Least decibels, some below what was measured: 56.6, 84.1, 44.3, 59.7, 40.1 and 67.4.
const INT8: f64 = 50.0;
const INT8_TEXT_ENCODER: f64 = 75.0;
const FP8: f64 = 42.0;
const Q8_0: f64 = 54.0;
const Q4_0: f64 = 36.0;
const K_QUANTS: f64 = 60.0;

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";
const TEXT_ENCODER: &str = "text_encoder/model.safetensors";
const VAE: &str = "vae/diffusion_pytorch_model.safetensors";

fn component(file: &str) -> Result<Container> {
    Container::read(&data("models/flux2-demo").join(file))
}

/// A folder for the files of a test.
struct Place(TempDir);

impl Place {
    fn new() -> Result<Self> {
        Ok(Self(TempDir::new()?))
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// Opens a file with these contents.
    fn open(&self, name: &str, bytes: &[u8]) -> Result<Arc<dyn TensorSource>> {
        fs::write(self.path(name), bytes)?;
        Ok(weights::open(self.path(name))?)
    }

    /// The file that our quantiser makes of `plain`.
    fn quantised(&self, plain: &Container, format: Format) -> Result<Container> {
        let source = Safetensors::from_bytes(Arc::new(plain.to_bytes()), "plain")?;
        let path = self.path("quantised.safetensors");
        let report = quantize(&source, format, &path, &Silent)?;
        ensure!(report.matrices > 0);
        Container::read(&path)
    }
}

fn transformer(source: Arc<dyn TensorSource>) -> Components {
    Components::default().with_transformer(source)
}

fn text_encoder(source: Arc<dyn TensorSource>) -> Components {
    Components::default().with_text_encoder(source)
}

/// The picture of the golden's prompt and seed, with these components instead of the model's.
fn picture(components: Components) -> Result<Tensor> {
    picture_of(&demo(), components, &LoadOptions::default())
}

fn picture_of(folder: &ModelFolder, components: Components, load: &LoadOptions) -> Result<Tensor> {
    let golden = Golden::open(GOLDEN)?;
    let options = request(&golden)?;
    let pipeline = Flux2Pipeline::load_with(folder, components, load)?;
    Ok(pipeline.generate(&options, &Silent)?.image)
}

fn wanted() -> Result<Tensor> {
    Ok(Golden::open(GOLDEN)?.tensor("image")?.squeeze(0)?)
}

/// Decibels of a picture against the golden's.
fn quality(what: &str, components: Components) -> Result<f64> {
    let decibels = psnr(&picture(components).with_context(|| what.to_owned())?, &wanted()?, 1.0)?;
    println!("{what}: {decibels:.1} dB");
    Ok(decibels)
}

/// The same file with every scale a sixteenth too large.
fn with_wrong_scales(container: &Container) -> Container {
    let mut wrong = container.clone();
    for (name, scale) in &mut wrong.tensors {
        if name.ends_with(".weight_scale") {
            let scaled = scale.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * 1.0625);
            scale.bytes = scaled.flat_map(f32::to_le_bytes).collect();
        }
    }
    wrong
}

/// `container` makes a picture of at least `least` decibels, and with wrong scales one of less.
fn holds(what: &str, container: &Container, least: f64) -> Result<()> {
    let place = Place::new()?;
    let of = |what: &str, container: &Container| {
        quality(what, transformer(place.open("x.safetensors", &container.to_bytes())?))
    };
    let right = of(what, container)?;
    ensure!(right >= least, "{what}: {right:.1} dB, {least} are wanted");
    let wrong = of(&format!("{what}, wrong scales"), &with_wrong_scales(container))?;
    ensure!(wrong < least, "{what}: wrong scales give {wrong:.1} dB, and {least} are wanted of right ones");
    Ok(())
}

#[test]
fn other_layouts_make_the_same_picture() -> Result<()> {
    let place = Place::new()?;
    let (t, e, v) = (component(TRANSFORMER)?, component(TEXT_ENCODER)?, component(VAE)?);
    let bfl = relayout(&t, "flux2-dev", "")?;
    let image = picture(transformer(place.open("bfl.safetensors", &bfl.to_bytes())?))?;
    assert_close("BFL single file", &image, &wanted()?, TOLERANCE)?;

    let comfy =
        transformer(place.open("comfy.safetensors", &relayout(&t, "flux2-dev", "model.diffusion_model.")?.to_bytes())?);
    let comfy = comfy
        .with_text_encoder(place.open("qwen_3.safetensors", &prefixed(&e, "model.").to_bytes())?)
        .with_vae(place.open("flux2-vae.safetensors", &relayout(&v, "flux2-vae", "")?.to_bytes())?);
    assert_close("ComfyUI, split files", &picture(comfy)?, &wanted()?, TOLERANCE)?;

    let mut whole = relayout(&t, "flux2-dev", "model.diffusion_model.")?;
    whole.tensors.extend(prefixed(&e, "text_encoders.qwen3_4b.transformer.model.").tensors);
    whole.tensors.extend(relayout(&v, "flux2-vae", "vae.")?.tensors);
    let whole = place.open("whole.safetensors", &whole.to_bytes())?;
    let one = transformer(whole.clone()).with_text_encoder(whole.clone()).with_vae(whole);
    assert_close("ComfyUI, one file", &picture(one)?, &wanted()?, TOLERANCE)
}

#[test]
fn gguf_files_of_plain_floats_make_the_same_picture() -> Result<()> {
    let place = Place::new()?;
    let float = |_: &str, shape: &[usize]| if shape.len() == 1 { GgmlDType::F32 } else { GgmlDType::BF16 };
    let t = gguf(&relayout(&component(TRANSFORMER)?, "flux2-dev", "")?, "flux2", float)?;
    let components = transformer(place.open("t.gguf", &t)?);
    let e = gguf(&relayout(&component(TEXT_ENCODER)?, "qwen3-8b", "")?, "qwen3", float)?;
    let components = components.with_text_encoder(place.open("e.gguf", &e)?);
    assert_close("GGUF, BF16", &picture(components)?, &wanted()?, TOLERANCE)?;
    // Also in the place of the component's own file.
    let copy = DemoCopy::new()?;
    fs::remove_file(copy.path(TRANSFORMER))?;
    fs::write(copy.path("transformer/flux-2-klein.gguf"), t)?;
    let image = picture_of(&copy.folder(), Components::default(), &LoadOptions::default())?;
    assert_close("GGUF in a folder", &image, &wanted()?, TOLERANCE)
}

#[test]
fn int8_convrot_makes_the_picture() -> Result<()> {
    let place = Place::new()?;
    let plain = component(TRANSFORMER)?;
    holds("int8-convrot", &place.quantised(&plain, CONVROT)?, INT8)?;
    // Query, key and value are one matrix here, and are cut out of it with their scales.
    let bfl = relayout(&plain, "flux2-dev", "")?;
    holds("int8-convrot, BFL names", &place.quantised(&bfl, CONVROT)?, INT8)?;
    // The larger groups of published files divide the rows of the text encoder's last map.
    let encoder = place.quantised(&component(TEXT_ENCODER)?, Format::Int8ConvRot { group_size: 256 })?;
    let found =
        quality("int8-convrot 256, text encoder", text_encoder(place.open("e.safetensors", &encoder.to_bytes())?))?;
    ensure!(found >= INT8_TEXT_ENCODER, "{found:.1} dB, {INT8_TEXT_ENCODER} are wanted");
    Ok(())
}

/// However quantised matrices take part: 56.6 dB as they are stored or decoded, 55.6 by products of bytes, whose arguments
/// are quantised as well.
#[test]
fn every_mode_makes_the_picture() -> Result<()> {
    let place = Place::new()?;
    let int8 = place.quantised(&component(TRANSFORMER)?, CONVROT)?;
    let int8 = place.open("x.safetensors", &int8.to_bytes())?;
    for mode in [QuantMode::DequantizeOnce, QuantMode::DequantizePerLayer, QuantMode::W8A8] {
        let load = LoadOptions::default().with_quant(QuantPolicy::Mode(mode));
        take_counters();
        let found = psnr(&picture_of(&demo(), transformer(int8.clone()), &load)?, &wanted()?, 1.0)?;
        let products = take_counters().cpu;
        println!("{mode:?}: {found:.1} dB, {products} products of bytes");
        ensure!(found >= INT8, "{mode:?}: {found:.1} dB, {INT8} are wanted");
        ensure!((products > 0) == (mode == QuantMode::W8A8), "{mode:?}: {products} products of bytes");
    }
    Ok(())
}

#[test]
fn scaled_fp8_makes_the_picture_however_its_scales_are_called() -> Result<()> {
    let place = Place::new()?;
    let comfy = place.quantised(&relayout(&component(TRANSFORMER)?, "flux2-dev", "")?, Format::Fp8Scaled)?;
    holds("fp8", &comfy, FP8)?;
    let image = picture(transformer(place.open("comfy.safetensors", &comfy.to_bytes())?))?;
    for (what, other) in [("older ComfyUI", older_comfy(&comfy)), ("BFL", bfl_fp8(&comfy)?)] {
        let other = picture(transformer(place.open("other.safetensors", &other.to_bytes())?))?;
        assert_same_bits(what, &other, &image)?;
    }
    Ok(())
}

/// `scale_weight` and `scale_input` instead of `weight_scale`, and a marker for the whole file.
fn older_comfy(comfy: &Container) -> Container {
    let mut out = Container::default();
    for (name, tensor) in &comfy.tensors {
        if let Some(module) = name.strip_suffix(".weight_scale") {
            out.tensors.insert(format!("{module}.scale_weight"), tensor.clone());
            out.tensors.insert(format!("{module}.scale_input"), scalar(1.0));
        } else if !name.ends_with(".comfy_quant") {
            out.tensors.insert(name.clone(), tensor.clone());
        }
    }
    let marker = Stored { dtype: "F8_E4M3".to_owned(), shape: vec![2], bytes: vec![0; 2] };
    out.tensors.insert("scaled_fp8".to_owned(), marker);
    out
}

/// Formats in the file's metadata, and a scale for the argument.
fn bfl_fp8(comfy: &Container) -> Result<Container> {
    let mut out = Container::default();
    let mut layers = serde_json::Map::new();
    for (name, tensor) in &comfy.tensors {
        if let Some(module) = name.strip_suffix(".comfy_quant") {
            layers.insert(module.to_owned(), serde_json::from_slice(&tensor.bytes)?);
            out.tensors.insert(format!("{module}.input_scale"), scalar(1.0));
        } else {
            out.tensors.insert(name.clone(), tensor.clone());
        }
    }
    let metadata = serde_json::json!({"format_version": "1.0", "layers": layers}).to_string();
    out.metadata.insert("_quantization_metadata".to_owned(), metadata);
    Ok(out)
}

fn scalar(value: f32) -> Stored {
    Stored { dtype: "F32".to_owned(), shape: Vec::new(), bytes: value.to_le_bytes().to_vec() }
}

#[test]
fn quantised_gguf_files_make_the_picture() -> Result<()> {
    let place = Place::new()?;
    let plain = relayout(&component(TRANSFORMER)?, "flux2-dev", "")?;
    for (what, types, least) in [
        ("Q8_0", [GgmlDType::Q8_0; 3], Q8_0),
        ("Q4_0, Q5_0 and Q5_1 mixed", [GgmlDType::Q4_0, GgmlDType::Q5_0, GgmlDType::Q5_1], Q4_0),
    ] {
        let mixed = |name: &str, shape: &[usize]| match name {
            _ if shape.len() == 1 => GgmlDType::F32,
            _ if !name.contains("_blocks.") => GgmlDType::BF16,
            _ => types[name.len() % 3],
        };
        let found = quality(what, transformer(place.open("t.gguf", &gguf(&plain, "flux2", mixed)?)?))?;
        ensure!(found >= least, "{what}: {found:.1} dB, {least} are wanted");
    }
    Ok(())
}

#[test]
fn k_quants_of_the_text_encoder_make_the_picture() -> Result<()> {
    let place = Place::new()?;
    let plain = relayout(&component(TEXT_ENCODER)?, "qwen3-8b", "")?;
    // Only rows of 256 hold blocks of these types.
    let mixed = |name: &str, shape: &[usize]| match (name.contains("ffn_down"), name.contains("blk.3.")) {
        _ if shape.len() == 1 => GgmlDType::F32,
        (true, true) => GgmlDType::Q6K,
        (true, false) => GgmlDType::Q4K,
        _ => GgmlDType::Q8_0,
    };
    let source = place.open("e.gguf", &gguf(&plain, "qwen3", mixed)?)?;
    let found = quality("Q4_K, Q6_K and Q8_0 in the text encoder", text_encoder(source))?;
    ensure!(found >= K_QUANTS, "{found:.1} dB, {K_QUANTS} are wanted");
    let other = place.open("gemma.gguf", &gguf(&plain, "gemma3", mixed)?)?;
    let error = picture(text_encoder(other));
    let text = format!("{:#}", error.err().context("another language model should be refused")?);
    ensure!(text.contains("gemma3") && text.contains("qwen3"), "{text}");
    Ok(())
}

#[test]
fn a_scale_that_is_missing_or_left_over_is_an_error() -> Result<()> {
    let place = Place::new()?;
    let good = place.quantised(&component(TRANSFORMER)?, CONVROT)?;
    let module = "transformer_blocks.0.attn.to_q";
    let refused = |container: &Container| -> Result<String> {
        fs::write(place.path("x.safetensors"), container.to_bytes())?;
        let load = |path: &Path| -> Result<()> {
            let components = transformer(weights::open(path)?);
            Flux2Pipeline::load_with(&demo(), components, &LoadOptions::default())?;
            Ok(())
        };
        let text = format!("{:#}", load(&place.path("x.safetensors")).err().context("should be refused")?);
        ensure!(text.contains(module) && !text.contains('\n'), "{text}");
        Ok(text)
    };
    let mut missing = good.clone();
    missing.tensors.remove(&format!("{module}.weight_scale"));
    refused(&missing)?;
    let mut unmarked = good.clone();
    unmarked.tensors.remove(&format!("{module}.comfy_quant"));
    refused(&unmarked)?;
    let mut left_over = good;
    left_over.tensors.insert(format!("{module}.weight_scale_2"), scalar(1.0));
    refused(&left_over)?;
    Ok(())
}
