use std::{fs, path::PathBuf, sync::Arc};

use tempfile::TempDir;

use super::*;
use crate::{
    loader::Expected,
    write::{Metadata, TensorData, header_only, to_bytes, to_file},
};

/// Tables of names and shapes of published models.
fn table(name: &str) -> (usize, u64, Vec<Expected>) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/names").join(name);
    let text = fs::read_to_string(&path).unwrap();
    // `# …; 169 tensors, 3875544576 elements`
    let number =
        |after: &str| text.lines().next().unwrap().split(after).next().unwrap().rsplit(' ').next().unwrap().parse();
    (number(" tensors").unwrap(), number(" elements").unwrap_or(0) as u64, Expected::from_table(&text).unwrap())
}

/// A file of zeros with these names, in bf16 but for scalars.
fn empty_file(path: &Path, table: &[Expected], prefix: &str) {
    let names: Vec<_> = table.iter().map(|e| format!("{prefix}{}", e.name)).collect();
    let entries = table.iter().zip(&names).map(|(e, name)| {
        let dtype = if e.shape.is_empty() { StoredDType::I64 } else { StoredDType::BF16 };
        (name.as_str(), dtype, e.shape.as_slice())
    });
    header_only(path, entries, &Metadata::new()).unwrap();
}

/// Published models are recognised, and the figures are those of the table and of the published file.
#[test]
fn published_models_are_recognised() {
    let dir = TempDir::new().unwrap();
    for (file, words) in [
        ("flux2-klein-4b.tsv", "FLUX.2 transformer (klein 4B), diffusers names"),
        ("flux2-klein-9b.tsv", "FLUX.2 transformer (klein 9B), diffusers names"),
        ("flux2-dev.tsv", "FLUX.2 transformer (dev), diffusers names"),
        ("flux2-dev.bfl.tsv", "FLUX.2 transformer (dev), BFL names"),
        ("flux2-vae.tsv", "FLUX.2 VAE, diffusers names"),
        ("qwen3-4b.tsv", "Qwen3 language model (4B), transformers names under `model.`"),
        ("qwen3-8b.tsv", "Qwen3 language model (8B), transformers names under `model.`"),
    ] {
        let (tensors, elements, expected) = table(file);
        let path = dir.path().join("x.safetensors");
        empty_file(&path, &expected, "");
        let report = inspect(&path).unwrap();
        assert_eq!(report.kind, Kind::Safetensors);
        assert_eq!(report.tensors(), tensors, "{file}");
        if elements > 0 {
            assert_eq!(report.elements(), elements, "{file}");
        }
        let part = &report.parts[0];
        assert_eq!(part.model.as_ref().map(Guess::describe).as_deref(), Some(words), "{file}");
        let scalars = expected.iter().filter(|e| e.shape.is_empty()).count() as u64;
        assert_eq!(part.dtypes[&StoredDType::BF16].elements, report.elements() - scalars);
        assert_eq!(part.bytes, 2 * (report.elements() - scalars) + 8 * scalars);
        assert!(report.description.contains("safetensors file, looks like"), "{}", report.description);
    }
    // The published file of klein 4B has 7,751,109,744 bytes; its header is written by another library.
    let (_, _, expected) = table("flux2-klein-4b.tsv");
    let bytes: usize = expected.iter().map(|e| StoredDType::BF16.byte_len(&e.shape).unwrap()).sum();
    assert_eq!(bytes, 7_751_089_152);
    assert!((7_751_109_744 - bytes) < 30_000);
}

#[test]
fn prefixes_are_seen_through() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("x.safetensors");
    let (_, _, expected) = table("flux2-dev.bfl.tsv");
    for prefix in ["model.diffusion_model.", "diffusion_model."] {
        empty_file(&path, &expected, prefix);
        let model = inspect(&path).unwrap().parts.remove(0).model.unwrap();
        assert_eq!((model.prefix, model.variant.as_deref()), (Some(prefix), Some("dev")));
    }
}

/// Models whose tables would be long: the few names that tell them.
#[test]
fn other_families_are_recognised() {
    type Names = &'static [(&'static str, &'static [usize])];
    let cases: &[(Names, &str)] = &[
        (
            &[
                ("decoder.mid_block.resnets.0.norm1.gamma", &[384]),
                ("decoder.norm_out.gamma", &[96]),
                ("post_quant_conv.weight", &[16, 16, 1, 1, 1]),
            ],
            "Wan video VAE (2.1, or Qwen-Image's, which has the same shapes), diffusers names",
        ),
        (
            &[
                ("decoder.middle.0.residual.0.gamma", &[1024]),
                ("decoder.head.0.gamma", &[256]),
                ("conv2.weight", &[48, 48, 1, 1, 1]),
            ],
            "Wan video VAE (2.2), original names",
        ),
        (
            &[
                ("decoder.mid_block.resnets.0.norm1.gamma", &[96]),
                ("decoder.norm_out.gamma", &[24]),
                ("post_quant_conv.weight", &[16, 16, 1, 1, 1]),
            ],
            "Wan video VAE (16 latent channels, decoder width 24), diffusers names",
        ),
        (&[("decoder.conv_in_x_t.weight", &[1]), ("latents_mean", &[128])], "LTX-2 diffusion decoder, diffusers names"),
        (&[("decoder.conv_in.conv.weight", &[1]), ("latents_mean", &[128])], "LTX video VAE, diffusers names"),
        (
            &[
                ("model.diffusion_model.patchify_proj.weight", &[4096, 128]),
                ("model.diffusion_model.audio_patchify_proj.weight", &[2048, 128]),
            ],
            "LTX-2 transformer (width 4096), original names under `model.diffusion_model.`",
        ),
        (
            &[
                ("proj_in.weight", &[4096, 128]),
                ("audio_proj_in.weight", &[2048, 128]),
                ("transformer_blocks.0.audio_attn1.to_q.weight", &[1]),
            ],
            "LTX-2 transformer (width 4096), diffusers names",
        ),
        (
            &[
                ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", &[16, 3072]),
                ("transformer.transformer_blocks.0.attn.to_q.lora_B.weight", &[3072, 16]),
            ],
            "LoRA or similar adapter (rank 16), PEFT names",
        ),
        (
            &[("lora_unet_single_blocks_0_linear1.lora_down.weight", &[8, 64])],
            "LoRA or similar adapter (rank 8), kohya names",
        ),
        (
            &[
                ("embed_tokens.weight", &[407, 96]),
                ("layers.0.self_attn.q_norm.weight", &[32]),
                ("layers.0.post_attention_layernorm.weight", &[96]),
            ],
            "Qwen3 language model (hidden size 96), transformers names",
        ),
        (
            &[("decoder.conv_in.weight", &[512, 16, 3, 3]), ("decoder.mid.block_1.norm1.weight", &[512])],
            "image VAE of the Stable Diffusion family (16 latent channels), original names",
        ),
    ];
    for (names, words) in cases {
        let mut tensors: Vec<_> = names
            .iter()
            .map(|(name, shape)| TensorInfo {
                name: (*name).to_owned(),
                dtype: StoredDType::BF16,
                shape: shape.to_vec(),
                bytes: 0..0,
                file: 0,
                quantisation: None,
            })
            .collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(recognise(&tensors).map(|g| g.describe()).as_deref(), Some(*words));
    }
    assert_eq!(recognise(&[]), None);
}

fn demo(dir: &Path) {
    fs::write(
        dir.join("model_index.json"),
        r#"{"_class_name":"Flux2KleinPipeline","vae":["diffusers","AutoencoderKLFlux2"]}"#,
    )
    .unwrap();
    for sub in ["vae", "text_encoder", "tokenizer"] {
        fs::create_dir(dir.join(sub)).unwrap();
    }
    fs::write(dir.join("tokenizer/tokenizer.json"), "{}").unwrap();
    fs::write(dir.join("vae/config.json"), r#"{"_class_name":"AutoencoderKLFlux2"}"#).unwrap();
    fs::write(dir.join("text_encoder/config.json"), r#"{"architectures":["Qwen3ForCausalLM"]}"#).unwrap();
    let vae = [TensorData::bf16("bn.running_mean", &[4], &[0.0; 4])];
    to_file(
        dir.join("vae/diffusion_pytorch_model.safetensors"),
        &vae,
        &Metadata::from([("format".to_owned(), "pt".to_owned())]),
    )
    .unwrap();
    let text = [TensorData::f32("norm.weight", &[2, 3], &[0.0; 6])];
    to_file(dir.join("text_encoder/model.safetensors"), &text, &Metadata::new()).unwrap();
}

#[test]
fn a_diffusers_folder_has_parts() {
    let dir = TempDir::new().unwrap();
    demo(dir.path());
    let report = inspect(dir.path()).unwrap();
    assert_eq!((report.kind, report.pipeline.as_deref()), (Kind::DiffusersFolder, Some("Flux2KleinPipeline")));
    let parts: Vec<_> = report.parts.iter().map(|p| (p.component.as_str(), p.class.as_deref(), p.bytes)).collect();
    assert_eq!(parts, [("text_encoder", Some("Qwen3ForCausalLM"), 24), ("vae", Some("AutoencoderKLFlux2"), 8)]);
    assert_eq!((report.tensors(), report.elements(), report.bytes()), (2, 10, 32));
    assert_eq!(report.parts[1].metadata["format"], "pt");

    // As JSON, for other programs.
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["kind"], "diffusers_folder");
    assert_eq!(json["parts"][1]["dtypes"]["BF16"]["elements"], 4);
    assert_eq!(json["parts"][0]["tensors"][0]["shape"], serde_json::json!([2, 3]));
}

#[test]
fn a_component_folder_is_its_weights() {
    let dir = TempDir::new().unwrap();
    demo(dir.path());
    let report = inspect(dir.path().join("vae")).unwrap();
    assert_eq!((report.kind, report.parts[0].class.as_deref()), (Kind::Safetensors, Some("AutoencoderKLFlux2")));
}

#[test]
fn damage_in_a_component_is_an_error() {
    let dir = TempDir::new().unwrap();
    demo(dir.path());
    let path = dir.path().join("vae/diffusion_pytorch_model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let text = inspect(dir.path()).unwrap_err().to_string();
    assert!(text.contains("diffusion_pytorch_model.safetensors") && text.contains("truncated"), "{text}");
    // Two candidates are no reason to leave the component out without a word.
    fs::write(dir.path().join("vae/a.safetensors"), &bytes).unwrap();
    fs::rename(&path, dir.path().join("vae/b.safetensors")).unwrap();
    assert!(matches!(inspect(dir.path()), Err(Error::NoWeights { .. })));
}

#[test]
fn shards_are_counted() {
    let dir = TempDir::new().unwrap();
    for name in ["a", "b"] {
        to_file(
            dir.path().join(format!("{name}.safetensors")),
            &[TensorData::f32(name, &[1], &[1.0])],
            &Metadata::new(),
        )
        .unwrap();
    }
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}"#).unwrap();
    for path in [index.as_path(), dir.path()] {
        let report = inspect(path).unwrap();
        assert_eq!((report.kind, report.tensors(), report.parts[0].files.len()), (Kind::ShardedSafetensors, 2, 2));
        assert_eq!(report.description, "safetensors in 2 shards, model unknown");
    }
}

#[test]
fn other_things_are_described() {
    let dir = TempDir::new().unwrap();
    let check = |name: &str, bytes: &[u8], word: &str| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let report = inspect(&path).unwrap();
        assert_eq!(report.kind, Kind::Other);
        assert!(report.description.contains(word), "{name}: {}", report.description);
    };
    check("m.bin", b"lmgg\x01\0\0\0", "old GGML format");
    // An archive without members.
    check("m.zip", &[&b"PK\x03\x04PK\x05\x06"[..], &[0; 12], &[4, 0, 0, 0, 0, 0]].concat(), "not a PyTorch checkpoint");
    check("m.pth", b"\x80\x02\x8a\nl\xfc\x9c", "old PyTorch checkpoint");
    check("config.json", b"{\"hidden_size\": 3}", "JSON");
    check("m.safetensors", b"version https://git-lfs.github.com/spec/v1", "Git LFS");
    let report = inspect(dir.path()).map(|r| r.description);
    assert!(matches!(&report, Err(Error::OtherFormat { .. })), "{report:?}");

    let empty = TempDir::new().unwrap();
    let report = inspect(empty.path()).unwrap();
    assert!(report.kind == Kind::Other && report.description.contains("nothing"), "{}", report.description);
    assert!(matches!(inspect(empty.path().join("none")), Err(Error::Io { .. })));
    fs::write(empty.path().join("x.safetensors.index.json"), "{}").unwrap();
    assert!(matches!(inspect(empty.path().join("x.safetensors.index.json")), Err(Error::Json { .. })));
}

/// Of quantised tensors the report names the formats; of a GGUF file also the model, by llama.cpp's names.
#[test]
fn quantised_files_are_inspected() {
    use candle_core::{
        DType, Device, Tensor,
        quantized::{GgmlDType, QTensor, gguf_file},
    };

    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let wide = Tensor::zeros((4, 256), DType::F32, &Device::Cpu).unwrap();
    let tensor = |t| QTensor::quantize(&wide, t).unwrap();
    let (q4, q8) = (tensor(GgmlDType::Q4K), tensor(GgmlDType::Q8_0));
    let named = [
        ("token_embd.weight", &q8),
        ("blk.0.attn_q_norm.weight", &q4),
        ("blk.0.ffn_gate.weight", &q4),
        ("blk.0.attn_q.weight", &q4),
    ];
    let mut file = fs::File::create(&path).unwrap();
    gguf_file::write(&mut file, &[], &named).unwrap();
    drop(file);
    let report = inspect(&path).unwrap();
    assert_eq!((report.kind, report.tensors()), (Kind::Gguf, 4));
    assert!(
        report.description.contains("GGUF file, looks like Qwen3 language model (hidden size 256), llama.cpp names"),
        "{}",
        report.description
    );
    let kinds: Vec<_> =
        report.parts[0].quantised.iter().map(|q| (q.format.as_str(), q.supported, q.tensors, q.bytes)).collect();
    assert_eq!(kinds, [("Q4_K", true, 3, 3 * 4 * 144), ("Q8_0", true, 1, 4 * 8 * 34)]);
    // The folder that holds it is the same; a damaged file is an error.
    assert_eq!(inspect(dir.path()).unwrap().parts[0].quantised, report.parts[0].quantised);
    fs::write(&path, b"GGUF\x03\0\0\0aaaaaaaaaaaaaaa").unwrap();
    assert!(matches!(inspect(&path), Err(Error::Gguf { .. })));

    let path = dir.path().join("m.safetensors");
    let marker = br#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":16}"#;
    let tensors = [
        TensorData::new("a.weight", StoredDType::I8, &[2, 16], vec![1; 32]),
        TensorData::f32("a.weight_scale", &[2, 1], &[1.0, 2.0]),
        TensorData::new("a.comfy_quant", StoredDType::U8, &[marker.len()], marker.to_vec()),
    ];
    to_file(&path, &tensors, &Metadata::new()).unwrap();
    let part = inspect(&path).unwrap().parts.remove(0);
    assert_eq!((part.tensors.len(), part.quantised.len()), (3, 1));
    let kind = &part.quantised[0];
    assert_eq!((kind.format.as_str(), kind.convrot, kind.tensors, kind.bytes), ("int8_tensorwise", Some(16), 1, 32));
    assert_eq!(kind.description, "int8_tensorwise, a scale per row, convrot 16");
}

#[test]
fn pytorch_checkpoints_are_inspected() {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let report = inspect(data.join("flat.pth")).unwrap();
    assert_eq!((report.kind, report.tensors()), (Kind::PyTorch, 16));
    assert_eq!(report.description, "PyTorch checkpoint, model unknown");
    let report = inspect(data.join("lora.pth")).unwrap();
    assert_eq!(report.description, "PyTorch checkpoint, looks like LoRA or similar adapter (rank 4), kohya names");
    let foreign = inspect(data.join("module.pth")).unwrap_err().to_string();
    assert!(foreign.contains("module.pth") && foreign.contains("torch.nn.modules.linear.Linear"), "{foreign}");
    let dir = TempDir::new().unwrap();
    let cut = dir.path().join("cut.pth");
    fs::write(&cut, &fs::read(data.join("flat.pth")).unwrap()[..2000]).unwrap();
    let text = inspect(&cut).unwrap_err().to_string();
    assert!(text.contains("cut.pth") && text.contains("truncated download"), "{text}");
}

#[test]
fn built_in_models_are_inspected() {
    let bytes = to_bytes(&[TensorData::f32("w", &[1], &[1.0])], &Metadata::new()).unwrap();
    let file: &'static [u8] = Box::leak(bytes.into_boxed_slice());
    let files: &'static [(&'static str, &'static [u8])] =
        Box::leak(Box::new([("model_index.json", b"{}" as &[u8]), ("vae/x.safetensors", file)]));
    let report = inspect_folder(&ModelFolder::Memory("demo", files)).unwrap();
    assert_eq!((report.path.as_str(), report.parts.len()), ("demo", 1));
    assert_eq!(report.parts[0].files[0].name, "demo/vae/x.safetensors");
    let _: Arc<dyn TensorSource> = ModelFolder::Memory("demo", files).tensors("vae").unwrap();
}
